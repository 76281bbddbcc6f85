"""What is compared: each arm is a way to put the same engine before the same clients."""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from launcher.command import Model, make_plan
from launcher.device import find
from loadtest.client import Address
from loadtest.processes import Child
from tests.harness import free_port

ROOT: Final = Path(__file__).resolve().parent.parent
MODEL: Final = "tiny"
SEQUENCES: Final = 16  # that the engine runs at once, whatever the machine: the workload is made for it
OWN_LIMIT: Final = 32
# float32 and a small cache: two engines fit, and the figures don't depend on what the CPU does in hardware.
ENGINE_ARGUMENTS: Final = f"--max-num-seqs {SEQUENCES} --dtype float32 --kv-cache-memory-bytes {2**30}".split()
ENGINE_START_S: Final = 300.0
GATEWAY_START_S: Final = 30.0
IDLE_S: Final = 120.0
PROBE_S: Final = 10.0
METRIC: Final = re.compile(r"^(vllm:[a-z_]+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Options:
    """How arms are set up. `settings` are the gateway's, by full name; without any it runs at its defaults."""

    settings: Mapping[str, str]
    out: Path  # the servers' logs go there
    in_turn: bool = False  # one engine at a time, for machines without memory for two
    tell: Callable[[str], None] = print


class Server:
    """A child that listens, and what can be asked of it over HTTP."""

    def __init__(self, child: Child, address: Address) -> None:
        self.child = child
        self.address = address
        # Two connections of its own, apart from those of the clients: it can be asked in the middle of an overload.
        transport = httpx.AsyncHTTPTransport(uds=address.socket or None, retries=0)
        self._http = httpx.AsyncClient(transport=transport, base_url=address.url, timeout=PROBE_S, trust_env=False)

    async def answers(self, path: str) -> bool:
        """Whether it answers 200."""
        with contextlib.suppress(httpx.HTTPError):
            return (await self._http.get(path)).status_code == 200
        return False

    async def engine_metrics(self) -> dict[str, float]:
        """vLLM's metrics by name, summed over their labels; empty if it does not answer."""
        found: dict[str, float] = {}
        with contextlib.suppress(httpx.HTTPError):
            for name, value in METRIC.findall((await self._http.get("/metrics")).text):
                found[name] = found.get(name, 0.0) + float(value)
        return found

    async def stop(self) -> None:
        await self._http.aclose()
        self.child.stop()


@dataclass(frozen=True, slots=True)
class Target:
    """Where the clients of an arm go, and which engine works for them."""

    address: Address
    engine: Server
    gateway: Server | None = None

    async def until_idle(self) -> None:
        """Wait until the engine has nothing left to do.

        Raises:
            ServerFailed: it has not come to rest.
        """

        async def idle() -> bool:
            metrics = await self.engine.engine_metrics()
            return metrics.get("vllm:num_requests_running", 1) + metrics.get("vllm:num_requests_waiting", 1) == 0

        await self.engine.child.until(idle, "idle", IDLE_S)


class Stage:
    """Starts what an arm needs, keeps engines for the arms to come, and ends everything with its `async with`."""

    def __init__(self, model: Path, options: Options) -> None:
        self._model = model
        self._options = options
        self._folder = tempfile.TemporaryDirectory(prefix="tg-")  # short: a Unix socket's path has a limit
        self._engines: dict[int | None, Server] = {}  # by their own limit

    async def __aenter__(self) -> "Stage":
        return self

    async def __aexit__(self, *_: object) -> None:
        for limit in list(self._engines):
            await self._engines.pop(limit).stop()
        self._folder.cleanup()

    def arm(self, name: str) -> AbstractAsyncContextManager[Target]:
        """Set up an arm for one run."""
        return ARMS[name](self)

    async def engine(self, own_limit: int | None = None) -> Server:
        """The engine with this limit of its own, started if it does not run, and idle.

        Raises:
            ServerFailed: it did not start or does not come to rest.
        """
        if self._options.in_turn:
            for limit in [limit for limit in self._engines if limit != own_limit]:
                await self._engines.pop(limit).stop()
        if own_limit not in self._engines:
            await self._start_engine(own_limit)
        engine = self._engines[own_limit]
        await Target(engine.address, engine).until_idle()
        return engine

    async def _start_engine(self, own_limit: int | None) -> None:
        name = "engine" if own_limit is None else f"engine-limit-{own_limit}"
        self._options.tell(f"starting {name} (about half a minute)")
        folder = self._empty_folder(name)
        address = Address(socket=str(folder / "engine.sock"))
        # Without a limit from here the launcher passes one that no run comes near.
        arguments = [*ENGINE_ARGUMENTS, *(() if own_limit is None else ("--max-num-queued-reqs", str(own_limit)))]
        plan = make_plan(find("auto"), Model(str(self._model), MODEL), Path(address.socket), arguments, os.environ)
        log = self._options.out / f"{name}.log"
        engine = Server(Child(name, plan.argv, plan.env, folder, log, niceness=plan.niceness), address)
        self._engines[own_limit] = engine
        await engine.child.until(lambda: engine.answers("/health"), "ready", ENGINE_START_S)

    def _empty_folder(self, name: str) -> Path:
        """To run in: nobody's .env is read, and no socket of an earlier engine is in the way of a new one."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._folder.name))

    @asynccontextmanager
    async def gateway(self, engine: Server) -> AsyncIterator[Server]:
        """A fresh Tidegate in front of an engine: as in a new start, it has learned nothing yet."""
        port = free_port()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TIDEGATE_", "WEB_CONC"))}
        settings = {
            "TIDEGATE_MAX_IN_FLIGHT": str(SEQUENCES),
            "TIDEGATE_ENGINE_URL": f"unix://{engine.address.socket}",
            "TIDEGATE_PORT": str(port),
            **self._options.settings,
        }
        folder = self._empty_folder("gateway")
        env = kept | {"PYTHONPATH": str(ROOT)} | settings
        log = self._options.out / "gateway.log"
        server = Server(Child("gateway", [sys.executable, "-m", "app"], env, folder, log), Address(port=port))
        try:
            await server.child.until(lambda: server.answers("/readyz"), "ready", GATEWAY_START_S)
            yield server
        finally:
            await server.stop()


@asynccontextmanager
async def _bare(stage: Stage) -> AsyncIterator[Target]:
    engine = await stage.engine()
    yield Target(engine.address, engine)


@asynccontextmanager
async def _own_limit(stage: Stage) -> AsyncIterator[Target]:
    engine = await stage.engine(OWN_LIMIT)
    yield Target(engine.address, engine)


@asynccontextmanager
async def _tidegate(stage: Stage) -> AsyncIterator[Target]:
    engine = await stage.engine()
    async with stage.gateway(engine) as gateway:
        yield Target(gateway.address, engine, gateway)


ARMS: Final[dict[str, Callable[[Stage], AbstractAsyncContextManager[Target]]]] = {
    "bare": _bare,
    "own-limit": _own_limit,
    "tidegate": _tidegate,
}
