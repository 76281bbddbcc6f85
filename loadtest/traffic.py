"""Load for a gateway whose engine is scripted: many streams, many plain calls, many refusals. Closed loop."""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import uvloop

from loadtest.client import Address, Exchange, NotServed, Shot
from loadtest.peers import MODEL
from loadtest.workload import SHORT, Request

WAIT_S: Final = 120.0  # for all of one load
CONTENT_LENGTH: Final = re.compile(rb"(?i)\r\ncontent-length: (\d+)")


class Timed(Exchange):
    """An exchange that notes the time between what comes in."""

    def __init__(self, shot: Shot, start: float) -> None:
        super().__init__(shot, start)
        self.gaps: list[float] = []
        self._last = 0.0

    def on_body(self, data: bytes) -> None:
        now = self._now()
        if self._last:
            self.gaps.append(now - self._last)
        self._last = now
        super().on_body(data)


@dataclass(slots=True)
class Seen:
    """What the client saw of a load; times in seconds."""

    took_s: float = 0.0
    events: int = 0
    latencies: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


def shot(*, stream: bool) -> Shot:
    """A chat request; what its answer is like is the engine's business."""
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16}
    text = json.dumps(body | {"stream": stream}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: loadtest\r\ncontent-type: application/json\r\n"
        f"content-length: {len(text)}\r\n\r\n"
    )
    return Shot(Request(0, 0.0, SHORT, 0, 0, ""), head.encode() + text)


async def streams(address: Address, count: int) -> Seen:
    """So many streams at once, each to its end.

    Raises:
        NotServed: one of them was not whole.
    """
    start = time.monotonic()
    one = shot(stream=True)
    exchanges = [Timed(one, start) for _ in range(count)]
    async with _in_time():
        await asyncio.gather(*(exchange.run(address) for exchange in exchanges))
    _check(exchanges, lambda exchange: exchange.record.whole)
    return Seen(
        time.monotonic() - start,
        sum(exchange.record.events for exchange in exchanges),
        gaps=[gap for exchange in exchanges for gap in exchange.gaps],
    )


async def calls(address: Address, total: int, in_flight: int, status: int = 200) -> Seen:
    """So many plain calls, `in_flight` at a time, each on a connection of its own.

    Raises:
        NotServed: one of them had another status.
    """
    start = time.monotonic()
    one = shot(stream=False)
    exchanges: list[Exchange] = []

    async def work() -> None:
        while len(exchanges) < total:
            exchanges.append(Exchange(one, start))
            await exchanges[-1].run(address)

    async with _in_time():
        await asyncio.gather(*(work() for _ in range(in_flight)))
    _check(exchanges, lambda exchange: exchange.record.status == status)
    return Seen(time.monotonic() - start, latencies=[_took(exchange) for exchange in exchanges])


async def refusals(address: Address, total: int, connections: int, a_second: float = 0.0) -> None:
    """So many plain calls, each refused, over connections that are kept; as fast as they go unless told a rate.

    Raises:
        NotServed: one of them was not refused.
    """
    payload = shot(stream=False).payload
    start, sent = time.monotonic(), 0

    async def work() -> None:
        nonlocal sent
        reader, writer = await asyncio.open_connection("127.0.0.1", address.port)
        try:
            while sent < total:
                sent += 1
                if a_second:
                    await asyncio.sleep(start + sent / a_second - time.monotonic())
                writer.write(payload)
                head = await reader.readuntil(b"\r\n\r\n")
                length = CONTENT_LENGTH.search(head)
                if b" 503 " not in head or not length:
                    raise NotServed(f"not refused: {head.partition(bytes([13]))[0].decode()}")
                await reader.readexactly(int(length[1]))
        finally:
            writer.close()

    async with _in_time():
        await asyncio.gather(*(work() for _ in range(connections)))


def storm(address: Address, total: int, connections: int, a_second: float) -> None:
    """`refusals` for a process of its own: sent by who reads the streams, they would hold up the reading.

    Raises:
        NotServed: one of them was not refused.
    """
    uvloop.run(refusals(address, total, connections, a_second))


@contextlib.asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(WAIT_S):
            yield
    except TimeoutError:
        raise NotServed(f"not done after {WAIT_S:g} s") from None


def _took(exchange: Exchange) -> float:
    record = exchange.record
    assert record.sent is not None
    assert record.end is not None
    return record.end - record.sent


def _check(exchanges: Sequence[Exchange], good: Callable[[Exchange], bool]) -> None:
    bad = [exchange.record for exchange in exchanges if not good(exchange)]
    if bad:
        first = bad[0]
        raise NotServed(
            f"{len(bad)} of {len(exchanges)} were not served; the first: {first.status}, {first.error or 'no end'}"
        )
