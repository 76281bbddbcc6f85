"""The client of the engine: it relays raw bytes, tells sent from unsent, aborts at once, and is a transport for httpx.

It is one of its own because the data path pays for it with every token: each read of the socket reaches the relay as
one piece, without buffering layers, and reading stops while the relay is not ready for more. Calls that are relayed
use `ask`, which spares them httpx's models of a request and of an answer.
"""

import asyncio
import contextlib
import select
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, cast
from urllib.parse import unquote, urlsplit

import httptools
import httpx

from app.headers import Headers

CONNECT_S: Final = 5.0
IDLE_S: Final = 4.0  # below the 5 s after which vLLM closes an idle connection unless told otherwise
JOINED_BYTES: Final = 64 * 1024  # a head and a body up to this go out in one write
MAX_HEAD_BYTES: Final = 256 * 1024
ENDED: Final = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)  # the last one is Linux's
HIGH_WATER_BYTES: Final = 256 * 1024  # unread bytes of one answer at which reading from the engine stops


class EngineStream(httpx.AsyncByteStream):
    """The body of one answer. `read` gives it in the pieces in which it came."""

    def __init__(self, connection: "EngineConnection") -> None:
        self._connection = connection
        self._closed = False

    async def read(self) -> bytes | None:
        """What has come since the last call; empty at the end; None after `poke`.

        Raises:
            httpx.RemoteProtocolError: the engine broke off before the end of its answer.
        """
        return await self._connection.read()

    async def pump(self, sink: Callable[[bytes], bool]) -> bool:
        """Hand what comes to `sink` in the moment in which it comes; true at the end, false after `poke`.

        Also false once `sink` has returned false: no more then, until the next call. It must not raise.

        Raises:
            httpx.RemoteProtocolError: the engine broke off before the end of its answer.
        """
        return await self._connection.pump(sink)

    def poke(self) -> None:
        """Make a waiting `read` or `pump` return."""
        self._connection.wake(poked=True)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (data := await self.read()) != b"":
            if data is not None:
                yield data

    def close(self) -> None:
        """Keep the connection if the answer has been read to its end, else cut it: that aborts the engine's work."""
        if not self._closed:
            self._closed = True
            self._connection.finish()

    async def aclose(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of an answer, with names in lower case, and the body that is to come."""

    status: int
    headers: Headers
    stream: EngineStream

    def header(self, name: bytes, default: bytes = b"") -> bytes:
        """All values of a header in one."""
        return b", ".join([value for other, value in self.headers if other == name]) or default


class EngineConnection(asyncio.Protocol):
    """One HTTP/1.1 connection with one exchange at a time."""

    def __init__(self, transport: "EngineTransport") -> None:
        self._pool = transport
        self._loop = asyncio.get_running_loop()
        self._wire: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._readable = select.poll()
        self._lost = False
        self._writable = True
        self._on_sent: Callable[[], None] | None = None
        self._sink: Callable[[bytes], bool] | None = None
        self.idle_since = 0.0
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0
        self.headers: Headers = []
        self.status: int | None = None
        self._parts: list[bytes] = []
        self._unread = 0
        self._reading = True
        self._complete = False
        self._failure: str | None = None
        self._poked = False
        self._keep_alive = False
        self._delimited = False
        self._surplus = False

    @property
    def usable(self) -> bool:
        """Whether another exchange may start on it: while it is idle, anything to read is the engine's end of it."""
        return not self._lost and self._wire is not None and not self._wire.is_closing() and not self._readable.poll(0)

    @property
    def ended(self) -> bool:
        """Whether the engine has closed it."""
        return self._lost or any(events & ENDED for _, events in self._readable.poll(0))

    async def exchange(self, head: bytes, body: list[bytes], on_sent: Callable[[], None]) -> None:
        """Write a request and wait for the head of its answer; `on_sent` is called when the engine has the body.

        The body is taken out of the list, so that a long answer does not hold it.

        Raises:
            httpx.RemoteProtocolError: the engine closed or sent something else before a complete head.
        """
        assert self._wire is not None
        self._begin()
        if self._lost:
            raise httpx.RemoteProtocolError("the engine closed the connection")
        if len(body[0]) <= JOINED_BYTES:
            self._wire.write(head + body.pop())
        else:
            self._wire.write(head)
            self._wire.write(body.pop())
        self._on_sent = on_sent
        if self._writable:
            self._sent()
        while self.status is None:
            if self._failure is not None:
                raise httpx.RemoteProtocolError(self._failure)
            await self._wait()

    async def read(self) -> bytes | None:
        """See `EngineStream.read`."""
        while not self._parts:
            if self._over():
                return b""
            if self._poked:
                self._poked = False
                return None
            await self._wait()
        return self._take_parts()

    async def pump(self, sink: Callable[[bytes], bool]) -> bool:
        """See `EngineStream.pump`."""
        if self._parts and not sink(self._take_parts()):
            return False
        self._sink = sink
        try:
            while True:
                if self._poked:
                    self._poked = False
                    return False
                if self._over():
                    return True
                await self._wait()
        finally:
            self._sink = None

    def _over(self) -> bool:
        if self._failure is not None and not self._complete:
            raise httpx.RemoteProtocolError(self._failure)
        return self._complete

    def _take_parts(self) -> bytes:
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._unread = 0
        if not self._reading and self._wire is not None and not self._lost:
            self._reading = True
            self._wire.resume_reading()
        return data

    def _sent(self) -> None:
        on_sent, self._on_sent = self._on_sent, None
        if on_sent is not None:
            on_sent()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self, *, poked: bool = False) -> None:
        """Let whoever waits look again."""
        self._poked = self._poked or poked
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def finish(self) -> None:
        """End the exchange: back into the pool if its answer came whole and was read, else cut."""
        if (
            self._complete
            and not self._parts
            and self.usable
            and self._keep_alive
            and self._writable
            and not self._surplus
        ):
            self._pool.keep(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Cut the connection now."""
        if self._wire is not None and not self._lost:
            self._wire.abort()

    def _fail(self, why: str) -> None:
        if not self._complete and self._failure is None:
            self._failure = why
        self.wake()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._wire = cast(asyncio.Transport, transport)
        self._readable.register(transport.get_extra_info("socket").fileno(), select.POLLIN | ENDED)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio with each read of the socket."""
        if self._complete:  # an answer that nobody asked for
            return self.abort()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail("the engine did not answer in HTTP")
            self.abort()
        if self._sink is not None:
            return self._push(self._sink)
        if self.status is None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._fail("the engine's head is too large")
                return self.abort()
        if self._unread > HIGH_WATER_BYTES and self._reading and self._wire is not None:
            self._reading = False
            self._wire.pause_reading()
        self.wake()

    def _push(self, sink: Callable[[bytes], bool]) -> None:
        if self._parts and not sink(self._take_parts()):
            self._sink = None  # what else comes in this turn of the loop waits to be asked for
            return self.wake(poked=True)
        if self._complete:
            self.wake()

    def eof_received(self) -> None:
        """Called by asyncio when the engine closes; its answer ends here if nothing else says where it ends."""
        if self.status is not None and not self._delimited:
            self._complete = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._lost = True
        self._pool.forget(self)
        self._fail("the engine closed the connection")

    def pause_writing(self) -> None:
        """Called by asyncio when the engine reads slower than the request is written."""
        self._writable = False

    def resume_writing(self) -> None:
        """Called by asyncio."""
        self._writable = True
        self._sent()

    # httptools' side

    def on_message_begin(self) -> None:
        """Called by the parser."""
        self._surplus = self._complete  # a second answer to one request is nobody's

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        if self.status is None:  # not a trailer, nor a header of a second answer
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        status = self._parser.get_status_code()
        if self._surplus:
            return None
        if status < 200:  # 100 Continue and its kind come before the answer
            return self.headers.clear()
        self._keep_alive = self._parser.should_keep_alive()
        names = {name for name, _ in self.headers}
        self._delimited = bool(names & {b"content-length", b"transfer-encoding"}) or status in (204, 304)
        self.status = status

    def on_body(self, body: bytes) -> None:
        """Called by the parser with each piece of a body."""
        if not self._surplus:
            self._parts.append(body)
            self._unread += len(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self.status is not None:
            self._complete = True


class EngineTransport(httpx.AsyncBaseTransport):
    """Connections to one engine. Their number is bounded by the gate, not here: nobody waits for a connection."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket_path = unquote(parts.path) if parts.scheme == "unix" else None
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._prefix = b"" if self._socket_path else parts.path.encode()
        self._host_header = b"localhost" if self._socket_path else parts.netloc.rpartition("@")[2].encode()
        self._idle: list[EngineConnection] = []
        self._open: set[EngineConnection] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The same for httpx's clients."""
        headers = [(name, value) for name, value in request.headers.raw if name.lower() != b"host"]
        answer = await self.ask(request.method, request.url.raw_path, headers, [await request.aread()])
        return httpx.Response(answer.status, headers=answer.headers, stream=answer.stream)

    async def ask(
        self,
        method: str,
        target: bytes,
        headers: Headers,
        body: list[bytes],
        on_sent: Callable[[], None] = lambda: None,
    ) -> Answer:
        """Send a request and return its answer as soon as the head is in.

        `body` is a list of one, from which it is taken; `on_sent` is called when the engine has all of it.

        Raises:
            httpx.ConnectError: nothing was sent, the engine does not take connections.
            httpx.RemoteProtocolError: the engine broke off after the request was sent.
        """
        connection = self._take() or await self._connect()
        try:
            await connection.exchange(self._head(method, target, headers), body, on_sent)
        except BaseException:
            connection.abort()
            raise
        assert connection.status is not None
        return Answer(connection.status, connection.headers, EngineStream(connection))

    def _head(self, method: str, target: bytes, headers: Headers) -> bytes:
        first = b"%b %b%b HTTP/1.1\r\nhost: %b" % (method.encode(), self._prefix, target, self._host_header)
        return b"\r\n".join([first, *(b"%b: %b" % header for header in headers), b"", b""])

    def _take(self) -> EngineConnection | None:
        oldest = asyncio.get_running_loop().time() - IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> EngineConnection:
        """A new connection; one that the engine closes before anything is sent costs nothing, so there is a second."""
        try:
            async with asyncio.timeout(CONNECT_S):
                for _ in range(2):
                    with contextlib.suppress(ConnectionResetError):
                        connection = await self._dial()
                        if not connection.ended:
                            return connection
                        connection.abort()
        except (OSError, TimeoutError) as error:
            raise httpx.ConnectError(str(error) or "timed out") from error
        raise httpx.ConnectError("the engine closes new connections")

    async def _dial(self) -> EngineConnection:
        loop = asyncio.get_running_loop()
        if self._socket_path:
            _, connection = await loop.create_unix_connection(lambda: EngineConnection(self), self._socket_path)
        else:
            _, connection = await loop.create_connection(lambda: EngineConnection(self), self._host, self._port)
        self._open.add(connection)
        return connection

    def keep(self, connection: EngineConnection) -> None:
        """Take an idle connection back."""
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def forget(self, connection: EngineConnection) -> None:
        """The connection is gone."""
        self._open.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    async def aclose(self) -> None:
        """Cut every connection."""
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()
