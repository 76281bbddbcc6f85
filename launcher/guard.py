"""The guard: a tiny process that outlives the launcher just long enough to end the engine that was left behind.

A parent-death signal does not reach the engine's grandchildren. A pipe does: however the launcher ends, so does the
guard's standard input. Run as a file, it needs nothing but the standard library.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

DEAF_TO: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the guard ends with the launcher, not before
GONE_S: Final = 30.0  # for killed processes to be gone; a driver may hold one for a while


def kill_all(group: int, number: int = signal.SIGKILL) -> list[int]:
    """Signal what lives of a process group and of the session of the same number; who was there (zombies don't count).

    With the signal 0 it only looks.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has just ended
                state, _, pgrp, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if str(group) in (pgrp, session) and state not in "ZX":
                    found.append(int(entry.name))
                    os.kill(found[-1], number)
    return found


class Guard:
    """The launcher's side: it has a folder to remove at the end, and is told which engine to end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", __file__, str(self._folder)]
        null = subprocess.DEVNULL
        before = signal.pthread_sigmask(signal.SIG_BLOCK, DEAF_TO)  # inherited, so from its first instruction on
        try:
            return subprocess.Popen(
                command, bufsize=0, stdin=subprocess.PIPE, stdout=null, stderr=null, cwd="/", start_new_session=True
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def watch(self, group: int) -> None:
        """From now on this is the process group to end; 0 is none. A guard that was killed is replaced."""
        while True:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(b"%d\n" % group)
                return
            self._process.stdin.close()
            self._process.wait()
            self._process = self._start()

    def stay(self, group: int) -> None:
        """Replace a guard that was killed while this group lives; call it now and then."""
        if self._process.poll() is not None:
            self.watch(group)

    def close(self) -> None:
        """End the engine, if one is left, and remove the folder."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GONE_S + 1)
        shutil.rmtree(self._folder, ignore_errors=True)


def main(folder: str) -> None:
    """Wait for the end of standard input, then clear away the group whose number came last."""
    group = 0
    for line in sys.stdin:
        group = int(line)
    end = time.monotonic() + GONE_S
    while group and kill_all(group) and time.monotonic() < end:
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
