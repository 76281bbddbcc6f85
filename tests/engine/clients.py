"""The clients' side of tests on a real engine: SDKs, bodies, streams that hold slots, a look at the load."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any, Self

import anthropic
import httpx
import openai

from tests.engine.real import LOAD, MODEL, load
from tests.harness import COMPLETIONS, Gateway, Metrics, until
from tests.wire import Json, Wire

ENDLESS = 8000  # tokens: minutes of work beside others, and more than any test waits for
LASTING_MS = (1500, 6000, 15_000)  # deadlines of a stream; on a busy machine the first may pass before a token comes
BUSY_S = 120.0  # patience where an engine computes; on a busy machine it is slow
QUESTION: Any = [{"role": "user", "content": "What is the weather like?"}]
WEATHER: Json = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": WEATHER}}


def sdk(gate: Gateway, **options: Any) -> openai.AsyncOpenAI:
    """OpenAI's client with its own defaults for retries and time."""
    return openai.AsyncOpenAI(base_url=f"{gate.base_url}/v1", api_key="unused", **options)


def claude(gate: Gateway, **options: Any) -> anthropic.AsyncAnthropic:
    """Anthropic's client, likewise."""
    return anthropic.AsyncAnthropic(base_url=gate.base_url, api_key="unused", **options)


def raw(gate: Gateway) -> httpx.AsyncClient:
    """A client without an SDK, with patience for a busy machine."""
    return gate.client(timeout=BUSY_S)


def words(count: int, prompt: Any = "hello", **more: Any) -> Json:
    """A body for the completions route whose answer has exactly `count` tokens."""
    return {"model": MODEL, "prompt": prompt, "max_tokens": count, "ignore_eos": True, **more}


@contextlib.asynccontextmanager
async def held(gate: Gateway, slots: int) -> AsyncIterator[list[Wire]]:
    """Endless streams that the engine has begun to answer; they leave with the block, or earlier one by one."""
    async with contextlib.AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(await gate.wire()) for _ in range(slots)]
        for wire in wires:
            await wire.request(COMPLETIONS, words(ENDLESS, stream=True))
        for wire in wires:
            assert (await wire.read_head(BUSY_S))[0] == 200
        yield wires


class Watch:
    """Follows the engine's load through the gateway's `/metrics`, several times in every 100 ms."""

    def __init__(self, gate: Gateway) -> None:
        self._gate = gate
        self._tasks: list[asyncio.Task[None]] = []
        self.seen: list[tuple[float, int, int]] = []  # time, running, waiting
        self.stood_still_s = 0.0  # how long this process itself got no turn: what the machine adds to any time

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._beat())]
        await until(lambda: self.seen, "a first look at the load", within=BUSY_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _beat(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            self.stood_still_s = max(self.stood_still_s, time.monotonic() - before - 0.01)

    async def _follow(self) -> None:
        async with raw(self._gate) as client:
            while True:
                seen = Metrics((await client.get("/metrics")).text)
                if LOAD[0] in seen.names:  # else the engine was too busy to say
                    self.seen.append((time.monotonic(), *load(seen)))
                await asyncio.sleep(0.01)

    @property
    def now(self) -> tuple[int, int]:
        """What runs and what waits."""
        _, running, waiting = self.seen[-1]
        return running, waiting

    async def reaches(self, holds: Callable[[int, int], bool], what: str) -> float:
        """Wait until the load is such; the time of the look that showed it."""
        await until(lambda: holds(*self.now), what, within=BUSY_S)
        return self.seen[-1][0]

    async def back_to(self, load: tuple[int, int], *, since: float = 0.0) -> float:
        """Wait until the load is this again; of the looks after `since` and before it, the time of the first."""
        return await self.reaches(
            lambda running, waiting: (running, waiting) == load and self.seen[-1][0] > since, f"a load of {load}"
        )


async def read(stream: AsyncIterable[Any], seen: list[Any]) -> None:
    """Collect a stream's pieces in `seen`, also when it raises."""
    async for piece in stream:
        seen.append(piece)  # noqa: PERF401  one at a time, so that those before an error are kept


class Attempts:
    """An HTTP client for an SDK that notes when each attempt was answered, how, and what wait it was told."""

    def __init__(self, client: Callable[..., Any]) -> None:
        self.statuses: list[int] = []
        self.waits: list[tuple[float, float]] = []  # told and taken, seconds, between one attempt and the next
        self._told: tuple[float, float] | None = None
        self.client = client(event_hooks={"request": [self._ask], "response": [self._answer]})

    async def _ask(self, _: Any) -> None:
        if self._told is not None:
            at, told = self._told
            self.waits.append((told, time.monotonic() - at))

    async def _answer(self, response: Any) -> None:
        self.statuses.append(response.status_code)
        told = response.headers.get("retry-after-ms")
        self._told = None if told is None else (time.monotonic(), int(told) / 1000)
