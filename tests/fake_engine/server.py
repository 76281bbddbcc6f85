"""The HTTP/1.1 side of the fake engine: one protocol object per connection."""

import asyncio
import hashlib
import json
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import parse_qs

import httptools

from tests.fake_engine.answers import dumps
from tests.fake_engine.engine import Engine, Record, exit_now
from tests.fake_engine.player import Broken, Player, head
from tests.fake_engine.script import Script, ScriptError, parse


@dataclass(slots=True)
class Request:
    """One request as it comes in."""

    target: bytes = b""
    method: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    whole: bool = False
    script: Script | None = None  # of header and defaults
    record: Record | None = None
    digest: Any = None

    def header(self, name: bytes) -> bytes:
        """The first header of that name (lower case), else empty."""
        return next((value for key, value in self.headers if key.lower() == name), b"")


class Connection(asyncio.Protocol):
    """Parses requests, answers one at a time. With `control` it knows only `/fake/` and stands outside all counts."""

    def __init__(self, engine: Engine, everyone: set["Connection"], *, control: bool = False) -> None:
        self.engine = engine
        self.everyone = everyone
        self.control = control
        self.loop = asyncio.get_running_loop()
        self.parser = httptools.HttpRequestParser(self)
        self.pending: deque[Request] = deque()
        self.request = Request()
        self.task: asyncio.Task[None] | None = None
        self.deaf = False
        self.writable = asyncio.Event()
        self.writable.set()
        self.number = 0

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self.control:
            return
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.engine.counts["connections"] += 1
        self.number = self.engine.counts["connections"]
        self.engine.open_connections += 1
        self.everyone.add(self)
        match self.engine.server.accept:
            case "hang":
                self.deaf = True
                self.transport.pause_reading()
            case "close" | "reset" as how:
                self.cut(how)

    def connection_lost(self, exc: Exception | None) -> None:
        self.writable.set()
        if not self.control:
            self.engine.open_connections -= 1
            self.everyone.discard(self)
        for request in (self.request, *self.pending):
            if request.record is not None and request.record.outcome == "received" and self.task is None:
                self.engine.end(request.record, "aborted")  # it went away in the middle of its body
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        if self.deaf:
            return
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.engine.counts["malformed"] += 1
            self.transport.abort()

    # httptools callbacks

    def on_message_begin(self) -> None:
        self.request = Request()

    def on_url(self, url: bytes) -> None:
        self.request.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.request.headers.append((name, value))

    def on_headers_complete(self) -> None:
        request = self.request
        request.method = self.parser.get_method()
        path = request.target.partition(b"?")[0].decode("latin-1")
        if request.header(b"expect").lower() == b"100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self.control or path.startswith("/fake/"):
            return
        self.engine.paths[path] += 1
        if path in ("/health", "/metrics"):
            return
        self._receive(request)
        script = request.script
        if script is not None and (script.early or (script.fault and script.at == "read")):
            self._enqueue(request)
            self.deaf = not script.early
            if self.deaf:
                self.transport.pause_reading()

    def on_body(self, body: bytes) -> None:
        request = self.request
        if request.record is not None:
            request.record.body_bytes += len(body)
            request.digest.update(body)
        request.body += body

    def on_message_complete(self) -> None:
        request = self.request
        request.whole = True
        if request.record is not None:
            request.record.body_sha256 = request.digest.hexdigest()
        if request.script is None or not request.script.early:
            self._enqueue(request)

    # One request after the other

    def _receive(self, request: Request) -> None:
        engine = self.engine
        priority = request.header(b"x-vllm-priority").decode("latin-1")
        request.digest = hashlib.sha256()
        request.record = Record(
            next(engine.ids),
            self.number,
            request.method.decode(),
            request.target.decode("latin-1"),
            [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers],
            engine.now(),
            priority=int(priority) if priority.lstrip("-").isdigit() else None,
        )
        engine.receive(request.record)
        given = request.header(b"x-fake")
        try:
            request.script = parse(given, engine.defaults) if given else engine.defaults
        except ScriptError:
            request.script = None  # answered with 400 once the request is whole

    def _enqueue(self, request: Request) -> None:
        self.pending.append(request)
        if self.task is None:
            self._next()

    def _next(self) -> None:
        while self.pending and self.task is None:
            request = self.pending.popleft()
            if self._quick(request):
                continue
            self.task = self.loop.create_task(self._answer(request))

    def _quick(self, request: Request) -> bool:
        """Answer at once what needs no task."""
        path = request.target.partition(b"?")[0].decode("latin-1")
        server = self.engine.server
        if self.control or path.startswith("/fake/"):
            self._control(path, request)
        elif path == "/health" and not server.health_ms:
            self.send(server.health_status, b"")
        elif path == "/metrics" and not server.metrics_ms:
            self._send_metrics()
        else:
            return False
        return True

    def _send_metrics(self) -> None:
        self.send(
            self.engine.server.metrics_status,
            self.engine.metrics(),
            [("content-type", "text/plain; version=0.0.4; charset=utf-8")],
        )

    async def _answer(self, request: Request) -> None:
        record = request.record
        try:
            if record is None:
                server = self.engine.server
                if request.target.startswith(b"/health"):
                    await asyncio.sleep(server.health_ms / 1000)
                    self.send(server.health_status, b"")
                else:
                    await asyncio.sleep(server.metrics_ms / 1000)
                    self._send_metrics()
            else:
                await Player(self, request, record).play()
                self.engine.end(record, "finished")
        except Broken:
            assert record is not None
            self.engine.end(record, "faulted")
        except ScriptError as error:
            assert record is not None
            self.send_json(400, {"error": {"message": f"fake: {error}", "type": "fake", "param": None, "code": 400}})
            self.engine.end(record, "finished")
        finally:
            if record is not None:
                self.engine.end(record, "aborted")
            self.task = None
        if not self.transport.is_closing():
            self._next()

    # Writing

    def send(self, status: int, body: bytes, headers: list[tuple[str, str]] | None = None) -> None:
        """One whole plain answer."""
        self.transport.write(head(status, [*(headers or []), ("content-length", str(len(body)))]) + body)

    def send_json(self, status: int, value: Any) -> None:
        """One whole JSON answer."""
        self.send(status, dumps(value).encode(), [("content-type", "application/json")])

    def cut(self, how: str) -> None:
        """End the connection: `close` lets what was written go out, `reset` sends RST (TCP)."""
        if how == "reset":
            sock = self.transport.get_extra_info("socket")
            if sock is not None and sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        else:
            self.transport.close()

    # /fake/

    def _control(self, path: str, request: Request) -> None:
        engine = self.engine
        try:
            given = json.loads(request.body) if request.body else {}
            match path:
                case "/fake/log":
                    query = parse_qs(request.target.partition(b"?")[2].decode())
                    return self.send_json(200, engine.entries(query["tag"][0] if "tag" in query else None))
                case "/fake/counts":
                    return self.send_json(200, engine.report())
                case "/fake/defaults":
                    engine.defaults = Script().merged(given)
                case "/fake/set":
                    engine.change(given)
                case "/fake/cut":
                    self._cut_all(given.get("how", "close"), given.get("which", "all"))
                case "/fake/reset":
                    self._cut_all("reset", "busy")
                    engine.reset()
                case "/fake/exit":
                    exit_now(given.get("code", 0))
                case _:
                    return self.send_json(404, {"detail": "Not Found"})
        except ValueError as error:
            return self.send_json(400, {"detail": str(error)})
        self.send_json(200, {})

    def _cut_all(self, how: str, which: str) -> None:
        for connection in list(self.everyone):
            busy = connection.task is not None
            if connection is not self and (which == "all" or busy == (which == "busy")):
                connection.cut(how)


def factory(engine: Engine, everyone: set[Connection], *, control: bool = False) -> Callable[[], Connection]:
    """What asyncio's `create_server` wants."""
    return lambda: Connection(engine, everyone, control=control)
