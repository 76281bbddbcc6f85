"""How many connections there may be: fewer than descriptors, so that those to the engine can always be had."""

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


class BoundedConnection(ClientConnection):
    """A client's connection; one too many is told so and closed, before it has sent anything."""

    def __init__(self, crowd: Crowd, **given: Any) -> None:
        super().__init__(**given)
        self._crowd = crowd

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        super().connection_made(transport)
        if len(self.connections) > self._crowd.most:
            self._crowd.tell(self.loop.time())
            self.transport.write(_full())
            self.transport.close()


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
