"""What the page calls "the last minute"."""

from app.call import Call
from app.lanes import Demand
from app.recent import KEPT, WINDOW_S, Recent, percentiles
from tests.unit.virtual_time import loops

LOOPS = loops()


def call(first_byte_s: float, lane: str = "short", outcome: str = "completed") -> Call:
    """One that arrived at 1,000 s."""

    async def nothing(*_: object) -> None:
        raise AssertionError

    made = Call({"type": "http", "headers": [], "raw_path": b"/"}, nothing, nothing)  # type: ignore[arg-type]
    made.demand, made.outcome, made.head_at = Demand(lane), outcome, 1000 + first_byte_s
    return made


async def test_times_are_told_by_lane_and_together() -> None:
    recent = Recent(["short", "long"])
    recent.ended(call(0.5), 1001)
    recent.ended(call(2, "long"), 1010)
    assert recent.times(1010, "short") == {"first_byte_s": {"p50": 0.5, "p95": 0.5}, "total_s": {"p50": 1, "p95": 1}}
    assert recent.times(1010)["total_s"] == {"p50": 10, "p95": 10}
    assert recent.times(1010, "long")["first_byte_s"] == {"p50": 2, "p95": 2}


async def test_only_whole_answers_count_and_only_for_a_minute() -> None:
    recent = Recent(["short"])
    for outcome in ("refused", "deadline", "client_left", "engine_error", "invalid"):
        recent.ended(call(0.5, outcome=outcome), 1001)
    assert recent.times(1001) == {"first_byte_s": None, "total_s": None}
    recent.ended(call(0.5), 1001)
    assert recent.times(1001 + WINDOW_S)["total_s"] == {"p50": 1, "p95": 1}
    assert recent.times(1001.1 + WINDOW_S)["total_s"] is None


async def test_memory_is_bounded() -> None:
    recent = Recent(["short"])
    for number in range(3 * KEPT):
        recent.ended(call(number / 1000), 1001)
    assert recent.times(1001)["first_byte_s"] == {"p50": 2.5 * KEPT / 1000, "p95": 2.95 * KEPT / 1000}


def test_percentiles_are_values_that_were_seen() -> None:
    assert percentiles([]) is None
    assert percentiles([3]) == {"p50": 3, "p95": 3}
    assert percentiles(list(range(100, 0, -1))) == {"p50": 51, "p95": 96}
