"""The engine's state, and how long a client is told to wait for it."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from app.errors import ENGINE_UNAVAILABLE, Refused
from app.status import NEVER_STARTED_S, RESTART_CAUSES, RESTARTS_KEPT, EngineState, EngineStatus
from tests.unit.virtual_clock import VirtualClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    clock = VirtualClock()
    monkeypatch.setattr("app.status.time", SimpleNamespace(monotonic=clock.time, time=lambda: 1.7e9 + clock.time()))
    return clock


@pytest.fixture
def status(clock: VirtualClock) -> EngineStatus:
    return EngineStatus()


def started(status: EngineStatus, clock: VirtualClock, seconds: float) -> None:
    status.start_begins()
    clock.skip(seconds)
    status.start_succeeded()


def test_a_life_with_a_crash(status: EngineStatus, clock: VirtualClock) -> None:
    states = [status.state]
    steps: list[Callable[[], None]] = [
        status.start_begins,
        status.start_succeeded,
        lambda: status.engine_died("exit"),
        status.start_succeeded,
        status.stall_begins,
        lambda: status.engine_died("stalled"),
        status.gave_up,
    ]
    for step in steps:
        step()
        states.append(status.state)
    assert states == "starting starting ready restarting ready stalled restarting dead".split()
    assert (dict(status.restarts), status.stalls) == ({"exit": 1, "stalled": 1}, 1)


def test_a_start_that_fails_again_and_again_is_still_the_first_one(status: EngineStatus) -> None:
    status.engine_died("exit")
    assert status.state is EngineState.STARTING


@pytest.mark.parametrize(
    ("last_start_s", "elapsed_s", "seconds"),
    [
        (None, 0, NEVER_STARTED_S),
        (None, 500, NEVER_STARTED_S),
        (20, 0, 20),
        (20, 12.5, 8),
        (20, 19.9, 1),
        (20, 20, 1),
        (20, 400, 1),
        (0.2, 0, 1),
        (90, 0, 30),
        (90, 75, 15),
    ],
)
def test_retry_after_is_what_is_left_of_the_last_start(
    status: EngineStatus, clock: VirtualClock, last_start_s: float | None, elapsed_s: float, seconds: int
) -> None:
    if last_start_s is not None:
        started(status, clock, last_start_s)
    status.engine_died("exit")
    clock.skip(elapsed_s)
    assert status.retry_after_s() == seconds


def test_retry_after_holds_the_pause_before_a_restart_too(status: EngineStatus, clock: VirtualClock) -> None:
    started(status, clock, 10)
    status.engine_died("exit", pause_s=8)
    assert status.retry_after_s() == 18
    clock.skip(8)
    assert status.retry_after_s() == 10
    started(status, clock, 10)
    assert status.last_start_s == 10


def test_a_start_that_was_not_seen_whole_says_nothing_of_the_next(status: EngineStatus, clock: VirtualClock) -> None:
    clock.skip(3)
    status.start_succeeded(seen_whole=False)
    assert status.last_start_s is None
    started(status, clock, 20)
    status.start_succeeded(seen_whole=False)
    assert status.last_start_s == 20


@pytest.mark.parametrize("state", EngineState)
def test_only_a_ready_engine_gets_requests(status: EngineStatus, state: EngineState) -> None:
    status.state = state
    if state is EngineState.READY:
        status.check_ready()
    else:
        with pytest.raises(Refused, match=state) as caught:
            status.check_ready()
        assert caught.value.kind is ENGINE_UNAVAILABLE
        assert caught.value.retry_after_s == NEVER_STARTED_S
    assert status.ready is (state is EngineState.READY)


def test_a_stall_is_told_to_whoever_can_restart_the_engine(status: EngineStatus) -> None:
    told: list[EngineState] = []
    status.on_stall = lambda: told.append(status.state)
    status.stall_begins()
    assert told == [EngineState.STALLED]


def test_after_a_stall_clients_wait_about_as_long_as_a_start_takes(status: EngineStatus, clock: VirtualClock) -> None:
    started(status, clock, 20)
    clock.skip(1000)
    status.stall_begins()
    assert status.retry_after_s() == 20


def test_the_last_restarts_are_kept_with_when_and_why(status: EngineStatus, clock: VirtualClock) -> None:
    began = clock.time()
    for number in range(RESTARTS_KEPT + 3):
        status.engine_died("killed" if number % 2 else "exit")
        clock.skip(10)
    assert len(status.last_restarts) == RESTARTS_KEPT
    assert status.last_restarts[-1] == (1.7e9 + began + 10 * (RESTARTS_KEPT + 2), "killed")
    assert {cause for _, cause in status.last_restarts} <= set(RESTART_CAUSES)
