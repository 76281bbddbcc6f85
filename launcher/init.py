"""What process 1 of a container has to do: hand signals on, and collect the ended children of others."""

import os
import signal
from types import FrameType
from typing import Final

FORWARDED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def stand_in() -> None:
    """Return in a process that isn't number 1: in this one, or in a child for which this one then acts as init.

    Collecting every child inside the launcher itself would take the exit codes away from asyncio.
    """
    if os.getpid() != 1:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until it is known to whom they go
    child = os.fork()
    if child == 0:
        os.setsid()  # else Ctrl-C at a terminal would come twice: from there, and handed on
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        return

    def forward(number: int, _: FrameType | None) -> None:
        os.kill(child, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
