"""OpenAI's Python SDK in front of a real engine: everything it can ask for, and everything that can go wrong."""

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.engine.clients import ENDLESS, LASTING_MS, QUESTION, TOOL, Attempts, held, raw, read, sdk, words
from tests.engine.conftest import Start
from tests.engine.real import CONTEXT, MODEL, Vllm
from tests.harness import COMPLETIONS, RESPONSES, refused, until
from tests.wire import CHAT, data_of, events_of

EXACTLY: Any = {"ignore_eos": True}  # as many tokens as asked for, whatever the random model says


class Weather(BaseModel):
    """What a client wants an answer to look like."""

    city: Literal["Paris", "Rome"]
    unit: Literal["C", "F"]


async def test_chat(gateway: Start) -> None:
    async with sdk(gateway()) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=8, extra_body=EXACTLY)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer._request_id


async def test_chat_stream_with_usage(gateway: Start) -> None:
    async with sdk(gateway()) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=EXACTLY,
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [8]
    assert not chunks[-1].choices


async def test_completions(gateway: Start) -> None:
    async with sdk(gateway()) as client:
        answer = await client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=4, n=2, extra_body=EXACTLY)
        stream = await client.completions.create(
            model=MODEL, prompt=[100, 101, 102], max_tokens=4, stream=True, extra_body=EXACTLY
        )
        chunks = [chunk async for chunk in stream]
    assert len(answer.choices) == 4
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
async def test_a_raw_stream_ends_with_done(gateway: Start, route: str) -> None:
    body = words(4, stream=True) if route == COMPLETIONS else {"model": MODEL, "messages": QUESTION, "max_tokens": 4}
    async with raw(gateway()) as client:
        answer = await client.post(route, json={**body, "stream": True})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.content.endswith(b"data: [DONE]\n\n")
    events = events_of(answer.content)
    assert len(events) >= 3
    assert all(data_of(event)["choices"] for event in events[:-1])


@pytest.mark.parametrize("choice", ["required", "named"])
async def test_a_streamed_tool_call(gateway: Start, letters: list[int], choice: str) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    async with sdk(gateway()) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            max_tokens=1000,
            tools=[TOOL],
            tool_choice=named if choice == "named" else "required",
            stream=True,
            seed=1,
            extra_body={"allowed_token_ids": letters},
        )
        chunks = [chunk async for chunk in stream]
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert {call.index for call in calls} == {0}
    assert [call.function.name for call in calls if call.function and call.function.name] == ["get_weather"]
    Weather.model_validate_json("".join((call.function and call.function.arguments) or "" for call in calls))


async def test_a_plain_tool_call(gateway: Start, letters: list[int]) -> None:
    async with sdk(gateway()) as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            max_tokens=1000,
            tools=[TOOL],
            tool_choice="required",
            seed=1,
            extra_body={"allowed_token_ids": letters},
        )
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    Weather.model_validate_json(call.function.arguments)


async def test_an_answer_that_follows_a_json_schema(gateway: Start, letters: list[int]) -> None:
    async with sdk(gateway()) as client:
        answer = await client.chat.completions.parse(
            model=MODEL,
            messages=QUESTION,
            max_tokens=1000,
            response_format=Weather,
            seed=1,
            extra_body={"allowed_token_ids": letters},
        )
    assert isinstance(answer.choices[0].message.parsed, Weather)


async def test_models(gateway: Start) -> None:
    async with sdk(gateway()) as client:
        models = [model async for model in client.models.list()]
    assert [model.id for model in models] == [MODEL]
    assert models[0].model_extra is not None
    assert models[0].model_extra["max_model_len"] == CONTEXT


async def test_responses(gateway: Start) -> None:
    async with sdk(gateway()) as client:
        answer = await client.responses.create(model=MODEL, input="hi", max_output_tokens=8)
        assert answer.output_text
        assert answer.status in ("completed", "incomplete")
        stream = await client.responses.create(model=MODEL, input="hi", max_output_tokens=8, stream=True)
        events: list[Any] = [event async for event in stream]
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].response.output_text == text


@pytest.mark.parametrize(
    ("route", "status", "body"),
    [
        (CHAT, 404, {"model": "nobody", "messages": QUESTION}),
        (RESPONSES, 404, {"model": "nobody", "input": "hi"}),
        (COMPLETIONS, 400, {"model": MODEL, "prompt": [100] * (CONTEXT + 1)}),
        (CHAT, 400, {"model": MODEL, "messages": "not a list"}),
        ("/v1/embeddings", 404, {"model": MODEL, "input": "hi"}),
    ],
    ids=["unknown model", "unknown model in responses", "prompt too long", "odd messages", "not an embedder"],
)
async def test_the_engines_own_refusal_arrives_word_for_word(
    gateway: Start, vllm: Vllm, route: str, status: int, body: dict[str, Any]
) -> None:
    data = json.dumps(body).encode()
    async with raw(gateway()) as client:
        seen = await client.post(route, content=data, headers={"content-type": "application/json"})
    own = vllm.ask("POST", route, data)
    assert (seen.status_code, seen.content) == (own.status_code, own.body)
    assert seen.status_code == status
    assert "x-tidegate-reason" not in seen.headers


async def test_the_sdk_names_what_is_wrong(gateway: Start) -> None:
    async with sdk(gateway()) as client:
        with pytest.raises(openai.NotFoundError, match="nobody"):
            await client.chat.completions.create(model="nobody", messages=QUESTION)
        with pytest.raises(openai.BadRequestError, match="maximum context length is 8192"):
            await client.completions.create(model=MODEL, prompt=[100] * (CONTEXT + 1))
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model=MODEL, input="hi")


async def test_a_body_that_is_no_json_is_refused(gateway: Start) -> None:
    async with raw(gateway()) as client:
        answer = await client.post(CHAT, content=b'{"model": ', headers={"content-type": "application/json"})
    assert "JSON" in refused(answer, "invalid_request")


async def test_a_504_is_sent_once(gateway: Start) -> None:
    gate = gateway()
    before, asked = gate.metrics(), gate.stats()["total_requests"]
    attempts = Attempts(openai.DefaultAsyncHttpxClient)
    async with sdk(gate, max_retries=2, http_client=attempts.client) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(**words_of_sdk(), extra_headers={"x-request-timeout-ms": "500"})
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    assert attempts.statuses == [504]
    assert gate.stats()["total_requests"] - asked == 1
    aborts = gate.metrics().total("tidegate_engine_aborts_total") - before.total("tidegate_engine_aborts_total")
    assert aborts == 1, "the engine saw another number of requests"


async def test_a_stream_that_runs_out_of_time_raises(gateway: Start) -> None:
    seen: list[Any] = []
    async with sdk(gateway()) as client:
        for deadline_ms in LASTING_MS:
            headers = {"x-request-timeout-ms": str(deadline_ms)}
            with pytest.raises(openai.APIError) as caught:
                await read(await client.completions.create(**words_of_sdk(), stream=True, extra_headers=headers), seen)
            assert caught.value.code == "deadline_exceeded"
            if seen:
                break
        else:
            pytest.fail("no token came")
    assert not isinstance(caught.value, openai.APIStatusError)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_a_503_is_repeated_after_the_told_time_and_succeeds_when_there_is_room(
    gateway: Start, stream: bool
) -> None:
    gate = gateway(max_in_flight=1, max_queue=0)
    attempts = Attempts(openai.DefaultAsyncHttpxClient)
    async with sdk(gate, max_retries=2, http_client=attempts.client) as client:
        async with held(gate, 1):
            call = asyncio.create_task(client.completions.create(model=MODEL, prompt="hi", max_tokens=4, stream=stream))
            await until(lambda: attempts.statuses, "a first refusal")
        answer: Any = await call
        assert [chunk async for chunk in answer] if stream else answer.choices[0].text
    assert attempts.statuses == [503, 200]
    ((told, taken),) = attempts.waits
    assert 1 <= told <= taken


def words_of_sdk() -> Any:
    """An endless completion as the SDK takes it."""
    return {"model": MODEL, "prompt": "hello", "max_tokens": ENDLESS, "extra_body": EXACTLY}
