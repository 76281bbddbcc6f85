"""The gate under any sequence of arrivals, ends, cancellations and pauses, checked step by step against its rules.

The rules are written down a second time here, over plain lists and without regard to speed: which waiting requests
may go at a moment. Each admission must be one of these, and after each event there must be none left.

More examples than a usual run takes, and than fit into a test's usual time; with `GATE_EXAMPLES` set, each run tries
other ones: `GATE_EXAMPLES=20000 python -m pytest --timeout 0 tests/unit/test_gate_properties.py`.
"""

import asyncio
import contextlib
import math
import os
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.gate import LEND_AFTER_S, Gate, GateFull, Ticket
from app.settings import Lane
from tests.unit.virtual_clock import VirtualClock

TICK_S = 1 / 1024  # between any two arrivals, so that no two requests are of the same age


@dataclass(eq=False)
class Request:
    """One request as the test knows it."""

    lane: str
    weight: int
    key: str
    arrived: float
    done: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


@dataclass
class Model:
    """Who runs, who waits by arrival, and who of them may go."""

    lanes: dict[str, Lane]
    limit: int
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    last_arrival: dict[str, float] = field(default_factory=dict)
    turns: dict[str, dict[str, int]] = field(
        default_factory=dict
    )  # slots by key, the last that had its turn at the end
    level: dict[str, int] = field(default_factory=dict)  # what keys that come anew start with

    def floor(self, lane: str) -> int:
        return self.lanes[lane].floor_slots(self.limit)

    def most(self, lane: str) -> int:
        return self.limit - sum(self.floor(other) for other in self.lanes if other != lane)

    def in_flight(self, lane: str) -> int:
        return sum(request.weight for request in self.running if request.lane == lane)

    def waiting_in(self, lane: str) -> list[Request]:
        return [request for request in self.waiting if request.lane == lane]

    def kept(self, lane: str, now: float) -> int:
        idle = now >= self.last_arrival.get(lane, -math.inf) + LEND_AFTER_S and not self.waiting_in(lane)
        return 0 if idle else max(0, self.floor(lane) - self.in_flight(lane))

    def fits(self, request: Request, now: float, *, in_floor_only: bool = False) -> bool:
        free = self.limit - sum(self.in_flight(lane) for lane in self.lanes)
        own = self.kept(request.lane, now)
        others = sum(self.kept(lane, now) for lane in self.lanes if lane != request.lane)
        in_floor = request.weight <= min(own, free)
        return in_floor or (not in_floor_only and request.weight <= free - others)

    def overdue_at(self, request: Request) -> float:
        return request.arrived + self.lanes[request.lane].max_wait_s

    def moments(self) -> list[float]:
        """When time may change who may go."""
        return [at + LEND_AFTER_S for at in self.last_arrival.values()] + [self.overdue_at(one) for one in self.waiting]

    def promoted(self, now: float) -> list[Request]:
        oldest = [waiting[0] for lane in self.lanes if (waiting := self.waiting_in(lane))]
        overdue = sorted((one for one in oldest if now >= self.overdue_at(one)), key=self.overdue_at)
        return [self.head(one.lane) for one in overdue]

    def head(self, lane: str) -> Request:
        """The next of the key that will have had the fewest slots after it."""
        first: dict[str, Request] = {}
        for request in self.waiting_in(lane):
            first.setdefault(request.key, request)
        return first[min(self.turns[lane], key=lambda key: self.turns[lane][key] + first[key].weight)]

    def may_go(self, now: float) -> list[Request]:
        """Any of these is right: the lanes' shares, which choose among them, are tested by counting."""
        slots_are_kept = False
        for promoted in self.promoted(now):
            if self.fits(promoted, now, in_floor_only=slots_are_kept):
                return [promoted]
            slots_are_kept = True
        heads = [self.head(lane) for lane in self.lanes if self.waiting_in(lane)]
        return [head for head in heads if self.fits(head, now, in_floor_only=slots_are_kept)]

    def arrive(self, request: Request) -> None:
        self.last_arrival[request.lane] = request.arrived
        self.waiting.append(request)
        self.turns.setdefault(request.lane, {}).setdefault(request.key, self.level.get(request.lane, 0))

    def leave_queue(self, request: Request, *, had_its_turn: bool) -> None:
        self.waiting.remove(request)
        turns = self.turns[request.lane]
        if had_its_turn:
            turns[request.key] = turns.pop(request.key) + request.weight
            self.level[request.lane] = max(self.level.get(request.lane, 0), turns[request.key])
        if not any(other.key == request.key for other in self.waiting_in(request.lane)):
            del turns[request.key]


class WatchedGate(Gate):
    """Writes down, in order, what the gate does."""

    def __init__(self, lanes: list[Lane], limit: int, max_queue: int, clock: VirtualClock) -> None:
        super().__init__(lanes, limit, max_queue, clock)
        self.events: list[tuple[str, Ticket, float]] = []
        self.clock = clock

    def release(self, ticket: Ticket) -> None:
        self.events.append(("release", ticket, self.clock.now))
        super().release(ticket)

    def _admit(self, ticket: Ticket, now: float) -> None:
        self.events.append(("admit", ticket, now))
        super()._admit(ticket, now)


def one_lane(index: int) -> st.SearchStrategy[Lane]:
    return st.builds(
        Lane,
        name=st.just("abc"[index]),
        floor=st.sampled_from([0, 0.25, 0.34, 0.5]),
        weight=st.sampled_from([1, 1, 2, 0.001, 1000]),
        queue=st.sampled_from([1, 1, 1, 0.5, 0.1, 0]),
        # A different fraction of a tick for each lane: no two requests become overdue at the same time.
        max_wait_s=st.sampled_from([0, 1, 5, 10, 30]).map(lambda seconds: seconds + index * TICK_S / 8),
    )


bursts = st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 3, 5, 99]), st.sampled_from("kkl")), min_size=1, max_size=8)
lane_sets = st.sampled_from([1, 2, 2, 3, 3]).flatmap(
    lambda count: st.tuples(*(one_lane(index) for index in range(count)))
)


class GateMachine(RuleBasedStateMachine):
    """Each request is a task that waits, works and releases, as in the gateway."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = VirtualClock()
        self.requests: dict[Ticket, Request] = {}
        self.newcomer: Request | None = None  # while it comes
        self.gate: WatchedGate
        self.model: Model

    @initialize(
        lanes=lane_sets,
        limit=st.sampled_from([4, 1, 2, 3, 6, 8, 9]),
        max_queue=st.sampled_from([30, 30, 30, 30, 3, 0]),
        crowd=st.lists(st.integers(0, 2), max_size=20),
    )
    def start(self, lanes: tuple[Lane, ...], limit: int, max_queue: int, crowd: list[int]) -> None:
        while sum(lane.floor_slots(limit) for lane in lanes) >= limit:  # too much for so few slots: halve the floors
            lanes = tuple(lane.model_copy(update={"floor": lane.floor / 2}) for lane in lanes)
        self.gate = WatchedGate(list(lanes), limit, max_queue, self.clock)
        self.model = Model({lane.name: lane for lane in lanes}, limit)
        for lane in crowd:
            self.arrive(lane, [(1, "k")])

    async def client(self, ticket: Ticket, request: Request) -> None:
        try:
            with contextlib.suppress(GateFull):  # another key's request took its place
                await ticket.wait()
                await request.done.wait()
        finally:
            self.gate.release(ticket)

    def settle(self) -> None:
        """Let the tasks run until each waits again, and check what happened."""
        self.loop.run_until_complete(self.some_ticks())
        self.check_events()

    async def some_ticks(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)

    def check_events(self) -> None:
        events, self.gate.events = self.gate.events, []
        for kind, ticket, now in events:
            request = self.requests[ticket]
            if kind == "admit":
                assert request in self.model.may_go(now), "it went out of turn, or took slots that are others'"
                self.model.leave_queue(request, had_its_turn=True)
                self.model.running.append(request)
                continue
            if request in self.model.running:
                self.model.running.remove(request)
            elif request in self.model.waiting:
                if self.newcomer is not None:
                    self.check_who_found_no_room(request, self.newcomer)
                self.model.leave_queue(request, had_its_turn=False)
        assert not self.model.may_go(self.clock.now), "it waits, although it may go"

    def check_who_found_no_room(self, refused: Request, newcomer: Request) -> None:
        """It is the newest of the key that has most in what is full, and the newcomer where nobody has more."""
        present = self.model.waiting_in(newcomer.lane)
        if len(present) <= math.ceil(self.model.lanes[newcomer.lane].queue * self.gate.max_queue):
            present = self.model.waiting
            assert len(present) > self.gate.max_queue
        counts = Counter(request.key for request in present)
        assert counts[refused.key] == max(counts.values())
        assert refused is newcomer or counts[refused.key] > counts[newcomer.key]
        assert refused is [request for request in present if request.key == refused.key][-1]

    @rule(lane=st.integers(0, 2), burst=bursts)
    def arrive(self, lane: int, burst: list[tuple[int, str]]) -> None:
        """Requests of one kind come one after the other, and each is admitted, queued or refused."""
        for weight, key in burst:
            self.clock.advance(TICK_S)
            self.check_events()
            self.come(list(self.model.lanes)[lane % len(self.model.lanes)], weight, key)

    @rule(pause=st.sampled_from([TICK_S, 0.5, 5, 10]), weight=st.integers(1, 3))
    def arrive_before_late_timers(self, pause: float, weight: int) -> None:
        """The event loop was busy: time has passed, and a request comes before the timers run."""
        self.clock.skip(pause)
        self.come(list(self.model.lanes)[-1], weight, "")
        self.clock.advance(0)
        self.check_events()

    def come(self, lane: str, weight: int, key: str) -> None:
        request = Request(lane, min(weight, self.model.most(lane)), key, self.clock.now)
        self.model.arrive(request)
        self.newcomer = request
        try:
            ticket = self.gate.enter(lane, weight, key)
        except GateFull as refusal:
            bound = refusal.bound
            [ticket] = [ticket for kind, ticket, _ in self.gate.events if kind == "release"]
            self.requests[ticket] = request
            self.check_events()
            places = math.ceil(self.model.lanes[lane].queue * self.gate.max_queue)
            assert bound == ("lane" if len(self.model.waiting_in(lane)) == places else "queue")
            assert bound == "lane" or len(self.model.waiting) == self.gate.max_queue
            self.newcomer = None
            return
        assert (ticket.lane, ticket.weight, ticket.key, ticket.arrived) == (lane, request.weight, key, request.arrived)
        self.requests[ticket] = request
        self.check_events()
        self.newcomer = None
        request.task = self.loop.create_task(self.client(ticket, request))
        self.settle()

    def pick(self, requests: list[Request], number: int) -> Request:
        return requests[number % len(requests)]

    @precondition(lambda self: self.model.running)
    @rule(number=st.integers(0, 99))
    def finish(self, number: int) -> None:
        """A request ends its work."""
        request = self.pick(self.model.running, number)
        request.done.set()
        self.settle()
        assert request not in self.model.running

    @precondition(lambda self: self.model.running + self.model.waiting)
    @rule(number=st.integers(0, 99))
    def cancel(self, number: int) -> None:
        """A client leaves, whether its request works or waits."""
        task = self.pick(self.model.running + self.model.waiting, number).task
        assert task
        task.cancel()
        self.settle()

    @precondition(lambda self: self.model.running)
    @rule(number=st.integers(0, 99), cancelled=st.sets(st.integers(0, 4)), before=st.booleans())
    def cancel_in_the_tick_of_the_hand_over(self, number: int, cancelled: set[int], before: bool) -> None:
        """Slots are handed on while those that wait for them are being cancelled, before or after they got them."""
        ticket = next(t for t, one in self.requests.items() if one is self.pick(self.model.running, number))
        if before:
            self.cancel_all([one for place, one in enumerate(self.model.waiting) if place in cancelled])
        self.gate.release(ticket)  # its own client will do it once more
        admitted = [self.requests[ticket] for kind, ticket, _ in self.gate.events if kind == "admit"]
        self.check_events()
        if not before:
            self.cancel_all([one for place, one in enumerate(admitted) if place in cancelled])
        self.requests[ticket].done.set()
        self.settle()

    @precondition(lambda self: self.model.waiting)
    @rule(older_than=st.sampled_from([1, 10]))
    def expire(self, older_than: float) -> None:
        """All that have waited for so long give up in one tick."""
        self.cancel_all([one for one in self.model.waiting if self.clock.now - one.arrived >= older_than])
        self.settle()

    def cancel_all(self, requests: list[Request]) -> None:
        for request in requests:
            assert request.task
            request.task.cancel()

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0, 999))
    def release_again(self, number: int) -> None:
        """A claim that has ended is ended once more."""
        present = self.model.running + self.model.waiting
        ended = [ticket for ticket, request in self.requests.items() if request not in present]
        if ended:
            self.gate.release(ended[number % len(ended)])
            self.check_events()

    @rule(seconds=st.sampled_from([TICK_S / 2, 0.5, 5]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.settle()

    @rule(times=st.integers(1, 4))
    def time_passes_until_it_matters(self, times: int) -> None:
        """Nothing happens until a floor is lent out or a waiting request becomes overdue."""
        for _ in range(times):
            later = [moment for moment in self.model.moments() if moment > self.clock.now]
            self.clock.advance(min(later, default=self.clock.now) - self.clock.now)
            self.settle()

    @invariant()
    def counters_are_true_and_within_bounds(self) -> None:
        gate, model = self.gate, self.model
        assert gate.in_flight == sum(request.weight for request in model.running) <= gate.limit
        assert gate.queued == len(model.waiting) <= gate.max_queue
        for name, lane in model.lanes.items():
            view, waiting = gate.lanes[name], model.waiting_in(name)
            assert (view.name, view.in_flight) == (name, model.in_flight(name))
            assert view.queued == len(waiting) <= math.ceil(lane.queue * gate.max_queue)
            assert view.queued_weight == sum(request.weight for request in waiting)

    @invariant()
    def timers_run_only_while_somebody_waits(self) -> None:
        assert len(self.clock.timers) <= (1 if self.model.waiting else 0)

    def teardown(self) -> None:
        """Everybody leaves; nothing must be left."""
        if hasattr(self, "gate"):
            self.cancel_all(self.model.running + self.model.waiting)
            self.settle()
            assert (self.gate.in_flight, self.gate.queued, self.clock.timers) == (0, 0, [])
            assert not any(lane.waiting or lane.turns or lane.queued_weight for lane in self.gate.lanes.values())
        self.loop.close()


examples = int(os.environ.get("GATE_EXAMPLES", "0"))
GateMachine.TestCase.settings = settings(
    max_examples=examples or 100,
    stateful_step_count=40,
    derandomize=not examples,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestGate = GateMachine.TestCase


def two_lanes(seed: int) -> list[Lane]:
    return [
        Lane(name="a", floor=0.5, weight=2, max_wait_s=(5, 20, 1000)[seed % 3]),
        Lane(name="b", floor=(0, 0.25)[seed % 2], max_wait_s=(5, 20, 1000)[seed // 3 % 3] + TICK_S / 8),
    ]


def three_lanes(seed: int) -> list[Lane]:
    return [*two_lanes(seed), Lane(name="c", weight=5, queue=0.5, max_wait_s=(8, 1000)[seed % 2] + TICK_S / 4)]


@pytest.mark.parametrize("seed", range(examples // 6 or 24))
def test_a_long_day_at_a_busy_gate(seed: int) -> None:
    """Some hundred steps each, of a kind and in a mixture that make lanes wait, lend, and come back."""
    dice = random.Random(seed)
    day = GateMachine()
    lanes = three_lanes(seed // 2) if seed % 2 else two_lanes(seed // 2)
    day.start(tuple(lanes), limit=dice.choice([3, 4, 8]), max_queue=20, crowd=[])
    favourite = 0
    for step in range(300):
        if step % 10 == 0:
            favourite = dice.randrange(3)  # others stay away for a while
        what = dice.choices(
            [day.arrive, day.finish, day.cancel, day.cancel_in_the_tick_of_the_hand_over, day.time_passes],
            [8, 6, 1, 1, 4],
        )[0]
        if what == day.arrive:
            lane = favourite if dice.random() < 0.8 else dice.randrange(3)
            day.arrive(lane, [(dice.choice([1, 1, 2, 3]), dice.choice("kl")) for _ in range(dice.randint(1, 3))])
        elif what == day.time_passes and dice.random() < 0.5:
            day.time_passes_until_it_matters(1)
        elif what == day.time_passes:
            day.time_passes(dice.choice([0.25, 1, 3]))
        elif what == day.cancel and day.model.running + day.model.waiting:
            day.cancel(dice.randrange(99))
        elif what == day.finish and day.model.running:
            day.finish(dice.randrange(99))
        elif what == day.cancel_in_the_tick_of_the_hand_over and day.model.running:
            day.cancel_in_the_tick_of_the_hand_over(dice.randrange(99), {0, 2}, dice.random() < 0.5)
        day.counters_are_true_and_within_bounds()
        day.timers_run_only_while_somebody_waits()
    day.teardown()
