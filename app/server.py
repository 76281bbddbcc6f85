"""uvicorn with our signals: drain first, close the listeners last, say by the exit code whether requests were cut.

uvicorn by itself closes its listeners at the first signal and ends by re-raising it.
"""

import asyncio
import contextlib
import errno
import functools
import gc
import logging
import resource
import signal
import socket
import ssl
from typing import Final

import uvicorn
from fastapi import FastAPI

from app.connection import LINGER_S
from app.crowd import OPS_CONNECTIONS, BoundedConnection, Crowd, most_connections
from app.gateway import Gateway
from app.listener import Listener, TlsListener
from app.main import create_app, create_ops_app
from app.settings import Settings, SettingsError
from app.status import EngineStatus

DRAINED: Final = 0
CUT: Final = 3
KEEP_ALIVE_S: Final = 660  # longer than load balancers keep theirs, so that they close first: they wait 600 s and more
BACKLOG: Final = 2048
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")

log = logging.getLogger("tidegate.server")


class PortTaken(Exception):
    """A listener cannot be opened; the text says which and what to do."""


class GatewayServer:
    """The gateway on its one or two ports, from the opening of the listeners to the exit code."""

    def __init__(self, settings: Settings, status: EngineStatus | None = None) -> None:
        self._settings = settings
        self._app = create_app(settings, status)
        self._sockets: list[tuple[FastAPI, socket.socket]] = []
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self.port = settings.port

    def bind(self) -> None:
        """Open the listeners. Clients that connect now are answered once `run` runs.

        Raises:
            PortTaken: a port cannot be had.
            SettingsError: the certificate or its key cannot be read.
        """
        settings = self._settings
        _raise_descriptor_limit()
        _check_certificate(settings)
        main = _listen(settings.host, settings.port, "TIDEGATE_PORT (of the launcher: --port)")
        self.port = main.getsockname()[1]
        self._sockets.append((self._app, main))
        if settings.ops_port is not None:
            ops = _listen(settings.host, settings.ops_port, "TIDEGATE_OPS_PORT")
            self._sockets.append((create_ops_app(self._app), ops))
        if not settings.api_keys and settings.api_keys_file is None and settings.host not in LOOPBACK:
            log.warning("no API keys are set (TIDEGATE_API_KEYS): all who can reach this port may use the engine")

    async def run(self) -> int:
        """Serve until told to stop and drained; `DRAINED`, or `CUT` if requests were still there at the end."""
        gc.collect()
        gc.freeze()  # what is loaded by now stays: looking through it for garbage would hold up every stream
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        servers = [self._server(app) for app, _ in self._sockets]
        serving = [
            asyncio.create_task(server.serve([sock])) for server, (_, sock) in zip(servers, self._sockets, strict=True)
        ]
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait([stopping, *serving], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        cut = await self._drain() if servers[0].started else 0
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*serving)
        return CUT if cut else DRAINED

    def stop(self, *, now: bool = False) -> None:
        """Begin the drain; `now` cuts it short. To be called in the event loop."""
        self._stop.set()
        if now:
            self._hurry.set()

    def _on_signal(self, number: int) -> None:
        again = self._stop.is_set()
        log.info(
            "%s: %s", signal.Signals(number).name, "ending now" if again else "draining; a second signal ends at once"
        )
        self.stop(now=again)

    def _server(self, app: FastAPI) -> Listener:
        """The main port bounded by descriptors, with TLS where it is set; the ops port small and plain."""
        settings, main = self._settings, app is self._app
        crowd = Crowd(most_connections(settings.max_in_flight) if main else OPS_CONNECTIONS)
        config = uvicorn.Config(
            app,
            http=functools.partial(BoundedConnection, crowd),  # type: ignore[arg-type]  # it wants a class, and calls it
            ws="none",
            loop="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            workers=1,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(LINGER_S),
            ssl_certfile=settings.tls_cert_file if main else None,
            ssl_keyfile=settings.tls_key_file if main else None,
        )
        return TlsListener(config, crowd) if config.is_ssl else Listener(config)

    async def _drain(self) -> int:
        """Let everything in the house finish within the limit, then end the rest; how many those were."""
        gateway: Gateway = self._app.state.gateway
        gateway.drain()
        over = [asyncio.create_task(event.wait()) for event in (gateway.empty, self._hurry)]
        await asyncio.wait(over, timeout=self._settings.drain_limit_s, return_when=asyncio.FIRST_COMPLETED)
        for task in over:
            task.cancel()
        cut = gateway.cut()
        if cut:
            log.warning("drain over: %d requests cut", cut)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await gateway.empty.wait()
        return cut


def _listen(host: str, port: int, setting: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        no_address = isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL
        remedy = (
            "give an address of this machine with TIDEGATE_HOST (of the launcher: --host)"
            if no_address
            else f"stop what uses it or choose another with {setting}"
        )
        raise PortTaken(f"cannot listen on {host} port {port}: {reason}; {remedy}") from None
    sock.setblocking(False)
    return sock


def _check_certificate(settings: Settings) -> None:
    if settings.tls_cert_file is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert_file, settings.tls_key_file, str)
        except (OSError, ssl.SSLError) as error:
            files = f"TIDEGATE_TLS_CERT_FILE={settings.tls_cert_file}, TIDEGATE_TLS_KEY_FILE={settings.tls_key_file}"
            raise SettingsError(f"{files}: {error.strerror or error}") from None


def _raise_descriptor_limit() -> None:
    """Each client and each of its requests to the engine takes one; many systems start with 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
