"""The gate's rules one by one, as somebody who sends requests would notice them."""

import asyncio
import gc
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

from app.gate import LEND_AFTER_S, Gate, GateFull, Ticket
from app.settings import DEFAULT_LANES, Lane
from tests.unit.virtual_clock import VirtualClock

NEVER_S = 1e9  # a max_wait_s that no test reaches


def lane(name: str = "only", **values: float) -> Lane:
    return Lane.model_validate({"name": name, "max_wait_s": NEVER_S, **values})


def fill(gate: Gate, lane: str, requests: int, weight: int = 1) -> list[Ticket]:
    """Let so many requests start; all must."""
    tickets = [gate.enter(lane, weight) for _ in range(requests)]
    assert all(ticket.admitted for ticket in tickets)
    return tickets


def queue(gate: Gate, lane: str, keys: Iterable[str] = ("",), weight: int = 1) -> list[Ticket]:
    """Let one request for each key wait; all must."""
    tickets = [gate.enter(lane, weight, key) for key in keys]
    assert not any(ticket.admitted for ticket in tickets)
    return tickets


def started(tickets: Sequence[Ticket]) -> list[int]:
    """Which of the tickets, by position, were admitted."""
    return [position for position, ticket in enumerate(tickets) if ticket.admitted]


def order_of_starts(gate: Gate, running: Ticket, waiting: Sequence[Ticket]) -> list[Ticket]:
    """End one request after the other on a gate with room for one, and say in which order the others start."""
    order = []
    for _ in waiting:
        gate.release(running)
        [running] = [ticket for ticket in waiting if ticket.admitted and ticket not in order]
        order.append(running)
    return order


class TestLimit:
    def test_a_burst_of_ten_times_the_limit_starts_exactly_as_many_as_there_are_slots(self) -> None:
        gate = Gate([lane()], limit=8, max_queue=40, clock=VirtualClock())
        tickets, refused = [], 0
        for _ in range(80):
            try:
                tickets.append(gate.enter("only"))
            except GateFull:
                refused += 1
        assert (len(started(tickets)), gate.in_flight, gate.queued, refused) == (8, 8, 40, 32)

    def test_a_burst_of_one_kind_leaves_the_other_kinds_floor_free(self) -> None:
        gate = Gate(DEFAULT_LANES, limit=64, max_queue=1000, clock=VirtualClock())
        gate.release(gate.enter("long"))
        short = [gate.enter("short") for _ in range(640)]
        assert len(started(short)) == 48
        assert len(fill(gate, "long", 16)) == 16
        assert gate.in_flight == 64

    def test_requests_beside_each_other_never_take_more_slots_than_the_limit(self) -> None:
        gate = Gate([lane()], limit=8, max_queue=10, clock=VirtualClock())
        fill(gate, "only", 2, weight=3)
        queue(gate, "only", weight=3)
        assert gate.in_flight == 6
        assert gate.lanes["only"].queued_weight == 3

    def test_a_request_for_more_than_there_is_takes_all_it_can_ever_get_and_runs(self) -> None:
        lanes = [lane("short", floor=0.5), lane("long", floor=0.25)]
        gate = Gate(lanes, limit=64, max_queue=10, clock=VirtualClock())
        assert (gate.lanes["short"].max_weight, gate.lanes["long"].max_weight) == (48, 32)
        ticket = gate.enter("long", weight=1000)
        assert (ticket.admitted, ticket.weight, gate.in_flight) == (True, 32, 32)

    def test_a_request_for_no_choices_still_takes_a_slot(self) -> None:
        gate = Gate([lane()], limit=2, max_queue=0, clock=VirtualClock())
        assert gate.enter("only", weight=0).weight == 1
        assert gate.enter("only", weight=-3).weight == 1

    def test_with_a_limit_of_one_either_kind_runs(self) -> None:
        gate = Gate(DEFAULT_LANES, limit=1, max_queue=10, clock=VirtualClock())
        for name in ("long", "short", "long"):
            ticket = gate.enter(name, weight=5)
            assert ticket.admitted
            gate.release(ticket)

    def test_floors_that_leave_no_open_slot_stop_the_start(self) -> None:
        with pytest.raises(ValueError, match="floors of 4 slots"):
            Gate([lane("a", floor=0.5), lane("b", floor=0.5)], limit=4, max_queue=1, clock=VirtualClock())
        with pytest.raises(ValueError, match="leave none of 0"):
            Gate([lane()], limit=0, max_queue=1, clock=VirtualClock())

    def test_an_unknown_lane_is_an_error_of_the_caller(self) -> None:
        with pytest.raises(KeyError):
            Gate([lane()], limit=1, max_queue=1, clock=VirtualClock()).enter("other")


class TestRelease:
    def test_ending_a_request_twice_does_not_free_a_second_slot(self) -> None:
        gate = Gate([lane()], limit=2, max_queue=10, clock=VirtualClock())
        first, _ = fill(gate, "only", 2)
        waiting = queue(gate, "only", ["", ""])
        gate.release(first)
        gate.release(first)
        assert started(waiting) == [0]
        assert gate.in_flight == 2

    def test_leaving_the_queue_twice_does_not_free_a_slot(self) -> None:
        gate = Gate([lane()], limit=1, max_queue=10, clock=VirtualClock())
        [running] = fill(gate, "only", 1)
        [waiting] = queue(gate, "only")
        gate.release(waiting)
        gate.release(waiting)
        assert (gate.in_flight, gate.queued, gate.lanes["only"].queued_weight) == (1, 0, 0)
        gate.release(running)
        assert gate.in_flight == 0
        assert not waiting.admitted

    def test_one_heavy_request_that_ends_starts_all_that_fit_in_its_place(self) -> None:
        gate = Gate([lane()], limit=4, max_queue=10, clock=VirtualClock())
        [heavy] = fill(gate, "only", 1, weight=4)
        waiting = queue(gate, "only", [""] * 6)
        gate.release(heavy)
        assert started(waiting) == [0, 1, 2, 3]

    def test_a_request_knows_how_long_it_waited(self) -> None:
        clock = VirtualClock(now=100.0)
        gate = Gate([lane()], limit=1, max_queue=10, clock=clock)
        [running] = fill(gate, "only", 1)
        [waiting] = queue(gate, "only", ["alice"])
        clock.advance(7)
        gate.release(running)
        assert (waiting.lane, waiting.key, waiting.arrived, waiting.admitted_at) == ("only", "alice", 100.0, 107.0)


class TestQueueBounds:
    def test_a_full_queue_refuses_and_keeps_those_who_wait(self) -> None:
        gate = Gate([lane("a"), lane("b")], limit=1, max_queue=3, clock=VirtualClock())
        fill(gate, "a", 1)
        queue(gate, "a", ["", ""])
        queue(gate, "b")
        with pytest.raises(GateFull, match="the queue is full") as refusal:
            gate.enter("b")
        assert refusal.value.bound == "queue"
        assert (gate.queued, gate.lanes["a"].queued, gate.lanes["b"].queued) == (3, 2, 1)

    def test_one_kind_cannot_fill_the_whole_queue(self) -> None:
        gate = Gate([lane("a", queue=0.25), lane("b")], limit=1, max_queue=10, clock=VirtualClock())
        fill(gate, "a", 1)
        queue(gate, "a", [""] * 3)
        with pytest.raises(GateFull, match="the lane is full") as refusal:
            gate.enter("a")
        assert refusal.value.bound == "lane"
        queue(gate, "b", [""] * 7)

    @pytest.mark.parametrize(("share", "max_queue", "places"), [(0.1, 30, 3), (0.07, 100, 7), (0.01, 10, 1), (0, 9, 0)])
    def test_a_lanes_share_of_the_queue_is_rounded_up_but_not_beyond(
        self, share: float, max_queue: int, places: int
    ) -> None:
        gate = Gate([lane(queue=share)], limit=1, max_queue=max_queue, clock=VirtualClock())
        assert gate.lanes["only"].max_queued == places

    def test_with_no_queue_a_request_starts_or_is_refused(self) -> None:
        gate = Gate([lane()], limit=1, max_queue=0, clock=VirtualClock())
        [running] = fill(gate, "only", 1)
        with pytest.raises(GateFull):
            gate.enter("only")
        gate.release(running)
        assert gate.enter("only").admitted

    def test_a_refused_request_leaves_no_trace_but_its_arrival(self) -> None:
        gate = Gate([lane()], limit=1, max_queue=0, clock=VirtualClock())
        fill(gate, "only", 1)
        with pytest.raises(GateFull):
            gate.enter("only", key="alice")
        view = gate.lanes["only"]
        assert (view.queued, view.queued_weight, len(view.turns), view.in_flight) == (0, 0, 0, 1)


class TestOrderWithinALane:
    def test_requests_of_one_client_start_in_the_order_in_which_they_came(self) -> None:
        gate = Gate([lane()], limit=1, max_queue=10, clock=VirtualClock())
        [running] = fill(gate, "only", 1)
        waiting = queue(gate, "only", ["k"] * 5)
        assert order_of_starts(gate, running, waiting) == waiting

    def test_a_light_request_does_not_slip_past_a_heavy_one_of_its_lane(self) -> None:
        gate = Gate([lane()], limit=4, max_queue=10, clock=VirtualClock())
        fill(gate, "only", 3)
        queue(gate, "only", weight=4)
        assert not gate.enter("only", weight=1).admitted

    def test_one_client_with_many_requests_does_not_hold_up_another_with_one(self) -> None:
        gate = Gate([lane()], limit=1, max_queue=20, clock=VirtualClock())
        [running] = fill(gate, "only", 1)
        waiting = queue(gate, "only", "aaaaabcc")
        assert "".join(ticket.key for ticket in order_of_starts(gate, running, waiting)) == "abcacaaa"

    def test_a_client_whose_first_request_leaves_keeps_its_turn(self) -> None:
        gate = Gate([lane()], limit=1, max_queue=20, clock=VirtualClock())
        [running] = fill(gate, "only", 1)
        waiting = queue(gate, "only", "aabbcc")
        gate.release(waiting.pop(2))
        assert "".join(ticket.key for ticket in order_of_starts(gate, running, waiting)) == "abcac"

    def test_a_client_whose_long_queue_is_overdue_still_takes_turns_with_others(self) -> None:
        clock = VirtualClock()
        gate = Gate([lane(max_wait_s=10), lane("other", weight=1000)], limit=1, max_queue=99, clock=clock)
        [running] = fill(gate, "only", 1)
        waiting = queue(gate, "only", "a" * 20)
        clock.advance(60)
        waiting += queue(gate, "only", "bbb")
        elsewhere = queue(gate, "other")
        assert "".join(ticket.key for ticket in order_of_starts(gate, running, waiting)) == "ababab" + "a" * 17
        assert not elsewhere[0].admitted, "the lane was overdue, and this came later"

    def test_turns_are_counted_in_slots_so_that_heavy_requests_get_no_more(self) -> None:
        gate = Gate([lane()], limit=4, max_queue=99, clock=VirtualClock())
        [running] = fill(gate, "only", 1, weight=4)
        heavy, light = queue(gate, "only", "h" * 5, weight=4), queue(gate, "only", "l" * 20)
        order = []
        while gate.queued:
            gate.release(running)
            started = [ticket for ticket in heavy + light if ticket.admitted and ticket not in order]
            order += started
            for running in started[:-1]:
                gate.release(running)
            [*_, running] = started
        slots = Counter({ticket.key: 0 for ticket in order})
        for ticket in order:
            slots[ticket.key] += ticket.weight
            assert abs(slots["h"] - slots["l"]) <= 4
        assert slots == {"h": 20, "l": 20}

    def test_a_client_that_was_away_has_saved_nothing_up(self) -> None:
        gate = Gate([lane()], limit=1, max_queue=99, clock=VirtualClock())
        [running] = fill(gate, "only", 1)
        early = queue(gate, "only", "a" * 30)
        for ticket in early[:20]:
            gate.release(running)
            running = ticket
        late = queue(gate, "only", "bbb")
        order = order_of_starts(gate, running, early[20:] + late)
        assert "".join(ticket.key for ticket in order) == "ababab" + "a" * 7


class TestRoomForOthers:
    """A client with many requests does not keep the queue full for itself."""

    def test_a_client_that_fills_the_queue_gives_way_until_both_have_as_much(self) -> None:
        gate = Gate([lane()], limit=1, max_queue=6, clock=VirtualClock())
        fill(gate, "only", 1)
        greedy = queue(gate, "only", "g" * 6)
        polite = queue(gate, "only", "ppp")
        assert Counter(ticket.key for ticket in gate.lanes["only"].waiting) == {"g": 3, "p": 3}
        assert list(gate.lanes["only"].waiting) == greedy[:3] + polite
        for key in "gp":
            with pytest.raises(GateFull):
                gate.enter("only", key=key)
        assert gate.queued == 6

    async def test_who_gives_way_is_told_so_and_leaves_nothing(self) -> None:
        gate = Gate([lane()], limit=1, max_queue=2, clock=VirtualClock())
        [running] = fill(gate, "only", 1)
        told: list[str] = []
        kept, displaced = (gate.enter("only", key="g", on_displaced=lambda: told.append("g")) for _ in range(2))
        waits = asyncio.create_task(displaced.wait())
        await asyncio.sleep(0)
        [newcomer] = queue(gate, "only", "p")
        assert told == ["g"]
        with pytest.raises(GateFull):
            await waits
        with pytest.raises(GateFull):
            await displaced.wait()
        gate.release(displaced)
        assert (gate.queued, gate.in_flight) == (2, 1)
        for ticket in (running, kept, newcomer):
            gate.release(ticket)
        assert (gate.queued, gate.in_flight, displaced.admitted) == (0, 0, False)

    async def test_giving_way_in_the_tick_of_a_cancellation_leaves_nothing(self) -> None:
        gate = Gate([lane()], limit=1, max_queue=2, clock=VirtualClock())
        fill(gate, "only", 1)
        _, displaced = queue(gate, "only", "gg")
        waits = asyncio.create_task(displaced.wait())
        await asyncio.sleep(0)
        waits.cancel()
        queue(gate, "only", "p")
        with pytest.raises(asyncio.CancelledError):
            await waits
        gate.release(displaced)
        assert gate.queued == 2

    def test_in_a_full_lane_only_its_own_requests_give_way(self) -> None:
        gate = Gate([lane("a", queue=0.25), lane("b")], limit=1, max_queue=8, clock=VirtualClock())
        fill(gate, "a", 1)
        elsewhere, here = queue(gate, "b", "g" * 6), queue(gate, "a", "gg")
        queue(gate, "a", "p")
        assert list(gate.lanes["b"].waiting) == elsewhere
        assert here[1] not in gate.lanes["a"].waiting

    def test_in_a_full_queue_the_newest_of_any_lane_gives_way(self) -> None:
        clock = VirtualClock()
        gate = Gate([lane("a"), lane("b")], limit=1, max_queue=3, clock=clock)
        fill(gate, "a", 1)
        for name in "aba":
            clock.advance(1)
            queue(gate, name, "g")
        queue(gate, "b", "p")
        assert (gate.lanes["a"].queued, gate.lanes["b"].queued) == (1, 2)

    def test_one_client_alone_is_refused_when_the_queue_is_full(self) -> None:
        gate = Gate([lane()], limit=1, max_queue=2, clock=VirtualClock())
        fill(gate, "only", 1)
        queue(gate, "only", "gg")
        assert not gate.displace(3)
        with pytest.raises(GateFull):
            gate.enter("only", key="g")

    def test_what_a_client_has_to_wait_for_is_its_own_and_as_much_of_each_other(self) -> None:
        gate = Gate([lane()], limit=4, max_queue=99, clock=VirtualClock())
        fill(gate, "only", 4)
        queue(gate, "only", "g" * 20)
        queue(gate, "only", "pp", weight=2)
        view = gate.lanes["only"]
        assert (view.ahead("g", 1), view.ahead("p", 2), view.ahead("new", 1)) == (24, 10, 2)


class TestFloors:
    def two_lanes(self, clock: VirtualClock, **short: float) -> Gate:
        return Gate([lane("short", floor=0.5, **short), lane("long")], limit=4, max_queue=10, clock=clock)

    def test_one_kind_of_traffic_uses_the_whole_engine_from_the_start(self) -> None:
        fill(self.two_lanes(VirtualClock()), "long", 4)

    def test_a_floor_is_kept_while_its_kind_of_traffic_pauses_for_less_than_ten_seconds(self) -> None:
        clock = VirtualClock()
        gate = self.two_lanes(clock)
        gate.release(gate.enter("short"))
        fill(gate, "long", 2)
        [waiting] = queue(gate, "long")
        clock.advance(LEND_AFTER_S - 0.001)
        assert not waiting.admitted

    def test_a_waiting_request_starts_on_a_lent_floor_without_anything_else_happening(self) -> None:
        clock = VirtualClock()
        gate = self.two_lanes(clock)
        gate.release(gate.enter("short"))
        fill(gate, "long", 2)
        waiting = queue(gate, "long", [""] * 3)
        clock.advance(LEND_AFTER_S)
        assert started(waiting) == [0, 1]
        assert not clock.timers

    def test_each_arrival_puts_the_loan_off(self) -> None:
        clock = VirtualClock()
        gate = self.two_lanes(clock)
        fill(gate, "short", 1)
        fill(gate, "long", 2)
        [waiting] = queue(gate, "long")
        for _ in range(5):
            clock.advance(6)
            gate.release(gate.enter("short"))
        assert not waiting.admitted
        clock.advance(LEND_AFTER_S)
        assert waiting.admitted

    def test_a_floor_in_use_is_lent_only_as_far_as_it_is_idle(self) -> None:
        clock = VirtualClock()
        gate = self.two_lanes(clock)
        fill(gate, "short", 1)
        clock.advance(LEND_AFTER_S)
        fill(gate, "long", 3)
        queue(gate, "long")

    def test_a_lent_floor_comes_back_as_requests_end(self) -> None:
        clock = VirtualClock()
        gate = self.two_lanes(clock)
        running = fill(gate, "long", 4)
        short = queue(gate, "short", [""] * 3)
        long = queue(gate, "long", [""] * 3)
        gate.release(running[0])
        gate.release(running[1])
        assert (started(short), started(long)) == ([0, 1], [])

    def test_a_refused_arrival_calls_its_floor_back(self) -> None:
        clock = VirtualClock()
        gate = self.two_lanes(clock, queue=0)
        running = fill(gate, "long", 4)
        with pytest.raises(GateFull):
            gate.enter("short")
        queue(gate, "long", [""] * 2)
        gate.release(running[0])
        assert gate.enter("short").admitted

    def test_a_lane_that_waits_for_its_floor_does_not_lend_it_out_again(self) -> None:
        clock = VirtualClock()
        gate = self.two_lanes(clock)
        running = fill(gate, "long", 4)
        [short] = queue(gate, "short", weight=2)
        long = queue(gate, "long", [""] * 4)
        clock.advance(10 * LEND_AFTER_S)
        gate.release(running[0])
        assert (short.admitted, started(long)) == (False, [])
        gate.release(short)  # nobody is left there: the floor is lent at once
        assert started(long) == [0]

    def test_a_request_within_its_floor_is_not_held_up_by_heavy_ones_of_other_lanes(self) -> None:
        gate = self.two_lanes(VirtualClock())
        fill(gate, "short", 1)
        fill(gate, "long", 1)
        queue(gate, "long", weight=2)
        assert gate.enter("short").admitted

    def test_two_lanes_whose_floors_come_back_at_once_both_get_on(self) -> None:
        clock = VirtualClock()
        lanes = [lane("x", floor=0.34), lane("y", floor=0.34), lane("rest")]
        gate = Gate(lanes, limit=3, max_queue=99, clock=clock)
        running, *_ = fill(gate, "rest", 3)
        waiting = []
        for name in "xyyxxy":
            waiting += queue(gate, name)
            clock.skip(0.001)
        order = order_of_starts(gate, running, waiting)
        assert order == waiting

    def test_a_single_idle_slot_is_used_when_two_lanes_wait_for_floors_that_are_lent(self) -> None:
        lanes = [lane("x", floor=0.5), lane("y", floor=0.25), lane("rest")]
        gate = Gate(lanes, limit=4, max_queue=99, clock=VirtualClock())
        running, *_ = fill(gate, "rest", 4)
        x, y = queue(gate, "x"), queue(gate, "y")
        gate.release(running)
        assert len(started(x + y)) == 1


class TestShares:
    @pytest.mark.parametrize(
        ("limit", "weights", "floors"),
        [
            (1, (1, 3), (0, 0)),
            (7, (1, 3, 5), (0, 0, 0)),
            (64, (2, 1), (0.5, 0.25)),
            (16, (2, 1), (0.5, 0.25)),
            (12, (1, 1), (0.5, 0)),
            (12, (1, 3), (0.5, 0.25)),
        ],
    )
    def test_lanes_that_wait_share_the_slots_beyond_the_floors_by_weight(
        self, limit: int, weights: tuple[float, ...], floors: tuple[float, ...]
    ) -> None:
        lanes = [lane(f"l{i}", weight=w, floor=f) for i, (w, f) in enumerate(zip(weights, floors, strict=True))]
        starts = self.starts_over_10000_ends(Gate(lanes, limit, max_queue=30, clock=VirtualClock()))
        beyond = limit - sum(one.floor_slots(limit) for one in lanes)
        for one in lanes:
            slots = one.floor_slots(limit) + beyond * one.weight / sum(weights)
            assert starts[one.name] == pytest.approx(10_000 * slots / limit, rel=0.1)

    def test_shares_are_counted_in_slots_not_in_requests(self) -> None:
        gate = Gate([lane("heavy"), lane("light")], limit=60, max_queue=200, clock=VirtualClock())
        [running] = fill(gate, "light", 1, weight=60)
        heavy, light = queue(gate, "heavy", [""] * 60, weight=2), queue(gate, "light", [""] * 60)
        gate.release(running)
        assert (len(started(heavy)), len(started(light))) == (15, 30)

    @staticmethod
    def starts_over_10000_ends(gate: Gate) -> Counter[str]:
        """Keep three requests waiting in each lane while 10,000 end, oldest first."""
        running: list[Ticket] = []
        waiting: dict[str, list[Ticket]] = {name: [] for name in gate.lanes}
        starts: Counter[str] = Counter()
        for _ in range(10_000):
            for name, tickets in waiting.items():
                while len(tickets) < 3:
                    ticket = gate.enter(name)
                    (running if ticket.admitted else tickets).append(ticket)
            gate.release(running.pop(0))
            for name, tickets in waiting.items():
                while tickets and tickets[0].admitted:
                    running.append(tickets.pop(0))
                    starts[name] += 1
        return starts

    def test_a_lane_that_was_away_does_not_catch_up_at_the_others_expense(self) -> None:
        gate = Gate([lane("a"), lane("b")], limit=1, max_queue=300, clock=VirtualClock())
        [running] = fill(gate, "a", 1)
        waiting = queue(gate, "a", [""] * 200)
        order_of_starts(gate, running, waiting)
        away = queue(gate, "b", [""] * 20) + queue(gate, "a", [""] * 20)
        order = order_of_starts(gate, waiting[-1], away)
        assert "".join(ticket.lane for ticket in order) in ("ab" * 20, "ba" * 20)

    def test_a_heavy_request_that_was_overtaken_gives_its_lane_no_credit(self) -> None:
        gate = Gate([lane("heavy"), lane("light")], limit=2, max_queue=300, clock=VirtualClock())
        running = fill(gate, "light", 2)
        [heavy] = queue(gate, "heavy", weight=2)
        behind = queue(gate, "heavy", [""] * 10)
        for _ in range(100):  # the light lane keeps one slot busy all the time
            [waiting] = queue(gate, "light")
            gate.release(running.pop(0))
            assert waiting.admitted
            running.append(waiting)
        assert not heavy.admitted
        light = queue(gate, "light", [""] * 10)
        gate.release(heavy)
        order = order_of_starts(gate, running[0], behind + light)
        assert Counter(ticket.lane for ticket in order[:10])["heavy"] in (5, 6)  # and not 10

    def test_promoted_requests_of_one_lane_leave_the_shares_of_the_others_alone(self) -> None:
        lanes = [lane("rare", weight=0.001, max_wait_s=0), lane("b"), lane("c", weight=3)]
        gate = Gate(lanes, limit=1, max_queue=2000, clock=VirtualClock())
        [running] = fill(gate, "b", 1)
        waiting = {"b": queue(gate, "b", [""] * 900), "c": queue(gate, "c", [""] * 900)}
        starts: Counter[str] = Counter()
        for _ in range(400):
            [promoted] = queue(gate, "rare")
            gate.release(running)
            assert promoted.admitted
            gate.release(promoted)
            [name] = [name for name, tickets in waiting.items() if tickets[0].admitted]
            running = waiting[name].pop(0)
            starts[name] += 1
        assert starts["c"] == pytest.approx(300, rel=0.1)

    @pytest.mark.parametrize("weight", [1e-300, 1e-9, 1e9, 1e300])
    def test_no_lane_starves_whatever_the_weights(self, weight: float) -> None:
        clock = VirtualClock()
        lanes = [lane("odd", weight=weight, max_wait_s=10), lane("plain", max_wait_s=10)]
        gate = Gate(lanes, limit=1, max_queue=99, clock=clock)
        [running] = fill(gate, "odd", 1)
        watched = {name: queue(gate, name)[0] for name in gate.lanes}
        newer = [ticket for name in gate.lanes for ticket in queue(gate, name, [""] * 40)]
        waiting = list(watched.values()) + newer
        for _ in range(12):
            gate.release(running)
            running = next(ticket for ticket in waiting if ticket.admitted)
            waiting.remove(running)
            clock.advance(1)
        assert all(ticket.admitted for ticket in watched.values())

    def test_a_short_lane_under_endless_load_does_not_starve_the_long_one(self) -> None:
        clock = VirtualClock()
        gate = Gate([lane("long", max_wait_s=10), lane("short", weight=1000)], limit=2, max_queue=99, clock=clock)
        running = fill(gate, "short", 2)
        waiting = queue(gate, "short", [""] * 3)
        first, long = queue(gate, "long", ["", ""])
        gate.release(running.pop(0))
        assert first.admitted  # as new in the queue; by its weight, the next one's turn would be a thousand slots away
        running.append(first)
        arrived = clock.now
        while not long.admitted:
            waiting += queue(gate, "short")
            gate.release(running.pop(0))
            while waiting and waiting[0].admitted:
                running.append(waiting.pop(0))
            clock.advance(0.25)
        assert long.admitted_at == arrived + 10


class TestPromotion:
    def test_an_overdue_request_gets_the_next_slot_before_a_lane_of_any_weight(self) -> None:
        clock = VirtualClock()
        gate = Gate([lane("a", max_wait_s=10), lane("b", weight=1000)], limit=1, max_queue=9, clock=clock)
        [running] = fill(gate, "b", 1)
        first, overdue = queue(gate, "a", ["", ""])
        before, after = queue(gate, "b", ["", ""])
        gate.release(running)
        assert first.admitted  # that was its share for the next thousand
        clock.advance(9.999)
        gate.release(first)
        assert before.admitted
        clock.advance(0.001)
        gate.release(before)
        assert (overdue.admitted, after.admitted) == (True, False)

    def test_among_overdue_requests_the_one_that_became_so_first_starts_first(self) -> None:
        clock = VirtualClock()
        gate = Gate([lane("slow", max_wait_s=10), lane("fast", max_wait_s=2)], limit=1, max_queue=9, clock=clock)
        [running] = fill(gate, "slow", 1)
        waiting = queue(gate, "slow")
        clock.advance(5)
        waiting += queue(gate, "fast")
        clock.advance(4)
        waiting += queue(gate, "fast")
        clock.advance(20)
        order = order_of_starts(gate, running, waiting)
        assert [waiting.index(ticket) for ticket in order] == [1, 0, 2]

    def test_an_overdue_request_does_not_take_another_lanes_floor(self) -> None:
        clock = VirtualClock()
        gate = Gate([lane("a", floor=0.5), lane("b", max_wait_s=1)], limit=4, max_queue=9, clock=clock)
        floor = fill(gate, "a", 2)
        fill(gate, "b", 2)
        [overdue] = queue(gate, "b")
        clock.advance(5)
        gate.release(floor[0])
        assert not overdue.admitted
        assert gate.enter("a").admitted

    def test_a_heavy_request_is_overtaken_only_until_it_is_overdue(self) -> None:
        clock = VirtualClock()
        gate = Gate([lane("light"), lane("heavy", max_wait_s=10)], limit=4, max_queue=9, clock=clock)
        running = fill(gate, "light", 3)
        [heavy] = queue(gate, "heavy", weight=3)
        running += fill(gate, "light", 1)
        gate.release(running.pop())
        clock.advance(10)
        newcomers = queue(gate, "light", ["", ""])
        gate.release(running.pop())
        assert (heavy.admitted, started(newcomers)) == (False, [])
        gate.release(running.pop())
        assert (heavy.admitted, started(newcomers), gate.in_flight) == (True, [], 4)

    def test_while_slots_are_kept_for_a_heavy_request_other_lanes_go_on_within_their_floors(self) -> None:
        clock = VirtualClock()
        gate = Gate([lane("light", floor=0.25), lane("heavy", max_wait_s=1)], limit=8, max_queue=9, clock=clock)
        running = fill(gate, "light", 8)
        [heavy] = queue(gate, "heavy", weight=6)
        clock.advance(1)
        light = queue(gate, "light", [""] * 5)
        for ticket in running[:6]:
            gate.release(ticket)
        assert (heavy.admitted, started(light)) == (True, [])
        gate.release(running[6])
        assert started(light) == [0]

    def test_when_a_heavy_request_gives_up_the_slots_kept_for_it_are_used_at_once(self) -> None:
        clock = VirtualClock()
        gate = Gate([lane("light"), lane("heavy", max_wait_s=1)], limit=4, max_queue=9, clock=clock)
        fill(gate, "light", 2)
        [heavy] = queue(gate, "heavy", weight=4)
        clock.advance(1)
        light = queue(gate, "light", [""] * 3)
        gate.release(heavy)
        assert started(light) == [0, 1]

    def test_a_newcomer_does_not_take_slots_before_those_that_time_has_just_let_in(self) -> None:
        clock = VirtualClock()
        gate = Gate([lane("a", floor=0.5), lane("b"), lane("c")], limit=2, max_queue=9, clock=clock)
        gate.release(gate.enter("a"))
        fill(gate, "b", 1)
        [waiting] = queue(gate, "b")
        clock.skip(LEND_AFTER_S)  # the floor is lent by now, but the loop was too busy for the timer
        assert not gate.enter("c").admitted
        assert waiting.admitted


class TestTimers:
    def test_nobody_waits_no_timer_runs(self) -> None:
        clock = VirtualClock()
        gate = Gate(DEFAULT_LANES, limit=4, max_queue=9, clock=clock)
        for ticket in [*fill(gate, "short", 2), *fill(gate, "long", 1)]:
            gate.release(ticket)
        assert not clock.timers

    def test_a_full_engine_needs_no_timer_however_many_wait(self) -> None:
        clock = VirtualClock()
        gate = Gate(DEFAULT_LANES, limit=4, max_queue=100, clock=clock)
        fill(gate, "long", 4)
        queue(gate, "long", "abcdefgh" * 3)
        assert not clock.timers

    def test_an_hour_of_waiting_does_not_poll(self) -> None:
        clock = VirtualClock()
        gate = Gate([lane("a", floor=0.25), lane("b", floor=0.25, max_wait_s=10)], limit=4, max_queue=9, clock=clock)
        fill(gate, "a", 3)
        queue(gate, "b", "xyz", weight=2)
        clock.advance(3600)
        assert clock.fired <= 3
        assert not clock.timers

    def test_the_last_one_to_leave_the_queue_takes_the_timer_along(self) -> None:
        clock = VirtualClock()
        gate = Gate([lane("a", floor=0.5), lane("b")], limit=2, max_queue=9, clock=clock)
        gate.release(gate.enter("a"))
        [running] = fill(gate, "b", 1)
        first, second = queue(gate, "b", ["", ""])
        assert len(clock.timers) == 1
        gate.release(first)
        assert len(clock.timers) == 1
        gate.release(second)
        assert not clock.timers
        [first] = queue(gate, "b")
        gate.release(running)
        assert first.admitted
        assert not clock.timers

    def test_a_closed_gate_leaves_no_timer(self) -> None:
        clock = VirtualClock()
        gate = Gate([lane("a", floor=0.5), lane("b")], limit=2, max_queue=9, clock=clock)
        gate.release(gate.enter("a"))
        fill(gate, "b", 1)
        queue(gate, "b")
        gate.close()
        assert not clock.timers


class TestWaiting:
    """On a real event loop, with its own clock."""

    async def test_a_request_that_may_start_does_not_wait(self) -> None:
        gate = Gate([lane()], limit=1, max_queue=1, clock=asyncio.get_running_loop())
        waiting = gate.enter("only").wait()
        with pytest.raises(StopIteration):  # it ran to its end without giving up the loop once
            waiting.send(None)

    async def test_a_request_starts_when_another_ends(self) -> None:
        gate = Gate([lane()], limit=1, max_queue=1, clock=asyncio.get_running_loop())
        [running] = fill(gate, "only", 1)
        [waiting] = queue(gate, "only")
        task = asyncio.create_task(waiting.wait())
        await asyncio.sleep(0)
        assert not task.done()
        gate.release(running)
        async with asyncio.timeout(1):
            await task

    async def test_a_request_that_is_cancelled_in_the_tick_of_its_hand_over_does_not_lose_the_slot(self) -> None:
        gate = Gate([lane()], limit=1, max_queue=10, clock=asyncio.get_running_loop())
        [running] = fill(gate, "only", 1)
        tickets = queue(gate, "only", [""] * 3)
        tasks = [asyncio.create_task(self.hold(gate, ticket)) for ticket in tickets]
        await asyncio.sleep(0)
        gate.release(running)
        assert tickets[0].admitted
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        assert (started(tickets), gate.in_flight, gate.queued) == ([0, 1], 1, 1)
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (gate.in_flight, gate.queued) == (0, 0)

    async def test_a_slot_handed_to_a_request_that_was_just_cancelled_goes_to_the_next(self) -> None:
        gate = Gate([lane()], limit=1, max_queue=10, clock=asyncio.get_running_loop())
        [running] = fill(gate, "only", 1)
        tickets = queue(gate, "only", ["", ""])
        tasks = [asyncio.create_task(self.hold(gate, ticket)) for ticket in tickets]
        await asyncio.sleep(0)
        tasks[0].cancel()
        gate.release(running)
        await asyncio.wait(tasks[:1])
        assert (tickets[1].admitted, gate.in_flight, gate.queued) == (True, 1, 0)
        tasks[1].cancel()
        await asyncio.wait(tasks)
        assert gate.in_flight == 0

    async def test_waiting_on_after_a_timeout_works(self) -> None:
        gate = Gate([lane()], limit=1, max_queue=10, clock=asyncio.get_running_loop())
        [running] = fill(gate, "only", 1)
        [ticket] = queue(gate, "only")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await ticket.wait()
        gate.release(running)
        await ticket.wait()
        assert ticket.admitted

    async def test_waiting_on_a_ticket_that_was_given_back_is_an_error_not_a_hang(self) -> None:
        gate = Gate([lane()], limit=1, max_queue=10, clock=asyncio.get_running_loop())
        fill(gate, "only", 1)
        [ticket] = queue(gate, "only")
        gate.release(ticket)
        with pytest.raises(RuntimeError, match="left the queue"):
            await ticket.wait()

    async def test_10000_requests_that_give_up_leave_nothing_behind(self) -> None:
        loop = asyncio.get_running_loop()
        gate = Gate([lane("a", floor=0.5), lane("b", max_wait_s=0.01)], limit=2, max_queue=10_000, clock=loop)
        gate.release(gate.enter("a"))
        running = fill(gate, "b", 1)

        async def give_up(key: str) -> bool:
            try:
                async with asyncio.timeout_at(deadline):
                    await self.hold(gate, gate.enter("b", key=key))
            except TimeoutError:
                return True
            return False

        deadline = loop.time() + 0.5
        assert all(await asyncio.gather(*(give_up(str(i % 100)) for i in range(10_000))))
        view = gate.lanes["b"]
        assert (gate.queued, view.queued_weight, len(view.waiting), len(view.turns)) == (0, 0, 0, 0)
        gc.collect()
        # By type alone: other libraries' objects may warn or worse when isinstance asks them for their class.
        assert [each for each in gc.get_objects() if type(each) is Ticket] == running

    @staticmethod
    async def hold(gate: Gate, ticket: Ticket) -> None:
        """A request as the gateway runs it, working until it is cancelled."""
        try:
            await ticket.wait()
            await asyncio.Event().wait()
        finally:
            gate.release(ticket)
