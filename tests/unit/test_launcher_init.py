"""As process 1 of a container, in a process namespace of its own."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness import ROOT, wait_until

UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
# Leaves an orphan that ends at once, then counts SIGTERMs, and says what it sees of zombies and of itself.
LAUNCHER = """
import os, signal, subprocess, sys, time
from pathlib import Path
from launcher.init import stand_in
stand_in()
got = []
signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
subprocess.run(["sh", "-c", "sleep 0.2 & exit"])
Path(sys.argv[1]).touch()
while not got:
    time.sleep(0.02)
time.sleep(0.5)
stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat")]
print(os.getpid() != 1, sum(stat.rpartition(")")[2].split()[0] == "Z" for stat in stats), len(got))
sys.exit(7)
"""


def can_unshare() -> bool:
    tool = shutil.which("unshare")
    return tool is not None and subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="makes a process namespace, which takes root and the tool `unshare`")
def test_signals_are_handed_on_and_zombies_collected(tmp_path: Path) -> None:
    mark = tmp_path / "up"
    command = [*UNSHARE, sys.executable, "-c", LAUNCHER, str(mark)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        wait_until(mark.exists, "start")
        time.sleep(0.5)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        subprocess.run(["kill", "-TERM", *children], check=True)  # the namespace's process 1
        output, _ = process.communicate(timeout=20)
    assert output.split() == ["True", "0", "1"]
    assert process.returncode == 7


def test_any_other_process_stays_what_it_is() -> None:
    script = "import os; from launcher.init import stand_in; was = os.getpid(); stand_in(); print(was == os.getpid())"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_the_signals_that_matter_are_handed_on() -> None:
    from launcher.init import FORWARDED

    assert {signal.SIGTERM, signal.SIGINT} <= set(FORWARDED)
