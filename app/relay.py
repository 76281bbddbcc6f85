"""From the engine's answer to the client's: when a head goes out, bytes as they come, an end that nobody can miss."""

import asyncio
from typing import Final

import httpx

from app.call import Call
from app.engine import Answer
from app.errors import Refused
from app.headers import to_client
from app.sse import KEEP_ALIVE, EngineErrorEvent, FirstEvent, Tail

HELD_BYTES: Final = 1024 * 1024  # of a first event that does not end; then it goes out as it is
GAP_EVERY: Final = 16  # of so many pieces, for one the time since the piece before it is kept
LAST_WORD_S: Final = 2.0  # for a client that reads slowly to take the error that ends its stream


class Activity:
    """When the engine last sent anything, in the loop's seconds; one of what tells a slow engine from a stalled one."""

    last_bytes_at = 0.0
    pieces = 0  # of all streams, so that short ones have their part in the sample of gaps


class Relay:
    """Relays one answer."""

    def __init__(self, call: Call, answer: Answer, keepalive_s: float, activity: Activity) -> None:
        assert call.route is not None
        self._call = call
        self._status = answer.status
        self._stream = answer.stream
        self._headers = to_client(answer.headers, answer.header(b"connection"))
        self._loop = asyncio.get_running_loop()
        self._keepalive_s = keepalive_s
        self._activity = activity
        self._last_sent_at = 0.0
        self.gaps: list[float] = []  # a sample, in seconds
        self._pulse: asyncio.TimerHandle | None = None
        self.family = call.route.family
        self.tail = Tail(self.family)
        self.is_stream = answer.header(b"content-type").lower().startswith(b"text/event-stream")
        # Compressed events cannot be told apart: such a stream passes as plain bytes.
        self.has_events = self.is_stream and answer.header(b"content-encoding", b"identity") == b"identity"
        if self.has_events or answer.status in (204, 304):  # comments and an error may come to it; there is no body
            self._headers = [header for header in self._headers if header[0] != b"content-length"]

    async def run(self) -> None:
        """Relay until the end.

        Raises:
            httpx.RemoteProtocolError: the engine broke off, or ended a stream without its end mark.
            EngineErrorEvent: the first event of a stream is an error, and no head is out.
        """
        if self.is_stream:
            self._set_header(b"x-accel-buffering", b"no")
        try:
            if self._status >= 600:
                raise httpx.RemoteProtocolError(f"the engine answered with status {self._status}")
            if self.has_events and self._status < 300:
                await self._hold_head()
                await self._pass_events()
            else:
                await self._pass_bytes()
        finally:
            if self._pulse is not None:
                self._pulse.cancel()
            self._stream.close()
        await self._call.finish()

    def _set_header(self, name: bytes, value: bytes) -> None:
        self._headers = [header for header in self._headers if header[0] != name] + [(name, value)]

    @property
    def end_is_told(self) -> bool:
        """Whether the client has been sent the end mark of its stream."""
        return self.has_events and self.tail.whole

    def output_tokens(self) -> int | None:
        """Length of a whole answer: events of a stream, or the usage that a plain answer reports."""
        return self.tail.events if self.has_events else self.tail.reported_output

    async def _pass_bytes(self) -> None:
        self._call.phase = "answer"
        if self._status == 500:  # SDKs repeat a 500 by themselves, although this one has cost the engine its work
            self._set_header(b"x-should-retry", b"false")
        await self._call.send_head(self._status, self._headers)
        self._call.arm(self._call.deadline.at)
        while data := await self._stream.read():
            await self._pass(data)

    async def _hold_head(self) -> None:
        """Hold head and bytes until the first event; once a keep-alive is due, they go out without it."""
        call = self._call
        if self._keepalive_s:
            self._beat(max(self._loop.time(), call.deadline.arrived + self._keepalive_s))
        first, held, seen, complete = FirstEvent(self.family), bytearray(), 0, False
        while not complete:
            data = await self._stream.read()
            if data is not None:
                if not data:
                    raise httpx.RemoteProtocolError("the engine ended the stream before its first event")
                self._activity.last_bytes_at = self._loop.time()
                try:
                    complete = first.feed(data)
                except EngineErrorEvent:
                    if not call.head_sent:
                        raise
                    complete = True
                held += data
                seen += len(data)
                complete = complete or seen > HELD_BYTES
            if complete or data is None or call.head_sent:
                if not call.head_sent:
                    await call.send_head(self._status, self._headers)
                if data is None:
                    await self._keep_alive()  # before what is held, which may be the beginning of an event
                if held:
                    await self._pass(bytes(held))
                    held.clear()
        call.phase = "answer"
        call.arm(call.deadline.at)

    async def _pass_events(self) -> None:
        if self._call.can_push:
            while not await self._stream.pump(self._push):
                await self._call.drain()
                await self._keep_alive()
        else:
            while (data := await self._stream.read()) != b"":
                await (self._keep_alive() if data is None else self._pass(data))
        if not self.tail.whole:
            raise httpx.RemoteProtocolError("the engine ended the stream without its end mark")

    async def _pass(self, data: bytes) -> None:
        self._activity.last_bytes_at = self._loop.time()
        await self._call.send(data)  # waits before it writes, if at all: what is cut off there was not sent
        self._note(data)

    def _push(self, data: bytes) -> bool:
        self._note(data)
        return self._call.push(data)

    def _note(self, data: bytes) -> None:
        activity, now = self._activity, self._loop.time()
        activity.pieces += 1
        if not activity.pieces % GAP_EVERY and self.has_events and self._last_sent_at:
            self.gaps.append(now - self._last_sent_at)
        activity.last_bytes_at = self._last_sent_at = now
        self.tail.feed(data)

    def _beat(self, at: float) -> None:
        if self._pulse is not None:
            self._pulse.cancel()
        self._pulse = self._loop.call_at(at, self._stream.poke)

    async def _keep_alive(self) -> None:
        """Send a comment if the stream has been silent for long enough; look again when it may have been."""
        if self._pulse is None:
            return
        now = self._loop.time()
        if now >= self._last_sent_at + self._keepalive_s:
            if self.tail.between_events:
                await self._call.send(KEEP_ALIVE)
            self._last_sent_at = now
        self._beat(self._last_sent_at + self._keepalive_s)


async def end_broken(call: Call, refused: Refused) -> None:
    """End an answer whose head is out: with an error event where one can be put in, else by breaking off.

    A stream that is whole only ends, whatever happened while its client was taking the last of it.
    """
    relay = call.relay
    if relay is None or not relay.has_events or not relay.tail.between_events:
        return call.abort()
    try:
        async with asyncio.timeout(LAST_WORD_S):
            if not relay.tail.whole:
                await call.send(refused.frame(anthropic=call.anthropic))
            await call.finish()
    except TimeoutError:  # the client does not read
        call.abort()
