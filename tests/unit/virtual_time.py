"""An event loop whose time passes only while everything waits, and then at once: no test of timing has to sleep."""

import asyncio
import selectors
from typing import Any


class _Selector(selectors.DefaultSelector):
    """Skips the time for which a selector would wait."""

    skipped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everything waits, and nothing is ever going to happen"
        self.skipped_s += max(0.0, timeout)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at 1,000 s. Not for sockets: what comes through them may come late."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return 1000.0 + self._virtual.skipped_s


def loops() -> dict[str, Any]:
    """For a module whose tests all run on it."""
    return {"virtual": VirtualTimeLoop}
