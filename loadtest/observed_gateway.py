"""The gateway with a window: at SIGUSR1 it writes down which tasks its event loop has and which of its objects live.

Nothing else tells of these from outside. It is `python -m app` in everything else; the file is named by `WINDOW`.
"""

import asyncio
import gc
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

from app.__main__ import main
from tests.harness import Gateway, wait_until

WINDOW: Final = "OBSERVED_GATEWAY_WINDOW"
KEPT: Final = ("Call", "Ticket", "Guest", "Relay", "EngineConnection", "BoundedConnection")  # for one request at most


def look(*_: object) -> None:
    """Write the counts; whole or not at all."""
    gc.collect()
    tasks = Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks())
    kinds = Counter(type(each).__name__ for each in gc.get_objects() if type(each).__module__.startswith("app."))
    file = Path(os.environ[WINDOW])
    part = file.with_suffix(".part")
    part.write_text(json.dumps({"tasks": tasks, "objects": {name: kinds[name] for name in KEPT}}))
    part.rename(file)


class ObservedGateway(Gateway):
    """A gateway process that can be looked into."""

    def spawn(self, module: str, arguments: Any, environment: Any) -> None:
        """Start this module in the place of `app`."""
        super().spawn("loadtest.observed_gateway", arguments, {**environment, WINDOW: str(self._window)})

    @property
    def _window(self) -> Path:
        return Path(self.folder.name, "window.json")

    def look(self) -> dict[str, dict[str, int]]:
        """Tasks by what they run, and objects of the data path by their type."""
        self._window.unlink(missing_ok=True)
        self.signal(signal.SIGUSR1)
        wait_until(self._window.exists, "a look into the gateway")
        seen: dict[str, dict[str, int]] = json.loads(self._window.read_text())
        return seen

    def descriptors(self) -> int:
        """Open ones."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def memory_bytes(self) -> int:
        """Resident memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, look)
    sys.exit(main())
