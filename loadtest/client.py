"""The client: it keeps to a schedule whatever the server does, and does as little as it can for each event.

Client, gateway and engine share the machine. So the answer's bytes go through httptools into a count of events, and
nothing else is parsed until the end; each request has a connection of its own; the garbage collector rests.
"""

import asyncio
import contextlib
import gc
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, cast

import httptools

from loadtest.outcomes import Record
from loadtest.workload import Request

EVENT: Final = b"\n\ndata: "  # JSON has no bare newlines: this is found between events and nowhere else
KEPT_BYTES: Final = 4096  # of the end of an answer: an error and the end mark fit in
DONE: Final = re.compile(rb"\n\ndata: ?\[DONE\]\s*$")
ERROR: Final = re.compile(rb'\n\ndata: ?(\{\s*"error".*?)\n\n')
LEAD_S: Final = 0.5  # from the call to the start of the schedule
TELL_EVERY_S: Final = 2.0


class NotServed(Exception):
    """A server without load failed a request that a measurement needs."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: a Unix socket, else a port, here unless a host is named."""

    socket: str = ""
    port: int = 0
    host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        """For people and for httpx, which is told of the socket apart."""
        return "http://engine" if self.socket else f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Shot:
    """A request ready to be sent."""

    request: Request
    payload: bytes


def load(request: Request, model: str, salt: str) -> Shot:
    """Make the bytes of a request beforehand."""
    body = request.body(model, salt)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: loadtest\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nx-request-timeout-ms: {request.kind.limit_s * 1000:.0f}\r\n\r\n"
    )
    return Shot(request, head.encode() + body)


class Answer:
    """An answer's body as it comes in: counts events, keeps the end."""

    __slots__ = ("_end", "events", "first_at")

    def __init__(self) -> None:
        self.events = 0
        self.first_at: float | None = None
        self._end = b"\n\n"

    def feed(self, data: bytes, now: float) -> None:
        """Take in a piece that came at `now`; an event may be spread over several."""
        end = self._end
        count = (end[1 - len(EVENT) :] + data).count(EVENT)
        if count:
            self.events += count
            if self.first_at is None:
                self.first_at = now
        self._end = data[-KEPT_BYTES:] if len(data) >= KEPT_BYTES else end[len(data) - KEPT_BYTES :] + data

    def tell(self, record: Record) -> None:
        """Write down what has come."""
        record.done = DONE.search(self._end) is not None
        errors = ERROR.findall(self._end + b"\n\n")
        if errors and not record.error:
            record.error = _code(errors[-1])
        record.events = self.events - record.done - len(errors)
        record.first = self.first_at if record.status == 200 and record.events > 0 else None


def _code(event: bytes) -> str:
    """The code of an error event, else its type, else `unknown`."""
    with contextlib.suppress(ValueError, AttributeError):
        error = json.loads(event)["error"]
        return str(error.get("code") or error.get("type") or "unknown")
    return "unknown"


class Exchange(asyncio.Protocol):
    """One request and its answer on a connection of its own; `over` is done when it has ended, however it ended."""

    def __init__(self, shot: Shot, start: float) -> None:
        request = shot.request
        self.record = Record(request.index, request.kind.name, request.tokens, request.kind.limit_s, request.at_s)
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._payload = shot.payload
        self._start = start
        self._answer = Answer()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None

    async def run(self, address: Address) -> None:
        """Connect, send, and wait for the end; a cancellation is the client giving up."""
        loop = asyncio.get_running_loop()
        self.record.sent = self._now()
        try:
            if address.socket:
                await loop.create_unix_connection(lambda: self, address.socket)
            else:
                await loop.create_connection(lambda: self, address.host, address.port)
            await self.over
        except OSError as error:
            self._finish(f"connect: {error.strerror or error}")
        except asyncio.CancelledError:
            self.record.cut = True
            self._finish()
            raise

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its base class
        self._transport.write(self._payload)
        self._payload = b""

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(f"not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._finish(f"connection lost: {error or 'closed before the end'}")

    # called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-tidegate-reason":
            self.record.reason = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.record.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._answer.feed(data, self._now())

    def on_message_complete(self) -> None:
        self._finish()

    def _finish(self, error: str = "") -> None:
        if self.record.end is not None:
            return
        self.record.end = self._now()
        self.record.error = error
        self._answer.tell(self.record)
        if not self.over.done():  # a client that gives up has cancelled it
            self.over.set_result(None)
        if self._transport is not None:
            self._transport.abort()

    def _now(self) -> float:
        return time.monotonic() - self._start


class Sent(Protocol):
    """What the open loop needs of a request on its way: an exchange, or somebody who makes several of them."""

    record: Record
    over: asyncio.Future[None]

    async def run(self, address: Address) -> None:
        """Until it has ended; a cancellation is the client giving up."""


async def open_loop(
    address: Address,
    shots: Sequence[Shot],
    give_up_s: float,
    tell: Callable[[str], None],
    make: Callable[[Shot, float], Sent] = Exchange,
) -> list[Record]:
    """Send each request at its time, whatever became of the others; after `give_up_s` seconds cut those still open."""
    with _undisturbed():
        start = time.monotonic() + LEAD_S
        exchanges: list[Sent] = []
        tasks: list[asyncio.Task[None]] = []
        teller = asyncio.create_task(_report(exchanges, len(shots), start, tell))
        try:
            for shot in shots:
                delay = start + shot.request.at_s - time.monotonic()
                if delay > 0:
                    await asyncio.sleep(delay)
                exchanges.append(make(shot, start))
                tasks.append(asyncio.create_task(exchanges[-1].run(address)))
            if tasks:
                await asyncio.wait(tasks, timeout=max(0.0, start + give_up_s - time.monotonic()))
        finally:
            teller.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(teller, *tasks, return_exceptions=True)
        return [exchange.record for exchange in exchanges]


async def closed_loop(
    address: Address, shots: Iterator[Shot], in_flight: int, warm_s: float, seconds: float
) -> list[Record]:
    """Keep `in_flight` requests open for `warm_s + seconds`; returns those that ended within the last `seconds`.

    Raises:
        NotServed: one of them failed.
    """
    start = time.monotonic()
    ended: list[Record] = []

    async def keep_one_open() -> None:
        while True:
            exchange = Exchange(next(shots), start)
            await exchange.run(address)
            if not exchange.record.whole:
                raise NotServed(f"status {exchange.record.status}, {exchange.record.error or 'no end mark'}")
            ended.append(exchange.record)

    with _undisturbed():
        workers = [asyncio.create_task(keep_one_open()) for _ in range(in_flight)]
        await asyncio.wait(workers, timeout=warm_s + seconds, return_when=asyncio.FIRST_EXCEPTION)
        for worker in workers:
            worker.cancel()
        results = await asyncio.gather(*workers, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return [record for record in ended if record.end is not None and warm_s <= record.end < warm_s + seconds]


async def _report(exchanges: Sequence[Sent], total: int, start: float, tell: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(TELL_EVERY_S)
        open_now = sum(not exchange.over.done() for exchange in exchanges)
        tell(f"{time.monotonic() - start:5.1f} s: {len(exchanges)} of {total} sent, {open_now} open")


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage collection meanwhile: it would hold up every request at once."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
