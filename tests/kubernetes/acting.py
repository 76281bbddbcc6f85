"""Pods acted out with real processes in kubelet's order, behind a Service as kube-proxy makes one.

The engine is the scriptable one, the gateway the real one with the settings of the rendered pod; only addresses are
others, since all pods share one loopback, and kubelet's times are shortened.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from tests.harness import TERM, FakeEngine, Gateway, free_port, gather_quietly, until
from tests.kubernetes.manifests import Pod

SHORTENED = 0.1  # of kubelet's sleeps and periods
HEARD_S = 0.3  # until a Service has heard that a pod came or went; a real one takes longer, as preStop does
ADDRESSES = {"TIDEGATE_HOST", "TIDEGATE_PORT", "TIDEGATE_OPS_PORT"}


class ActedPod:
    """The two containers of a rendered pod."""

    def __init__(self, pod: Pod) -> None:
        assert pod.gateway
        assert pod.engine
        self.container = pod.gateway
        self.engine_probe = pod.engine["livenessProbe"]
        given = {name: value for name, value in pod.environment(pod.gateway).items() if name not in ADDRESSES}
        self.engine = FakeEngine(tcp=True, start=False)  # sidecars start first
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(self.engine)
        try:
            self.engine.start()
            self.engine.set(health_status=503)  # loading
            gateway = Gateway(self.engine, wait="/livez", environment=given, ops_port=free_port())
        except BaseException:
            self.stack.close()
            raise
        self.gateway = self.stack.enter_context(gateway)

    def probe(self, kind: str) -> bool:
        """What kubelet hears from a probe of the gateway."""
        return self._ask(self.container[kind]["httpGet"]["path"])

    def probe_engine(self) -> bool:
        """What it hears about the engine."""
        return self._ask(self.engine_probe["httpGet"]["path"])

    def _ask(self, path: str) -> bool:
        return self.gateway.get(path).status_code == 200

    async def load(self) -> None:
        """The model is loaded; wait until the readiness probe says so."""
        self.engine.set(health_status=200)
        await until(lambda: self.probe("readinessProbe"), "readiness")

    async def end(self) -> int:
        """preStop, SIGTERM to the main container, then to the sidecar, as kubelet does; the gateway's exit code."""
        await asyncio.sleep(self.container["lifecycle"]["preStop"]["sleep"]["seconds"] * SHORTENED)
        self.gateway.signal(TERM)
        await until(lambda: not self.gateway.running, "the gateway's end")
        assert self.engine.running, "the engine must outlive the gateway"
        assert self.engine.counts()["aborted"] == 0, "work was cut at the engine"
        self.engine.signal(TERM)
        await until(lambda: not self.engine.running, "the engine's end")
        return self.gateway.exit_code()

    def close(self) -> None:
        """Whatever still runs ends."""
        self.stack.close()


class Service:
    """One address; each connection goes to one pod, in turn, and stays there, whatever becomes of the pod."""

    def __init__(self) -> None:
        self.pods: list[ActedPod] = []
        self.port = 0
        self._turn = itertools.count()
        self._open: set[asyncio.Task[None]] = set()

    async def hear(self, change: Callable[[], Any]) -> None:
        """A pod came or went: proxies hear it later."""
        await asyncio.sleep(HEARD_S)
        change()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._open.add(task)
        pod = self.pods[next(self._turn) % len(self.pods)]
        try:
            there, back = await asyncio.open_connection("127.0.0.1", pod.gateway.port)
        except OSError:
            writer.transport.abort()
        else:
            try:
                await asyncio.gather(_pump(reader, back), _pump(there, writer))
            finally:
                writer.transport.abort()
                back.transport.abort()
        self._open.discard(task)

    @contextlib.asynccontextmanager
    async def listen(self) -> AsyncIterator[None]:
        """Take connections on a free port for the duration of the block."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            for task in self._open:
                task.cancel()
            await gather_quietly(*self._open)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.transport.abort()


async def repeat(call: Callable[[], Awaitable[str]], over: asyncio.Event, outcomes: list[str]) -> None:
    """Call again and again until it is over, and note how each call ended."""
    while not over.is_set():
        outcomes.append(await call())
