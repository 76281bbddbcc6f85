"""One budget per request, whoever set it, and an engine that stops when it is spent."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Start
from tests.gateway.test_heads import check_error_end
from tests.harness import (
    COMPLETIONS,
    MESSAGES,
    ONE_LANE,
    RESPONSES,
    Gateway,
    body_for,
    chat,
    occupied,
    queued,
    refused,
    until,
)
from tests.wire import CHAT

pytestmark = pytest.mark.slow

LONG = {"first_ms": 60_000, "tag": "long"}
ENDLESS = {"events": 2000, "gap_ms": 20, "tag": "long"}
MS = "x-request-timeout-ms"
AMPLE = {MS: "1500"}  # time enough for a first token on a busy machine


async def post(
    gate: Gateway, headers: dict[str, str], fake: dict[str, Any] = LONG, route: str = CHAT, **more: Any
) -> httpx.Response:
    """One call."""
    async with gate.client() as client:
        return await client.post(route, json=body_for(route, fake=fake, **more), headers=headers)


@pytest.mark.parametrize(
    "headers",
    [
        {MS: "200"},
        {"x-envoy-expected-rq-timeout-ms": "200"},
        {MS: "200", "x-envoy-expected-rq-timeout-ms": "60000"},
        {MS: "60000", "x-envoy-expected-rq-timeout-ms": "200"},
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [True, False])
async def test_tightest_header_wins_and_the_engine_stops(gateway: Start, headers: dict[str, str], stream: bool) -> None:
    gate = gateway()
    refused(await post(gate, headers, stream=stream), "deadline")
    await until(lambda: gate.engine.entry("long")["outcome"] == "aborted")


@pytest.mark.parametrize("headers", [{}, {MS: "60000"}, {MS: "99999999999999999999"}], ids=str)
async def test_no_header_loosens_the_setting(gateway: Start, headers: dict[str, str]) -> None:
    refused(await post(gateway(deadline_s=0.3), headers), "deadline")


async def test_sdk_timeout_counts_only_when_asked_for_and_only_without_a_stream(gateway: Start) -> None:
    header = {"x-stainless-read-timeout": "0.2"}
    slow = {"first_ms": 600}
    assert (await post(gateway(), header, slow)).status_code == 200
    gate = gateway(use_stainless_timeout=True)
    refused(await post(gate, header, slow), "deadline")
    assert (await post(gate, header, slow, stream=True)).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_sdk_timeout_that_is_no_number_is_refused_before_the_body_is_read(gateway: Start, stream: bool) -> None:
    gate = gateway(use_stainless_timeout=True)
    async with await gate.wire() as wire:
        await wire.request(CHAT, b"", length=1000, headers={"x-stainless-read-timeout": "soon"})
        refused(await wire.answer(), "invalid_request")


async def test_first_token_bound_holds_for_the_first_token_only(gateway: Start) -> None:
    gate = gateway(keepalive_s=0)
    header = {"x-slo-ttft-ms": "1000"}
    assert "(x-slo-ttft-ms" in refused(await post(gate, header, stream=True), "deadline")
    answer = await post(gate, header, {"events": 3, "gap_ms": 700}, stream=True)
    assert answer.content.endswith(b"data: [DONE]\n\n")
    assert (await post(gate, header, {"first_ms": 1300})).status_code == 200, "a plain call has no first token"


async def test_first_token_bound_after_the_head_is_an_error_in_the_stream(gateway: Start) -> None:
    answer = await post(gateway(keepalive_s=0.1), {"x-slo-ttft-ms": "1500"}, stream=True)
    check_error_end(answer.content, "deadline_exceeded", CHAT)


async def test_deadline_in_the_middle_of_a_stream(gateway: Start) -> None:
    gate = gateway()
    routes = [CHAT, COMPLETIONS, RESPONSES, MESSAGES]
    for route, answer in zip(
        routes, await asyncio.gather(*(post(gate, AMPLE, ENDLESS, route, stream=True) for route in routes)), strict=True
    ):
        assert answer.status_code == 200
        check_error_end(answer.content, "deadline_exceeded", route)
    await until(lambda: gate.engine.counts()["aborted"] == 4)


async def test_deadline_in_the_middle_of_an_event_breaks_the_connection(gateway: Start) -> None:
    gate = gateway()
    script = {"fault": "stall", "at": 2, "half": True, "events": 5, "tag": "long"}
    async with await gate.wire() as wire:
        await wire.request(CHAT, chat(stream=True, fake=script), headers=AMPLE)
        answer = await wire.answer()
    assert (answer.status_code, answer.whole) == (200, False)
    assert b"deadline_exceeded" not in answer.body
    await until(lambda: gate.engine.entry("long")["outcome"] == "aborted")


async def test_deadline_in_the_middle_of_a_plain_body_breaks_the_connection(gateway: Start) -> None:
    gate = gateway()
    async with await gate.wire() as wire:
        await wire.request(CHAT, chat(fake={"fault": "stall", "at": 1, "events": 50}), headers={MS: "400"})
        answer = await wire.answer()
    assert (answer.status_code, answer.whole) in ((200, False), (504, True))


async def test_message_names_the_phase_in_which_the_time_ran_out(gateway: Start) -> None:
    gate = gateway(max_in_flight=1, max_queue=5)
    seen = gate.metrics()
    async with await gate.wire() as wire:
        await wire.request(CHAT, b"{", length=100, headers={MS: "200"})
        assert "body" in refused(await wire.answer(), "deadline")
    async with occupied(gate):
        assert "queue" in refused(await post(gate, {MS: "200"}), "deadline")
    assert "first byte" in refused(await post(gate, {MS: "200"}, stream=True), "deadline")
    await post(gate, AMPLE, ENDLESS, stream=True)
    gate.quiet()
    name = "tidegate_deadline_exceeded_total"
    grown = {key: value - seen.of(name).get(key, 0) for key, value in gate.metrics().of(name).items()}
    phases = {
        phase for key, value in grown.items() if value for phase in ("body", "queue", "first", "answer") if phase in key
    }
    assert phases == {"body", "queue", "first", "answer"}


async def test_clock_starts_at_the_headers(gateway: Start) -> None:
    """A slow upload eats from the same budget as the answer."""
    gate = gateway()
    data = b'{"model": "m", "messages": [], "max_tokens": 1, "fake": {"first_ms": 700}}'
    async with await gate.wire() as wire:
        await wire.request(CHAT, data[:10], length=len(data), headers={MS: "1000"})
        await asyncio.sleep(0.6)
        await wire.send(data[10:])
        refused(await wire.answer(), "deadline")


async def test_expired_waiters_never_reach_the_engine(gateway: Start) -> None:
    gate = gateway(max_in_flight=1, max_queue=100, lanes=ONE_LANE)
    async with occupied(gate), gate.client() as client:
        calls = [client.post(CHAT, json=chat(), headers={MS: "500"}) for _ in range(100)]
        for answer in await asyncio.gather(*calls):
            refused(answer, "deadline")
        await queued(gate, 0)
        assert gate.engine.counts()["received"] == 1


async def test_deadline_while_queued_inside_the_engine(gateway: Start) -> None:
    gate = gateway(engine={"max_num_seqs": 1})
    async with occupied(gate):
        refused(await post(gate, {MS: "300"}), "deadline")
        await until(lambda: gate.engine.entry("long")["outcome"] == "aborted")
        assert gate.engine.entry("long")["started"] is None


@pytest.mark.parametrize(
    "fault",
    [
        {"at": "read", "fault": "stall"},
        {"at": "head", "fault": "stall"},
        {"at": "mid_head", "fault": "stall"},
        {"drip_ms": 500},
    ],
    ids=str,
)
async def test_engine_that_keeps_a_call_waiting_in_any_manner(gateway: Start, fault: dict[str, Any]) -> None:
    gate = gateway()
    gate.engine.defaults(**fault)
    refused(await post(gate, {MS: "300"}, {}), "deadline")
    assert gate.stats()["in_flight"] == 0


async def test_aside_routes_have_a_deadline_too(gateway: Start) -> None:
    refused(await post(gateway(), {MS: "200"}, {"first_ms": 60_000}, "/tokenize"), "deadline")
