"""Failures that users of such gateways have reported, each as a small experiment named by its symptom.

Those that belong to one subject are tested there: drains in `test_drain`, refusals of large bodies in `test_bounds`,
redirects in `test_routes`, retries of clients in `test_sdk`, more workers than one in `test_start`.
"""

import asyncio
import base64
import contextlib
import gzip
import json
import random
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Pair, Start
from tests.gateway.test_heads import check_error_end
from tests.harness import (
    COMPLETIONS,
    MESSAGES,
    ONE_LANE,
    RESPONSES,
    FakeEngine,
    Gateway,
    body_for,
    chat,
    gather_quietly,
    occupied,
    queued,
    refused,
    until,
)
from tests.wire import CHAT

pytestmark = pytest.mark.slow

DECODING = {"events": 1000, "gap_ms": 20}
MIB = 1024 * 1024


async def call_and_leave(gate: Pair, after_s: float, body: Any, **headers: str) -> None:
    """Send a call (or the part of it that `body` is) and hang up after a while."""
    async with await gate.wire() as wire:
        await wire.request(CHAT, body, headers=headers, length=5000 if isinstance(body, bytes) else None)
        await asyncio.sleep(after_s)
        wire.reset()


async def test_cancelled_stream_frees_its_slot(gateway: Start) -> None:
    gate = gateway(max_in_flight=1, max_queue=0)
    async with gate.client() as client:
        async with client.stream("POST", CHAT, json=chat(stream=True, fake=DECODING | {"tag": "left"})) as answer:
            lines = answer.aiter_lines()
            for _ in range(4):
                await anext(lines)
        await until(lambda: gate.engine.entry("left")["outcome"] == "aborted")
        assert (await client.post(CHAT, json=chat())).status_code == 200


async def test_gauges_do_not_drift_after_mixed_failures(gateway: Start) -> None:
    gate = gateway(max_in_flight=4, max_queue=100, engine={"tcp": True})
    at: list[int | str] = ["head", "mid_head", 0, 1, 3]
    scripts: list[dict[str, Any]] = [
        {"fault": fault, "at": where} for fault in ("reset", "close", "garbage") for where in at
    ]
    scripts += [{"status": 500}, {"status": 400}, {"error": {"code": 503}}, {"fault": "stall", "at": 1}, {}]
    async with gate.client() as client:
        await gather_quietly(
            *(
                client.post(
                    CHAT, json=chat(stream=bool(number % 2), fake=script), headers={"x-request-timeout-ms": "3000"}
                )
                for number, script in enumerate(scripts * 5)
            )
        )
    gate.quiet()
    # A slot is free once the connection is cut, and an engine may hear of that after the next request.
    assert gate.engine.counts()["max_running"] <= 8


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_cancels_leak_no_slot(gateway: Start, seed: int) -> None:
    gate = gateway(max_in_flight=4, max_queue=50, lanes=ONE_LANE)
    chance = random.Random(seed)
    script = {"events": 20, "gap_ms": 5}
    bodies = [chat(stream=chance.random() < 0.5, fake=script, n=chance.randint(1, 6)) for _ in range(120)]
    await gather_quietly(*(call_and_leave(gate, chance.uniform(0, 0.3), body) for body in bodies))
    await whole_capacity(gate, 4)
    assert gate.engine.counts()["max_running"] <= 4


async def whole_capacity(gate: Pair, slots: int) -> None:
    """Every slot can be had again, all at once."""
    gate.quiet()
    async with occupied(gate, slots):
        assert gate.stats()["in_flight"] == slots


@pytest.mark.parametrize("during", ["call", "upload"])
async def test_cancel_at_the_moment_work_starts_does_not_stick_the_slot(gateway: Start, during: str) -> None:
    gate = gateway(max_in_flight=2, max_queue=50, lanes=ONE_LANE)
    body: Any = chat(fake=DECODING) if during == "call" else b'{"model": '
    for jitter in range(0, 50, 2):
        await call_and_leave(gate, jitter / 10_000, body)
    await whole_capacity(gate, 2)


@pytest.mark.parametrize("stream", [True, False])
async def test_middleware_does_not_hide_the_disconnect(gateway: Start, stream: bool) -> None:
    gate = gateway(cors_origins="https://app.example", api_keys="a:secret-a", log_format="json")
    async with await gate.wire() as wire:
        await wire.request(
            CHAT, chat(stream=stream, fake=DECODING | {"tag": "left"}), headers={"origin": "https://app.example"}
        )
        await until(lambda: gate.engine.counts()["running"] == 1)
        wire.reset()
        await until(lambda: gate.engine.entry("left")["outcome"] == "aborted")


@pytest.mark.parametrize(
    ("route", "mark"),
    [(CHAT, b"[DONE]"), (COMPLETIONS, b"[DONE]"), (RESPONSES, b"response.completed"), (MESSAGES, b"message_stop")],
)
@pytest.mark.parametrize(("end_ms", "whole"), [(300, True), (60_000, False)])
async def test_who_closes_at_the_end_mark_as_sdks_do_has_not_left_early(
    gateway: Start, route: str, mark: bytes, end_ms: int, whole: bool
) -> None:
    """The engine's answer is over with its end mark, whenever it closes it; one that never does is cut."""
    gate = gateway(max_in_flight=1, lanes=ONE_LANE)
    before = gate.metrics()
    script = {"events": 1, "tag": "told", "end_ms": end_ms}
    async with await gate.wire() as wire:
        await wire.request(route, body_for(route, stream=True, fake=script))
        await wire.reader.readuntil(mark)
        await wire.reader.readuntil(b"\n\n")
    await until(lambda: gate.engine.entry("told")["outcome"] == ("finished" if whole else "aborted"))
    await until(lambda: not gate.leftovers())
    after = gate.metrics()

    def grown(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    assert grown("tidegate_requests_total", outcome="completed") == whole
    assert grown("tidegate_requests_total", outcome="client_left") == (not whole)
    assert grown("tidegate_engine_aborts_total") == (not whole)


async def test_generation_stops_when_a_plain_calls_client_leaves(gateway: Start) -> None:
    gate = gateway()
    with contextlib.suppress(httpx.ReadTimeout):
        async with gate.client(timeout=0.5) as client:
            await client.post(CHAT, json=chat(fake={"first_ms": 20_000, "tag": "left"}))
    await until(lambda: gate.engine.entry("left")["outcome"] == "aborted")


async def test_headers_then_silence_for_ever_ends_at_the_deadline(gateway: Start) -> None:
    gate = gateway(max_in_flight=1, max_queue=0, keepalive_s=0.1)
    async with gate.client() as client:
        script = {"fault": "stall", "at": 0}
        answer = await client.post(CHAT, json=chat(stream=True, fake=script), headers={"x-request-timeout-ms": "2000"})
        check_error_end(answer.content, "deadline_exceeded", CHAT)
        gate.quiet()
        assert (await client.post(CHAT, json=chat())).status_code == 200


async def test_client_timeout_leaves_no_dead_request_behind(gateway: Start) -> None:
    """Neither the one that decodes nor the one that waits."""
    gate = gateway(max_in_flight=1, max_queue=5)
    for tag in ("running", "waiting"):
        gate.engine.defaults(tag=tag)
    async with gate.client(timeout=1.0) as client:
        calls = [client.post(CHAT, json=chat(fake=DECODING | {"tag": tag})) for tag in ("a", "b", "c")]
        assert all(isinstance(end, httpx.ReadTimeout) for end in await gather_quietly(*calls))
    gate.quiet()
    await until(lambda: gate.engine.counts()["running"] == 0)
    assert gate.engine.counts()["aborted"] == gate.engine.counts()["received"] <= 3
    reached = gate.engine.counts()["received"]
    await asyncio.sleep(0.2)
    assert gate.engine.counts()["received"] == reached, "those that waited must not start now"


async def test_urgent_request_is_not_stuck_behind_full_engine_slots(gateway: Start) -> None:
    """The engine is fuller than its own limit; the lane's priority decides who is next there."""
    gate = gateway(max_in_flight=8, engine={"max_num_seqs": 1})
    async with gate.client() as client:
        calls = []
        async with occupied(gate):
            for place, (tag, tokens) in enumerate([("long1", 4000), ("long2", 4000), ("short", 4)], start=1):
                body = chat(max_tokens=tokens, fake={"tag": tag, "events": 1})
                calls.append(asyncio.create_task(client.post(CHAT, json=body)))
                await until(lambda place=place: gate.engine.counts()["queued"] == place)  # type: ignore[misc]
        await asyncio.gather(*calls)
    order = sorted(gate.engine.entries(), key=lambda entry: float(entry["started"]))
    assert [entry["tag"] for entry in order] == ["occupier", "short", "long1", "long2"]


async def test_endless_short_load_does_not_starve_a_long_request(gateway: Start) -> None:
    lanes = [{"name": "short", "max_cost": 512, "weight": 1000}, {"name": "long", "max_wait_s": 0.5}]
    gate = gateway(max_in_flight=2, max_queue=100, lanes=lanes)
    stop = asyncio.Event()
    async with gate.client() as client:

        async def load() -> None:
            while not stop.is_set():
                await client.post(CHAT, json=chat(fake={"first_ms": 20}))

        loaders = [asyncio.create_task(load()) for _ in range(10)]
        await until(lambda: gate.stats()["queue_depth"] >= 5)
        answer = await client.post(CHAT, json=chat(max_tokens=4000, fake={"events": 1}))
        assert answer.status_code == 200
        assert not any(loader.done() for loader in loaders)
        stop.set()
        await asyncio.gather(*loaders)


async def test_refusal_tells_when_to_come_back_and_reads_no_30_mb_first(gateway: Start) -> None:
    gate = gateway(max_in_flight=1, max_queue=0)
    async with occupied(gate), await gate.wire() as wire:
        await wire.request(CHAT, b"{", length=30 * MIB)
        status, headers = await wire.read_head()
    assert (status, headers["x-tidegate-reason"]) == (503, "queue_full")
    assert int(headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [True, False])
async def test_burst_of_ten_times_the_limit_admits_exactly_the_limit(gateway: Start, stream: bool) -> None:
    gate = gateway(max_in_flight=8, max_queue=0, lanes=ONE_LANE)
    gate.engine.set(hang=True)
    async with gate.client() as client:
        calls = [asyncio.create_task(client.post(CHAT, json=chat(stream=stream))) for _ in range(80)]
        await until(lambda: sum(call.done() for call in calls) == 72)
        gate.engine.set(hang=False)
        answers = await asyncio.gather(*calls)
    assert sorted(answer.status_code for answer in answers) == [200] * 8 + [503] * 72
    assert gate.engine.counts()["received"] == 8


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_overloaded_stream_is_refused_by_status_never_by_an_event(gateway: Start, route: str) -> None:
    gate = gateway(max_in_flight=2, max_queue=2, max_wait_s=0.5, lanes=ONE_LANE)
    async with gate.client() as client:
        body = body_for(route, stream=True, fake={"first_ms": 1500})
        answers = await asyncio.gather(*(client.post(route, json=body) for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200, 503}
    for answer in answers:
        if answer.status_code == 200:
            assert b'"error":{' not in answer.content
        else:
            refused(answer, answer.headers["x-tidegate-reason"], anthropic=route == MESSAGES)


async def test_health_checks_answer_under_overload(gateway: Start) -> None:
    gate = gateway(max_in_flight=8, max_queue=16, lanes=ONE_LANE)
    stop = asyncio.Event()
    served = 0
    # The probes have a connection of their own: httpx's pool of 40 busy ones would make them wait, not the gateway.
    async with gate.client() as client, await gate.wire() as probe:

        async def load() -> None:
            nonlocal served
            while not stop.is_set():
                answer = await client.post(CHAT, json=chat(stream=True, fake={"events": 10, "gap_ms": 10}))
                served += answer.status_code == 200
                if answer.status_code == 503:
                    await asyncio.sleep(0.02)  # else the clients take the CPU that the probes need

        loaders = [asyncio.create_task(load()) for _ in range(40)]
        overtaken: list[int] = []
        await until(lambda: served)
        while served < 100:
            for path in ("/livez", "/readyz", "/metrics"):
                before = served
                await probe.request(path, method="GET")
                assert (await probe.answer()).status_code == 200
                overtaken.append(served - before)
        stop.set()
        await asyncio.gather(*loaders)
    assert max(overtaken) < len(loaders)  # nor was one starved beside the requests


async def test_proxy_that_cuts_silent_connections_does_not_cut_a_long_wait(gateway: Start) -> None:
    gate = gateway(keepalive_s=0.1)
    async with gate.client(timeout=1.0) as client:  # between bytes, as a proxy's idle limit
        answer = await client.post(CHAT, json=chat(stream=True, fake={"first_ms": 2500, "events": 2}))
    assert answer.content.endswith(b"data: [DONE]\n\n")


async def test_aborts_are_counted_and_the_engines_metrics_are_there(gateway: Start) -> None:
    gate = gateway()
    before = gate.metrics().total("tidegate_engine_aborts_total")
    async with occupied(gate, 10) as wires:
        for wire in wires:
            wire.reset()
    await until(lambda: gate.metrics().total("tidegate_engine_aborts_total") == before + 10)
    assert "vllm:num_requests_running" in gate.metrics().names
    await until(lambda: gate.engine.counts()["aborted"] == 10)


@pytest.mark.parametrize("accept", ["gzip", "identity", None])
@pytest.mark.parametrize("stream", [True, False])
async def test_compressed_answers_keep_header_and_body_in_agreement(
    gateway: Start, stream: bool, accept: str | None
) -> None:
    gate = gateway()
    headers = {"accept-encoding": accept} if accept else {}
    async with await gate.wire() as wire:
        await wire.request(CHAT, chat(stream=stream, fake={"gzip": True, "tag": "z"}), headers=headers)
        answer = await wire.answer()
    assert answer.whole
    body = gzip.decompress(answer.body) if answer.headers.get("content-encoding") == "gzip" else answer.body
    assert b"zw0" in body
    assert int(answer.headers.get("content-length", len(answer.body))) == len(answer.body)
    sent = {name.lower(): value for name, value in gate.engine.entry("z")["headers"]}
    assert sent["accept-encoding"] == "identity"


async def test_claude_code_can_count_tokens_while_every_slot_is_taken(gateway: Start) -> None:
    gate = gateway(max_in_flight=1, max_queue=0, api_keys="a:secret-a")
    path = "/v1/messages/count_tokens"
    async with (
        occupied(gate),
        gate.client(headers={"x-api-key": "secret-a", "anthropic-version": "2023-06-01"}) as client,
    ):
        answer = await client.post(f"{path}?beta=true", json=body_for(path, fake={"tag": "c"}))
        assert answer.json()["input_tokens"] >= 1
        assert gate.engine.entry("c")["target"] == f"{path}?beta=true"
        wrong = await client.post(f"{path}?beta=true", json={}, headers={"x-api-key": "wrong"})
        refused(wrong, "invalid_api_key", anthropic=True)


SHORT, LONG = 0, 10  # priorities of the default lanes
WORDS = "word " * 4000
IDS = list(range(4000))
SHAPES: list[tuple[str, dict[str, Any], int]] = [
    (COMPLETIONS, {"prompt": "hi"}, SHORT),
    (COMPLETIONS, {"prompt": ["hi", "you"]}, SHORT),
    (COMPLETIONS, {"prompt": [1, 2, 3]}, SHORT),
    (COMPLETIONS, {"prompt": [[1], [2]]}, SHORT),
    (COMPLETIONS, {"prompt": WORDS}, LONG),
    (COMPLETIONS, {"prompt": ["hi", WORDS]}, LONG),
    (COMPLETIONS, {"prompt": IDS}, LONG),
    (COMPLETIONS, {"prompt": [IDS[:2000], IDS[:2000]]}, LONG),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, SHORT),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": WORDS}]}]}, LONG),
    (CHAT, {"messages": [{"role": "assistant", "content": None}]}, SHORT),
    (CHAT, {"messages": []}, SHORT),
    (CHAT, {"max_tokens": 4000}, LONG),
    (CHAT, {"max_tokens": None, "max_completion_tokens": 4000}, LONG),
    (CHAT, {"max_tokens": 4000, "max_completion_tokens": 4}, SHORT),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "description": WORDS}}]}, LONG),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"d": WORDS}}}}, LONG),
    (RESPONSES, {"input": "hi"}, SHORT),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": WORDS}]}]}, LONG),
    (RESPONSES, {"instructions": WORDS}, LONG),
    (MESSAGES, {"system": "short"}, SHORT),
    (MESSAGES, {"system": WORDS}, LONG),
    (MESSAGES, {"system": [{"type": "text", "text": WORDS}]}, LONG),
]


@pytest.mark.parametrize(("route", "fields", "priority"), SHAPES, ids=lambda value: str(value)[:60])
async def test_every_input_shape_lands_in_its_lane(
    gateway: Start, route: str, fields: dict[str, Any], priority: int
) -> None:
    gate = gateway()
    async with gate.client() as client:
        body = body_for(route, fake={"tag": "s", "events": 1}) | fields
        assert (await client.post(route, json=body)).status_code == 200
    assert gate.engine.entry("s")["priority"] == priority


async def test_20_mb_image_is_no_long_prompt_and_no_error(gateway: Start) -> None:
    gate = gateway()
    async with gate.client() as client:
        for tag, size in (("small", 100), ("large", 15 * MIB)):
            url = "data:image/png;base64," + base64.b64encode(bytes(size)).decode()
            content = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": url}}]
            body = chat(messages=[{"role": "user", "content": content}], fake={"tag": tag})
            assert (await client.post(CHAT, json=body)).status_code == 200
    assert gate.engine.entry("large")["body_bytes"] > 20 * MIB
    assert gate.engine.entry("large")["priority"] == gate.engine.entry("small")["priority"]


async def test_redirects_never_happen_even_behind_tls(gateway: Start) -> None:
    gate = gateway()
    headers = {"x-forwarded-proto": "https", "host": "api.example"}
    async with gate.client(headers=headers) as client:
        for path in ("/v1/chat/completions/", "/v1/models/", "/livez/", "/metrics/", "/v1/v1/chat/completions"):
            answer = await client.get(path)
            assert (answer.status_code, "location" in answer.headers) == (404, False)


async def test_engines_death_ends_every_open_request_with_an_error(gateway: Start) -> None:
    gate = gateway(fresh=True)
    async with await gate.wire() as stream, await gate.wire() as plain:
        await stream.request(CHAT, chat(stream=True, fake=DECODING))
        await plain.request(CHAT, chat(fake=DECODING))
        await until(lambda: gate.engine.counts()["running"] == 2)
        gate.engine.kill()
        check_error_end((await stream.answer()).body, "engine_error", CHAT)
        refused(await plain.answer(), "engine_error")
    await until(lambda: gate.get("/readyz").status_code == 503)


async def test_loading_engine_keeps_the_pod_alive_and_unready(gateway: Start) -> None:
    with FakeEngine(start=False) as engine, Gateway(engine, wait="/livez") as gate:
        async with gate.client() as client:
            for _ in range(5):
                assert gate.get("/livez").status_code == 200
                assert gate.get("/enginez").status_code == 200
                assert gate.get("/readyz").status_code == 503
                refused(await client.post(CHAT, json=chat()), "engine_unavailable")
                await asyncio.sleep(0.2)
            engine.start()
            await until(lambda: gate.get("/readyz").status_code == 200)
            assert (await client.post(CHAT, json=chat())).status_code == 200


async def test_events_are_prompt_through_a_proxy_that_speaks_http_1_0(gateway: Start) -> None:
    gate = gateway()
    data = json.dumps(chat(stream=True, fake={"tag": "n", "events": 4, "gap_ms": 500, "size": 250})).encode()
    async with await gate.wire() as wire:
        head = wire.head("POST", CHAT, {"content-length": str(len(data)), "content-type": "application/json"})
        await wire.send(head.replace(b"HTTP/1.1", b"HTTP/1.0") + data)
        _, headers = await wire.read_head()
        assert headers["x-accel-buffering"] == "no"
        for number in range(3):
            await wire.reader.readuntil(f"w{number}".encode())
            assert gate.engine.entry("n")["outcome"] == "running", "the event came while the engine was still at work"


async def test_engine_that_only_answers_health_is_found(gateway: Start) -> None:
    gate = gateway(fresh=True, stall_s=1)
    async with gate.client() as client:
        assert gate.get("/enginez").status_code == 200
        gate.engine.set(hang=True)
        call = asyncio.create_task(client.post(CHAT, json=chat()))
        await until(lambda: gate.get("/enginez").status_code == 503)
        assert gate.get("/readyz").status_code == 503
        assert gate.stats()["engine"]["state"] == "stalled"
        assert gate.metrics().total("tidegate_engine_stalls_total") == 1
        refused(await client.post(CHAT, json=chat()), "engine_unavailable")
        gate.engine.set(hang=False)
        assert (await call).status_code == 200
        await until(lambda: gate.get("/readyz").status_code == 200, "recovery")


async def test_what_the_front_end_answers_by_itself_is_no_sign_of_life(gateway: Start) -> None:
    gate = gateway(fresh=True, stall_s=1)
    async with gate.client() as client:
        assert gate.get("/enginez").status_code == 200
        gate.engine.set(metrics_frozen=True)
        call = asyncio.create_task(client.post(CHAT, json=chat(fake={"fault": "stall"})))
        answered = 0
        while gate.get("/enginez").status_code == 200:
            answered += (await client.get("/v1/models")).status_code == 200  # else it has just been found
        assert answered > 1
        call.cancel()


async def test_calls_beside_the_gate_do_not_make_an_idle_engine_look_stalled(gateway: Start) -> None:
    gate = gateway(fresh=True, stall_s=1)
    over = asyncio.Event()

    async def ask(client: httpx.AsyncClient) -> int:
        answered = 0
        while not over.is_set():
            answer = await client.post("/tokenize", json=chat(fake={"head_ms": 100}))
            assert answer.status_code == 200, answer.text
            answered += 1
        return answered

    async with gate.client() as client:
        assert (await client.post(CHAT, json=chat())).status_code == 200
        asking = [asyncio.create_task(ask(client)) for _ in range(8)]
        await asyncio.sleep(4)  # several times the limit
        over.set()
        assert all(await asyncio.gather(*asking))
    assert gate.metrics().total("tidegate_engine_stalls_total") == 0


async def test_what_waits_is_not_handed_to_a_server_that_has_lost_its_engine(gateway: Start) -> None:
    """vLLM's server lives some seconds longer than its engine, and fails what it is given."""
    gate = gateway(fresh=True, max_in_flight=2, max_queue=20)
    async with gate.client() as client:
        lost = {"tag": "lost", "head_ms": 60_000}
        running = [asyncio.create_task(client.post(CHAT, json=chat(fake=lost))) for _ in range(2)]
        await until(lambda: len(gate.engine.entries("lost")) == 2)
        waiting = [asyncio.create_task(client.post(CHAT, json=chat(fake=lost))) for _ in range(10)]
        await queued(gate, 10)
        gate.engine.set(health_status=503)
        gate.engine.cut()
        for answer in await asyncio.gather(*running):
            refused(answer, "engine_error")
        for answer in await asyncio.gather(*waiting):
            refused(answer, "engine_unavailable")
        assert len(gate.engine.entries("lost")) == 2
        gate.engine.set(health_status=200)
        await until(lambda: gate.get("/readyz").status_code == 200, "recovery")


ALIVE = [
    pytest.param({"prefill_ms": 4000}, {}, id="long prefill: only KV use moves"),
    pytest.param({"events": 40, "gap_ms": 100}, {"metrics_frozen": True}, id="only bytes move"),
]


@pytest.mark.parametrize(("script", "engine"), ALIVE)
async def test_engine_that_works_slowly_is_not_taken_for_stalled(
    gateway: Start, script: dict[str, Any], engine: dict[str, Any]
) -> None:
    gate = gateway(fresh=True, stall_s=1)
    gate.engine.set(**engine)
    async with gate.client() as client:
        call = asyncio.create_task(client.post(CHAT, json=chat("x" * 10_000, stream=True, fake=script)))
        while not call.done():
            assert gate.get("/enginez").status_code == 200
            await asyncio.sleep(0.05)
        assert (await call).status_code == 200


async def test_idle_engine_is_not_taken_for_stalled(gateway: Start) -> None:
    gate = gateway(fresh=True, stall_s=0.5)
    for _ in range(10):
        assert gate.get("/readyz").status_code == 200
        await asyncio.sleep(0.25)


async def test_busy_engine_that_answers_health_slowly_is_not_punished(gateway: Start) -> None:
    """Its stream moves; a probe takes longer than a stall may, and no scrape is answered in time."""
    gate = gateway(fresh=True, stall_s=0.5)
    await until(lambda: gate.stats()["engine"]["running"] is not None, "a scrape")  # without one nothing is judged
    gate.engine.set(health_ms=700, metrics_ms=3000)
    before = gate.engine.counts()["paths"]["/metrics"]
    async with await gate.wire() as wire:
        await wire.request(CHAT, chat(stream=True, fake=DECODING | {"events": 5000}))
        await wire.read_head()
        while gate.engine.counts()["paths"]["/metrics"] < before + 3:  # so that what follows two is judged
            assert gate.get("/readyz").status_code == 200
            await asyncio.sleep(0.05)
        assert gate.stats()["engine"]["restarts"] == 0
        gate.engine.set(hang=True)
        await until(lambda: gate.get("/enginez").status_code == 503, "a stall, once the stream stands still too")
    assert gate.metrics().total("tidegate_engine_stalls_total") == 1


@pytest.mark.slow
async def test_giant_bodies_do_not_starve_health_and_streams(gateway: Start) -> None:
    gate = gateway()
    stop = asyncio.Event()
    data = json.dumps(chat("x" * 10 * MIB, fake={"events": 1})).encode()
    seen: list[str] = []
    async with gate.client() as client:

        async def watch() -> None:
            async with client.stream("POST", CHAT, json=chat(stream=True, fake=DECODING)) as answer:
                async for _ in answer.aiter_raw():
                    seen.append("event")
                    if stop.is_set():
                        return

        async def probe() -> None:
            while not stop.is_set():
                answer = await asyncio.to_thread(gate.get, "/livez")
                assert answer.status_code == 200
                seen.append("health")

        async def giant() -> None:
            answer = await client.post(CHAT, content=data, headers={"content-type": "application/json"})
            assert answer.status_code == 200
            seen.append("giant")

        watchers = [asyncio.create_task(watch()), asyncio.create_task(probe())]
        await until(lambda: {"event", "health"} <= {*seen})
        seen.clear()
        await asyncio.gather(*(giant() for _ in range(20)))
        stop.set()
        await asyncio.gather(*watchers)
    while seen[-1] != "giant":
        seen.pop()
    # Both go on between the giants: neither waits until the last of them has been read and answered.
    assert seen.count("event") >= 20
    assert seen.count("health") >= 20


async def test_cheap_routes_answer_while_every_slot_is_taken(gateway: Start) -> None:
    gate = gateway(max_in_flight=1, max_queue=1)
    async with occupied(gate), gate.client() as client:
        waiting = asyncio.create_task(client.post(CHAT, json=chat()))
        await queued(gate, 1)
        for path in ("/v1/models", "/version", "/metrics", "/health", "/livez", "/stats", "/"):
            assert (await client.get(path)).status_code == 200
        assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 200
        gate.engine.cut(which="busy")
        await waiting


async def test_autoscalers_expression_exceeds_its_target_under_overload(gateway: Start) -> None:
    """In-flight is capped by the slots; queue depth and refusals are not."""
    gate = gateway(max_in_flight=2, max_queue=4, lanes=ONE_LANE)
    before = gate.metrics().total("tidegate_refusals_total")
    async with occupied(gate, 2), gate.client() as client:
        waiting = [asyncio.create_task(client.post(CHAT, json=chat())) for _ in range(20)]
        await until(lambda: sum(call.done() for call in waiting) == 16)
        metrics = gate.metrics()
        demand = metrics.total("tidegate_in_flight") + metrics.total("tidegate_queue_depth")
        assert demand / metrics.total("tidegate_in_flight_limit") == 3
        assert metrics.total("tidegate_refusals_total") - before == 16
        gate.engine.cut(which="busy")
        await asyncio.gather(*waiting)
