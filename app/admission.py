"""The way of a gated request: house, body, lane, gate, engine, and back. A straight line, undone in one `finally`."""

import asyncio
import math
from collections.abc import Callable

from app.call import Call
from app.deadline import stainless_read_timeout_s
from app.errors import DEADLINE, INFEASIBLE, QUEUE_FULL, QUEUE_TIMEOUT, Refused
from app.forward import Forwarder, content_length
from app.gate import Gate, GateFull, Ticket
from app.house import Guest, House
from app.lanes import Lanes
from app.pace import Pace
from app.settings import Settings
from app.status import EngineStatus


class Admission:
    """Takes gated requests from their headers to their end."""

    def __init__(
        self, settings: Settings, status: EngineStatus, house: House, lanes: Lanes, forwarder: Forwarder
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._status = status
        self._house = house
        self._lanes = lanes
        self._forwarder = forwarder
        self._priorities = {lane.name: lane.priority for lane in settings.lanes}
        self.gate = Gate(settings.lanes, settings.max_in_flight, settings.max_queue, self._loop)
        self.pace = Pace(self.gate.lanes, self._loop.time)

    async def serve(self, call: Call) -> None:
        """Serve one request to its end.

        Raises:
            Refused: it is not served, or its end is an error, which the caller tells the client.
            ClientLeft: nobody waits for an answer.
        """
        no_stream_at = call.deadline.arrived
        no_stream_at += stainless_read_timeout_s(call.headers) if self._settings.use_stainless_timeout else math.inf
        self._house.check_open()
        self._status.check_ready()
        guest = self._house.enter(
            content_length(call),
            lambda: self.pace.retry_after_s(None),
            call.key,
            self.gate.displace,
        )
        try:
            with call.interruptible():
                body_limit = call.deadline.arrived + self._settings.body_s
                body = await self._forwarder.read_body(call, guest, body_limit)
                call.read_at = self._loop.time()
                ticket = self._queue(call, body[0], guest, no_stream_at)
                watcher = asyncio.create_task(call.watch())
                try:
                    await self._wait(call, ticket)
                    await self._forwarder.send(call, body, guest, self._priorities[ticket.lane])
                finally:
                    watcher.cancel()
                    self.gate.release(ticket)
            if call.outcome == "completed":
                self._note_service(call, self.pace.served)
        except Refused as refused:
            if refused.kind is DEADLINE:
                self._note_service(call, self.pace.cut)
            raise
        finally:
            guest.leave()

    def _note_service(self, call: Call, note: Callable[[str, float, float], None]) -> None:
        if call.admitted_at is not None:
            note(call.demand.lane, self._loop.time() - call.admitted_at, call.demand.work)

    def _queue(self, call: Call, body: bytes, guest: Guest, no_stream_at: float) -> Ticket:
        assert call.route is not None
        call.demand = demand = self._lanes.classify(call.route, body)
        if not demand.stream:
            call.deadline.tighten(no_stream_at)
            call.deadline.first_event_at = math.inf
        self._check_feasible(call)
        try:
            return self.gate.enter(demand.lane, demand.weight, call.key, guest.leave)
        except GateFull as full:
            raise self._full(demand.lane, f"The {full.bound} is full.") from None

    def _full(self, lane: str, what: str) -> Refused:
        return Refused(QUEUE_FULL, f"{what} Retry later.", retry_after_s=self.pace.retry_after_s(lane))

    def _check_feasible(self, call: Call) -> None:
        """Refuse at once what would only grow old in the queue.

        The spare time of a request is what its deadline leaves beside the time that its answer takes. It may be
        expected to wait for a share of that: the estimate is a mean, and who is let in should make it on a bad day too.
        The share shrinks with the work that the request asks for, measured by the lane's mean: when not all can be
        served, the same engine time then serves more of them.
        """
        lane = call.demand.lane
        wait_s = self.pace.wait_s(lane, self.gate.lanes[lane].ahead(call.key, call.demand.weight))
        if not wait_s:
            return
        relative = self.pace.relative_work(lane, call.demand.work)
        now = self._loop.time()
        spare_s = min(call.deadline.left(now) - self._service_s(call), call.deadline.first_event_at - now)
        if wait_s > min(1.0, self._settings.wait_share / relative**2) * max(0.0, spare_s):
            raise self._infeasible(call, f"The queue takes about {wait_s:.1f} s and an answer")

    def _check_still_feasible(self, call: Call) -> None:
        """Refuse what has waited for longer than expected, rather than have the engine work on it for nothing."""
        left_s = call.deadline.left(self._loop.time())
        if left_s <= 0:  # its timer is due too, and comes a moment later
            raise call.deadline_passed()
        if left_s < self._service_s(call):
            raise self._infeasible(call, "The queue took longer than expected, an answer takes")

    def _service_s(self, call: Call) -> float:
        """Expected time at the engine; 0 while nothing is known."""
        lane = call.demand.lane
        return (self.pace.service_s(lane) or 0.0) * self.pace.relative_work(lane, call.demand.work)

    def _infeasible(self, call: Call, why: str) -> Refused:
        left_s, lane = call.deadline.left(self._loop.time()), call.demand.lane
        return Refused(
            INFEASIBLE,
            f"{why} about {self._service_s(call):.1f} s: too much for a deadline in {left_s:.1f} s. Retry later.",
            retry_after_s=self.pace.retry_after_s(lane, whole_queue=True),
        )

    async def _wait(self, call: Call, ticket: Ticket) -> None:
        call.phase = "queue"
        call.queued_at = ticket.arrived
        first_limit = min(call.deadline.at, call.deadline.first_event_at)
        if not ticket.admitted:
            last_turn = ticket.arrived + self._settings.max_wait_s
            if last_turn < first_limit:
                call.arm(last_turn, lambda: self._waited_too_long(ticket.lane))
            else:
                call.arm(first_limit)
            try:
                await ticket.wait()
            except GateFull:
                what = "The queue is full, and this request's place went to another key's, which has fewer in it."
                raise self._full(ticket.lane, what) from None
            self._status.check_ready()
            self._check_still_feasible(call)
        call.admitted_at = self._loop.time()
        call.phase = "first byte"
        call.arm(first_limit)

    def _waited_too_long(self, lane: str) -> Refused:
        message = f"The request waited {self._settings.max_wait_s:g} s for its turn. Retry later."
        return Refused(QUEUE_TIMEOUT, message, retry_after_s=self.pace.retry_after_s(lane, whole_queue=True))
