"""The state of the engine: told by the launcher, or inferred by a gateway that runs alone."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from app.errors import ENGINE_UNAVAILABLE, Refused
from app.pace import MAX_RETRY_AFTER_S

RESTART_CAUSES: Final = ("exit", "killed", "oom", "stalled", "start", "unknown")
RESTARTS_KEPT: Final = 5
NEVER_STARTED_S: Final = 10  # Retry-After while it is not known how long a start takes


class EngineState(StrEnum):
    """What the engine is doing, as `/stats` says it."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STALLED = "stalled"
    DEAD = "dead"


class EngineStatus:
    """Filled by whoever knows; read by the gateway before anything is admitted. Times in seconds."""

    def __init__(self) -> None:
        self.state = EngineState.STARTING
        self.restarts: Counter[str] = Counter()
        self.last_restarts: deque[tuple[float, str]] = deque(maxlen=RESTARTS_KEPT)  # Unix time and cause
        self.stalls = 0
        self.last_start_s: float | None = None
        self.on_stall: Callable[[], None] | None = None  # the launcher restarts the engine
        self.on_loss: Callable[[], None] | None = None  # the launcher sees to its end, and restarts it
        self._began = time.monotonic()
        self._was_ready = False

    @property
    def ready(self) -> bool:
        """Whether requests may be sent to it."""
        return self.state is EngineState.READY

    def start_begins(self, pause_s: float = 0.0) -> None:
        """The engine is being started, for the first time or again, after a pause."""
        self._began = time.monotonic() + pause_s
        self.state = EngineState.RESTARTING if self._was_ready else EngineState.STARTING

    def start_succeeded(self, *, seen_whole: bool = True) -> None:
        """It answers; how long that took, where it was seen whole, is what the next Retry-After rests on."""
        if seen_whole:
            self.last_start_s = time.monotonic() - self._began
        self._was_ready = True
        self.state = EngineState.READY

    def lost(self) -> None:
        """Its server says that there is no engine behind it any more, or takes no connections."""
        self.start_begins()
        if self.on_loss is not None:
            self.on_loss()

    def engine_died(self, cause: str, pause_s: float = 0.0) -> None:
        """It is gone and will be started again in `pause_s`; `cause` is one of `RESTART_CAUSES`."""
        self.count_restart(cause)
        self.start_begins(pause_s)

    def count_restart(self, cause: str) -> None:
        """Count a restart that is about to be, or that has been noticed."""
        self.restarts[cause] += 1
        self.last_restarts.append((time.time(), cause))

    def gave_up(self) -> None:
        """It will not be started again."""
        self.state = EngineState.DEAD

    def stall_begins(self) -> None:
        """It holds requests and does nothing for them."""
        self.stalls += 1
        self._began = time.monotonic()
        self.state = EngineState.STALLED
        if self.on_stall is not None:
            self.on_stall()

    def retry_after_s(self) -> int:
        """The last start time and the pause before it, less what has elapsed; at most 30, and 1 once overdue."""
        if self.last_start_s is None:
            return NEVER_STARTED_S
        left = self.last_start_s - (time.monotonic() - self._began)
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(left)))

    def check_ready(self) -> None:
        """Raises: Refused: `engine_unavailable`."""
        if not self.ready:
            raise self.unavailable()

    def unavailable(self) -> Refused:
        """The refusal while the engine is away."""
        return Refused(
            ENGINE_UNAVAILABLE,
            f"The engine is not available ({self.state}). Retry later.",
            retry_after_s=self.retry_after_s(),
        )
