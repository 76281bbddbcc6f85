"""Two engines, each with launcher and gateway, behind vLLM's own router: what becomes of requests when one goes.

A start takes long, so the tests share the two; each leaves what it used running or lets the next start it anew.
"""

import asyncio
import contextlib
import os
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loadtest.peers import environment
from loadtest.processes import Child as Server
from tests.engine.launched import START_S, Launcher, processes, session_of, words
from tests.harness import COMPLETIONS, free_port, refused, until, wait_until

pytestmark = pytest.mark.timeout(4 * START_S)

SLOTS = 8
TURNS = 3  # requests of each client after the kill
STALL_S = 15  # the other engine may be starting on the same cores
SETTINGS = {
    "TIDEGATE_MAX_IN_FLIGHT": str(SLOTS),
    "TIDEGATE_STALL_S": str(STALL_S),
    "TIDEGATE_LANES": '[{"name": "all"}]',
    "TIDEGATE_MAX_WAIT_S": "300",  # a busy machine is slow
}
PATIENCE = httpx.Timeout(300)


class Pair:
    """Two launchers; one that has ended is started anew."""

    def __init__(self) -> None:
        self._running = [Launcher(environment=SETTINGS) for _ in range(2)]  # side by side

    def launched(self, place: int) -> Launcher:
        if not self._running[place].running:
            self._running[place].close()
            self._running[place] = Launcher(environment=SETTINGS)
        return self._running[place]

    def __getitem__(self, place: int) -> Launcher:
        one = self.launched(place)
        wait_until(lambda: not one.running or one.ask("/readyz")[0] == 200, "a ready engine", within=START_S)
        assert one.running, one.log[-5000:]
        return one

    def close(self) -> None:
        for one in self._running:
            session = one.engine()
            try:
                one.kill()
                one.leaves_nothing(session)
            finally:
                one.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    both = Pair()
    try:
        yield both
    finally:
        both.close()


@pytest.fixture
def router(pair: Pair) -> Iterator[str]:
    """vLLM's router over both gateways; its address."""
    command, port = environment("vllm-router", print) / "vllm-router", free_port()
    urls = [pair[0].base_url, pair[1].base_url]
    argv = [str(command), "--worker-urls", *urls, "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--policy", "round_robin", "--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
    argv += ["--prometheus-port", str(free_port()), "--log-level", "warning"]
    with tempfile.TemporaryDirectory() as folder:
        server = Server("router", argv, os.environ, Path(folder), Path(folder, "log"))
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: _answers(server, f"{url}/v1/models"), "an answer through the router", within=60)
            yield url
        finally:
            server.stop()


def _answers(server: Server, url: str) -> bool:
    server.check()
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, trust_env=False).status_code == 200
    return False


async def ask(client: httpx.AsyncClient, count: int, *, stream: bool, name: str = "") -> str:
    """What became of one request: whole, an error that the client can see, or a lie."""
    try:
        headers = {"x-request-id": name} if name else {}
        answer = await client.post(COMPLETIONS, json=words(count, stream=stream), headers=headers)
    except httpx.HTTPError as error:
        return f"broken: {error!r}"
    if answer.status_code != 200:
        return f"{answer.status_code} {answer.headers.get('x-tidegate-reason')}"
    if not stream:
        return "whole" if answer.json()["usage"]["completion_tokens"] == count else "a lie"
    if '"error"' in answer.text:
        return "error in the stream"
    return "whole" if answer.text.rstrip().endswith("[DONE]") else "a lie"


def open_client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False, limits=limits)


def errors(one: Launcher) -> int:
    return int(one.metrics().total("tidegate_requests_total", outcome="engine_error"))


async def test_a_dead_engine_behind_the_router_costs_only_what_it_was_running(pair: Pair, router: str) -> None:
    """What waits in its gateway, and what comes later, is served by the other; its own start waits for the group."""
    dead, other = pair[0], pair[1]
    before, ups = dead.engine(), dead.ups()
    done: Counter[str] = Counter()
    killed = asyncio.Event()
    async with open_client(router) as client:

        async def keep_asking(number: int) -> None:
            more = TURNS
            while more:
                more -= killed.is_set()
                done[await ask(client, 64, stream=(number + sum(done.values())) % 2 == 0)] += 1

        asking = [asyncio.create_task(keep_asking(number)) for number in range(4 * SLOTS)]
        await until(lambda: sum(done.values()) >= 20, "some answers", within=120)
        core = dead.engine("VLLM::EngineCore")[0]
        await until(lambda: dead.ask("/stats")[1]["in_flight"] >= SLOTS // 2, "a busy engine", within=60)
        os.kill(core, signal.SIGKILL)
        killed.set()
        await asyncio.gather(*asking)
    lost = sum(done.values()) - done["whole"]
    # Its API server outlives it by two seconds, but is given no more; the router asks the other again.
    assert lost <= errors(dead) <= SLOTS, done
    assert set(done) <= {"whole", "error in the stream", "502 engine_error"}, done
    assert errors(other) == 0
    dead.next_engine(ups + 1)
    assert not set(before) & processes().keys(), "the group is gone before the next engine is up"
    assert dead.metrics().total("tidegate_engine_restarts_total", cause="exit") >= 1
    assert dead.metrics().total("tidegate_engine_start_seconds") > 0


async def test_an_engine_that_hangs_is_found_told_of_and_restarted(pair: Pair) -> None:
    """Its API server still says that it is healthy."""
    one = pair[1]
    before, stalls = one.engine(), one.metrics().total("tidegate_engine_stalls_total")
    async with open_client(one.base_url) as client:
        assert await ask(client, 4, stream=False) == "whole"
        stream = asyncio.create_task(ask(client, 8000, stream=True, name="stuck-stream"))
        plain = asyncio.create_task(ask(client, 8000, stream=False, name="stuck-plain"))
        await until(lambda: one.ask("/stats")[1]["engine"]["running"] == 2, "work at the engine", within=60)
        os.kill(one.engine("VLLM::EngineCore")[0], signal.SIGSTOP)
        async with asyncio.timeout(10 * STALL_S):
            assert (await stream, await plain) == ("error in the stream", "502 engine_error")
        late = await client.post(COMPLETIONS, json=words(4, stream=False))
        refused(late, "engine_unavailable")
        assert 1 <= int(late.headers["retry-after"]) <= 30
        assert (await client.get("/readyz")).status_code == 503
    seen = one.metrics()
    assert seen.total("tidegate_engine_stalls_total") == stalls + 1
    assert seen.total("tidegate_engine_restarts_total", cause="stalled") >= 1
    assert re.search(r"engine stalled: 2 requests at it \(stuck-plain, stuck-stream\)", one.log)
    wait_until(lambda: set(one.engine()) - set(before), "the next engine", within=60)
    assert not set(before) & processes().keys()


async def test_a_drain_completes_every_open_stream_running_or_queued(pair: Pair) -> None:
    one = pair[0]
    session = one.engine()
    async with open_client(one.base_url) as client:
        streams = [asyncio.create_task(ask(client, 100, stream=True)) for _ in range(50)]
        await until(lambda: one.ask("/stats")[1]["queue_depth"] == 50 - SLOTS, "a queue", within=60)
        one.signal(signal.SIGTERM)
        await until(lambda: one.ask("/readyz")[0] == 503, "readiness to fail")
        refused(await client.post(COMPLETIONS, json=words(4, stream=True)), "draining")
        assert Counter(await asyncio.gather(*streams)) == {"whole": 50}
    assert one.exit_code(60) == 0
    one.leaves_nothing(session)
    assert not re.search(r"^Traceback", one.log, re.MULTILINE)


def test_a_killed_launcher_and_a_killed_leader_leave_no_engine_and_no_socket(pair: Pair) -> None:
    """Workers that outlive their server would go on holding the GPU; also while they load."""
    one = pair.launched(1)
    wait_until(lambda: one.engine("VLLM::EngineCore"), "an engine that loads or is ready", within=START_S)
    session = one.engine()
    (leader,) = [pid for pid in session if session_of(pid) == pid]
    one.kill()
    with contextlib.suppress(ProcessLookupError):
        os.kill(leader, signal.SIGKILL)
    one.leaves_nothing(session)
