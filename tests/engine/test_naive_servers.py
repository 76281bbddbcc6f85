"""The naive servers on the embedded model: real answers, and a batch that says what each request alone would."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from launcher import model
from loadtest.baselines.generator import Generator
from loadtest.client import Address
from loadtest.naive_arms import NaiveServer, start
from tests.harness import free_port

QUESTIONS = ("What is the capital of France?", "Say hello.", "Name three colours, and say where you have seen each.")


def body(question: str, tokens: int, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": question}], "max_tokens": tokens, **more}


def test_a_batch_of_unlike_prompts_gives_each_the_answer_that_it_gets_alone() -> None:
    generator = Generator(model.prepare(print))
    asked = zip(QUESTIONS, (10, 3, 6), (False, False, True), strict=True)
    prompts = [generator.prompt(json.dumps(body(text, tokens, ignore_eos=on)).encode()) for text, tokens, on in asked]
    together = generator(prompts)
    assert together == [generator([prompt])[0] for prompt in prompts]
    assert "Paris" in together[0].text
    assert together[0].tokens <= 10
    assert together[1].tokens <= 3
    assert together[2].tokens == 6


async def stats_when(http: httpx.AsyncClient, **shown: int) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while True:
            stats: dict[str, Any] = (await http.get("/stats")).json()
            if shown.items() <= stats.items():
                return stats
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("name", "most", "counted"),
    [
        ("one_at_a_time", 1, {"total_requests": 3}),
        ("hand_batching", 2, {"batches": 2, "largest_batch": 2, "batches_by_queue": {"short": 2}}),
    ],
)
async def test_it_runs_alone_and_answers_whole_and_as_a_stream_what_waits_one_by_one_or_as_a_batch(
    name: str, most: int, counted: dict[str, object], tmp_path: Path
) -> None:
    address = Address(port=free_port())
    server = NaiveServer(start(name, model.prepare(print), address, tmp_path, tmp_path), address)
    try:
        await server.child.until(lambda: server.answers("/health"), "ready", 120)
        async with httpx.AsyncClient(base_url=address.url, timeout=60, trust_env=False) as http:

            def ask(question: str, tokens: int, **more: object) -> asyncio.Task[httpx.Response]:
                return asyncio.create_task(http.post("/v1/chat/completions", json=body(question, tokens, **more)))

            first = ask(QUESTIONS[2], 20, ignore_eos=True)  # the others come while it runs, and find each other
            seen = [await stats_when(http, running=1)]
            both = [ask(QUESTIONS[0], 12), ask(QUESTIONS[0], 12, stream=True)]
            seen.append(await stats_when(http, running=1, waiting=2))
            while not all(task.done() for task in both):
                seen.append((await http.get("/stats")).json())
                await asyncio.sleep(0.01)
            plain, stream = await asyncio.gather(*both)
            whole = (await first).json()["usage"]["completion_tokens"]
            last = (await http.get("/stats")).json()
        assert "Paris" in plain.json()["choices"][0]["message"]["content"]
        event, end, rest = stream.text.split("\n\n")
        assert "Paris" in json.loads(event.removeprefix("data: "))["choices"][0]["delta"]["content"]
        assert (end, rest) == ("data: [DONE]", "")
        work = await server.work()
        assert work is not None
        assert work.open == 0
        assert whole == 20
        assert work.tokens == whole + 2 * plain.json()["usage"]["completion_tokens"]
        assert max(stats["running"] for stats in seen) == most
        assert {name: last[name] for name in counted} == counted
    finally:
        await server.stop()
