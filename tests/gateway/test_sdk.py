"""What users of the real SDKs see: answers, errors they can act on, and no attempt that costs the engine twice."""

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.gateway.conftest import Pair, Start
from tests.harness import ROOT, occupied, until

pytestmark = pytest.mark.slow

USER: Any = [{"role": "user", "content": "hello"}]
NODE_PACKAGES = ROOT / "tests" / "node" / "node_modules"
ENDLESS = {"events": 2000, "gap_ms": 20, "tag": "s"}


def sdk(gate: Pair, **options: Any) -> openai.AsyncOpenAI:
    """OpenAI's client with its own defaults for retries and time."""
    return openai.AsyncOpenAI(base_url=f"{gate.base_url}/v1", api_key="unused", **options)


def claude(gate: Pair, **options: Any) -> anthropic.AsyncAnthropic:
    """Anthropic's client, likewise."""
    return anthropic.AsyncAnthropic(base_url=gate.base_url, api_key="unused", **options)


async def ask(client: openai.AsyncOpenAI, script: dict[str, Any] | None = None, **more: Any) -> Any:
    """A chat call."""
    body = {"fake": {"tag": "s"} | (script or {})}
    return await client.chat.completions.create(model="m", messages=USER, max_tokens=4, extra_body=body, **more)


async def tell(client: anthropic.AsyncAnthropic, script: dict[str, Any] | None = None, **more: Any) -> Any:
    """A call of Anthropic's messages route."""
    body = {"fake": {"tag": "s"} | (script or {})}
    return await client.messages.create(model="m", messages=USER, max_tokens=4, extra_body=body, **more)


async def read(stream: Any, seen: list[Any]) -> None:
    """Collect a stream's pieces in `seen`, also when it raises."""
    async for piece in stream:
        seen.append(piece)  # noqa: PERF401 - what came before an exception counts


async def test_openai_answers(gateway: Start) -> None:
    async with sdk(gateway()) as client:
        answer = await ask(client)
        assert answer.choices[0].message.content == " sw0 sw1 sw2 sw3"
        assert answer.usage.completion_tokens == 4
        pieces = [chunk async for chunk in await ask(client, stream=True, stream_options={"include_usage": True})]
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == " sw0 sw1 sw2 sw3"
        assert pieces[-1].usage.completion_tokens == 4
        completion = await client.completions.create(model="m", prompt="hi", max_tokens=2)
        assert completion.choices[0].text == " w0 w1"
        assert [model.id async for model in client.models.list()] == ["fake-model"]
        embedding = await client.embeddings.create(model="m", input=["a", "b"], encoding_format="float")
        assert len(embedding.data) == 2
        text = await client.audio.transcriptions.create(model="m", file=("a.wav", b"x" * 1000))
        assert text.text


async def test_openai_responses(gateway: Start) -> None:
    async with sdk(gateway()) as client:
        answer = await client.responses.create(model="m", input="hi", max_output_tokens=3)
        assert answer.output_text == " w0 w1 w2"
        stream = await client.responses.create(model="m", input="hi", max_output_tokens=3, stream=True)
        kinds = [event.type async for event in stream]
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


async def test_openai_ignores_keepalives(gateway: Start) -> None:
    async with sdk(gateway(keepalive_s=0.1)) as client:
        pieces = [
            chunk async for chunk in await ask(client, {"first_ms": 500, "gap_ms": 300, "events": 2}, stream=True)
        ]
        assert len(pieces) == 4


async def test_openai_sends_a_504_once(gateway: Start) -> None:
    gate = gateway()
    before = gate.stats()["total_requests"]
    async with sdk(gate, max_retries=2) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(client, {"first_ms": 60_000}, extra_headers={"x-request-timeout-ms": "300"})
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    assert caught.value.request_id
    assert gate.stats()["total_requests"] - before == 1


@pytest.mark.parametrize("script", [{"fault": "close"}, {"status": 500, "body": {"error": {"message": "x"}}}], ids=str)
async def test_openai_sends_what_has_cost_the_engine_once(gateway: Start, script: dict[str, Any]) -> None:
    gate = gateway()
    async with sdk(gate, max_retries=2) as client:
        with pytest.raises(openai.InternalServerError):
            await ask(client, script)
    assert len(gate.engine.entries("s")) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_openai_retries_a_503_and_succeeds_when_room_appears(gateway: Start, stream: bool) -> None:
    gate = gateway(max_in_flight=1, max_queue=0)
    async with sdk(gate, max_retries=2) as client:
        async with occupied(gate):
            refusals = gate.metrics().total("tidegate_refusals_total")
            call = asyncio.create_task(ask(client, stream=stream))
            await until(lambda: gate.metrics().total("tidegate_refusals_total") > refusals)
        answer = await call
        if stream:
            assert [chunk async for chunk in answer]
    headers = {name.lower(): value for name, value in gate.engine.entry("s")["headers"]}
    assert headers["x-stainless-retry-count"] in ("1", "2")


async def test_openais_attempts_are_bounded_and_wait_as_told(gateway: Start) -> None:
    gate = gateway(max_in_flight=1, max_queue=0)
    async with occupied(gate), sdk(gate) as client:
        before = gate.stats()["total_requests"]
        begun = asyncio.get_running_loop().time()
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(client)
        assert asyncio.get_running_loop().time() - begun >= 2, "two waits of a second at least"
        assert caught.value.code == "server_is_overloaded"
        assert gate.stats()["total_requests"] - before == 3


@pytest.mark.parametrize(("kind", "code"), [("deadline", "deadline_exceeded"), ("engine", "engine_error")])
async def test_openai_raises_when_a_stream_breaks(gateway: Start, kind: str, code: str) -> None:
    script = ENDLESS if kind == "deadline" else {"events": 10, "fault": "close", "at": 3, "gap_ms": 20}
    seen: list[Any] = []
    async with sdk(gateway()) as client:
        stream = await ask(client, script, stream=True, extra_headers={"x-request-timeout-ms": "1500"})
        with pytest.raises(openai.APIError) as caught:
            await read(stream, seen)
    assert len(seen) >= 3
    assert caught.value.code == code


@pytest.mark.parametrize("at", [1, 3])
async def test_openai_raises_when_a_stream_breaks_inside_an_event(gateway: Start, at: int) -> None:
    """The connection is broken off, which can't be taken for a success."""
    import httpx

    async with sdk(gateway()) as client:
        stream = await ask(client, {"events": 10, "fault": "close", "at": at, "half": True, "gap_ms": 20}, stream=True)
        with pytest.raises((openai.APIConnectionError, httpx.RemoteProtocolError)):
            await read(stream, [])


async def test_openai_sees_a_late_refusal_of_the_engine_as_a_status(gateway: Start) -> None:
    async with sdk(gateway(), max_retries=0) as client:
        with pytest.raises(openai.RateLimitError):
            await ask(client, {"error": {"message": "busy", "type": "x", "code": 429}}, stream=True)


async def test_openai_reads_the_engines_own_error(gateway: Start) -> None:
    body = {
        "error": {"message": "maximum context length is 4096", "type": "BadRequestError", "param": None, "code": 400}
    }
    async with sdk(gateway()) as client:
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await ask(client, {"status": 400, "body": body})


async def test_openai_reads_ours(gateway: Start) -> None:
    gate = gateway(api_keys="a:secret-a,b:secret-b")
    async with sdk(gate) as client:
        with pytest.raises(openai.AuthenticationError):
            await ask(client)
    async with openai.AsyncOpenAI(base_url=f"{gate.base_url}/v1/v1", api_key="secret-a") as client:
        with pytest.raises(openai.NotFoundError, match="/v1"):
            await ask(client)


async def test_anthropic_answers(gateway: Start) -> None:
    async with claude(gateway()) as client:
        answer = await tell(client)
        assert answer.content[0].text == " sw0 sw1 sw2 sw3"
        pieces = [
            event.delta.text async for event in await tell(client, stream=True) if event.type == "content_block_delta"
        ]
        assert "".join(pieces) == " sw0 sw1 sw2 sw3"
        assert (await client.messages.count_tokens(model="m", messages=USER)).input_tokens >= 1


async def test_anthropic_sends_a_504_once(gateway: Start) -> None:
    gate = gateway()
    async with claude(gate, max_retries=2) as client:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await tell(client, {"first_ms": 60_000}, extra_headers={"x-request-timeout-ms": "300"})
    assert caught.value.status_code == 504
    assert caught.value.body["type"] == "error"  # type: ignore[index]
    assert len(gate.engine.entries("s")) == 1


async def test_anthropic_retries_a_503(gateway: Start) -> None:
    gate = gateway(max_in_flight=1, max_queue=0)
    async with claude(gate, max_retries=2) as client:
        async with occupied(gate):
            refusals = gate.metrics().total("tidegate_refusals_total")
            call = asyncio.create_task(tell(client))
            await until(lambda: gate.metrics().total("tidegate_refusals_total") > refusals)
        assert (await call).content


async def test_anthropic_raises_when_a_stream_runs_out_of_time(gateway: Start) -> None:
    async with claude(gateway()) as client:
        stream = await tell(client, ENDLESS, stream=True, extra_headers={"x-request-timeout-ms": "1500"})
        with pytest.raises(anthropic.APIStatusError, match="deadline_exceeded"):
            await read(stream, [])


async def node(gate: Pair, scenario: str) -> dict[str, Any]:
    """Run a scenario of `tests/node/openai.mjs` with OpenAI's Node SDK; what it saw."""
    if not (NODE_PACKAGES / "openai").exists() or not shutil.which("node"):
        if os.environ.get("CI"):
            pytest.fail("Node or its packages are missing: run `npm ci` in tests/node")
        pytest.skip("needs Node and `npm ci` in tests/node")
    process = await asyncio.create_subprocess_exec(
        "node",
        str(Path("tests", "node", "openai.mjs")),
        scenario,
        f"{gate.base_url}/v1",
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 50)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()
    seen: dict[str, Any] = json.loads(out)
    return seen


async def test_node_answers(gateway: Start) -> None:
    seen = await node(gateway(), "answers")
    assert seen == {
        "plain": " nw0 nw1 nw2 nw3",
        "stream": " nw0 nw1 nw2 nw3",
        "models": ["fake-model"],
        "response": " nw0 nw1",
    }


async def test_node_sends_a_504_once(gateway: Start) -> None:
    gate = gateway()
    seen = await node(gate, "deadline")
    assert (seen["status"], seen["code"]) == (504, "deadline_exceeded")
    assert len(gate.engine.entries("n")) == 1


async def test_node_retries_a_503(gateway: Start) -> None:
    gate = gateway(max_in_flight=1, max_queue=0)
    async with occupied(gate):
        refusals = gate.metrics().total("tidegate_refusals_total")
        call = asyncio.create_task(node(gate, "retry"))
        await until(lambda: call.done() or gate.metrics().total("tidegate_refusals_total") > refusals)
    assert (await call)["plain"] == " nw0 nw1 nw2 nw3"


async def test_node_raises_when_a_stream_runs_out_of_time(gateway: Start) -> None:
    seen = await node(gateway(), "late")
    assert seen["code"] == "deadline_exceeded"
    assert seen["pieces"] >= 1
