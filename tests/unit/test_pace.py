"""How fast lanes drain, and what clients are told from it."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from app.pace import Pace
from tests.unit.virtual_clock import VirtualClock


@dataclass
class Load:
    in_flight: int = 0
    queued_weight: int = 0


def pace(*loads: Load, clock: VirtualClock | None = None, **service_s: Sequence[float]) -> Pace:
    """What is known after these completions in lanes `a` and `b`, with these loads now."""
    lanes = dict(zip("ab", loads or (Load(), Load()), strict=True))
    made = Pace(lanes, (clock or VirtualClock()).time)
    for lane, times in service_s.items():
        for seconds in times:
            made.served(lane, seconds)
    return made


@pytest.mark.parametrize(
    ("load", "wait_s"),
    [
        (Load(in_flight=4, queued_weight=0), 0),
        (Load(in_flight=4, queued_weight=8), 4),
        (Load(in_flight=1, queued_weight=8), 16),
        (Load(in_flight=0, queued_weight=8), 16),
    ],
)
def test_the_wait_is_the_queue_over_the_rate_at_which_slots_come_free(load: Load, wait_s: float) -> None:
    assert pace(load, Load(), a=[1, 2, 3, 2, 2]).wait_s("a", load.queued_weight) == wait_s


def test_with_fewer_than_five_completions_nothing_is_known() -> None:
    little = pace(Load(1, 100), Load(1, 100), a=[100] * 4)
    assert little.service_s("a") is None
    assert little.wait_s("a", 100) is None
    assert little.retry_after_s("a") == 1


def test_lanes_are_measured_apart() -> None:
    assert pace(a=[1] * 5).service_s("b") is None


def test_work_is_told_by_the_mean_of_the_lane() -> None:
    lanes = pace(b=[1] * 5)
    for work in (10, 20, 30, 20):
        lanes.served("a", 1, work)
    assert lanes.relative_work("a", 40) == 1, "too few are known"
    lanes.served("a", 1, 20)
    assert lanes.relative_work("a", 40) == 2
    assert lanes.relative_work("a", 15) == 0.75
    assert lanes.relative_work("a", 1) == 0.5, "whatever is small"
    assert lanes.relative_work("a", 10**9) == 2, "a limit is not a length"
    lanes.served("a", 1)
    assert lanes.relative_work("a", 40) == 2, "what is not known does not count as none"
    assert lanes.relative_work("a", 0) == 1, "of this request nothing is known"
    assert lanes.relative_work("b", 40) == 1, "of that lane nothing is known"


def test_a_deadline_that_came_first_is_no_completion_and_never_makes_a_lane_look_faster() -> None:
    lanes = pace(a=[2] * 5)
    for _ in range(5):
        lanes.cut("a", 0.01)
        lanes.cut("b", 9)
    assert lanes.service_s("a") == 2
    assert lanes.service_s("b") is None
    lanes.cut("a", 8)
    assert lanes.service_s("a") == 3


def test_what_is_older_than_a_minute_is_forgotten() -> None:
    clock = VirtualClock()
    lanes = pace(clock=clock, a=[50] * 5)
    clock.skip(59)
    assert lanes.service_s("a") == 50
    for _ in range(5):
        lanes.served("a", 1)
    clock.skip(2)
    assert lanes.service_s("a") == 1
    clock.skip(60)
    assert lanes.service_s("a") is None


@pytest.mark.parametrize(
    ("lane", "whole_queue", "seconds"),
    [
        ("a", False, 1),  # a slot of four comes free every half second
        ("a", True, 5),
        ("b", False, 20),
        ("b", True, 30),  # 40, but never more than 30
        (None, False, 1),  # whichever lane frees one first
        (None, True, 5),
    ],
)
def test_retry_after_is_the_time_until_there_is_room(lane: str | None, whole_queue: bool, seconds: int) -> None:
    loads = Load(in_flight=4, queued_weight=10), Load(in_flight=1, queued_weight=2)
    assert pace(*loads, a=[2] * 5, b=[20] * 5).retry_after_s(lane, whole_queue=whole_queue) == seconds


@pytest.mark.parametrize(("service_s", "seconds"), [(0.001, 1), (2.1, 3), (1e6, 30)])
def test_retry_after_is_whole_seconds_from_1_to_30(service_s: float, seconds: int) -> None:
    assert pace(Load(1, 1), Load(), a=[service_s] * 5).retry_after_s("a") == seconds


def test_an_unknown_lane_goes_by_the_lanes_of_which_something_is_known() -> None:
    assert pace(Load(1, 1), Load(1, 1), a=[7] * 5, b=[1] * 4).retry_after_s(None) == 7


def test_a_million_completions_are_not_all_remembered() -> None:
    lanes = pace(a=[9] * 1000 + [1] * 300)
    assert lanes.service_s("a") == 1
