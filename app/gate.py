"""The admission gate: which request goes to the engine now, which waits, and which is refused.

A request takes as many of the gate's slots as its weight, and holds them until it is released. Free slots go, in order:

1. To promoted lanes, whose oldest request has waited their `max_wait_s`: the one where it became overdue first goes
   first, and while its next request does not fit, slots that come free are kept for it.
2. To the lanes that wait, in proportion to their weights, counted in slots beyond the floors. Requests of promoted
   lanes do not count, nor do those that met no queue, and a lane that has nothing to send saves nothing up.

Neither takes idle slots of another lane's floor, unless they are lent: a lane lends its floor out while none of its
requests waits and none has arrived for `LEND_AFTER_S`. After its next arrival the floor comes back, as requests end.

Within a lane, keys take turns, counted in slots: the more of them a key's requests take, the rarer its turns. A key's
requests go by arrival. Once the oldest request of a lane has waited `max_wait_s`, the lane is promoted, and within it
the turns go on: else a key with a long queue, which is always overdue, would leave the others none. While the request
that is next in a lane does not fit, other lanes may overtake it, its own does not.

When the queue is full, a request of a key that has fewer waiting takes the place of the newest of the key with most.
"""

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import Protocol

from app.settings import Lane

LEND_AFTER_S = 10.0
PROMOTED, IN_FLOOR, BY_SHARE = range(3)  # ranks of requests, in the order in which they go


class Timer(Protocol):
    """A call to come, from `Clock.call_at`."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Seconds that never go back, and calls at a given second. An asyncio event loop is one."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> Timer: ...


class GateFull(Exception):
    """A request can neither start nor wait (any longer). `bound` is what is full: its "lane", or the whole "queue"."""

    def __init__(self, bound: str) -> None:
        super().__init__(f"the {bound} is full")
        self.bound = bound


class Ticket:
    """One request's claim on `weight` slots, from `Gate.enter` to `Gate.release`. Times are the clock's seconds."""

    __slots__ = (
        "_awaited",
        "_displaced",
        "_holds_slots",
        "_home",
        "_on_displaced",
        "_overdue_at",
        "admitted_at",
        "arrived",
        "key",
        "weight",
    )

    def __init__(
        self, home: "LaneState", weight: int, key: str, arrived: float, on_displaced: Callable[[], object]
    ) -> None:
        self.weight = weight
        self.key = key
        self.arrived = arrived
        self.admitted_at: float | None = None
        self._home = home
        self._holds_slots = False
        self._overdue_at = arrived + home.max_wait_s
        self._awaited: asyncio.Future[None] | None = None
        self._on_displaced = on_displaced
        self._displaced = False

    @property
    def lane(self) -> str:
        return self._home.name

    @property
    def admitted(self) -> bool:
        """Whether it ever was: a release does not undo it."""
        return self.admitted_at is not None

    async def wait(self) -> None:
        """Return once the request may start. For one task at a time; cancelling it leaves the claim as it is.

        Raises:
            GateFull: its place went to a request of a key that has fewer waiting.
            RuntimeError: the ticket was released before it was admitted.
        """
        if self.admitted:
            return
        if self in self._home.waiting:
            self._awaited = asyncio.get_running_loop().create_future()
            await self._awaited
        elif not self._displaced:
            raise RuntimeError("this ticket has left the queue")
        if self._displaced:
            raise GateFull("queue")


class Turn:
    """A key that waits in a lane: its requests by arrival, and slots taken by the keys' common count."""

    __slots__ = ("paid", "queued_weight", "waiting")

    def __init__(self, paid: int) -> None:
        self.paid = paid
        self.queued_weight = 0
        # An ordered dict: a plain one takes ever longer to find its first entry while older ones leave.
        self.waiting: OrderedDict[Ticket, None] = OrderedDict()

    @property
    def first(self) -> Ticket:
        return next(iter(self.waiting))

    def due(self) -> int:
        """The lowest goes next: what this key will have taken with its next request."""
        return self.paid + self.first.weight


class LaneState:
    """What a lane holds and who waits in it; outside of the gate, for reading only.

    `floor`, `max_weight`, `in_flight` and `queued_weight` are slots, `queued` and `max_queued` are requests.
    `max_weight` is what one request takes at most: all but the other lanes' floors.
    """

    def __init__(self, lane: Lane, floor: int, max_weight: int, max_queued: int) -> None:
        self.name = lane.name
        self.max_wait_s = lane.max_wait_s
        self.floor = floor
        self.max_weight = max_weight
        self.max_queued = max_queued
        self.in_flight = 0
        self.queued_weight = 0
        self.lends_at = -math.inf
        self.share = lane.weight
        self.paid = 0.0  # for slots taken as its share, each at a price of 1 / share
        self.waiting: OrderedDict[Ticket, None] = OrderedDict()  # by arrival
        self.turns: OrderedDict[str, Turn] = OrderedDict()  # the same by key, the key that had its turn last at the end
        self._paid_by_keys = 0  # by the key that went last: one that comes now was away, and starts from here

    @property
    def queued(self) -> int:
        return len(self.waiting)

    def kept(self, now: float) -> int:
        """Idle slots of the floor, which no other lane may take."""
        lent = now >= self.lends_at and not self.waiting
        return 0 if lent else max(0, self.floor - self.in_flight)

    def room(self, now: float, free: int, unkept: int) -> int:
        """Slots that a request of this lane may take, of `free` ones of which no lane keeps `unkept`."""
        # Lanes can keep more than is free, while others still work on slots that had been lent.
        return min(free, self.kept(now) + unkept)

    def head(self, now: float) -> tuple[tuple[int, float], Ticket]:
        """The rank of the request to go next among those of the other lanes, lowest first, and the request."""
        oldest = next(iter(self.waiting))
        first = oldest if len(self.turns) == 1 else min(self.turns.values(), key=Turn.due).first
        if now >= oldest._overdue_at:
            return (PROMOTED, oldest._overdue_at), first
        # Lanes compete for slots of their floors only while these come back from a loan: then by age.
        return ((IN_FLOOR, first.arrived) if first.weight <= self.kept(now) else (BY_SHARE, self.paid)), first

    def changes_at(self) -> float:
        """When time alone changes what may go: the floor is lent."""
        return self.lends_at if not self.waiting and self.in_flight < self.floor else math.inf

    def ahead(self, key: str, weight: int) -> int:
        """Slots that go before a request of this key and weight that comes now."""
        own = self.turns[key].queued_weight if key in self.turns else 0
        others = [min(turn.queued_weight, own + weight) for name, turn in self.turns.items() if name != key]
        return own + sum(others)

    def join(self, ticket: Ticket) -> None:
        self.waiting[ticket] = None
        turn = self.turns.get(ticket.key)
        if turn is None:
            turn = self.turns[ticket.key] = Turn(self._paid_by_keys)
        turn.waiting[ticket] = None
        turn.queued_weight += ticket.weight
        self.queued_weight += ticket.weight

    def leave(self, ticket: Ticket) -> None:
        del self.waiting[ticket]
        self.queued_weight -= ticket.weight
        turn = self.turns[ticket.key]
        del turn.waiting[ticket]
        turn.queued_weight -= ticket.weight
        if ticket.admitted:
            turn.paid += ticket.weight
            self._paid_by_keys = max(self._paid_by_keys, turn.paid)
            self.turns.move_to_end(ticket.key)
        if not turn.waiting:
            del self.turns[ticket.key]


class Gate:
    """Admits requests to at most `limit` slots, lets at most `max_queue` requests wait, and refuses the rest.

    Each call counts, checks and hands on in one go; the event loop runs nothing in between. The caller writes

        ticket = gate.enter(lane)
        try:
            await ticket.wait()
            ...
        finally:
            gate.release(ticket)

    so that a request which is cancelled just when slots were handed to it hands them on.
    """

    def __init__(self, lanes: Sequence[Lane], limit: int, max_queue: int, clock: Clock) -> None:
        """Raises ValueError unless the floors leave at least one of the `limit` slots to every lane."""
        floors = [lane.floor_slots(limit) for lane in lanes]
        if sum(floors) >= limit:
            raise ValueError(f"floors of {sum(floors)} slots leave none of {limit}")
        self.limit = limit
        self.max_queue = max_queue
        self._clock = clock
        self._timer: Timer | None = None
        self._timer_at = math.inf
        self._paid = 0.0  # by the lane that last took its share: those behind it were away, and start from here
        self._lanes = [
            LaneState(
                lane,
                floor=floor,
                max_weight=limit - sum(floors) + floor,
                max_queued=math.ceil(round(lane.queue * max_queue, 9)),  # 0.07 of 100 is 7, not a hair more
            )
            for lane, floor in zip(lanes, floors, strict=True)
        ]
        self.lanes: Mapping[str, LaneState] = MappingProxyType({lane.name: lane for lane in self._lanes})

    @property
    def in_flight(self) -> int:
        """Slots in use."""
        return sum([lane.in_flight for lane in self._lanes])

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return sum([len(lane.waiting) for lane in self._lanes])

    def enter(
        self, lane: str, weight: int = 1, key: str = "", on_displaced: Callable[[], object] = lambda: None
    ) -> Ticket:
        """Admit a request or let it wait. A weight above the lane's `max_weight` counts as that, one below 1 as 1.

        `on_displaced` is called in the moment in which another key's request takes its place in the queue.

        Raises:
            GateFull: it can neither start nor wait. Its lane has had an arrival nevertheless, and keeps its floor.
            KeyError: there is no such lane.
        """
        home = self.lanes[lane]
        now = self._clock.time()
        home.lends_at = now + LEND_AFTER_S
        ticket = Ticket(home, max(1, min(weight, home.max_weight)), key, now, on_displaced)
        # Mostly nobody waits, and this spares the queue's bookkeeping.
        if not self.queued and ticket.weight <= home.room(now, *self._free(now)):
            self._admit(ticket, now)
            return ticket
        home.join(ticket)
        self._hand_out(now)
        if not ticket.admitted and (home.queued > home.max_queued or self.queued > self.max_queue):
            bound, full = ("lane", [home]) if home.queued > home.max_queued else ("queue", self._lanes)
            if not self._displace(full, _waiting(full)[key]):
                self.release(ticket)
                raise GateFull(bound)
        return ticket

    def displace(self, count: int) -> bool:
        """Refuse the newest request of the key that has most waiting, if these are more than `count`; whether it was.

        For a request that finds no room, of a key that has `count` with it.
        """
        return self._displace(self._lanes, count)

    def _displace(self, lanes: Sequence[LaneState], count: int) -> bool:
        [(key, most)] = _waiting(lanes).most_common(1) or [("", 0)]
        if most <= count:
            return False
        newest = max(
            (next(reversed(lane.turns[key].waiting)) for lane in lanes if key in lane.turns),
            key=attrgetter("arrived"),
        )
        newest._displaced = True
        self.release(newest)
        if newest._awaited is not None and not newest._awaited.done():
            newest._awaited.set_result(None)
        newest._on_displaced()
        return True

    def release(self, ticket: Ticket) -> None:
        """End a claim, whatever became of it: its slots are handed on, or it no longer waits. Again: no effect."""
        home = ticket._home
        if ticket._holds_slots:
            ticket._holds_slots = False
            home.in_flight -= ticket.weight
        elif ticket in home.waiting:
            home.leave(ticket)
        else:
            return
        if self.queued:
            self._hand_out(self._clock.time())
        else:
            self.close()

    def close(self) -> None:
        """Cancel the timer that runs while requests wait."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._timer_at = math.inf

    def _free(self, now: float) -> tuple[int, int]:
        """Idle slots, and how many of them no lane keeps."""
        free, kept = self.limit, 0
        for lane in self._lanes:
            free -= lane.in_flight
            kept += lane.kept(now)
        return free, max(0, free - kept)

    def _admit(self, ticket: Ticket, now: float) -> None:
        ticket.admitted_at = now
        ticket._holds_slots = True
        ticket._home.in_flight += ticket.weight
        if ticket._awaited is not None and not ticket._awaited.done():
            ticket._awaited.set_result(None)

    def _hand_out(self, now: float) -> None:
        """Admit waiting requests until none may go."""
        while found := self._next(now):
            rank, ticket = found
            self._admit(ticket, now)
            ticket._home.leave(ticket)
            if rank != PROMOTED:
                self._charge(ticket._home, ticket.weight)
        self._set_timer(now)

    def _next(self, now: float) -> tuple[int, Ticket] | None:
        """The waiting request that may go now, if there is one, and its rank."""
        free, unkept = self._free(now)
        if not free:
            return None
        heads = [lane.head(now) for lane in self._lanes if lane.waiting]
        for (rank, _), ticket in sorted(heads, key=itemgetter(0)):
            if ticket.weight <= ticket._home.room(now, free, unkept):
                return rank, ticket
            if rank == PROMOTED:
                unkept = 0  # all kept for this one
        return None

    def _charge(self, lane: LaneState, slots: int) -> None:
        """Count slots towards the lane's share: the part of them that all its work has beyond its floor."""
        if lane.in_flight > lane.floor:
            self._paid = max(self._paid, lane.paid)
            lane.paid = self._paid + slots / lane.share * (1 - lane.floor / lane.in_flight)

    def _set_timer(self, now: float) -> None:
        """Look again when time alone may let a request in, which it cannot while all slots are in use."""
        if not self.queued:
            self.close()
        elif self.in_flight < self.limit:
            at = min((moment for lane in self._lanes if (moment := lane.changes_at()) > now), default=math.inf)
            if at < self._timer_at:  # one that comes too early only looks and sets the next
                self.close()
                self._timer = self._clock.call_at(at, self._on_timer)
                self._timer_at = at

    def _on_timer(self) -> None:
        self._timer = None
        self._timer_at = math.inf
        self._hand_out(self._clock.time())


def _waiting(lanes: Iterable[LaneState]) -> Counter[str]:
    """How many requests of each key wait in these lanes."""
    waiting: Counter[str] = Counter()
    for lane in lanes:
        for key, turn in lane.turns.items():
            waiting[key] += len(turn.waiting)
    return waiting
