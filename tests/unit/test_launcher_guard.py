"""A launcher that is killed leaves no engine, no socket and no folder, whenever it happens."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.guard import Guard, kill_all
from launcher.supervisor import GATED
from tests.harness import ROOT, wait_until
from tests.unit.launcher_engine import is_alive

# Starts a guard and a group of two processes that ignore SIGTERM, says who they are, and waits to be killed.
LAUNCHER = """
import json, subprocess, sys, time
from pathlib import Path
from launcher.guard import Guard
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
both = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); exec({child!r})"
guard = Guard(Path(sys.argv[1]))
engine = subprocess.Popen([sys.executable, "-c", both], stdout=subprocess.PIPE, start_new_session=True)
guard.watch(engine.pid)
engine.stdout.read(2)
print(json.dumps({"engine": engine.pid, "guard": guard._process.pid}), flush=True)
time.sleep(600)
"""


def alive_in(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and is_alive(int(entry.name)):
            try:
                pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[2]
            except OSError:
                continue
            if int(pgrp) == group:
                found.append(int(entry.name))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    private = tmp_path / "private"
    private.mkdir()
    (private / "engine.sock").touch()
    return private


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield process
        process.kill()


def test_nothing_survives_a_launcher_that_is_killed(folder: Path) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as launcher:
        assert launcher.stdout is not None
        pids = json.loads(launcher.stdout.readline())
        assert len(alive_in(pids["engine"])) == 2
        for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pids["guard"], ignored)
        launcher.kill()
    wait_until(lambda: not alive_in(pids["engine"]), "the end of the engine")
    wait_until(lambda: not folder.exists(), "removal of the folder")
    wait_until(lambda: not is_alive(pids["guard"]), "the end of the guard")


def test_a_signal_does_not_end_the_guard_even_while_it_starts(folder: Path) -> None:
    guard = Guard(folder)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(guard._process.pid, ignored)
    guard.close()
    assert guard._process.returncode == 0


def test_an_engine_that_the_guard_does_not_know_yet_never_starts(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    assert subprocess.run([*GATED, "touch", str(mark)], stdin=subprocess.DEVNULL, check=False).returncode
    assert not mark.exists()
    subprocess.run([*GATED, "touch", str(mark)], input=b"go\n", check=True)
    assert mark.exists()


def test_a_guard_that_was_killed_is_replaced(folder: Path, sleeper: subprocess.Popen[bytes]) -> None:
    guard = Guard(folder)
    guard._process.kill()
    guard._process.wait()
    guard.watch(sleeper.pid)
    guard.close()
    assert sleeper.wait(10) == -signal.SIGKILL
    assert not folder.exists()


def test_a_group_that_is_gone_is_forgotten(folder: Path, sleeper: subprocess.Popen[bytes]) -> None:
    guard = Guard(folder)
    guard.watch(sleeper.pid)
    guard.watch(0)
    guard.close()
    assert sleeper.poll() is None


def test_members_of_the_session_are_killed_too() -> None:
    """A worker may have made itself the leader of another process group."""
    script = "import os, subprocess, time; os.setpgid(0, 0); print(os.getsid(0), flush=True); time.sleep(600)"
    shell = ["setsid", "sh", "-c", f'"{sys.executable}" -c "{script}" & wait']
    with subprocess.Popen(shell, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        session = int(process.stdout.readline())
        assert len(kill_all(session)) == 2
        wait_until(lambda: not kill_all(session), "the end of the session")
