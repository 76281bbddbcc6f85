"""uvicorn's server without its signals, and one for TLS that bounds who has not shaken hands yet."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn

from app.connection import LINGER_S
from app.crowd import Crowd

HANDSHAKE_S: Final = 10.0
ACCEPT_AGAIN_S: Final = 0.1


class Listener(uvicorn.Server):
    """uvicorn's, which leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Called by uvicorn."""
        yield


class TlsListener(Listener):
    """Counts connections from their first moment: uvicorn's protocol knows of none before the handshake is done."""

    def __init__(self, config: uvicorn.Config, crowd: Crowd) -> None:
        super().__init__(config)
        self._crowd = crowd
        self._greeting: set[asyncio.Task[None]] = set()
        self._accepting: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn, which then listens to nothing itself."""
        await super().startup([])
        self._accepting = [asyncio.create_task(self._accept(listener)) for listener in sockets or ()]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn."""
        tasks = [*self._accepting, *self._greeting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError:  # gone again, or no descriptor left
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            if len(self.server_state.connections) + len(self._greeting) >= self._crowd.most:
                self._crowd.tell(loop.time())
                client.close()
                continue
            task = loop.create_task(self._greet(client))
            self._greeting.add(task)
            task.add_done_callback(self._greeting.discard)

    async def _greet(self, client: socket.socket) -> None:
        def connection() -> asyncio.Protocol:
            # As uvicorn itself makes one; to the type checker it is any protocol, which takes no arguments.
            return self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )

        with contextlib.suppress(OSError):  # what is no TLS, or breaks off, is nobody's concern
            client.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(
                connection,
                client,
                ssl=self.config.ssl,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=LINGER_S,
            )
