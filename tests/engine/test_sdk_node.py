"""OpenAI's Node SDK in front of a real engine. What it does is in `tests/node/engine.mjs`."""

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.engine.clients import BUSY_S, ENDLESS, LASTING_MS, TOOL, held
from tests.engine.conftest import Start
from tests.engine.real import CONTEXT, MODEL
from tests.harness import ROOT, Gateway

SCRIPT = ROOT / "tests" / "node" / "engine.mjs"
ANSWERS = "chat stream completions tool schema models responses unknown_model prompt_too_long no_embedder".split()


class Node:
    """A run of the script."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def sees_a_status(self) -> str:
        """The next status that the SDK got."""
        assert self._process.stderr is not None
        return (await asyncio.wait_for(self._process.stderr.readline(), BUSY_S)).decode().strip()

    async def result(self) -> dict[str, Any]:
        """What all scenarios saw."""
        out, err = await asyncio.wait_for(self._process.communicate(), BUSY_S)
        assert self._process.returncode == 0, err.decode()
        seen: dict[str, Any] = json.loads(out)
        return seen


@contextlib.asynccontextmanager
async def node(gate: Gateway, letters: list[int], *scenarios: str, **more: int) -> AsyncIterator[Node]:
    """Run scenarios, one after another."""
    if not (SCRIPT.parent / "node_modules" / "openai").exists() or not shutil.which("node"):
        if os.environ.get("CI"):
            pytest.fail("Node or its packages are missing: run `npm ci` in tests/node")
        pytest.skip("needs Node and `npm ci` in tests/node")
    options = {"model": MODEL, "letters": letters, "tool": TOOL, "endless": ENDLESS, "context": CONTEXT, **more}
    process = await asyncio.create_subprocess_exec(
        *("node", str(SCRIPT), ",".join(scenarios), f"{gate.base_url}/v1", json.dumps(options)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Node(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def run(gate: Gateway, letters: list[int], scenario: str, **more: int) -> Any:
    """What one scenario saw."""
    async with node(gate, letters, scenario, **more) as script:
        return (await script.result())[scenario]


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    """What the scenarios without trouble saw: one process runs them all."""
    return {}


@pytest.fixture
async def seen(gateway: Start, letters: list[int], kept: dict[str, Any]) -> dict[str, Any]:
    if not kept:
        async with node(gateway(), letters, *ANSWERS) as script:
            kept |= await script.result()
    return kept


def test_chat(seen: dict[str, Any]) -> None:
    assert seen["chat"]["text"]
    assert seen["chat"]["usage"]["completion_tokens"] == 8
    assert seen["chat"]["id"]


def test_chat_stream_with_usage(seen: dict[str, Any]) -> None:
    assert seen["stream"]["text"]
    assert [usage["completion_tokens"] for usage in seen["stream"]["usage"]] == [8]


def test_completions(seen: dict[str, Any]) -> None:
    assert seen["completions"] == {"choices": 2, "end": "length"}


def test_a_streamed_tool_call(seen: dict[str, Any]) -> None:
    assert seen["tool"]["names"] == ["get_weather"]
    is_weather(seen["tool"]["arguments"])


def test_an_answer_that_follows_a_json_schema(seen: dict[str, Any]) -> None:
    is_weather(seen["schema"])


def is_weather(value: Any) -> None:
    assert value.keys() == {"city", "unit"}
    assert value["city"] in ("Paris", "Rome")
    assert value["unit"] in ("C", "F")


def test_models(seen: dict[str, Any]) -> None:
    assert seen["models"] == [MODEL]


def test_responses(seen: dict[str, Any]) -> None:
    assert seen["responses"]["text"]
    assert seen["responses"]["first"] == "response.created"
    assert seen["responses"]["last"] in ("response.completed", "response.incomplete")
    assert seen["responses"]["deltas"] >= 1


@pytest.mark.parametrize(
    ("scenario", "kind", "text"),
    [
        ("unknown_model", "NotFoundError", "nobody"),
        ("prompt_too_long", "BadRequestError", "maximum context length is 8192"),
        ("no_embedder", "NotFoundError", ""),
    ],
)
def test_the_sdk_names_what_is_wrong(seen: dict[str, Any], scenario: str, kind: str, text: str) -> None:
    assert seen[scenario]["kind"] == kind
    assert text in seen[scenario]["message"]
    assert seen[scenario]["attempts"] == 1


async def test_a_504_is_sent_once(gateway: Start, letters: list[int]) -> None:
    gate = gateway()
    before = gate.metrics()
    asked = gate.stats()["total_requests"]
    seen = await run(gate, letters, "deadline")
    assert (seen["kind"], seen["status"], seen["code"]) == ("InternalServerError", 504, "deadline_exceeded")
    assert seen["attempts"] == 1
    assert gate.stats()["total_requests"] - asked == 1
    aborts = gate.metrics().total("tidegate_engine_aborts_total") - before.total("tidegate_engine_aborts_total")
    assert aborts == 1, "the engine saw another number of requests"


async def test_a_stream_that_runs_out_of_time_raises(gateway: Start, letters: list[int]) -> None:
    for deadline_ms in LASTING_MS:
        seen = await run(gateway(), letters, "late", late_ms=deadline_ms)
        assert seen["code"] == "deadline_exceeded"
        if seen["chunks"]:
            break
    else:
        pytest.fail("no token came")
    assert seen["kind"] == "APIError"
    assert seen["attempts"] == 1


async def test_a_503_is_repeated_after_the_told_time_and_succeeds_when_there_is_room(
    gateway: Start, letters: list[int]
) -> None:
    gate = gateway(max_in_flight=1, max_queue=0)
    async with held(gate, 1) as wires, node(gate, letters, "retry") as script:
        assert await script.sees_a_status() == "status 503"
        await wires[0].close()
        seen = (await script.result())["retry"]
    assert seen["text"]
    first, second = seen["attempts"]
    assert (first["status"], second["status"]) == (503, 200)
    assert 1000 <= first["told"] <= second["asked"] - first["answered"] + 1
