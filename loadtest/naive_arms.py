"""More arms: the servers that one writes before there is an engine, on the same weights, and a server anywhere."""

import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx

from launcher.niceness import NICENESS
from loadtest.arms import ARMS, PROBE_S, Arm, Server, Stage, Target, Work, environment
from loadtest.client import Address
from loadtest.processes import Child, ServerFailed
from tests.harness import free_port

START_S: Final = 120.0  # torch and transformers load slowly on a busy machine


class NaiveServer(Server):
    """One of the baselines; it counts in `/stats`."""

    async def work(self) -> Work | None:
        with contextlib.suppress(httpx.HTTPError):
            seen = (await self._http.get("/stats")).json()
            return Work(seen["waiting"] + seen["running"], seen["generated_tokens"])
        return None


class Elsewhere(Child):
    """A server that somebody else has started: nothing can be done to it, and its CPU time is not known."""

    def __init__(self) -> None:
        self.name = "the server"

    def check(self) -> None:
        return

    def cpu_s(self) -> float:
        return 0.0

    def stop(self) -> None:
        return

    def _end_of_log(self) -> str:
        return "it has no log here"


@asynccontextmanager
async def naive(stage: Stage, name: str) -> AsyncIterator[Target]:
    """A baseline, fresh for each run: it goes on computing for clients that are gone, and would in the next run too."""
    address = Address(port=free_port())
    server = NaiveServer(start(name, stage.model, address, stage.empty_folder(name), stage.options.out), address)
    try:
        await server.child.until(lambda: server.answers("/health"), "ready", START_S)
        yield Target(address, server, comes_to_rest=False)
    finally:
        await server.stop()


def start(name: str, model: Path, address: Address, folder: Path, out: Path) -> Child:
    """Start `loadtest.baselines.NAME` as the engine is started: in a session of its own, with the same niceness."""
    app = f"loadtest.baselines.{name}:create_app"
    # Nobody is left to wait for what it still computes when it is stopped.
    flags = f"--factory --port {address.port} --no-access-log --log-level warning --timeout-graceful-shutdown 1".split()
    argv = [sys.executable, "-m", "uvicorn", app, *flags]
    return Child(name, argv, environment() | {"MODEL": str(model)}, folder, out / f"{name}.log", niceness=NICENESS)


@asynccontextmanager
async def _url(stage: Stage) -> AsyncIterator[Target]:
    parts = urlsplit(stage.options.url)
    if parts.scheme != "http" or not parts.hostname:
        raise ServerFailed(f"--url {stage.options.url!r} must be http://host:port")
    address = Address(port=parts.port or 80, host=parts.hostname)
    server = Server(Elsewhere(), address)
    try:
        async with httpx.AsyncClient(base_url=address.url, timeout=PROBE_S, trust_env=False) as http:
            model = (await http.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        yield Target(address, server, comes_to_rest=await server.work() is not None, model=model)
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise ServerFailed(f"{address.url}/v1/models gives no model: {error!r}") from error
    finally:
        await server.stop()


def _of(name: str) -> Arm:
    return lambda stage: naive(stage, name)


NAIVE_ARMS: Final[dict[str, Arm]] = {
    "one-at-a-time": _of("one_at_a_time"),
    "hand-batching": _of("hand_batching"),
}
ALL_ARMS: Final[dict[str, Arm]] = {**NAIVE_ARMS, **ARMS, "url": _url}
