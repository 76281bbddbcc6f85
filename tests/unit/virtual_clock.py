"""A clock that moves only when a test says so."""

from collections.abc import Callable


class VirtualTimer:
    """A call to come; it belongs to the clock until it has run or been cancelled."""

    def __init__(self, clock: "VirtualClock", when: float, callback: Callable[[], object]) -> None:
        self._clock = clock
        self.when = when
        self.callback = callback

    def cancel(self) -> None:
        if self in self._clock.timers:
            self._clock.timers.remove(self)


class VirtualClock:
    """Stands in for an event loop's `time` and `call_at`. `timers` are those still to run, `fired` counts those run."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.timers: list[VirtualTimer] = []
        self.fired = 0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], object], /) -> VirtualTimer:
        timer = VirtualTimer(self, when, callback)
        self.timers.append(timer)
        return timer

    def skip(self, seconds: float) -> None:
        """Move on without running timers, as when the event loop is busy."""
        self.now += seconds

    def advance(self, seconds: float) -> None:
        """Move on, running each timer at its time (those overdue, at once)."""
        until = self.now + seconds
        while due := [timer for timer in self.timers if timer.when <= until]:
            timer = min(due, key=lambda timer: timer.when)
            self.timers.remove(timer)
            self.now = max(self.now, timer.when)
            self.fired += 1
            timer.callback()
        self.now = until
