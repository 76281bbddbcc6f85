"""Bytes go through as they are, both ways, however awkwardly they come; and no further than the client reads."""

import asyncio
import hashlib
import json
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Start
from tests.harness import COMPLETIONS, MESSAGES, RESPONSES, Gateway, body_for, chat, until
from tests.wire import CHAT, PATIENCE_S, Answer, Wire

pytestmark = pytest.mark.slow

TCP = {"tcp": True}
MIB = 1024 * 1024
AWKWARD: list[dict[str, Any]] = [
    {"chunk_bytes": 1},
    {"chunk_bytes": 7, "chunk_ms": 1},
    {"chunk_bytes": 1000, "coalesce": 5},
    {"coalesce": 20},
    {"crlf": True},
    {"crlf": True, "chunk_bytes": 1},
    {"comments": 3},
    {"size": 5 * MIB, "events": 1},
    {"size": 5 * MIB, "events": 1, "chunk_bytes": 10_000},
    {"gzip": True},
    {"gzip": True, "chunk_bytes": 3},
    {"framing": "length"},
    {"framing": "close"},
    {"drip_ms": 1},
    {"usage": True},
    {"events": 0},
    {"tag": "é漢字🙂\u2028"},
]


async def direct_and_through(gate: Gateway, route: str, body: dict[str, Any]) -> tuple[Answer, Answer]:
    """The same call to the engine itself and through the gateway."""
    assert gate.engine
    assert gate.engine.port
    async with await Wire.open(gate.engine.port) as wire:
        await wire.request(route, body)
        direct = await wire.answer()
    async with await gate.wire() as wire:
        await wire.request(route, body)
        return direct, await wire.answer()


@pytest.mark.parametrize("script", AWKWARD, ids=lambda script: ascii(script))
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
@pytest.mark.parametrize("stream", [True, False])
async def test_answer_is_the_engines_to_the_byte(
    gateway: Start, route: str, stream: bool, script: dict[str, Any]
) -> None:
    body = body_for(route, fake={"events": 8} | script, stream=stream)
    direct, through = await direct_and_through(gateway(engine=TCP), route, body)
    assert direct.whole
    assert through.whole
    assert through.body == direct.body
    assert through.status_code == direct.status_code
    for name in ("content-type", "content-encoding"):
        assert through.headers.get(name) == direct.headers.get(name)


@pytest.mark.parametrize("chunk_bytes", [0, 7])
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_a_stream_that_the_engine_closes_early_is_its_own_up_to_there(
    gateway: Start, route: str, chunk_bytes: int
) -> None:
    script = {"events": 8, "fault": "close", "at": 3} | ({"chunk_bytes": chunk_bytes} if chunk_bytes else {})
    direct, through = await direct_and_through(gateway(engine=TCP), route, body_for(route, fake=script, stream=True))
    assert not direct.whole
    assert b"w2" in direct.body
    assert through.body.startswith(direct.body)
    added = through.body.removeprefix(direct.body)
    assert added.startswith(b"event: error\ndata: {" if route == MESSAGES else b'data: {"error":')
    assert added.count(b"data: {") == 1


async def test_a_plain_answer_that_the_engine_closes_early_is_its_own_up_to_there(gateway: Start) -> None:
    body = chat(fake={"size": MIB, "events": 1, "fault": "close", "at": 0, "half": True})
    direct, through = await direct_and_through(gateway(engine=TCP), CHAT, body)
    assert not direct.whole
    assert not through.whole
    assert len(direct.body) > MIB // 3
    assert through.body == direct.body


@pytest.mark.parametrize(
    "data",
    [
        b'{ "model" :\t"m",\r\n "messages":[] , "max_tokens":4 }  ',
        '{"messages": [{"content": "é漢字🙂"}]}'.encode(),
        b'{"messages": [{"content": "\\u00e9\\ud83d\\ude42\\/"}], "x": 1.0e+02, "y": 12345678901234567890123}',
        b'{"messages": [], "messages": [1], "padding": "' + b"x" * 20 * MIB + b'"}',
    ],
    ids=["spaces", "utf8", "escapes", "20MB"],
)
@pytest.mark.parametrize("chunked", [False, True])
async def test_body_reaches_the_engine_to_the_byte(gateway: Start, data: bytes, chunked: bool) -> None:
    gate = gateway()
    async with await gate.wire() as wire:
        if chunked:
            await wire.start_chunked(CHAT)
            for start in range(0, len(data), 100_000):
                await wire.chunk(data[start : start + 100_000])
            await wire.chunk(b"")
        else:
            await wire.request(CHAT, data)
        assert (await wire.answer()).status_code == 200
    (entry,) = gate.engine.entries()
    assert entry["body_sha256"] == hashlib.sha256(data).hexdigest()


async def test_body_in_single_bytes(gateway: Start) -> None:
    gate = gateway()
    data = json.dumps(chat()).encode()
    async with await gate.wire() as wire:
        await wire.start_chunked(CHAT)
        for value in data:
            await wire.chunk(bytes([value]))
        await wire.chunk(b"")
        assert (await wire.answer()).status_code == 200


async def test_client_that_waits_for_100_continue(gateway: Start) -> None:
    gate = gateway()
    data = json.dumps(chat()).encode()
    async with await gate.wire() as wire:
        await wire.request(CHAT, b"", length=len(data), headers={"expect": "100-continue"})
        assert (await wire.read_head())[0] == 100
        await wire.send(data)
        assert (await wire.answer()).status_code == 200


async def test_expecting_client_is_refused_without_being_asked_for_its_body(gateway: Start) -> None:
    gate = gateway(max_body_bytes=100_000)
    async with await gate.wire() as wire:
        await wire.request(CHAT, b"", length=10 * MIB, headers={"expect": "100-continue"})
        assert (await wire.read_head())[0] == 413


@pytest.mark.parametrize(
    ("stream", "script", "name", "value"),
    [
        (True, {"headers": {"x-accel-buffering": "yes"}}, "x-accel-buffering", "no"),
        (True, {"content_type": "Text/Event-Stream; charset=utf-8"}, "x-accel-buffering", "no"),
        (False, {"status": 500, "headers": {"x-should-retry": "true"}}, "x-should-retry", "false"),
    ],
)
async def test_header_that_the_gateway_sets_stands_there_once(
    gateway: Start, stream: bool, script: dict[str, Any], name: str, value: str
) -> None:
    async with gateway().client() as client:
        answer = await client.post(CHAT, json=chat(stream=stream, fake=script))
    assert answer.headers.get_list(name) == [value]


@pytest.mark.parametrize("stream", [True, False])
async def test_pipelined_calls_are_answered_in_order(gateway: Start, stream: bool) -> None:
    gate = gateway(engine=TCP)
    scripts: list[dict[str, Any]] = [{"first_ms": 200, "tag": "a"}, {"tag": "b"}, {"first_ms": 50, "tag": "c"}]
    bodies = [chat(stream=stream, fake=script) for script in scripts]
    apart = [(await direct_and_through(gate, CHAT, body))[0].body for body in bodies]
    async with await gate.wire() as wire:
        head, calls = {"content-type": "application/json"}, b""
        for body in bodies:
            data = json.dumps(body).encode()
            calls += wire.head("POST", CHAT, head | {"content-length": str(len(data))}) + data
        await wire.send(calls)
        assert [(await wire.answer()).body for _ in bodies] == apart
    assert len({*apart}) == len(apart)


@pytest.mark.parametrize("stream", [True, False])
async def test_one_connection_serves_many_calls(gateway: Start, stream: bool) -> None:
    gate = gateway(engine=TCP)
    async with await gate.wire() as wire:
        for number in range(50):
            await wire.request(CHAT, chat(stream=stream, fake={"tag": f"<{number}>"}))
            answer = await wire.answer()
            assert answer.whole
            assert f"<{number}>".encode() in answer.body
    assert gate.engine.counts()["connections"] <= 3, "and few connections to the engine"


@pytest.mark.parametrize("after", ["close", "reset"])
async def test_engine_that_drops_idle_connections_is_never_felt(gateway: Start, after: str) -> None:
    gate = gateway(engine=TCP)
    async with gate.client() as client:
        for _ in range(30):
            answer = await client.post(CHAT, json=chat(fake={"after": after}))
            assert answer.status_code == 200
            await asyncio.sleep(
                0.05
            )  # what is sent before the engine has closed may have been worked on: that is a 502
    assert gate.engine.counts()["finished"] == 30


async def test_engine_that_closes_every_new_connection_at_once(gateway: Start) -> None:
    """One that answers nothing gets one more try on a fresh connection, then the client hears of it."""
    gate = gateway(fresh=True, engine=TCP)
    gate.engine.set(accept="close")
    gate.engine.cut(which="idle")
    async with gate.client() as client:
        answer = await client.post(CHAT, json=chat())
    assert answer.status_code in (502, 503)
    assert gate.engine.counts()["received"] == 0


@pytest.mark.parametrize("query", ["a=1&a=2", "", "a=%2F..%0d%0a", "?//@:[]|^`{}"])
async def test_query_reaches_the_engine_as_it_is(gateway: Start, query: str) -> None:
    gate = gateway()
    async with await gate.wire() as wire:
        await wire.request(f"{CHAT}?{query}", chat(fake={"tag": "q"}))
        assert (await wire.answer()).status_code == 200
    assert gate.engine.entry("q")["target"] == (f"{CHAT}?{query}" if query else CHAT)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leave", ["reset", "close"])
async def test_client_that_leaves_stops_the_engine(gateway: Start, leave: str, stream: bool) -> None:
    gate = gateway()
    async with await gate.wire() as wire:
        await wire.request(CHAT, chat(stream=stream, fake={"tag": "l", "events": 1000, "gap_ms": 20}))
        await until(lambda: gate.engine.entries("l") and gate.engine.entry("l")["events"] > 2)
        if leave == "reset":
            wire.reset()
        else:
            await wire.close()
        await until(lambda: gate.engine.entry("l")["outcome"] == "aborted")


async def test_stalled_reader_stops_the_engine_instead_of_filling_memory(gateway: Start) -> None:
    gate = gateway()
    size = 100 * MIB
    async with await gate.wire(receive_buffer=8192) as wire:
        await wire.request(CHAT, chat(stream=True, fake={"tag": "s", "events": 100, "size": size // 100}))
        seen: list[int] = []

        def settled() -> bool:
            seen.append(sum(entry["sent_bytes"] for entry in gate.engine.entries("s")))
            return seen[-1] > 0 and len(set(seen[-30:])) == 1

        await until(settled, "end of the engine's sending")
        assert seen[-1] < 16 * MIB, "what the engine has sent must be about what sockets hold"
        assert gate.stats()["in_flight"] == 1
        answer = await wire.answer(within=PATIENCE_S * 2)
    assert answer.whole
    assert len(answer.body) > size


async def test_stalled_reader_is_cut_at_its_deadline(gateway: Start) -> None:
    gate = gateway()
    script = {"tag": "s", "events": 100, "size": MIB}
    async with await gate.wire(receive_buffer=8192) as wire:
        await wire.request(CHAT, chat(stream=True, fake=script), headers={"x-request-timeout-ms": "3000"})
        await until(lambda: gate.engine.entries("s") and gate.engine.entry("s")["outcome"] == "aborted")
        gate.quiet()
        assert not (await wire.answer()).whole


async def test_http_1_0_client(gateway: Start) -> None:
    gate = gateway()
    data = json.dumps(chat(stream=True, fake={"events": 3})).encode()
    async with await gate.wire() as wire:
        head = wire.head("POST", CHAT, {"content-type": "application/json", "content-length": str(len(data))})
        await wire.send(head.replace(b"HTTP/1.1", b"HTTP/1.0") + data)
        assert (await wire.read_head())[0] == 200
        assert b"[DONE]" in await wire.reader.read()


@pytest.mark.parametrize(
    "head",
    [
        b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n{}{}{}",
        b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n{}",
        b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 2x\r\n\r\n{}",
        b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
        b"POST %b HTTP/1.1\r\nhost: x\r\n folded: y\r\ncontent-length: 2\r\n\r\n{}",
        b"POST %b HTTP/1.1\r\nhost : x\r\ncontent-length: 2\r\n\r\n{}",
        b"nonsense\r\n\r\n",
    ],
    ids=["both", "two lengths", "negative", "not a number", "two codings", "folded", "space", "nonsense"],
)
async def test_smuggling_shapes_never_reach_the_engine(gateway: Start, head: bytes) -> None:
    gate = gateway()
    async with await gate.wire() as wire:
        await wire.send(head.replace(b"%b", CHAT.encode()))
        wire.half_close()
        data = await wire.reader.read()
    assert data == b"" or data.startswith(b"HTTP/1.1 400")
    assert gate.engine.counts()["received"] == gate.engine.counts()["malformed"] == 0


async def test_engine_answer_before_the_body_is_in(gateway: Start) -> None:
    """An engine may refuse at the headers; its answer is the client's."""
    gate = gateway()
    gate.engine.defaults(early=True, status=413, body={"error": {"code": 413}})
    async with gate.client() as client:
        answer = await client.post(CHAT, json=chat("x" * 8 * MIB))
    assert (answer.status_code, answer.json()) == (413, {"error": {"code": 413}})


async def test_trailing_bytes_of_one_stream_never_show_in_the_next(gateway: Start) -> None:
    gate = gateway(engine=TCP)
    async with gate.client() as client:

        async def call(number: int) -> None:
            marker = f"<{number}>"
            text = (
                await client.post(CHAT, json=chat(stream=True, fake={"tag": marker, "events": 20, "coalesce": 3}))
            ).text
            assert text.count("<") == text.count(marker) > 20

        answers = await asyncio.gather(*(call(number) for number in range(40)), return_exceptions=True)
    assert [answer for answer in answers if answer is not None] == []


async def test_upstream_head_with_odd_but_legal_headers(gateway: Start) -> None:
    gate = gateway()
    extra = [
        ["x-two", "1"],
        ["x-two", "2"],
        ["X-Mixed-Case", "v"],
        ["connection", "x-hop"],
        ["x-hop", "1"],
        ["x-empty", ""],
    ]
    async with gate.client() as client:
        answer = await client.post(CHAT, json=chat(fake={"headers": extra}))
    assert answer.status_code == 200
    assert answer.headers.get_list("x-two") == ["1", "2"]
    assert (answer.headers["x-mixed-case"], answer.headers["x-empty"]) == ("v", "")
    assert "x-hop" not in answer.headers
    assert "uvicorn" not in str(answer.headers), "the engine's server name stays inside"


async def test_hundred_streams_at_once(gateway: Start) -> None:
    gate = gateway(max_in_flight=100)
    async with gate.client() as client:

        async def call() -> httpx.Response:
            return await client.post(CHAT, json=chat(stream=True, fake={"events": 20, "gap_ms": 100}))

        answers = await asyncio.gather(*(call() for _ in range(100)))
    assert {answer.content for answer in answers} == {answers[0].content}
    assert gate.engine.counts()["max_running"] == 100


async def test_event_stream_with_a_length_may_have_keep_alives_in_it(gateway: Start) -> None:
    """Their bytes don't count towards a length that the engine gave for its own."""
    gate = gateway(keepalive_s=0.2)
    body = chat(fake={"framing": "length", "events": 4, "gap_ms": 500}, stream=True)
    async with await gate.wire() as wire:
        await wire.request(CHAT, body)
        answer = await wire.answer()
    assert answer.whole
    assert b": keep-alive" in answer.body
    assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_client_that_pipelines_and_leaves_stops_the_stream(gateway: Start) -> None:
    gate = gateway()
    wire = await gate.wire()
    for _ in range(2):
        await wire.request(CHAT, chat(fake={"events": 400, "gap_ms": 50}, stream=True))
    await until(lambda: gate.stats()["in_flight"] == 1, "work at the engine")
    await wire.close()
    await until(lambda: gate.stats()["in_flight"] == 0, "its end")


async def test_client_that_pipelines_and_leaves_while_the_engine_is_silent_stops_the_engine(gateway: Start) -> None:
    """Nothing is written then that could fail, and who doesn't read doesn't see an end."""
    gate = gateway()
    async with await gate.wire() as wire:
        await wire.request(CHAT, chat(fake={"tag": "p", "fault": "stall", "at": "head"}))
        await until(lambda: gate.engine.entries("p"))
        await wire.request("/livez", method="GET")
        await asyncio.sleep(0.1)
        wire.reset()
    await until(lambda: gate.engine.entry("p")["outcome"] == "aborted", "an abort long before the deadline")
    gate.quiet()
