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
    url: str = ""  # of the server that the arm `url` goes to
    tell: Callable[[str], None] = print


@dataclass(frozen=True, slots=True)
class Work:
    """What a server that generates says of itself: open requests, and tokens made since its start."""

    open: float
    tokens: float


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

    async def work(self) -> Work | None:
        """What vLLM's metrics say, summed over their labels; None if they are not to be had."""
        found: dict[str, float] = {}
        with contextlib.suppress(httpx.HTTPError):
            for name, value in METRIC.findall((await self._http.get("/metrics")).text):
                found[name] = found.get(name, 0.0) + float(value)
        if not found:
            return None
        waiting = found.get("vllm:num_requests_running", 1) + found.get("vllm:num_requests_waiting", 1)
        return Work(waiting, found.get("vllm:generation_tokens_total", 0.0))

    async def stop(self) -> None:
        await self._http.aclose()
        self.child.stop()


@dataclass(frozen=True, slots=True)
class Target:
    """Where the clients of an arm go, and which engine works for them."""

    address: Address
    engine: Server
    gateway: Server | None = None
    comes_to_rest: bool = True  # whether the engine drops what its clients have left
    model: str = MODEL  # the name that it knows its model by

    async def until_idle(self) -> None:
        """Wait until the engine has nothing left to do.

        Raises:
            ServerFailed: it has not come to rest.
        """

        async def idle() -> bool:
            work = await self.engine.work()
            return work is not None and work.open == 0

        if self.comes_to_rest:
            await self.engine.child.until(idle, "idle", IDLE_S)


class Stage:
    """Starts what an arm needs, keeps engines for the arms to come, and ends everything with its `async with`."""

    def __init__(self, model: Path, options: Options) -> None:
        self.model = model
        self.options = options
        # Short, for a Unix socket's path has a limit; and what a dying engine still writes there spoils no experiment.
        self._folder = tempfile.TemporaryDirectory(prefix="tg-", ignore_cleanup_errors=True)
        self._engines: dict[int | None, Server] = {}  # by their own limit

    async def __aenter__(self) -> "Stage":
        return self

    async def __aexit__(self, *_: object) -> None:
        for limit in list(self._engines):
            await self._engines.pop(limit).stop()
        self._folder.cleanup()

    async def engine(self, own_limit: int | None = None) -> Server:
        """The engine with this limit of its own, started if it does not run, and idle.

        Raises:
            ServerFailed: it did not start or does not come to rest.
        """
        if self.options.in_turn:
            for limit in [limit for limit in self._engines if limit != own_limit]:
                await self._engines.pop(limit).stop()
        if own_limit not in self._engines:
            await self._start_engine(own_limit)
        engine = self._engines[own_limit]
        await Target(engine.address, engine).until_idle()
        return engine

    async def _start_engine(self, own_limit: int | None) -> None:
        name = "engine" if own_limit is None else f"engine-limit-{own_limit}"
        self.options.tell(f"starting {name} (about half a minute)")
        folder = self.empty_folder(name)
        address = Address(socket=str(folder / "engine.sock"))
        # Without a limit from here the launcher passes one that no run comes near.
        arguments = [*ENGINE_ARGUMENTS, *(() if own_limit is None else ("--max-num-queued-reqs", str(own_limit)))]
        plan = make_plan(find("auto"), Model(str(self.model), MODEL), Path(address.socket), arguments, os.environ)
        log = self.options.out / f"{name}.log"
        engine = Server(Child(name, plan.argv, plan.env, folder, log, niceness=plan.niceness), address)
        self._engines[own_limit] = engine
        await engine.child.until(lambda: engine.answers("/health"), "ready", ENGINE_START_S)

    def empty_folder(self, name: str) -> Path:
        """To run in: nobody's .env is read, and no socket of an earlier engine is in the way of a new one."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._folder.name))

    @asynccontextmanager
    async def gateway(self, engine: Server) -> AsyncIterator[Server]:
        """A fresh Tidegate in front of an engine: as in a new start, it has learned nothing yet."""
        port = free_port()
        settings = {
            "TIDEGATE_MAX_IN_FLIGHT": str(SEQUENCES),
            "TIDEGATE_ENGINE_URL": f"unix://{engine.address.socket}",
            "TIDEGATE_PORT": str(port),
            **self.options.settings,
        }
        folder = self.empty_folder("gateway")
        log = self.options.out / "gateway.log"
        argv = [sys.executable, "-m", "app"]
        server = Server(Child("gateway", argv, environment() | settings, folder, log), Address(port=port))
        try:
            await server.child.until(lambda: server.answers("/readyz"), "ready", GATEWAY_START_S)
            yield server
        finally:
            await server.stop()


def environment() -> dict[str, str]:
    """This process's, without settings of a gateway, for children that import the project."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TIDEGATE_", "WEB_CONC"))}
    return kept | {"PYTHONPATH": str(ROOT)}


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


Arm = Callable[[Stage], AbstractAsyncContextManager[Target]]
ARMS: Final[dict[str, Arm]] = {  # those that are compared unless others are named
    "bare": _bare,
    "own-limit": _own_limit,
    "tidegate": _tidegate,
}
