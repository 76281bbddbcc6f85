"""The playing of one request's script: pacing, manners and faults of its answer."""

import asyncio
import json
import zlib
from typing import TYPE_CHECKING, Any

from tests.fake_engine.answers import GENERATION, SIDE, WORK, Shape, dumps, plain_body, prompt_tokens, stream_plan
from tests.fake_engine.engine import Record, exit_now
from tests.fake_engine.script import Script, ScriptError

if TYPE_CHECKING:
    from tests.fake_engine.server import Connection, Request

REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 429: "Too Many Requests"}
GARBAGE = b"\x00\xffthis is not HTTP\r\n\r\n" * 3


class Broken(Exception):
    """The script has ended the connection."""


def head(status: int, headers: list[tuple[str, str]]) -> bytes:
    """A response head."""
    lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Scripted')}", "server: uvicorn"]
    lines += [f"{name}: {value}" for name, value in headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Player:
    """Plays one request's script on its connection."""

    def __init__(self, connection: "Connection", request: "Request", record: Record) -> None:
        self.connection = connection
        self.engine = connection.engine
        self.request = request
        self.record = record
        self.path = request.target.partition(b"?")[0].decode("latin-1")
        self.script = Script()
        self.pack: Any = None
        self.chunked = False

    async def play(self) -> None:
        """Run the script to its end.

        Raises:
            Broken: the script ended the connection.
            ScriptError: the script can't be read.
        """
        given = self._read()
        script, record = self.script, self.record
        record.tag = script.tag
        if script.fault and script.at == "read":
            await self.fault()
        family = WORK.get(self.path) if self.request.method == b"POST" else None
        if family is None:
            return await self._aside(given)
        count = script.events
        if count is None:
            asked = (given.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"))
            count = next((value for value in asked if isinstance(value, int)), 16)
        record.prompt_tokens = script.prompt_tokens or prompt_tokens(given)
        record.prefill_s = script.prefill_ms / 1000
        shape = self._shape(family, given, count)
        streams = bool(given.get("stream")) and self.path in GENERATION
        if streams and script.status == 200:
            await self._stream(shape)
        else:
            await self._plain(shape, given)
        if script.after:
            self.connection.cut(script.after)

    def _read(self) -> dict[str, Any]:
        """The body as an object (empty when it isn't one), and `self.script`."""
        request = self.request
        script = request.script
        if script is None:
            raise ScriptError(f"bad x-fake: {request.header(b'x-fake')!r}")
        given: Any = None
        if request.whole and request.header(b"content-type").startswith(b"application/json"):
            try:
                given = json.loads(request.body)
            except ValueError:
                given = None
        request.body = bytearray()
        body: dict[str, Any] = given if isinstance(given, dict) else {}
        self.script = script.merged(body.get("fake"))
        return body

    def _shape(self, family: str, given: dict[str, Any], count: int) -> Shape:
        script = self.script
        options = given.get("stream_options") or {}
        return Shape(
            family,
            str(given.get("model", self.engine.model)),
            script.tag,
            count,
            script.size,
            self.record.prompt_tokens,
            script.usage or bool(options.get("include_usage")),
            script.done,
            script.end,
            script.crlf,
            script.comments,
            None if script.error is None else dumps(script.error),
            script.error_at,
        )

    async def _aside(self, given: dict[str, Any]) -> None:
        """Routes that take no slot, and unknown ones."""
        family = SIDE.get(self.path)
        await self.sleep(self.script.head_ms + self.script.first_ms)
        if family is None:
            return self.connection.send_json(404, {"detail": "Not Found"})
        self.record.prompt_tokens = prompt_tokens(given)
        await self._whole(plain_body(self._shape(family, given, self.script.events or 0), given))

    # Whole answers

    async def _plain(self, shape: Shape, given: dict[str, Any]) -> None:
        script, engine = self.script, self.engine
        await engine.acquire(self.record)
        if script.fault and script.at == "head":
            await self.sleep(script.head_ms)
            await self.fault()
        await self.sleep(script.first_ms + script.prefill_ms)
        if script.status == 200:
            for index in range(shape.events if script.gap_ms else 0):
                await self.sleep(script.gap_ms if index else 0)
                engine.token(self.record)
            if not script.gap_ms:
                engine.token(self.record, shape.events)
        await self._whole(plain_body(shape, given))

    async def _whole(self, value: Any) -> None:
        script = self.script
        if script.body is not None:
            value = script.body
        body = value.encode() if isinstance(value, str) else dumps(value).encode()
        if script.gzip:
            body = gzip_once(body)
        framing = script.framing or "length"
        await self.head(script.content_type or "application/json", framing, len(body))
        if isinstance(script.at, int) and script.fault:
            if script.at or script.half:
                await self.emit(body[: len(body) // 2])
            await self.fault()
        await self.emit(body)
        await self.finish(framing)

    # Streams

    async def _stream(self, shape: Shape) -> None:
        script, connection, record = self.script, self.connection, self.record
        loop = connection.loop
        plan = stream_plan(shape)
        stop = script.at if script.fault and isinstance(script.at, int) else None
        if script.fault and script.at == "head":
            await self.sleep(script.head_ms)
            await self.fault()
        if script.gzip:
            self.pack = zlib.compressobj(wbits=31)
        framing = script.framing or "chunked"
        total = sum(map(len, plan.early + plan.opening + plan.tokens + plan.closing))
        await self.head(script.content_type or "text/event-stream; charset=utf-8", framing, total)
        for event in plan.early:
            await self.emit(event)
        await self.engine.acquire(record)
        await self.sleep(script.first_ms + script.prefill_ms)
        if stop == 0:
            await self.break_at((*plan.opening, *plan.tokens, *plan.closing)[0])
        for event in plan.opening:
            await self.emit(event)
        step, gap = max(1, script.coalesce), script.gap_ms / 1000
        due = loop.time()
        for index in range(0, len(plan.tokens), step):
            if index:
                due += gap
                delay = due - loop.time()
                if delay > 0:
                    await asyncio.sleep(delay)
                elif index % 64 < step:
                    await asyncio.sleep(0)
            if stop is not None and stop <= index:
                await self.break_at(plan.tokens[index])
            events = plan.tokens[index : index + step]
            await self.emit(events[0] if step == 1 else b"".join(events))
            self.engine.token(record, len(events))
        if stop is not None:
            await self.break_at((*plan.closing, b"")[0])
        await self.emit(b"".join(plan.closing) if step > 1 else b"", *(plan.closing if step == 1 else ()))
        await self.finish(framing)

    # Pieces

    async def sleep(self, ms: float) -> None:
        """Pause, and stand still while the engine hangs."""
        if ms > 0:
            await asyncio.sleep(ms / 1000)
        if not self.engine.going.is_set():
            await self.engine.going.wait()

    async def head(self, content_type: str, framing: str, length: int) -> None:
        """Write the response head, in whatever bad manner the script asks for."""
        script = self.script
        await self.sleep(script.head_ms)
        headers = [("content-type", content_type), ("x-fake-id", str(self.record.id))]
        if script.gzip:
            headers.append(("content-encoding", "gzip"))
        if framing == "chunked":
            headers.append(("transfer-encoding", "chunked"))
        else:
            headers.append(("connection", "close") if framing == "close" else ("content-length", str(length)))
        more = script.headers or {}
        headers += more.items() if isinstance(more, dict) else [(name, value) for name, value in more]
        data = head(script.status, headers)
        self.chunked = framing == "chunked"
        if script.fault and script.at == "mid_head":
            self.write(data[: len(data) // 2])
            await self.fault()
        if not script.drip_ms:
            return self.write(data)
        for start in range(0, len(data), 16):
            self.write(data[start : start + 16])
            await asyncio.sleep(script.drip_ms / 1000)

    async def emit(self, *events: bytes) -> None:
        """Write body bytes: compressed, cut up and framed as the script asks for."""
        script = self.script
        for data in events:
            if self.pack is not None and data:
                data = self.pack.compress(data) + self.pack.flush(zlib.Z_SYNC_FLUSH)
            if not data:
                continue
            if not self.engine.going.is_set():
                await self.engine.going.wait()
            if not self.connection.writable.is_set():
                await self.connection.writable.wait()
            if not script.chunk_bytes:
                self.write(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)
                continue
            for start in range(0, len(data), script.chunk_bytes):
                piece = data[start : start + script.chunk_bytes]
                self.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self.chunked else piece)
                await asyncio.sleep(script.chunk_ms / 1000)
                if not self.connection.writable.is_set():
                    await self.connection.writable.wait()

    async def finish(self, framing: str) -> None:
        """End the body."""
        if self.pack is not None:
            data, self.pack = self.pack.flush(), None
            await self.emit(data)
        await self.sleep(self.script.end_ms)
        if self.chunked:
            self.write(b"0\r\n\r\n")
        if framing == "close":
            self.connection.transport.close()

    async def break_at(self, following: bytes) -> None:
        """The fault between two events, or in the middle of `following`."""
        if self.script.half:
            await self.emit(following[: len(following) // 2])
        await self.fault()

    async def fault(self) -> None:
        """End it as the script says; a stall ends when the client goes.

        Raises:
            Broken: always, unless cancelled first.
        """
        if self.script.fault == "stall":
            await asyncio.Event().wait()
        if self.script.fault == "exit":
            exit_now(self.script.exit_code)
        await asyncio.sleep(0.01)  # lets what was written reach the client before a RST takes it away
        if self.script.fault == "garbage":
            self.write(GARBAGE)
        self.connection.cut("reset" if self.script.fault == "reset" else "close")
        raise Broken

    def write(self, data: bytes) -> None:
        """Hand bytes to the socket and count them."""
        self.record.sent_bytes += len(data)
        self.connection.transport.write(data)


def gzip_once(data: bytes) -> bytes:
    """`data` as one gzip member."""
    pack = zlib.compressobj(wbits=31)
    return pack.compress(data) + pack.flush()
