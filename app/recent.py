"""Times of requests that ended lately, for people who look now; histories of any length are Prometheus's."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from app.call import Call

WINDOW_S: Final = 60.0
KEPT: Final = 500  # requests of one lane; beyond that the window is shorter

Percentiles = dict[str, float] | None


class Recent:
    """First bytes and whole answers of the last minute, by lane. Times in seconds."""

    def __init__(self, lanes: Iterable[str]) -> None:
        self._ended: dict[str, deque[tuple[float, float, float]]] = {lane: deque(maxlen=KEPT) for lane in lanes}

    def ended(self, call: Call, now: float) -> None:
        """Take a request in, if the engine's answer to it went out whole."""
        if call.outcome == "completed" and call.head_at is not None:
            arrived = call.deadline.arrived
            self._ended[call.demand.lane].append((now, call.head_at - arrived, now - arrived))

    def times(self, now: float, *lanes: str) -> dict[str, Percentiles]:
        """The percentiles of these lanes together, of all without any; None where nothing has ended."""
        rows = [row for lane in lanes or self._ended for row in self._ended[lane] if row[0] >= now - WINDOW_S]
        return {
            "first_byte_s": percentiles([first for _, first, _ in rows]),
            "total_s": percentiles([total for _, _, total in rows]),
        }


def percentiles(values: Sequence[float]) -> Percentiles:
    """Median and 95th percentile, each a value that was seen."""
    if not values:
        return None
    ordered = sorted(values)
    at = {
        name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in (("p50", 0.5), ("p95", 0.95))
    }
    return {name: round(value, 4) for name, value in at.items()}
