"""A rolling update of two pods under load, acted out with real processes: no request is lost."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import httpx
import openai
import pytest

from tests.harness import TERM, chat, occupied, refused, until
from tests.kubernetes.acting import ActedPod, Service, repeat
from tests.kubernetes.manifests import parse, pods, rendered
from tests.wire import CHAT, Json

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CLIENTS = 6  # of each kind, calling all the time
ANSWER = {"events": 8, "gap_ms": 40}
LONG = {"events": 60, "gap_ms": 50}


@pytest.fixture
def start() -> Iterator[list[ActedPod]]:
    """Pods that run; they end with the test."""
    running: list[ActedPod] = []
    yield running
    for pod in running:
        pod.close()


def new_pod(running: list[ActedPod]) -> ActedPod:
    """One more pod of the GPU overlay, whose model is still loading."""
    (template,) = pods(parse(rendered("gpu")))
    running.append(ActedPod(template))
    return running[-1]


async def on_a_fresh_connection(service: Service) -> str:
    """As a proxy in front does it: it picks a pod for each request, and nobody tries again."""
    body = chat(stream=True, fake=ANSWER)
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=20) as client:
        try:
            answer = await client.post(f"http://127.0.0.1:{service.port}{CHAT}", json=body)
        except httpx.HTTPError as error:
            return type(error).__name__
    return "whole" if answer.text.endswith("data: [DONE]\n\n") else answer.headers.get("x-tidegate-reason", "cut")


async def with_the_sdk(client: openai.AsyncOpenAI, fake: Json) -> str:
    """As most programs do it: connections are kept, and the SDK tries again."""
    try:
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "?"}], stream=True, extra_body={"fake": fake}
        )
        last = None
        async for chunk in stream:
            last = chunk
    except openai.OpenAIError as error:
        return type(error).__name__
    return "whole" if last is not None and last.choices[0].finish_reason else "cut"


@contextlib.asynccontextmanager
async def load(service: Service, outcomes: dict[str, list[str]]) -> AsyncIterator[openai.AsyncOpenAI]:
    """Both kinds of clients at work for the duration of the block; yields an SDK client of its own."""
    over = asyncio.Event()
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{service.port}/v1", api_key="none") as client:
        tasks = [
            asyncio.create_task(repeat(lambda: on_a_fresh_connection(service), over, outcomes["fresh"]))
            for _ in range(CLIENTS)
        ] + [
            asyncio.create_task(repeat(lambda: with_the_sdk(client, ANSWER), over, outcomes["sdk"]))
            for _ in range(CLIENTS)
        ]
        try:
            yield client
        finally:
            over.set()
            await asyncio.gather(*tasks)


async def test_rolling_update_under_load_loses_no_request(start: list[ActedPod]) -> None:
    service = Service()
    service.pods = [new_pod(start), new_pod(start)]
    await asyncio.gather(*(pod.load() for pod in service.pods))
    outcomes: dict[str, list[str]] = {"fresh": [], "sdk": []}
    codes, long = [], []
    async with service.listen(), load(service, outcomes) as client:
        for old in list(service.pods):
            new = new_pod(start)  # maxSurge: 1
            assert new.probe("livenessProbe"), "the gateway answers while the model loads"
            assert new.probe_engine(), "and nobody takes the engine for stalled"
            assert not new.probe("readinessProbe")
            async with new.gateway.client() as direct:
                refused(await direct.post(CHAT, json=chat()), "engine_unavailable")
            await new.load()
            await service.hear(lambda new=new: service.pods.append(new))  # type: ignore[misc]
            long += [asyncio.create_task(with_the_sdk(client, LONG)) for _ in range(4)]
            await asyncio.sleep(0.2)
            leaving = asyncio.create_task(service.hear(lambda old=old: service.pods.remove(old)))  # type: ignore[misc]
            codes.append(await old.end())
            await leaving
        assert {await call for call in long} == {"whole"}, "a stream that was running when its pod was told to end"
    assert codes == [0, 0]
    assert {kind: dict(Counter(seen)) for kind, seen in outcomes.items()} == {
        kind: {"whole": len(seen)} for kind, seen in outcomes.items()
    }
    assert min(map(len, outcomes.values())) > 10 * CLIENTS


async def test_without_the_prestop_sleep_requests_are_lost(start: list[ActedPod]) -> None:
    """What the sleep is there for: a pod that drains is still in the Service, and turns away whoever is sent to it."""
    service = Service()
    service.pods = [new_pod(start), new_pod(start)]
    await asyncio.gather(*(pod.load() for pod in service.pods))
    old = service.pods[0]
    async with service.listen(), occupied(old.gateway):  # so that the drain lasts until it is seen
        old.gateway.signal(TERM)
        await until(lambda: not old.probe("readinessProbe"), "the drain")
        assert {await on_a_fresh_connection(service) for _ in service.pods} == {"whole", "draining"}
