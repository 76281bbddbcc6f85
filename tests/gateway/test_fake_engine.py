"""The fake engine keeps what its documentation promises; without that no other test here means anything."""

import asyncio
import hashlib
import json
import time
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.harness import MESSAGES, RESPONSES, FakeEngine, Metrics, body_for, chat, until
from tests.wire import CHAT, Cut, Wire, data_of, events_of

pytestmark = pytest.mark.slow


@pytest.fixture
async def client(fake: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=fake.url, trust_env=False, timeout=20) as client:
        yield client


async def play(fake: FakeEngine, script: dict[str, Any], route: str = CHAT, **more: Any) -> Any:
    """A streamed call on the bare socket, as it came."""
    assert fake.port
    async with await Wire.open(fake.port) as wire:
        await wire.request(route, body_for(route, fake=script, **({"stream": True} | more)))
        return await wire.answer()


async def test_stream_has_one_event_per_token_and_ends(fake: FakeEngine) -> None:
    answer = await play(fake, {"events": 3, "tag": "a", "size": 50}, stream_options={"include_usage": True})
    role, *tokens, finish, usage, done = events_of(answer.body)
    assert [data_of(event)["choices"][0]["delta"]["content"].strip("x ") for event in tokens] == ["aw0", "aw1", "aw2"]
    assert data_of(role)["choices"][0]["delta"]["role"] == "assistant"
    assert data_of(finish)["choices"][0]["finish_reason"] == "stop"
    assert data_of(usage)["usage"]["completion_tokens"] == 3
    assert done == b"data: [DONE]"


@pytest.mark.parametrize(
    ("route", "first", "last"),
    [(RESPONSES, "response.created", "response.completed"), (MESSAGES, "message_start", "message_stop")],
)
async def test_named_events(fake: FakeEngine, route: str, first: str, last: str) -> None:
    answer = await play(fake, {"events": 2}, route)
    kinds = [data_of(event)["type"] for event in events_of(answer.body)]
    assert (kinds[0], kinds[-1]) == (first, last)
    assert all(
        event.startswith(f"event: {kind}\n".encode()) for event, kind in zip(events_of(answer.body), kinds, strict=True)
    )
    unfinished = await play(fake, {"events": 2, "done": False}, route)
    assert last.encode() not in unfinished.body


async def test_pacing_follows_the_script(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    begun = time.monotonic()
    await client.post(CHAT, json=chat(fake={"tag": "t", "first_ms": 100, "gap_ms": 20, "events": 6}, stream=True))
    assert time.monotonic() - begun >= 0.2
    entry = fake.entry("t")
    assert entry["first"] - entry["started"] >= 0.1
    assert (entry["events"], entry["outcome"]) == (6, "finished")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "script",
    [
        {"chunk_bytes": 1},
        {"crlf": True},
        {"gzip": True},
        {"coalesce": 4},
        {"framing": "close"},
        {"framing": "length"},
        {"comments": 2},
        {"drip_ms": 1},
    ],
    ids=str,
)
async def test_manners_keep_the_content(fake: FakeEngine, script: dict[str, Any], stream: bool) -> None:
    plain = await play(fake, {"events": 8}, stream=stream)
    answer = await play(fake, {"events": 8} | script, stream=stream)
    body = zlib.decompress(answer.body, 31) if script.get("gzip") else answer.body
    assert answer.whole
    assert events_of(body) == events_of(plain.body)


@pytest.mark.parametrize(
    ("script", "events"),
    [
        ({"fault": "reset", "at": 2}, 3),
        ({"fault": "close", "at": 0}, 0),
        ({"fault": "close", "at": 1, "half": True}, 3),
        ({"fault": "garbage", "at": 2}, 3),
    ],
    ids=str,
)
async def test_faults_in_a_stream(fake: FakeEngine, script: dict[str, Any], events: int) -> None:
    try:
        answer = await play(fake, {"events": 5, "tag": "f"} | script)
        assert not answer.whole
        assert len(events_of(answer.body)) == events
    except ValueError:
        assert script["fault"] == "garbage"
    assert fake.entry("f")["outcome"] == "faulted"


@pytest.mark.parametrize("fault", ["reset", "close"])
@pytest.mark.parametrize("at", ["head", "mid_head", "read"])
async def test_faults_before_the_body(fake: FakeEngine, fault: str, at: str) -> None:
    assert fake.port
    async with await Wire.open(fake.port) as wire:
        await wire.request(CHAT, chat(), headers={"x-fake": json.dumps({"fault": fault, "at": at})})
        with pytest.raises(Cut):
            await wire.answer()


async def test_stall_lasts_until_the_client_goes(fake: FakeEngine) -> None:
    assert fake.port
    wire = await Wire.open(fake.port)
    await wire.request(CHAT, chat(stream=True, fake={"tag": "s", "fault": "stall", "at": 1, "events": 9}))
    await wire.read_head()
    await until(lambda: fake.entry("s")["events"] == 1)
    assert fake.counts()["running"] == 1
    await wire.close()
    await until(lambda: fake.entry("s")["outcome"] == "aborted")
    assert fake.counts()["running"] == 0


async def test_error_event_and_error_status(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    error = {"message": "full", "code": 503}
    answer = await play(fake, {"error": error})
    assert [data_of(event) for event in events_of(answer.body)[:-1]] == [{"error": error}]
    late = await play(fake, {"error": error, "error_at": 2, "events": 5})
    assert len(events_of(late.body)) == 5
    got = await client.post(CHAT, json=chat(fake={"status": 429, "body": {"e": 1}, "headers": {"retry-after": "7"}}))
    assert (got.status_code, got.json(), got.headers["retry-after"]) == (429, {"e": 1}, "7")


async def test_log_holds_what_came(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    data = json.dumps(chat(fake={"tag": "l"})).encode()
    headers = {"content-type": "application/json", "x-vllm-priority": "-3"}
    await client.post(f"{CHAT}?q=1", content=data, headers=headers)
    entry = fake.entry("l")
    assert (entry["target"], entry["priority"]) == (f"{CHAT}?q=1", -3)
    assert (entry["body_bytes"], entry["body_sha256"]) == (len(data), hashlib.sha256(data).hexdigest())


async def test_slots_go_to_the_urgent_first(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    fake.set(max_num_seqs=1)

    def call(tag: str, priority: int, **script: Any) -> asyncio.Task[httpx.Response]:
        headers = {"x-vllm-priority": str(priority)}
        return asyncio.create_task(client.post(CHAT, json=chat(fake={"tag": tag} | script), headers=headers))

    holder = call("holder", 9, fault="stall")
    await until(lambda: fake.counts()["running"] == 1)
    late = call("late", 10)
    await until(lambda: fake.counts()["queued"] == 1)
    urgent = call("urgent", 0)
    await until(lambda: fake.counts()["queued"] == 2)
    holder.cancel()
    await asyncio.gather(late, urgent)
    assert [entry["tag"] for entry in sorted(fake.entries(), key=lambda entry: entry["started"])][1:] == [
        "urgent",
        "late",
    ]
    assert fake.counts()["max_running"] == 1


async def test_metrics_move_with_work_and_freeze(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    async def read() -> Metrics:
        return Metrics((await client.get("/metrics")).text)

    before = await read()
    await client.post(CHAT, json=chat(fake={"events": 7, "prompt_tokens": 11}))
    after = await read()
    grown = {name: after.total(name) - before.total(name) for name in after.names}
    assert grown["vllm:generation_tokens_total"] == grown["vllm:iteration_tokens_total_count"] == 7
    assert (grown["vllm:prompt_tokens_total"], grown["vllm:request_success_total"]) == (11, 1)
    fake.set(metrics_frozen=True)
    await client.post(CHAT, json=chat())
    assert (await read()).samples == after.samples


async def test_hang_answers_health_only(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    fake.set(hang=True)
    call = asyncio.create_task(client.post(CHAT, json=chat()))
    await until(lambda: fake.counts()["running"] == 1)
    assert (await client.get("/health")).status_code == 200
    assert not call.done()
    fake.set(hang=False)
    assert (await call).status_code == 200


async def test_a_misspelt_script_is_an_error(client: httpx.AsyncClient) -> None:
    assert (await client.post(CHAT, json=chat(fake={"evens": 1}))).status_code == 400


async def test_connections_can_be_cut_by_the_control_side(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    await client.get("/version")
    fake.cut(which="idle")
    await until(lambda: fake.counts()["open_connections"] == 0)
    fake.set(accept="close")
    with pytest.raises(httpx.TransportError):
        await client.get("/version")
