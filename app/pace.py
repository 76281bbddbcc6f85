"""How fast each lane drains, from the completions of the last minute; what Retry-After and feasibility rest on."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol

WINDOW_S: Final = 60.0
ENOUGH: Final = 5  # completions; with fewer nothing is known
KEPT: Final = 256  # completions remembered for each lane
MAX_RETRY_AFTER_S: Final = 30
RELATIVE: Final = (0.5, 2.0)
EPSILON: Final = 1e-6  # what adding and taking away may leave of a sum


class LaneLoad(Protocol):
    """What the gate tells of a lane: slots in use, and slots that its queue asks for."""

    @property
    def in_flight(self) -> int: ...
    @property
    def queued_weight(self) -> int: ...


class _Done:
    """Completions of one lane: when, after how long, and for how much work; with their running sums."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, float, float]] = deque()
        self._sum_s = 0.0
        self._sum_work = 0.0
        self._with_work = 0

    def add(self, now: float, service_s: float, work: float) -> None:
        self._kept.append((now, service_s, work))
        self._sum_s += service_s
        self._sum_work += work
        self._with_work += work > 0
        if len(self._kept) > KEPT:
            self._drop()

    def means(self, now: float) -> tuple[float, float] | None:
        while self._kept and self._kept[0][0] < now - WINDOW_S:
            self._drop()
        count = len(self._kept)
        return (self._sum_s / count, self._sum_work / max(1, self._with_work)) if count >= ENOUGH else None

    def _drop(self) -> None:
        _, service_s, work = self._kept.popleft()
        self._sum_s -= service_s
        self._sum_work -= work
        self._with_work -= work > 0


class Pace:
    """Measured service times. A lane with m slots in use and a mean service time of s seconds frees m / s a second."""

    def __init__(self, loads: Mapping[str, LaneLoad], clock: Callable[[], float]) -> None:
        self._loads = loads  # by lane
        self._done = {lane: _Done() for lane in loads}
        self._clock = clock

    def served(self, lane: str, service_s: float, work: float = 0.0) -> None:
        """Take in a request that the engine has answered in full, in `service_s`."""
        self._done[lane].add(self._clock(), service_s, work)

    def cut(self, lane: str, service_s: float, work: float = 0.0) -> None:
        """Take in one whose deadline came first. It would have taken longer, which says something above the mean."""
        mean_s = self.service_s(lane)
        if mean_s is not None and service_s > mean_s:
            self.served(lane, service_s, work)

    def service_s(self, lane: str) -> float | None:
        """Mean service time over the window; None while too few are known."""
        means = self._done[lane].means(self._clock())
        return means and means[0]

    def relative_work(self, lane: str, work: float) -> float:
        """A request's work over the lane's mean, within `RELATIVE`; 1 where either is not known.

        The bounds are there because a limit on the output is not its length, and because lanes hold all kinds of work.
        """
        means = self._done[lane].means(self._clock())
        if not means or not work or means[1] < EPSILON:
            return 1.0
        return min(RELATIVE[1], max(RELATIVE[0], work / means[1]))

    def wait_s(self, lane: str, ahead: int) -> float | None:
        """Expected wait while the lane hands out `ahead` slots; None while too little is known."""
        service = self.service_s(lane)
        return None if service is None else ahead * service / max(1, self._loads[lane].in_flight)

    def retry_after_s(self, lane: str | None, *, whole_queue: bool = False) -> int:
        """Whole seconds until the queue has room for one more, or (`whole_queue`) until it is worked off.

        `lane` None means that the request's lane is not known: the lane that frees a slot first counts.
        """
        waits = []
        for name in self._loads if lane is None else (lane,):
            ahead = self._loads[name].queued_weight if whole_queue else 1
            if (wait_s := self.wait_s(name, ahead)) is not None:
                waits.append(wait_s)
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(min(waits, default=1))))
