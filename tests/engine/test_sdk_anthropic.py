"""Anthropic's SDK on `/v1/messages`, as Claude Code uses it, in front of a real engine."""

import asyncio
from typing import Any

import anthropic
import pytest

from tests.engine.clients import ENDLESS, LASTING_MS, Attempts, claude, held, read
from tests.engine.conftest import Start
from tests.engine.real import CONTEXT, MODEL
from tests.harness import until

ASKED: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


async def test_messages(gateway: Start) -> None:
    async with claude(gateway()) as client:
        answer = await client.messages.create(**ASKED, max_tokens=8)
    assert answer.role == "assistant"
    assert answer.content[0].type == "text"
    assert answer.content[0].text
    assert 1 <= answer.usage.output_tokens <= 8


async def test_messages_stream(gateway: Start) -> None:
    async with claude(gateway()) as client, client.messages.stream(**ASKED, max_tokens=8) as stream:
        kinds = [event.type async for event in stream]
        answer = await stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert answer.content[0].type == "text"
    assert answer.content[0].text
    assert answer.stop_reason in ("max_tokens", "end_turn")


@pytest.mark.parametrize("beta", [False, True], ids=["plain", "beta"])
async def test_tokens_are_counted_without_a_slot(gateway: Start, beta: bool) -> None:
    """Claude Code asks with `?beta=true`."""
    gate = gateway(max_in_flight=1, max_queue=0)
    async with claude(gate) as client, held(gate, 1):
        counter: Any = client.beta.messages if beta else client.messages
        count = await counter.count_tokens(**ASKED)
    assert count.input_tokens > 1


async def test_errors_have_the_form_that_the_sdk_reads(gateway: Start) -> None:
    async with claude(gateway()) as client:
        with pytest.raises(anthropic.NotFoundError, match="nobody"):
            await client.messages.create(**{**ASKED, "model": "nobody"}, max_tokens=8)
        long = [{"role": "user", "content": "word " * (CONTEXT + 1)}]
        with pytest.raises(anthropic.BadRequestError, match="context"):
            await client.messages.create(**{**ASKED, "messages": long}, max_tokens=8)


async def test_a_504_is_sent_once(gateway: Start) -> None:
    attempts = Attempts(anthropic.DefaultAsyncHttpxClient)
    async with claude(gateway(), max_retries=2, http_client=attempts.client) as client:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await endless(client, {"x-request-timeout-ms": "500"})
    assert caught.value.status_code == 504
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["code"] == "deadline_exceeded"
    assert attempts.statuses == [504]


async def test_a_stream_that_runs_out_of_time_raises(gateway: Start) -> None:
    seen: list[Any] = []
    async with claude(gateway()) as client:
        for deadline_ms in LASTING_MS:
            with pytest.raises(anthropic.APIStatusError, match="deadline_exceeded"):
                await read(await endless(client, {"x-request-timeout-ms": str(deadline_ms)}, stream=True), seen)
            kinds = [event.type for event in seen]
            if "content_block_delta" in kinds:
                break
        else:
            pytest.fail("no token came")
    assert "message_stop" not in kinds


async def test_a_503_is_repeated_after_the_told_time_and_succeeds_when_there_is_room(gateway: Start) -> None:
    gate = gateway(max_in_flight=1, max_queue=0)
    attempts = Attempts(anthropic.DefaultAsyncHttpxClient)
    async with claude(gate, max_retries=2, http_client=attempts.client) as client:
        async with held(gate, 1):
            call = asyncio.create_task(client.messages.create(**ASKED, max_tokens=4))
            await until(lambda: attempts.statuses, "a first refusal")
        assert (await call).content
    assert attempts.statuses == [503, 200]
    ((told, taken),) = attempts.waits
    assert 1 <= told <= taken


async def endless(client: anthropic.AsyncAnthropic, headers: dict[str, str], *, stream: bool = False) -> Any:
    """An answer that takes long."""
    # The route knows no way to ignore the model's own end, but one may ask for what can't be said.
    more: Any = {"stream": stream, "extra_headers": headers, "extra_body": {"ignore_eos": True}, "timeout": 60}
    return await client.messages.create(**ASKED, max_tokens=ENDLESS, **more)
