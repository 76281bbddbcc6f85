"""A client's connection: uvicorn's, with what an ASGI application has no way to do, and fewer system calls.

Each write to a socket costs more than all that this server does for an event, so there is one for each piece of an
answer, and none for a head alone.
"""

import asyncio
from collections.abc import Iterable
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from app.call import ABORT, CLOSE, WHOLE, WRITE

LINGER_S: Final = 5.0  # for a client to take what has been written before its connection is closed hard
READ_AHEAD: Final = 8  # requests that may wait behind the one that is answered before no more are read
JOINED_BYTES: Final = 64 * 1024  # copying more costs more than a system call


class ClientConnection(HttpToolsProtocol):
    """Puts into the scope the ways to end the connection, and one to write a piece of a chunked body at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._answering: RequestResponseCycle | None = None
        self._writes = JoinedWrites(transport, self.loop)
        super().connection_made(self._writes)  # type: ignore[arg-type]  # it has what uvicorn uses of a transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio. uvicorn tells only the newest request of a connection that its client is gone."""
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn lets the timer run on after a reset, and hold the connection

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio. The parser skips the body of who asks for another protocol: here nobody gets one.

        Taken as it is, that body would be the next request: one that a proxy in front has not seen.
        """
        self._unset_keepalive_if_required()
        rest: bytes | memoryview = data
        try:
            while rest:
                try:
                    self.parser.feed_data(rest)
                    return
                except httptools.HttpParserUpgrade as wish:
                    if not self._asks_for_upgrade():
                        return  # what follows a CONNECT is no request
                    rest, head = memoryview(rest)[wish.args[0] :], self._head_without_upgrade()
                    self.parser = httptools.HttpRequestParser(self)  # the other may be at its end
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
                    self.parser.feed_data(head)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _asks_for_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _head_without_upgrade(self) -> bytes:
        first = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        kept = (b"%b: %b" % header for header in self.headers if header[0] != b"upgrade")
        return b"\r\n".join([first, *kept, b"", b""])

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        if self._asks_for_upgrade():
            return  # the head comes again without
        super().on_headers_complete()
        self.headers = []  # trailers are no headers: nobody has checked or filtered them as such
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False
        if 0 < len(self.pipeline) < READ_AHEAD:
            self.flow.resume_reading()  # else nobody would see that the client of the first one leaves

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if not self._asks_for_upgrade():
            super().on_message_complete()

    def on_message_begin(self) -> None:
        """Called by the parser."""
        super().on_message_begin()
        scope: Any = self.scope
        scope[CLOSE] = self._close
        scope[ABORT] = self._close
        scope[WRITE] = self._write
        scope[WHOLE] = self._has_come

    def _close(self) -> None:
        self.transport.close()  # what has been written still goes out
        self.loop.call_later(LINGER_S, self.transport.abort)

    def _has_come(self) -> bool:
        return self._answering is not None and not self._answering.more_body

    def _write(self, data: bytes) -> bool:
        if len(data) > JOINED_BYTES:
            self._writes.write_parts((b"%x\r\n" % len(data), data, b"\r\n"))
        else:
            self._writes.write_now(b"%x\r\n%b\r\n" % (len(data), data))
        return not self.flow.write_paused


class JoinedWrites:
    """A transport that sends what is written within one turn of the event loop together."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""
        self._write = transport.write
        self._is_closing = transport.is_closing
        for name in ("abort", "get_extra_info", "is_closing", "pause_reading", "resume_reading", "set_protocol"):
            setattr(self, name, getattr(transport, name))

    def write(self, data: bytes) -> None:
        """Send it at the end of this turn, or with what is written before that."""
        if len(self._held) + len(data) > JOINED_BYTES:
            self.write_now(data)
        elif self._held:
            self._held += data
        elif data:
            self._held = data
            self._loop.call_soon(self._flush)

    def write_now(self, data: bytes) -> None:
        """Send it after what is held, without waiting for the end of the turn."""
        if self._held:
            self._flush()
        if not self._is_closing():
            self._write(data)

    def write_parts(self, parts: Iterable[bytes]) -> None:
        """The same for pieces that are too large to be put together."""
        self._flush()
        if not self._is_closing():
            self._transport.writelines(parts)

    def close(self) -> None:
        """Close once all that was written is sent."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        held, self._held = self._held, b""
        if held and not self._is_closing():
            self._write(held)
