"""Every row of the refusal table: status, error object, reason, retry headers, in OpenAI's form and in Anthropic's."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Start
from tests.harness import (
    COMPLETIONS,
    MESSAGES,
    ONE_LANE,
    RESPONSES,
    TERM,
    FakeEngine,
    Gateway,
    body_for,
    chat,
    occupied,
    queued,
    refused,
    until,
)
from tests.wire import CHAT

FORMS = pytest.mark.parametrize("route", [CHAT, MESSAGES])


async def post(
    gate: Gateway,
    route: str = CHAT,
    *,
    fake: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
    **more: Any,
) -> httpx.Response:
    """One call."""
    async with gate.client() as client:
        return await client.post(route, json=body_for(route, fake=fake, **more), headers=headers)


@FORMS
async def test_queue_full(gateway: Start, route: str) -> None:
    gate = gateway(max_in_flight=1, max_queue=0)
    async with occupied(gate):
        refused(await post(gate, route), "queue_full", anthropic=route == MESSAGES)
    assert len(gate.engine.entries()) == 1


@FORMS
async def test_queue_timeout(gateway: Start, route: str) -> None:
    gate = gateway(max_in_flight=1, max_queue=5, max_wait_s=0.3)
    async with occupied(gate):
        refused(await post(gate, route), "queue_timeout", anthropic=route == MESSAGES)
    assert len(gate.engine.entries()) == 1


async def test_lane_full_while_the_other_lane_still_takes(gateway: Start) -> None:
    lanes = [{"name": "short", "max_cost": 100, "queue": 0.25}, {"name": "long"}]
    gate = gateway(max_in_flight=1, max_queue=4, lanes=lanes)
    async with occupied(gate), gate.client() as client:
        waiting = asyncio.create_task(client.post(CHAT, json=chat()))
        await queued(gate, 1)
        refused(await client.post(CHAT, json=chat()), "queue_full")
        long = asyncio.create_task(client.post(CHAT, json=chat(max_tokens=1000, fake={"events": 1})))
        await queued(gate, 2)
        gate.engine.cut(which="busy")
        assert [answer.status_code for answer in await asyncio.gather(waiting, long)] == [200, 200]


@pytest.mark.slow
@FORMS
async def test_deadline_that_cannot_be_made_is_refused_before_the_wait(gateway: Start, route: str) -> None:
    gate = gateway(fresh=True, max_in_flight=1, max_queue=50, lanes=ONE_LANE)
    for _ in range(6):
        await post(gate, fake={"first_ms": 150})
    async with occupied(gate), gate.client() as client:
        ahead = [asyncio.create_task(client.post(CHAT, json=chat())) for _ in range(20)]
        await queued(gate, 20)
        answer = await post(gate, route, headers={"x-request-timeout-ms": "1000"}, fake={"tag": "late"})
        refused(answer, "deadline_infeasible", anthropic=route == MESSAGES)
        assert int(answer.headers["retry-after"]) > 1, "20 wait at about 6 a second: more than a second"
        gate.engine.cut(which="busy")
        assert {call.status_code for call in await asyncio.gather(*ahead)} == {200}
    assert gate.engine.entries("late") == []


@pytest.mark.slow
async def test_a_small_request_may_still_wait_where_a_large_one_may_not(gateway: Start) -> None:
    gate = gateway(fresh=True, max_in_flight=1, max_queue=50, lanes=ONE_LANE)
    for _ in range(6):
        await post(gate, max_tokens=16, fake={"first_ms": 150, "events": 1})
    async with occupied(gate), gate.client() as client:
        ahead = [asyncio.create_task(client.post(CHAT, json=chat())) for _ in range(20)]
        await queued(gate, 20)
        headers = {"x-request-timeout-ms": "20000"}  # the queue is worth 3 s, a quarter of this is 5 s
        small = asyncio.create_task(client.post(CHAT, json=chat(max_tokens=4), headers=headers))
        await queued(gate, 21)
        refused(await post(gate, max_tokens=64, headers=headers), "deadline_infeasible")
        gate.engine.cut(which="busy")
        assert {call.status_code for call in await asyncio.gather(small, *ahead)} == {200}


@pytest.mark.slow
async def test_a_request_whose_turn_comes_too_late_costs_the_engine_nothing(gateway: Start) -> None:
    gate = gateway(fresh=True, max_in_flight=5, lanes=ONE_LANE)
    await asyncio.gather(*(post(gate, fake={"first_ms": 1000, "events": 1}) for _ in range(5)))
    async with occupied(gate, 5):
        late = asyncio.create_task(post(gate, headers={"x-request-timeout-ms": "4000"}, fake={"tag": "late"}))
        await queued(gate, 1)
        await asyncio.sleep(3.2)  # 0.8 s are left, and an answer takes 1 s
        gate.engine.cut(which="busy")
        assert "longer than expected" in refused(await late, "deadline_infeasible")
    assert gate.engine.entries("late") == []


async def test_nothing_is_called_infeasible_before_five_completions(gateway: Start) -> None:
    gate = gateway(fresh=True, max_in_flight=1, max_queue=50)
    await post(gate, fake={"first_ms": 150})
    async with occupied(gate):
        refused(await post(gate, headers={"x-request-timeout-ms": "300"}), "deadline")


@FORMS
async def test_engine_away(gateway: Start, route: str) -> None:
    gate = gateway(fresh=True)
    gate.engine.kill()
    answer = await post(gate, route)
    refused(answer, "engine_unavailable", anthropic=route == MESSAGES)
    await until(lambda: gate.get("/readyz").status_code == 503)
    refused(await post(gate, route), "engine_unavailable", anthropic=route == MESSAGES)
    assert gate.get("/livez").status_code == 200
    gate.engine.start()
    await until(lambda: gate.get("/readyz").status_code == 200, "readiness after the engine is back")
    assert (await post(gate, route)).status_code == 200


async def test_engine_that_was_never_there(gateway: Start) -> None:
    with FakeEngine(start=False) as engine, Gateway(engine, wait="/livez") as gate:
        answer = await post(gate)
        refused(answer, "engine_unavailable")
        assert answer.headers["retry-after"] == "10"
        assert gate.get("/readyz").status_code == 503


@FORMS
async def test_draining(gateway: Start, route: str) -> None:
    gate = gateway(fresh=True)
    async with occupied(gate):
        gate.signal(TERM)
        await until(lambda: gate.get("/readyz").status_code == 503)
        refused(await post(gate, route), "draining", anthropic=route == MESSAGES)


@FORMS
async def test_deadline_before_the_head(gateway: Start, route: str) -> None:
    gate = gateway()
    answer = await post(gate, route, fake={"first_ms": 20_000, "tag": "d"}, headers={"x-request-timeout-ms": "200"})
    refused(answer, "deadline", anthropic=route == MESSAGES)
    await until(lambda: gate.engine.entry("d")["outcome"] == "aborted")


@FORMS
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fault", ["reset", "close", "garbage"])
@pytest.mark.parametrize("at", ["head", "mid_head"])
async def test_no_complete_head_from_the_engine(gateway: Start, route: str, at: str, fault: str, stream: bool) -> None:
    gate = gateway(engine={"tcp": True})
    answer = await post(gate, route, fake={"fault": fault, "at": at, "tag": "e"}, stream=stream)
    refused(answer, "engine_error", anthropic=route == MESSAGES)
    assert answer.headers["x-should-retry"] == "false"
    assert len(gate.engine.entries("e")) == 1, "a request that was sent is never sent again"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b'{"a": 1} x', b"\xff\xfe", b'{"model": "\xff"}', b"[1,", b"[" * 100_000],
    ids=lambda body: str(body[:20]),
)
@FORMS
async def test_body_that_is_not_json(gateway: Start, route: str, body: bytes) -> None:
    gate = gateway()
    async with gate.client() as client:
        answer = await client.post(route, content=body, headers={"content-type": "application/json"})
    refused(answer, "invalid_request", anthropic=route == MESSAGES)
    assert gate.engine.counts()["received"] == 0


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"null",
        b"1",
        b'"x"',
        b"{}",
        b'{"messages": 5, "max_tokens": "many", "n": [], "stream": 7}',
        b'{"a":NaN}',
        b'{"model":"a","model":"b"}',
        b'{"x":"\\ud800"}',
        b'{"max_tokens": 1e400}',
        b'{"n": -1}',
        b'{"n": 1e99}',
        b'{"prompt": [[1],[2,"x"],null]}',
        b" " * 1000 + b"{}",
        "{}".encode("utf-16"),
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda body: str(body[:40]),
)
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/v1/embeddings"])
async def test_valid_json_of_any_shape_is_left_to_the_engine(gateway: Start, route: str, body: bytes) -> None:
    gate = gateway()
    async with gate.client() as client:
        answer = await client.post(
            route, content=body, headers={"content-type": "application/json", "x-fake": json.dumps({"events": 1})}
        )
    assert answer.status_code == 200
    assert gate.engine.entries()[0]["body_bytes"] == len(body)


@pytest.mark.parametrize("name", ["x-request-timeout-ms", "x-envoy-expected-rq-timeout-ms", "x-slo-ttft-ms"])
@pytest.mark.parametrize("value", ["soon", "-5", "1e3", "", "12 13", "٣"])
async def test_malformed_deadline_header(gateway: Start, name: str, value: str) -> None:
    gate = gateway()
    async with await gate.wire() as wire:
        data = json.dumps(chat()).encode()
        head = wire.head("POST", CHAT, {"content-type": "application/json", "content-length": str(len(data))})
        await wire.send(head[:-2] + f"{name}: {value}\r\n\r\n".encode() + data)
        message = refused(await wire.answer(), "invalid_request")
    assert name in message
    assert gate.engine.counts()["received"] == 0


@FORMS
async def test_body_too_large(gateway: Start, route: str) -> None:
    gate = gateway(max_body_bytes=100_000)
    refused(await post(gate, route, padding="x" * 100_000), "request_too_large", anthropic=route == MESSAGES)
    assert gate.engine.counts()["received"] == 0


async def test_shed_status_replaces_only_the_503s_of_overload(gateway: Start) -> None:
    gate = gateway(fresh=True, max_in_flight=1, max_queue=1, max_wait_s=2, shed_status=429)
    async with occupied(gate), gate.client() as client:
        waiting = asyncio.create_task(client.post(CHAT, json=chat()))
        await queued(gate, 1)
        refused(await post(gate), "queue_full", status=429)
        refused(await waiting, "queue_timeout", status=429)
    gate.engine.kill()
    await until(lambda: gate.get("/readyz").status_code == 503)
    refused(await post(gate), "engine_unavailable")


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, {"error": {"code": 400, "message": "context_length_exceeded"}}),
        (404, {"error": {"code": 404}}),
        (429, {"x": [1, 2]}),
        (422, "plain text"),
        (500, {"error": {"code": 500}}),
        (503, {"error": {"code": 503}}),
        (504, ""),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_engines_own_errors_pass_unchanged(gateway: Start, status: int, body: Any, stream: bool) -> None:
    answer = await post(
        gateway(), fake={"status": status, "body": body, "headers": {"retry-after": "7"}}, stream=stream
    )
    assert (answer.status_code, answer.headers["retry-after"]) == (status, "7")
    assert answer.text == (body if isinstance(body, str) else json.dumps(body, separators=(",", ":")))
    assert "x-tidegate-reason" not in answer.headers
    assert (answer.headers.get("x-should-retry") == "false") == (status == 500)


async def test_request_id_is_the_clients_or_a_new_one(gateway: Start) -> None:
    gate = gateway()
    named = await post(gate, headers={"x-request-id": "mine-1"}, fake={"tag": "i"})
    first, second = await post(gate), await post(gate)
    assert named.headers["x-request-id"] == "mine-1"
    assert ["x-request-id", "mine-1"] in [[name.lower(), value] for name, value in gate.engine.entry("i")["headers"]]
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
