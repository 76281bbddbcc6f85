"""When a response head goes out: failures before it are a status, failures after it an error in the stream."""

import asyncio
from typing import Any

import pytest

from tests.gateway.conftest import Start
from tests.harness import (
    COMPLETIONS,
    KEEPALIVE,
    MESSAGES,
    RESPONSES,
    Gateway,
    body_for,
    chat,
    occupied,
    queued,
    refused,
)
from tests.wire import CHAT, Answer, Wire, data_of, events_of

pytestmark = pytest.mark.slow

STREAMING = pytest.mark.parametrize("route", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
ENDLESS = {"fault": "stall", "at": 0}
SOON = {"x-request-timeout-ms": "500"}


async def stream(
    gate: Gateway, fake: dict[str, Any], route: str = CHAT, headers: dict[str, str] | None = None
) -> Answer:
    """A streamed call on the bare socket."""
    async with await gate.wire() as wire:
        await wire.request(route, body_for(route, fake=fake, stream=True), headers=headers)
        return await wire.answer()


async def silent(wire: Wire, seconds: float) -> bool:
    """Whether nothing comes for that long."""
    try:
        await asyncio.wait_for(wire.reader.readexactly(1), seconds)
    except TimeoutError:
        return True
    return False


async def test_nothing_is_sent_while_a_request_waits_in_the_gate(gateway: Start) -> None:
    gate = gateway(max_in_flight=1, keepalive_s=0.1)
    async with occupied(gate), await gate.wire() as wire:
        await wire.request(CHAT, chat(stream=True))
        await queued(gate, 1)
        assert await silent(wire, 0.5)
        gate.engine.cut(which="busy")
        assert (await wire.answer()).status_code == 200


async def test_nothing_is_sent_before_the_engines_own_head(gateway: Start) -> None:
    gate = gateway(keepalive_s=0.1)
    answer = await stream(gate, {"fault": "stall", "at": "head"}, headers=SOON)
    refused(answer, "deadline")


@STREAMING
async def test_head_waits_for_the_first_event(gateway: Start, route: str) -> None:
    refused(await stream(gateway(keepalive_s=0), ENDLESS, route, SOON), "deadline", anthropic=route == MESSAGES)


async def test_comments_are_no_first_event(gateway: Start) -> None:
    refused(await stream(gateway(keepalive_s=0), ENDLESS | {"comments": 3}, headers=SOON), "deadline")


@STREAMING
async def test_silence_is_filled_with_keepalives_once_the_engine_has_a_head(gateway: Start, route: str) -> None:
    gate = gateway(keepalive_s=0.1)
    script = {"first_ms": 600, "gap_ms": 600, "events": 2}
    answer = await stream(gate, script, route)
    assert answer.status_code == 200
    first, last = answer.body.find(b"w0"), answer.body.find(b"w1")
    assert KEEPALIVE in answer.body[:first]
    assert KEEPALIVE in answer.body[first:last]
    quiet = await stream(gateway(keepalive_s=0), script | {"first_ms": 0, "gap_ms": 0}, route)
    assert answer.body.replace(KEEPALIVE, b"") == quiet.body


async def test_keepalive_can_be_switched_off(gateway: Start) -> None:
    answer = await stream(gateway(keepalive_s=0), {"first_ms": 300, "gap_ms": 300, "events": 2})
    assert KEEPALIVE not in answer.body


@pytest.mark.parametrize("before", [{"comments": 1}, {"chunk_bytes": 7, "chunk_ms": 200}], ids=str)
async def test_the_first_keepalive_goes_out_with_the_head_whatever_is_held(
    gateway: Start, before: dict[str, Any]
) -> None:
    gate = gateway(keepalive_s=0.3)
    async with await gate.wire() as wire:
        await wire.request(CHAT, chat(stream=True, fake={"first_ms": 60_000, "gap_ms": 60_000} | before))
        _, headers = await wire.read_head()
        async for piece in wire.pieces(headers):
            assert piece.startswith(KEEPALIVE)
            break


async def test_no_keepalive_inside_an_event(gateway: Start) -> None:
    gate = gateway(keepalive_s=0.1)
    answer = await stream(gate, {"chunk_bytes": 40, "chunk_ms": 150, "events": 1, "first_ms": 0})
    plain = await stream(gate, {"events": 1})
    assert events_of(answer.body) == events_of(plain.body)


@pytest.mark.parametrize("streams", [True, False])
async def test_a_call_that_does_not_stream_is_never_kept_alive(gateway: Start, streams: bool) -> None:
    gate = gateway(keepalive_s=0.1)
    async with gate.client() as client:
        answer = await client.post(CHAT, json=chat(stream=streams, fake={"first_ms": 400}))
    assert (KEEPALIVE in answer.content) is streams
    assert ("x-accel-buffering" in answer.headers) is streams
    assert answer.headers.get("x-accel-buffering", "no") == "no"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (400, 400),
        (404, 404),
        (429, 429),
        (503, 503),
        (599, 599),
        (200, 502),
        (600, 502),
        ("busy", 502),
        (None, 502),
        (503.5, 502),
        (True, 502),
    ],
)
async def test_first_event_an_error_becomes_the_status(gateway: Start, code: Any, status: int) -> None:
    error = {"message": "busy", "type": "x", "param": None, "code": code}
    answer = await stream(gateway(), {"error": error})
    assert (answer.status_code, answer.json()) == (status, {"error": error})
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.whole


async def test_first_event_an_error_becomes_the_status_on_messages(gateway: Start) -> None:
    error = {"message": "busy", "type": "overloaded_error"}
    answer = await stream(gateway(), {"error": error}, MESSAGES)
    assert (answer.status_code, answer.json()) == (502, {"type": "error", "error": error})


async def test_first_event_an_error_after_openai_preamble_becomes_the_status(gateway: Start) -> None:
    """`response.created` and `response.in_progress` come before any work is done."""
    error = {"message": "busy", "code": 503}
    answer = await stream(gateway(), {"error": error, "first_ms": 50}, RESPONSES)
    assert (answer.status_code, answer.json()) == (503, {"error": error})


@pytest.mark.parametrize("script", [{"comments": 2}, {"crlf": True}, {"chunk_bytes": 1}, {"first_ms": 100}], ids=str)
async def test_error_is_found_however_it_comes(gateway: Start, script: dict[str, Any]) -> None:
    answer = await stream(gateway(), {"error": {"message": "busy", "code": 503}} | script)
    assert answer.status_code == 503


@pytest.mark.parametrize("script", [{"error_at": 1}, {"first_ms": 1000}], ids=str)
async def test_error_after_the_head_stays_in_the_stream(gateway: Start, script: dict[str, Any]) -> None:
    error = {"message": "busy", "code": 503}
    answer = await stream(gateway(keepalive_s=0.1), {"error": error} | script)
    assert answer.status_code == 200
    *_, failure, done = events_of(answer.body)
    assert (data_of(failure), done) == ({"error": error}, b"data: [DONE]")


async def test_the_word_error_in_a_token_is_no_error(gateway: Start) -> None:
    answer = await stream(gateway(), {"tag": '{"error": {"code": 503}}'})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "script",
    [
        {"chunk_bytes": 1},
        {"crlf": True},
        {"coalesce": 16},
        {"size": 300_000, "events": 1},
        {"size": 300_000, "chunk_bytes": 7000, "events": 1},
    ],
    ids=str,
)
@STREAMING
async def test_held_head_loses_nothing(gateway: Start, route: str, script: dict[str, Any]) -> None:
    gate = gateway()
    answer = await stream(gate, {"events": 16} | script, route)
    plain = await stream(
        gate, {"events": 16} | {key: value for key, value in script.items() if key in ("size", "events")}, route
    )
    assert answer.whole
    assert events_of(answer.body) == events_of(plain.body)


async def test_stream_that_ends_before_any_event(gateway: Start) -> None:
    answer = await stream(gateway(engine={"tcp": True}), {"fault": "close", "at": 0})
    refused(answer, "engine_error")


@pytest.mark.parametrize("fault", ["reset", "close", "garbage"])
@STREAMING
async def test_engine_failure_between_events_is_an_error_in_the_stream(gateway: Start, route: str, fault: str) -> None:
    gate = gateway(engine={"tcp": True})
    answer = await stream(gate, {"fault": fault, "at": 2, "events": 5, "gap_ms": 20}, route)
    assert (answer.status_code, answer.whole) == (200, True)
    check_error_end(answer.body, "engine_error", route)


@pytest.mark.parametrize("fault", ["reset", "close"])
async def test_engine_failure_inside_an_event_breaks_the_connection(gateway: Start, fault: str) -> None:
    gate = gateway(engine={"tcp": True})
    answer = await stream(gate, {"fault": fault, "at": 2, "half": True, "events": 5, "gap_ms": 20})
    assert (answer.status_code, answer.whole) == (200, False)
    assert b"engine_error" not in answer.body


@STREAMING
async def test_stream_without_its_last_event_is_not_passed_off_as_whole(gateway: Start, route: str) -> None:
    """SDKs take a stream that just ends for a complete answer."""
    answer = await stream(gateway(), {"done": False, "events": 2}, route)
    if answer.whole:
        check_error_end(answer.body, "engine_error", route)


@pytest.mark.parametrize("end", ["completed", "incomplete", "failed"])
async def test_every_end_of_a_response_is_an_end(gateway: Start, end: str) -> None:
    answer = await stream(gateway(), {"end": end}, RESPONSES)
    assert answer.whole
    assert data_of(events_of(answer.body)[-1])["type"] == f"response.{end}"


@pytest.mark.parametrize("script", [{"framing": "length"}, {"framing": "chunked"}], ids=str)
async def test_engine_failure_in_a_plain_answer_breaks_the_connection(gateway: Start, script: dict[str, Any]) -> None:
    gate = gateway(engine={"tcp": True})
    for fault in ("reset", "close"):
        async with await gate.wire() as wire:
            await wire.request(CHAT, chat(fake={"fault": fault, "at": 1, "events": 50} | script))
            answer = await wire.answer()
        assert (answer.status_code, answer.whole) == (200, False)


@pytest.mark.parametrize("status", [204, 304])
async def test_answer_without_a_body_is_whole_whatever_length_the_engine_names(gateway: Start, status: int) -> None:
    gate = gateway()
    script = {"status": status, "framing": "close", "headers": {"content-length": "5"}, "body": ""}
    async with await gate.wire() as wire:
        for _ in range(2):
            await wire.request(CHAT, chat(fake=script))
            assert (await wire.answer()).status_code == status
    assert "Traceback" not in gate.log


def check_error_end(body: bytes, code: str, route: str) -> None:
    """The stream ends in the gateway's error, in the form of its route."""
    events = events_of(body)
    assert body.endswith(b"\n\n")
    if route == MESSAGES:
        assert events[-1].startswith(b"event: error\n")
        failure = data_of(events[-1])
        assert failure["type"] == "error"
    else:
        assert events[-1] == b"data: [DONE]"
        failure = data_of(events[-2])
    assert failure["error"]["code"] == code
    assert failure["error"].keys() == {"message", "type", "param", "code"}
