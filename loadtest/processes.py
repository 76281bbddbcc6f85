"""Servers under test as child processes: each in a session of its own, so that all it starts ends with it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from launcher.niceness import give_way

LOG_LINES: Final = 15  # shown when a server doesn't start
POLL_S: Final = 0.1
STOP_S: Final = 10.0
CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")


class ServerFailed(Exception):
    """A server under test did not start, ended by itself, or did not do what was waited for."""


class Child:
    """A running server; its output goes to `log`."""

    def __init__(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path, *, niceness: int = 0
    ) -> None:
        self.name = name
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                argv,
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        give_way(self._process.pid, niceness)

    def check(self) -> None:
        """Raises ServerFailed if it has ended."""
        code = self._process.poll()
        if code is not None:
            raise ServerFailed(f"{self.name} ended by itself with code {code}; {self._end_of_log()}")

    async def until(self, holds: Callable[[], Awaitable[bool]], what: str, within_s: float) -> None:
        """Wait for something that this server is to do.

        Raises:
            ServerFailed: it ended, or took longer.
        """
        end = time.monotonic() + within_s
        while not await holds():
            self.check()
            if time.monotonic() > end:
                raise ServerFailed(f"{self.name} was not {what} within {within_s:.0f} s; {self._end_of_log()}")
            await asyncio.sleep(POLL_S)

    def cpu_s(self) -> float:
        """CPU time of it and of what it has started, as far as that still runs."""
        return sum(int(fields[11]) + int(fields[12]) for fields in self._group()) / CLOCK_TICKS

    def memory_bytes(self) -> int:
        """Resident memory of it alone."""
        fields = Path(f"/proc/{self._process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def group_bytes(self) -> int:
        """Resident memory of it and of what it has started; pages that they share count for each."""
        return sum(int(fields[21]) for fields in self._group()) * os.sysconf("SC_PAGE_SIZE")

    def _group(self) -> list[list[str]]:
        return [fields for fields in _stats() if int(fields[2]) == self._process.pid]

    def stop(self) -> None:
        """End the whole group; one that doesn't follow is killed."""
        for request in (signal.SIGTERM, signal.SIGKILL):
            if not self._signal(request):
                break
            end = time.monotonic() + STOP_S
            while time.monotonic() < end and self._signal(0):
                time.sleep(POLL_S)
        self._process.wait(STOP_S)

    def _signal(self, number: int) -> bool:
        """False when nothing of the group is left."""
        self._process.poll()  # an ended child counts as one of the group until it is reaped
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _end_of_log(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return f"the end of {self._log}:\n" + "\n".join(lines)


def end_in_order() -> None:
    """From now on SIGTERM ends this program as an exit does: with the servers that it has started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def machine_cpu_s() -> float:
    """CPU time that the whole machine has spent on anything."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
        return (user + nice + system + irq + softirq) / CLOCK_TICKS
    return 0.0


def _stats() -> list[list[str]]:
    """`/proc/PID/stat` of every process, from the state on, which is field 0 here."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            found.append(file.read_text().rpartition(")")[2].split())
    return [fields for fields in found if fields]
