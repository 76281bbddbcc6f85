"""Runs a test again that failed while the machine stood still.

A CPU engine keeps every core busy, and on some virtual machines whatever runs beside it then waits for seconds at a
time. A deadline of two seconds says nothing in such a moment, so a failure counts only if the machine was awake.
"""

import threading
import time

import pytest
from _pytest.runner import runtestprotocol

TRIES = 4
NOT_AWAKE_S = 0.5
LOOK_S = 0.02


class Standstill:
    """The longest time that this process, which has next to nothing to do, was kept from running, in seconds."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Standstill":
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._looking.join()

    def _look(self) -> None:
        began = time.monotonic()
        while not self._over.wait(LOOK_S):
            now = time.monotonic()
            self.worst_s = max(self.worst_s, now - began - LOOK_S)
            began = now


def run(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Run one test to a result that counts, at most `TRIES` times, and report it."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports: list[pytest.TestReport] = []
    for left in reversed(range(TRIES)):
        with Standstill() as standstill:
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if not left or standstill.worst_s < NOT_AWAKE_S or not any(report.failed for report in reports):
            break
        print(f"\n{item.nodeid}: failed while the machine stood still for {standstill.worst_s:.1f} s; once more")
        item._initrequest()  # type: ignore[attr-defined] # fixtures anew; pytest has no public way
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
