"""Everything that a client can fill is bounded, counted and empties again."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Start
from tests.harness import ONE_LANE, Gateway, chat, eventually, occupied, queued, refused, until
from tests.wire import CHAT, Answer, Wire

pytestmark = pytest.mark.slow

MIB = 1024 * 1024


def sized(size: int) -> bytes:
    """A valid body of exactly that size."""
    data = json.dumps(chat(padding="")).encode()
    return data.replace(b'"padding": ""', b'"padding": "' + b"x" * (size - len(data)) + b'"')


async def upload(gate: Gateway, data: bytes, *, chunked: bool, **options: Any) -> Answer:
    """Send a body in 64 KiB pieces, in either framing, as a client does that looks for no early answer."""
    async with await gate.wire() as wire:
        if chunked:
            await wire.start_chunked(CHAT, **options)
        else:
            await wire.request(CHAT, b"", length=len(data), **options)
        for start in range(0, len(data), 65536):
            piece = data[start : start + 65536]
            await (wire.chunk(piece) if chunked else wire.send(piece))
        if chunked:
            await wire.chunk(b"")
        return await wire.answer()


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_limit_holds_in_both_framings(gateway: Start, chunked: bool) -> None:
    gate = gateway(max_body_bytes=100_000)
    assert (await upload(gate, sized(100_000), chunked=chunked)).status_code == 200
    refused(await upload(gate, sized(100_001), chunked=chunked), "request_too_large")
    assert gate.engine.counts()["received"] == 1


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [1_000, MIB, 10 * MIB])
async def test_refusal_arrives_as_a_status_whatever_is_still_being_sent(
    gateway: Start, size: int, chunked: bool
) -> None:
    gate = gateway(max_in_flight=1, max_queue=0)
    async with occupied(gate):
        refused(await upload(gate, sized(size), chunked=chunked), "queue_full")
    refused(await upload(gateway(max_body_bytes=500), sized(size), chunked=chunked), "request_too_large")


@pytest.mark.parametrize("size", [1_000, 10 * MIB])
async def test_refusal_by_header_arrives_as_a_status_too(gateway: Start, size: int) -> None:
    gate = gateway(api_keys="a:secret-a,b:secret-b")
    refused(await upload(gate, sized(size), chunked=False, headers={"authorization": "Bearer no"}), "invalid_api_key")
    async with await gate.wire() as wire:
        await wire.request("/nowhere", sized(size))
        refused(await wire.answer(), "not_found")


async def test_sender_without_end_is_hung_up_on(gateway: Start) -> None:
    gate = gateway(max_body_bytes=100_000)
    async with await gate.wire() as wire:
        await wire.start_chunked()
        with pytest.raises(ConnectionError):
            await send_for_ever(wire)


async def send_for_ever(wire: Wire) -> None:
    """A body without end."""
    while True:
        await wire.chunk(b"x" * MIB)


async def test_house_is_bounded_by_running_queued_and_uploading_together(gateway: Start) -> None:
    gate = gateway(max_in_flight=2, max_queue=3, lanes=ONE_LANE)
    async with occupied(gate, 2), gate.client() as client:
        before = gate.stats()["total_requests"]
        uploads = [await half_sent(gate) for _ in range(3)]
        await until(lambda: gate.stats()["total_requests"] == before + 3, "arrival of the uploads")
        refused(await client.post(CHAT, json=chat()), "queue_full")
        for wire in uploads:
            wire.reset()
        await asyncio.gather(*(wire.close() for wire in uploads))
        waiting = await admitted(gate, client, 3)
        refused(await client.post(CHAT, json=chat()), "queue_full")
        gate.engine.cut(which="busy")
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * 3


async def half_sent(gate: Gateway, size: int = 1000, **options: Any) -> Wire:
    """A client in the middle of its upload."""
    wire = await gate.wire()
    await wire.request(CHAT, b"{", length=size, **options)
    return wire


async def admitted(gate: Gateway, client: Any, count: int) -> list[asyncio.Task[Any]]:
    """That many calls which wait in the gate, sent again while the house still counts clients that have left."""
    calls: list[asyncio.Task[Any]] = []
    while len(calls) < count:
        call = asyncio.create_task(client.post(CHAT, json=chat()))
        await until(lambda call=call: call.done() or gate.stats()["queue_depth"] > len(calls))  # type: ignore[misc]
        if not call.done():
            calls.append(call)
    return calls


@pytest.mark.parametrize("chunked", [False, True])
async def test_held_bytes_are_bounded(gateway: Start, chunked: bool) -> None:
    gate = gateway(max_held_bytes=100_000)
    if chunked:
        holder = await gate.wire()
        await holder.start_chunked()
        await holder.chunk(sized(80_000)[:-1])
    else:
        holder = await half_sent(gate, 80_000)
    async with gate.client() as client:

        def another() -> Awaitable[httpx.Response]:
            return client.post(CHAT, content=sized(40_000), headers={"content-type": "application/json"})

        await eventually(another, 503)
        refused(await upload(gate, sized(40_000), chunked=True), "queue_full")
        assert (await client.post(CHAT, json=chat())).status_code == 200, "a small one still fits"
        await holder.close()
        await eventually(another, 200)


async def test_bytes_are_held_only_until_the_engine_has_them(gateway: Start) -> None:
    gate = gateway(max_held_bytes=100_000)
    script = {"fault": "stall", "at": 1, "tag": "big"}
    async with gate.client() as client:
        for _ in range(3):
            request = client.build_request("POST", CHAT, json=chat("x" * 60_000, stream=True, fake=script))
            answer = await client.send(request, stream=True)
            assert answer.status_code == 200
        assert len(gate.engine.entries("big")) == 3


async def test_upload_that_takes_too_long(gateway: Start) -> None:
    gate = gateway(body_s=0.3)
    async with await half_sent(gate) as wire:
        assert "body" in refused(await wire.answer(), "deadline")


@pytest.mark.parametrize("leave", ["reset", "close", "half_close"])
async def test_client_that_leaves_in_its_upload_leaves_nothing(gateway: Start, leave: str) -> None:
    gate = gateway(max_in_flight=1, max_queue=0)
    async with contextlib.AsyncExitStack() as stack, gate.client() as client:
        for _ in range(5):
            wire = await stack.enter_async_context(await half_sent(gate))
            if leave == "close":
                await wire.close()
            else:
                getattr(wire, leave)()
        await until(lambda: gate.stats()["in_flight"] == 0)
        await eventually(lambda: client.post(CHAT, json=chat()), 200)
    assert gate.engine.counts()["received"] == 1


async def test_cheap_routes_have_a_cap_and_a_time_of_their_own(gateway: Start) -> None:
    gate = gateway()
    gate.engine.defaults(first_ms=60_000)
    async with gate.client() as client:
        calls = [asyncio.create_task(client.post("/tokenize", json={"prompt": "x"})) for _ in range(16)]
        await until(lambda: gate.engine.counts()["received"] == 16)
        refused(await client.post("/detokenize", json={"tokens": [1]}), "queue_full")
        refused(await client.get("/v1/models"), "queue_full")
        gate.engine.defaults()
        assert (await client.post(CHAT, json=chat())).status_code == 200, "the gate has room"
        for answer in await asyncio.gather(*calls):
            refused(answer, "deadline")
    await until(lambda: gate.engine.counts()["aborted"] == 16)


async def test_queue_is_bounded_and_empties_in_order(gateway: Start) -> None:
    gate = gateway(max_in_flight=1, max_queue=4, lanes=ONE_LANE)
    async with occupied(gate), gate.client() as client:
        waiting = []
        for place in range(4):
            waiting.append(asyncio.create_task(client.post(CHAT, json=chat(fake={"tag": f"p{place}"}))))
            await queued(gate, place + 1)
        refused(await client.post(CHAT, json=chat()), "queue_full")
        gate.engine.cut(which="busy")
        await asyncio.gather(*waiting)
    assert [entry["tag"] for entry in gate.engine.entries()] == ["occupier", "p0", "p1", "p2", "p3"]


async def test_weight_takes_as_many_slots_as_sequences(gateway: Start) -> None:
    gate = gateway(max_in_flight=4, lanes=ONE_LANE)
    stall = {"fault": "stall", "at": 1, "tag": "w"}
    async with await gate.wire() as wire:
        await wire.request("/v1/completions", {"prompt": ["a", "b"], "n": 2, "stream": True, "fake": stall})
        await wire.read_head()
        assert gate.stats()["in_flight"] == 4
        async with await gate.wire() as second:
            await second.request(CHAT, chat())
            await queued(gate, 1)
    async with await gate.wire() as wire:
        await wire.request("/v1/completions", {"prompt": "a", "n": 99, "stream": True, "fake": stall})
        assert (await wire.read_head())[0] == 200, "more than the limit is capped, not refused"
        assert gate.stats()["in_flight"] == 4
