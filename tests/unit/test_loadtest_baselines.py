"""The naive servers do what the text says of them: no limit and one at a time; batches, bounds and a fair order."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from fastapi import FastAPI

from loadtest.baselines import hand_batching, one_at_a_time
from loadtest.baselines.batcher import Batcher, QueueFull
from loadtest.baselines.generator import BadRequest, Prompt, Text
from tests.harness import until

CHAT = "/v1/chat/completions"


class Words:
    """A model for tests: a token a word, and it notes each batch. While `go` is not set it works on."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.at_once = 0
        self.most_at_once = 0
        self.go = threading.Event()
        self.go.set()

    def prompt(self, body: bytes) -> Prompt:
        if not body.startswith(b"words "):
            raise BadRequest("no words")
        return Prompt(tuple(range(len(body.split()) - 1)), 4, True, False)

    def __call__(self, prompts: Sequence[Prompt]) -> list[Text]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.batches.append(len(prompts))
        self.go.wait(10)
        time.sleep(0.002)
        self.at_once -= 1
        return [Text("a b c d", prompt.tokens) for prompt in prompts]


@asynccontextmanager
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://naive") as http,
    ):
        yield http


async def until_waiting(http: httpx.AsyncClient, count: int) -> None:
    for _ in range(5000):
        if (await http.get("/stats")).json()["waiting"] == count:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"there were never {count} waiting")


async def test_the_first_server_works_on_one_request_at_a_time_and_refuses_nobody() -> None:
    model = Words()
    model.go.clear()
    async with client(one_at_a_time.create_app(model)) as http:
        calls = [asyncio.create_task(http.post(CHAT, content="words one two")) for _ in range(300)]
        await until_waiting(http, 299)
        assert (await http.get("/stats")).json()["running"] == 1
        model.go.set()
        answers = await asyncio.gather(*calls)
        assert {answer.status_code for answer in answers} == {200}
        assert (await http.get("/stats")).json()["generated_tokens"] == 1200
    assert model.batches == [1] * 300
    assert model.most_at_once == 1


async def test_batching_by_hand_fills_batches_of_sixteen_from_what_has_gathered() -> None:
    model = Words()
    model.go.clear()
    async with client(hand_batching.create_app(model)) as http:
        first = asyncio.create_task(http.post(CHAT, content="words one"))
        await until(lambda: model.batches, "a batch")
        rest = [asyncio.create_task(http.post(CHAT, content="words one")) for _ in range(40)]
        await until_waiting(http, 40)
        model.go.set()
        answers = await asyncio.gather(first, *rest)
        stats = (await http.get("/stats")).json()
    assert {answer.status_code for answer in answers} == {200}
    assert model.batches == [1, 16, 16, 8]
    assert stats["avg_batch_size"] == 41 / 4
    assert (stats["largest_batch"], stats["batches_by_queue"], stats["generated_tokens"]) == (16, {"short": 4}, 164)


async def test_whoever_comes_within_the_gathering_time_shares_the_batch() -> None:
    sizes: list[int] = []

    async def run(items: Sequence[int]) -> list[int]:
        sizes.append(len(items))
        return [item * 10 for item in items]

    batcher = Batcher[int, int](run, lambda _: "all", gather_s=0.5, batch=3)
    async with working(batcher):
        answers = await asyncio.gather(*(batcher.ask(item) for item in range(4)))
    assert answers == [0, 10, 20, 30]
    assert sizes == [3, 1]  # a full one doesn't wait, a single one is not left behind


async def test_short_and_long_prompts_never_share_a_batch_and_the_oldest_goes_first() -> None:
    model = Words()
    model.go.clear()
    long = "words " + "w " * (hand_batching.LONG_PROMPT + 1)
    async with client(hand_batching.create_app(model)) as http:
        first = asyncio.create_task(http.post(CHAT, content="words one"))
        await until(lambda: model.batches, "a batch")
        rest = []
        for number, content in enumerate([long, long, "words one", long, "words one"]):
            rest.append(asyncio.create_task(http.post(CHAT, content=content)))
            await until_waiting(http, number + 1)
        model.go.set()
        await asyncio.gather(first, *rest)
        stats = (await http.get("/stats")).json()
    assert model.batches == [1, 3, 2]
    assert stats["batches_by_queue"] == {"short": 2, "long": 1}


async def test_a_full_queue_is_503_at_once_and_a_request_that_waited_too_long_is_504_and_never_computed() -> None:
    model = Words()
    model.go.clear()
    async with client(hand_batching.create_app(model, limit=3, wait_s=0.3)) as http:
        first = asyncio.create_task(http.post(CHAT, content="words one"))
        await until(lambda: model.batches, "a batch")
        waiting = [asyncio.create_task(http.post(CHAT, content="words one")) for _ in range(3)]
        await until_waiting(http, 3)
        refused = await http.post(CHAT, content="words one")
        assert not any(call.done() for call in waiting)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "503")
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [504, 504, 504]
        model.go.set()
        assert (await first).status_code == 504
        assert (await http.post(CHAT, content="words one")).status_code == 200
        stats = (await http.get("/stats")).json()
    assert model.batches == [1, 1]
    assert (stats["refused"], stats["timed_out"], stats["waiting"]) == (1, 4, 0)


async def test_its_bounds_are_those_of_the_classic_design() -> None:
    batcher = Batcher[int, int](lambda _: asyncio.sleep(0, []), lambda _: "all")
    assert (batcher._batch, batcher._gather_s, batcher._limit, batcher._wait_s) == (16, 0.05, 200, 30)


async def test_a_batch_that_fails_tells_its_requests_and_the_next_one_runs() -> None:
    fails = True

    async def run(items: Sequence[int]) -> list[int]:
        if fails:
            raise RuntimeError("out of memory")
        return list(items)

    batcher = Batcher[int, int](run, lambda _: "all", gather_s=0.01)
    async with working(batcher):
        with pytest.raises(RuntimeError, match="out of memory"):
            await batcher.ask(1)
        fails = False
        assert await batcher.ask(2) == 2


async def test_a_queue_with_a_limit_counts_only_those_who_still_wait() -> None:
    batcher = Batcher[int, int](lambda items: asyncio.sleep(0, list(items)), lambda _: "all", limit=1)
    gone = asyncio.create_task(batcher.ask(1))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await batcher.ask(2)
    gone.cancel()
    with suppress(asyncio.CancelledError):
        await gone
    async with working(batcher):
        assert await batcher.ask(3) == 3
    assert batcher.statistics.batched == 1


@pytest.mark.parametrize("create_app", [one_at_a_time.create_app, hand_batching.create_app])
async def test_what_is_no_chat_request_is_400(create_app: type) -> None:
    async with client(create_app(Words())) as http:
        assert (await http.post(CHAT, content="{}")).status_code == 400
        assert (await http.get("/health")).status_code == 200


@asynccontextmanager
async def working(batcher: Batcher[int, int]) -> AsyncIterator[None]:
    worker = asyncio.create_task(batcher.work())
    try:
        yield
    finally:
        worker.cancel()
        with suppress(asyncio.CancelledError):
            await worker
