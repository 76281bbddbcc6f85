"""What connections may take: fewer descriptors than there are, so that the engine can always be reached, and no memory
for heads without an end.
"""

import asyncio
import logging
import resource
import secrets
import sys
from typing import Any, Final

from app.connection import ClientConnection
from app.errors import QUEUE_FULL, Refused

RESERVED: Final = 128  # descriptors for the ops port, the calls beside the gate, the probes of the engine, files
OPS_CONNECTIONS: Final = 64
FEWEST: Final = 16  # whatever the system allows
HEAD_BYTES: Final = 128 * 1024  # of a head, or between two pieces of a chunked body: the parser keeps what it has seen
PIPELINED: Final = 32  # requests behind one that is at work: each takes a hundred times the memory of its bytes
TELL_EVERY_S: Final = 60.0

log = logging.getLogger("tidegate.server")


def most_connections(max_in_flight: int) -> int:
    """Connections of clients that leave a descriptor for each request at the engine."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(FEWEST, descriptors - max_in_flight - RESERVED)


class Crowd:
    """The bound of one port."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._told_at = -TELL_EVERY_S

    def tell(self, now: float) -> None:
        """Log that it is full, once in a while."""
        if now - self._told_at >= TELL_EVERY_S:
            self._told_at = now
            log.warning("%d connections are open, as many as descriptors allow: new ones are closed", self.most)


class TooManyAhead(Exception):
    """More requests than may wait for their turn on one connection; the parser hands it on as an error of its own."""


class BoundedConnection(ClientConnection):
    """A client's connection; one too many is told so and closed, and so is one whose head or pipeline doesn't end."""

    def __init__(self, crowd: Crowd, **given: Any) -> None:
        super().__init__(**given)
        self._crowd = crowd
        self._got_on = False
        self._unparsed = 0  # bytes since the parser last got on

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        super().connection_made(transport)
        if len(self.connections) > self._crowd.most:
            self._crowd.tell(self.loop.time())
            self.transport.write(_full())
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        self._got_on = False
        super().data_received(data)
        self._unparsed = 0 if self._got_on else self._unparsed + len(data)
        if self._unparsed > HEAD_BYTES and not self.transport.is_closing():
            # There is none at first, which uvicorn's annotation leaves out.
            if self.cycle is None or self.cycle.response_complete:  # type: ignore[redundant-expr]
                self.send_400_response("The head of the request is too large.")
            else:
                self.transport.close()

    def on_message_begin(self) -> None:
        """Called by the parser, as are the next three."""
        self._got_on = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A head is in. Raises: TooManyAhead."""
        self._got_on = True
        if len(self.pipeline) >= PIPELINED:
            raise TooManyAhead
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._got_on = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is whole."""
        self._got_on = True
        super().on_message_complete()


def _full() -> bytes:
    refused = Refused(QUEUE_FULL, "The server has as many connections as it can take. Retry later.")
    body = refused.body(anthropic=False)
    headers = [
        *refused.headers(),
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", secrets.token_hex(16).encode()),
        (b"connection", b"close"),
    ]
    return b"".join(
        [b"HTTP/1.1 503 Service Unavailable\r\n", *(b"%b: %b\r\n" % pair for pair in headers), b"\r\n", body]
    )
