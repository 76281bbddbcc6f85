"""One request while it is here: its identity, its clock, what ends it early, and what has been sent to its client."""

import asyncio
import contextlib
import re
import secrets
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from starlette.types import Receive, Scope, Send

from app.deadline import Deadline
from app.errors import DEADLINE, Refused
from app.headers import Headers
from app.lanes import Demand
from app.routes import Route, is_anthropic

if TYPE_CHECKING:
    from app.relay import Relay

REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
TRACEPARENT: Final = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
DISCARD_BYTES: Final = 16 * 1024 * 1024
DISCARD_S: Final = 5.0
END_S: Final = 2.0  # for an engine to close a stream whose end mark it has sent
CLOSE: Final = "tidegate.close"  # our server puts the ways to end a connection into the scope
ABORT: Final = "tidegate.abort"
WRITE: Final = "tidegate.write"  # and one to write a piece of a chunked body; false: the client has to catch up
WHOLE: Final = "tidegate.whole"  # and whether all of the request's body has come
NO_LANE: Final = "-"  # the label of a request that ended before its lane was known


class ClientLeft(Exception):
    """The client closed its connection."""


class Call:
    """State of one request, kept in one place for the relay, the metrics and the log. Times are the loop's seconds."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.raw_send = send
        self._loop = asyncio.get_running_loop()
        self.headers = _by_name(scope["headers"])
        offered = self.headers.get(b"x-request-id", b"")
        self.id = offered if REQUEST_ID.fullmatch(offered) else secrets.token_hex(16).encode()
        self.anthropic = is_anthropic(scope["raw_path"])
        self.route: Route | None = None
        self.key = ""
        self.demand = Demand(NO_LANE)
        self.deadline = Deadline(self._loop.time(), 0, 0)
        self.phase = "body"
        self.outcome = ""
        self.status = 0
        self.sent_bytes = 0
        self.read_at: float | None = None  # when the body was whole
        self.queued_at: float | None = None
        self.admitted_at: float | None = None
        self.sent_at: float | None = None  # when the request went to the engine
        self.head_at: float | None = None  # when the head went to the client
        self.relay: Relay | None = None  # once the engine has answered
        self.body_read = False
        self._write: Callable[[bytes], bool] | None = scope.get(WRITE)
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._cause: Exception | None = None

    # what ends a call early

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """While inside, `interrupt` raises its cause at the point where the call waits."""
        self._task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if self._cause is None or self._task is None:
                raise
            self._task.uncancel()
            raise self._cause from None
        finally:
            self._task = None
            self.disarm()

    def interrupt(self, cause: Exception) -> None:
        """End the call at its next turn; the first cause counts, and a call that is over is left alone."""
        if self._task is not None and self._cause is None:
            self._cause = cause
            self._task.cancel()

    def arm(self, at: float, cause: Callable[[], Exception] | None = None) -> None:
        """Replace the timer: interrupt at this time, with the deadline's error unless told otherwise."""
        self.disarm()
        self._timer = self._loop.call_at(at, lambda: self.interrupt((cause or self.deadline_passed)()))

    def disarm(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def deadline_passed(self) -> Refused:
        """The error for a deadline that has passed; names the phase in which it did."""
        after = self._loop.time() - self.deadline.arrived
        first = self.phase in ("queue", "first byte") and self.deadline.first_event_at < self.deadline.at
        header = "x-slo-ttft-ms" if first else "x-request-timeout-ms"
        advice = f"Allow more time ({header}, up to the server's own limit), or ask for less."
        return Refused(DEADLINE, f"The deadline passed after {after:.3f} s, in phase: {self.phase}. {advice}")

    async def watch(self) -> None:
        """Wait for the client to leave; the one task beside the call's own.

        SDKs close the connection at the end mark of a stream. That is no leaving: the call ends with the engine's
        answer, which has only to be closed.
        """
        while (await self.receive())["type"] != "http.disconnect":
            pass
        if self.relay is not None and self.relay.end_is_told:
            self.arm(self._loop.time() + END_S, ClientLeft)
        else:
            self.interrupt(ClientLeft())

    # what the client gets

    @property
    def head_sent(self) -> bool:
        """Whether a status has gone out, after which errors can only end the body."""
        return self.head_at is not None

    async def send_head(self, status: int, headers: Headers) -> None:
        """Send status and headers, with the request's id."""
        self.status = status
        self.head_at = self._loop.time()
        headers.append((b"x-request-id", self.id))
        if self.admitted_at is not None and self.queued_at is not None:
            waited_ms = b"%.1f" % ((self.admitted_at - self.queued_at) * 1000)
            headers += [(b"x-tidegate-lane", self.demand.lane.encode()), (b"x-tidegate-queue-ms", waited_ms)]
        await self.raw_send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, data: bytes) -> None:
        """Send a piece of the body; waits while the client does not read."""
        self.sent_bytes += len(data)
        await self.raw_send({"type": "http.response.body", "body": data, "more_body": True})

    @property
    def can_push(self) -> bool:
        """Whether `push` may be used for a body without a length; another server than ours has `send` alone."""
        return self._write is not None

    def push(self, data: bytes) -> bool:
        """Send a piece of the body without waiting; false when the client has to catch up first, see `drain`."""
        assert self._write is not None
        self.sent_bytes += len(data)
        return self._write(data)

    async def drain(self) -> None:
        """Wait until the client has taken most of what was sent; at once where it has."""
        await self.raw_send({"type": "http.response.body", "body": b"", "more_body": True})

    async def finish(self) -> None:
        """Send the end of the body."""
        await self.raw_send({"type": "http.response.body", "body": b"", "more_body": False})

    def abort(self) -> None:
        """Break the connection so that the client sees that the answer is not whole."""
        self.scope.get(ABORT, _nothing)()

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer of ours; a client that is still sending is heard out first, within bounds."""
        headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await self.send_head(status, headers)
        if self.body_read or self.scope.get(WHOLE, _nothing)():
            return await self.raw_send({"type": "http.response.body", "body": body, "more_body": False})
        await self.send(body)
        heard_out = await self._discard_body()
        await self.finish()
        if not heard_out:
            self.scope.get(CLOSE, _nothing)()

    async def refuse(self, refused: Refused, shed_status: int | None = None) -> None:
        """Answer with an error; `shed_status` replaces its 503."""
        await self.answer(shed_status or refused.kind.status, refused.headers(), refused.body(anthropic=self.anthropic))

    async def _discard_body(self) -> bool:
        """Read what the client still sends; false when it is more or slower than allowed."""
        if b"expect" in self.headers:
            return False  # the client waits for a go-ahead and may or may not send now
        seen = 0
        with contextlib.suppress(TimeoutError, Refused), self.interruptible():  # too slow, or the drain is over
            self._cause = None  # whatever ended the call; this is about its end
            self.arm(self._loop.time() + DISCARD_S, TimeoutError)
            while seen <= DISCARD_BYTES:
                message = await self.receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return True
                seen += len(message.get("body", b""))
        return False

    def log_fields(self, now: float) -> dict[str, object]:
        """What the log says of it: never a prompt, never a key's value."""
        arrived = self.deadline.arrived
        waited = None if self.queued_at is None else (self.admitted_at or now) - self.queued_at
        return {
            "id": self.id.decode(),
            "route": self.route.name if self.route else None,
            "key": self.key or None,
            "lane": self.demand.lane,
            "weight": self.demand.weight,
            "status": self.status,
            "outcome": self.outcome,
            "queue_ms": None if waited is None else round(waited * 1000, 1),
            "first_byte_ms": None if self.head_at is None else round((self.head_at - arrived) * 1000, 1),
            "total_ms": round((now - arrived) * 1000, 1),
            "bytes": self.sent_bytes,
            "trace_id": _trace_id(self.headers.get(b"traceparent", b"")),
        }


def _by_name(headers: Headers) -> dict[bytes, bytes]:
    named = dict(headers)
    if len(named) != len(headers):  # a header that is repeated is a list
        named = {name: b",".join(value for other, value in headers if other == name) for name in named}
    return named


def _trace_id(traceparent: bytes) -> str | None:
    """The trace to which the client says its request belongs, as W3C writes it."""
    found = TRACEPARENT.fullmatch(traceparent)
    return found[1].decode() if found else None


def _nothing() -> None:
    """Another server than ours closes the connection by itself when an answer stays incomplete."""
