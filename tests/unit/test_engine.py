"""The client of the engine, against a peer that the test plays itself: every framing, every way to break off."""

import asyncio
import contextlib
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from app.engine import HIGH_WATER_BYTES, MAX_HEAD_BYTES, Answer, EngineConnection, EngineStream, EngineTransport

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
PATIENCE_S = 20.0
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
ANSWERS = {
    "content-length": (b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\nhello world", b"hello world"),
    "chunked": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\n world\r\n0\r\n\r\n",
        b"hello world",
    ),
    "chunked with trailers": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nx-checksum: 1\r\n\r\n",
        b"hello",
    ),
    "nothing": (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b""),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    "after 100 Continue": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK, b"ok"),
}
UNTIL_CLOSE = {
    "HTTP/1.1": b"HTTP/1.1 200 OK\r\n\r\nhello",
    "HTTP/1.1, said so": b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhello",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\nserver: x\r\n\r\nhello",
}
each_answer = pytest.mark.parametrize("name", ANSWERS)


class Peer:
    """One connection, seen from the engine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def request(self) -> tuple[bytes, bytes]:
        """Head and body of the next request."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: ")), b": 0")
        return head, await self.reader.readexactly(int(length.partition(b": ")[2]))

    async def send(self, data: bytes, piece: int = 0) -> None:
        """Write, in pieces that arrive one by one if told so."""
        for begin in range(0, len(data), piece or len(data)):
            self.writer.write(data[begin : begin + (piece or len(data))])
            await asyncio.sleep(0)

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def gone(self) -> None:
        """Wait until the gateway has cut the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass


class Engine:
    """Takes connections; the test answers them."""

    def __init__(self) -> None:
        self.url = ""
        self.accepted = 0
        self._peers: asyncio.Queue[Peer] = asyncio.Queue()
        self._all: list[Peer] = []

    def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._all.append(Peer(reader, writer))
        self._peers.put_nowait(self._all[-1])

    async def peer(self) -> Peer:
        """The next new connection."""
        return await self._peers.get()

    async def close(self) -> None:
        for peer in self._all:
            peer.close()
            with contextlib.suppress(ConnectionError):
                await peer.writer.wait_closed()


@pytest.fixture(autouse=True)
async def _no_hang() -> AsyncIterator[None]:
    """Ends a test that waits for what never comes; uvloop doesn't let pytest's own timer do that."""
    loop = asyncio.get_running_loop()
    timer = loop.call_later(PATIENCE_S, lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
    yield
    timer.cancel()


@pytest.fixture(params=["tcp", "unix"])
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Engine]:
    engine = Engine()
    if request.param == "unix":
        server = await asyncio.start_unix_server(engine.take, tmp_path / "e.sock")
        engine.url = f"unix://{tmp_path}/e.sock"
    else:
        server = await asyncio.start_server(engine.take, "127.0.0.1", 0)
        engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield engine
    await engine.close()
    server.close()
    await server.wait_closed()


@pytest.fixture
async def transport(engine: Engine) -> AsyncIterator[EngineTransport]:
    transport = EngineTransport(engine.url)
    yield transport
    await transport.aclose()
    await until(lambda: not transport._open)


async def until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110 - nobody is there to set an event
        await asyncio.sleep(0.001)


def ask(
    transport: EngineTransport, body: bytes = b"{}", path: str = "/v1/completions", **more: Any
) -> asyncio.Task[Answer]:
    headers = [(b"Content-Length", b"%d" % len(body)), (b"X-Odd", b"a, b")]
    asking = asyncio.create_task(transport.ask("POST", path.encode(), headers, [body], **more))
    del body
    asking.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody asks when a test has failed
    return asking


def held_by_nobody_else(body: bytes) -> bool:
    """Whether only the calling test has a name for it."""
    other = bytes(9)
    return sys.getrefcount(body) - 1 == sys.getrefcount(other)


async def read(answer: Answer) -> bytes:
    """The whole body; then the exchange is over."""
    try:
        return b"".join([part async for part in answer.stream])
    finally:
        answer.stream.close()


async def exchange(transport: EngineTransport, engine: Engine, answer: bytes = OK) -> Peer:
    """One exchange on a new connection."""
    asking = ask(transport)
    peer = await engine.peer()
    await peer.request()
    await peer.send(answer)
    await read(await asking)
    return peer


async def next_one_is_good(transport: EngineTransport, engine: Engine) -> None:
    """Whatever has happened, another request gets its answer on a connection of its own."""
    await exchange(transport, engine)


async def test_is_a_transport_for_httpx(transport: EngineTransport, engine: Engine) -> None:
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        asking = asyncio.create_task(client.get("/metrics", params={"a": "b"}))
        peer = await engine.peer()
        head, _ = await peer.request()
        assert head.startswith(b"GET /metrics?a=b HTTP/1.1\r\nhost: ")
        assert head.lower().count(b"\r\nhost: ") == 1
        await peer.send(OK)
        assert (await asking).text == "ok"


class TestRequest:
    async def test_reaches_the_engine_as_it_was_given(self, transport: EngineTransport, engine: Engine) -> None:
        asking = ask(transport, b'{"a": 1}', "/v1/messages?beta=true&x=%2F")
        peer = await engine.peer()
        head, body = await peer.request()
        host = b"localhost" if engine.url.startswith("unix") else engine.url.removeprefix("http://").encode()
        assert head == (
            b"POST /v1/messages?beta=true&x=%2F HTTP/1.1\r\n"
            b"host: " + host + b"\r\nContent-Length: 8\r\nX-Odd: a, b\r\n\r\n"
        )
        assert body == b'{"a": 1}'
        await peer.send(OK)
        await read(await asking)

    async def test_goes_below_the_path_of_the_engines_address(self, engine: Engine) -> None:
        if engine.url.startswith("unix"):
            return
        transport = EngineTransport(f"http://user:pw@{engine.url.removeprefix('http://')}/base")
        asking = ask(transport)
        peer = await engine.peer()
        head, _ = await peer.request()
        assert head.startswith(b"POST /base/v1/completions HTTP/1.1\r\nhost: 127.0.0.1:")
        await peer.send(OK)
        await read(await asking)
        await transport.aclose()

    @pytest.mark.parametrize("how", ["close", "reset", "while it is made"])
    async def test_goes_to_a_second_connection_where_the_first_is_closed_before_anything_is_sent(
        self, transport: EngineTransport, engine: Engine, monkeypatch: pytest.MonkeyPatch, how: str
    ) -> None:
        dial, dialled = transport._dial, 0

        async def closed_at_once() -> EngineConnection:
            nonlocal dialled
            dialled += 1
            connection = await dial()
            if dialled == 1:
                await until(lambda: connection.ended)
                if how == "while it is made":
                    raise ConnectionResetError
            return connection

        monkeypatch.setattr(transport, "_dial", closed_at_once)
        asking = ask(transport)
        first = await engine.peer()
        first.close() if how == "close" else first.reset()
        second = await engine.peer()
        await second.request()
        await second.send(OK)
        assert await read(await asking) == b"ok"
        assert dialled == 2

    async def test_has_no_third_connection(
        self, transport: EngineTransport, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dial = transport._dial

        async def closed_at_once() -> EngineConnection:
            connection = await dial()
            (await engine.peer()).close()
            await until(lambda: connection.ended)
            return connection

        monkeypatch.setattr(transport, "_dial", closed_at_once)
        with pytest.raises(httpx.ConnectError, match="closes new connections"):
            await ask(transport)
        assert engine.accepted == 2

    @pytest.mark.parametrize("url", ["http://127.0.0.1:9", "unix:///nowhere/e.sock", "http://name.invalid:80"])
    async def test_without_an_engine_fails_as_not_connected(self, url: str) -> None:
        with pytest.raises(httpx.ConnectError):
            await ask(EngineTransport(url))


class TestAnswer:
    @each_answer
    @pytest.mark.parametrize("piece", [0, 1])
    async def test_is_relayed_whole_however_it_is_framed_and_cut(
        self, name: str, piece: int, transport: EngineTransport, engine: Engine
    ) -> None:
        raw, body = ANSWERS[name]
        asking = ask(transport)
        peer = await engine.peer()
        await peer.request()
        sending = asyncio.create_task(peer.send(raw, piece))
        answer = await asking
        assert answer.status == (204 if name == "no content" else 200)
        assert await read(answer) == body
        await sending

    async def test_has_no_trailers_among_its_headers(self, transport: EngineTransport, engine: Engine) -> None:
        asking = ask(transport)
        await (await engine.peer()).send(ANSWERS["chunked with trailers"][0])
        answer = await asking
        assert await read(answer) == b"hello"
        assert answer.headers == [(b"transfer-encoding", b"chunked")]

    @pytest.mark.parametrize("name", UNTIL_CLOSE)
    async def test_without_a_length_ends_with_the_connection(
        self, name: str, transport: EngineTransport, engine: Engine
    ) -> None:
        asking = ask(transport)
        peer = await engine.peer()
        await peer.request()
        await peer.send(UNTIL_CLOSE[name], 1)
        peer.close()
        assert await read(await asking) == b"hello"
        await next_one_is_good(transport, engine)

    async def test_comes_piece_by_piece_as_the_engine_writes_it(
        self, transport: EngineTransport, engine: Engine
    ) -> None:
        asking = ask(transport)
        peer = await engine.peer()
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Two: 1\r\nx-two: 2\r\n\r\n")
        answer = await asking
        assert answer.headers == [(b"transfer-encoding", b"chunked"), (b"x-two", b"1"), (b"x-two", b"2")]
        for number in range(3):
            await peer.send(b"8\r\nevent %d\n\r\n" % number)
            assert await answer.stream.read() == b"event %d\n" % number
        await peer.send(b"0\r\n\r\n")
        assert await answer.stream.read() == await answer.stream.read() == b""
        answer.stream.close()

    async def test_can_be_waited_for_with_a_break(self, transport: EngineTransport, engine: Engine) -> None:
        asking = ask(transport)
        peer = await engine.peer()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n")
        stream = (await asking).stream
        asyncio.get_running_loop().call_later(0.01, stream.poke)
        assert await stream.read() is None
        await peer.send(b"ab")
        assert await stream.read() == b"ab"
        stream.poke()
        assert await stream.read() is None
        await peer.send(b"cd")
        assert [await stream.read(), await stream.read()] == [b"cd", b""]
        stream.close()

    async def test_may_come_before_the_body_is_sent(self, transport: EngineTransport, engine: Engine) -> None:
        asking = ask(transport, b"x" * 8_000_000)
        peer = await engine.peer()
        await peer.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        answer = await asking
        assert (answer.status, await read(answer)) == (413, b"no")
        await peer.gone()
        await next_one_is_good(transport, engine)

    async def test_with_a_head_in_two_pieces_and_a_large_body_is_no_large_head(self) -> None:
        connection = EngineConnection(EngineTransport("http://engine"))
        connection.data_received(b"HTTP/1.1 2")
        connection.data_received(b"00 OK\r\ncontent-length: 1000000\r\n\r\n" + b"x" * MAX_HEAD_BYTES)
        assert connection.status == 200
        assert await connection.read() == b"x" * MAX_HEAD_BYTES

    @pytest.mark.parametrize("chunk", [1, 30])
    async def test_in_chunks_of_any_size_cut_anywhere_is_what_was_sent(self, chunk: int) -> None:
        body = bytes(range(200))
        chunks = [body[begin : begin + chunk] for begin in range(0, len(body), chunk)]
        wire = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        wire += b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in chunks) + b"0\r\n\r\n"
        for cut in range(1, len(wire), 3):
            connection = EngineConnection(EngineTransport("http://engine"))
            for begin in range(0, len(wire), cut):
                connection.data_received(wire[begin : begin + cut])
            assert [await connection.read(), await connection.read()] == [body, b""]


class Sink:
    """Collects what is pumped; full from the first piece on if told so."""

    def __init__(self, *, full: bool = False) -> None:
        self.full = full
        self.data = b""

    def __call__(self, data: bytes) -> bool:
        self.data += data
        return not self.full


class TestPumping:
    """`pump` hands an answer on in the moment in which it comes."""

    @staticmethod
    async def begin(transport: EngineTransport, engine: Engine) -> tuple[Peer, EngineStream]:
        asking = ask(transport)
        peer = await engine.peer()
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n")
        return peer, (await asking).stream

    async def test_gives_what_has_come_and_what_comes_to_the_end(
        self, transport: EngineTransport, engine: Engine
    ) -> None:
        peer, stream = await self.begin(transport, engine)
        sink = Sink()
        pumping = asyncio.create_task(stream.pump(sink))
        for count, piece in enumerate((b"cd", b"ef"), start=1):
            await until(lambda: len(sink.data) >= 2 * count)  # noqa: B023
            await peer.send(b"2\r\n%s\r\n" % piece)
        await until(lambda: sink.data == b"abcdef")
        assert not pumping.done()
        await peer.send(b"0\r\n\r\n")
        assert await pumping is True
        assert sink.data == b"abcdef"
        stream.close()
        assert len(transport._idle) == 1  # kept for the next

    async def test_stops_while_the_sink_is_full(self, transport: EngineTransport, engine: Engine) -> None:
        peer, stream = await self.begin(transport, engine)
        sink = Sink(full=True)
        for _ in range(3):
            assert await stream.pump(sink) is False
            await peer.send(b"2\r\nab\r\n")
        assert sink.data[:4] == b"abab"
        assert len(sink.data) < 8  # the last is left for the next call
        await peer.send(b"0\r\n\r\n")
        sink.full = False
        assert await stream.pump(sink) is True
        assert sink.data == b"ab" * 4

    async def test_into_a_full_sink_gives_it_no_more_in_the_same_turn_and_loses_nothing(self) -> None:
        connection = EngineConnection(EngineTransport("http://engine"))
        connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        sink = Sink(full=True)
        pumping = asyncio.create_task(connection.pump(sink))
        await asyncio.sleep(0)
        for number in range(5):
            connection.data_received(b"1\r\n%d\r\n" % number)
        connection.data_received(b"0\r\n\r\n")
        assert sink.data == b"0"
        assert await pumping is False
        sink.full = False
        assert await connection.pump(sink) is True
        assert sink.data == b"01234"

    async def test_that_nobody_goes_on_with_reads_no_more_than_its_bound(
        self, transport: EngineTransport, engine: Engine
    ) -> None:
        peer, stream = await self.begin(transport, engine)
        assert await stream.pump(Sink(full=True)) is False
        for _ in range(500):
            peer.writer.write(b"10000\r\n" + bytes(65536) + b"\r\n")
        await asyncio.sleep(0.1)
        assert stream._connection._unread <= HIGH_WATER_BYTES + 512 * 1024

    async def test_ends_at_a_poke_and_goes_on(self, transport: EngineTransport, engine: Engine) -> None:
        peer, stream = await self.begin(transport, engine)
        sink = Sink()
        asyncio.get_running_loop().call_later(0.01, stream.poke)
        assert await stream.pump(sink) is False
        await peer.send(b"2\r\ncd\r\n0\r\n\r\n")
        assert await stream.pump(sink) is True
        assert sink.data == b"abcd"

    @pytest.mark.parametrize("end", ["close", "reset", "garbage"])
    async def test_of_an_answer_that_breaks_off_is_an_error_after_what_has_come(
        self, end: str, transport: EngineTransport, engine: Engine
    ) -> None:
        peer, stream = await self.begin(transport, engine)
        sink = Sink()
        pumping = asyncio.create_task(stream.pump(sink))
        await until(lambda: sink.data)
        if end == "garbage":
            await peer.send(b"2\r\ncd\r\nnot a chunk\r\n")
        else:
            getattr(peer, end)()
        with pytest.raises(httpx.RemoteProtocolError):
            await pumping
        assert sink.data == (b"abcd" if end == "garbage" else b"ab")
        stream.close()
        await next_one_is_good(transport, engine)


class TestBreakingOff:
    @pytest.mark.parametrize("end", ["close", "reset"])
    @pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 2", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n"])
    async def test_before_a_complete_head_is_an_error(
        self, sent: bytes, end: str, transport: EngineTransport, engine: Engine
    ) -> None:
        asking = ask(transport)
        peer = await engine.peer()
        await peer.request()
        if sent:
            await peer.send(sent)
        getattr(peer, end)()
        with pytest.raises(httpx.RemoteProtocolError):
            await asking
        await next_one_is_good(transport, engine)

    @pytest.mark.parametrize("end", ["close", "reset"])
    @pytest.mark.parametrize("framing", [b"content-length: 9", b"transfer-encoding: chunked"])
    async def test_inside_a_body_is_an_error_after_what_has_come(
        self, framing: bytes, end: str, transport: EngineTransport, engine: Engine
    ) -> None:
        asking = ask(transport)
        peer = await engine.peer()
        await peer.request()
        await peer.send(
            b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n" + (b"5\r\n" * (b"chunked" in framing)) + b"hello"
        )
        stream = (await asking).stream
        assert await stream.read() == b"hello"
        getattr(peer, end)()
        with pytest.raises(httpx.RemoteProtocolError):
            await stream.read()
        stream.close()
        await next_one_is_good(transport, engine)

    async def test_a_reset_does_not_end_a_body_without_a_length(
        self, transport: EngineTransport, engine: Engine
    ) -> None:
        if engine.url.startswith("unix"):
            return  # no resets there
        asking = ask(transport)
        peer = await engine.peer()
        await peer.request()
        await peer.send(UNTIL_CLOSE["HTTP/1.1"])
        stream = (await asking).stream
        assert await stream.read() == b"hello"
        peer.reset()
        with pytest.raises(httpx.RemoteProtocolError):
            await stream.read()
        stream.close()

    @pytest.mark.parametrize(
        "answer",
        [
            b"SSH-2.0-OpenSSH_9.6\r\n",
            b"\x00" * 100,
            b"HTTP/1.1 abc\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
            b"HTTP/1.1 200 OK\r\n" + b"x-long: " + b"x" * (MAX_HEAD_BYTES + 1),
            b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * (MAX_HEAD_BYTES // 5),
        ],
        ids=["ssh", "zeros", "no status", "no colon", "no length", "upgrade", "one huge header", "many headers"],
    )
    async def test_an_answer_that_is_no_http_is_an_error_and_the_connection_is_cut(
        self, answer: bytes, transport: EngineTransport, engine: Engine
    ) -> None:
        asking = ask(transport)
        peer = await engine.peer()
        await peer.request()
        await peer.send(answer)
        with pytest.raises(httpx.RemoteProtocolError):
            await asking
        await peer.gone()
        await next_one_is_good(transport, engine)

    async def test_a_body_that_stops_being_http_is_an_error(self, transport: EngineTransport, engine: Engine) -> None:
        asking = ask(transport)
        peer = await engine.peer()
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\nrubbish\r\n")
        answer = await asking
        with pytest.raises(httpx.RemoteProtocolError):
            await read(answer)
        await peer.gone()


class TestReuse:
    @each_answer
    async def test_a_connection_whose_answer_was_read_to_its_end_serves_the_next_request(
        self, name: str, transport: EngineTransport, engine: Engine
    ) -> None:
        peer = await exchange(transport, engine, ANSWERS[name][0])
        for _ in range(3):
            asking = ask(transport)
            await peer.request()
            await peer.send(OK)
            assert await read(await asking) == b"ok"
        assert engine.accepted == 1

    async def test_requests_at_the_same_time_have_connections_of_their_own(
        self, transport: EngineTransport, engine: Engine
    ) -> None:
        asking = [ask(transport) for _ in range(3)]
        for peer in [await engine.peer() for _ in range(3)]:
            await peer.request()
            await peer.send(OK)
        assert [await read(answer) for answer in await asyncio.gather(*asking)] == [b"ok"] * 3

    @pytest.mark.parametrize(
        "answer",
        [b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok", OK.replace(b"1.1", b"1.0")],
        ids=["connection: close", "HTTP/1.0"],
    )
    async def test_is_not_tried_when_the_engine_does_not_want_it(
        self, answer: bytes, transport: EngineTransport, engine: Engine
    ) -> None:
        peer = await exchange(transport, engine, answer)
        await peer.gone()
        await next_one_is_good(transport, engine)

    async def test_is_not_tried_on_a_connection_that_has_been_idle_for_long(
        self, transport: EngineTransport, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        peer = await exchange(transport, engine)
        monkeypatch.setattr("app.engine.IDLE_S", 0.0)
        await asyncio.sleep(0.01)
        await next_one_is_good(transport, engine)
        await peer.gone()

    @pytest.mark.parametrize("end", ["close", "reset"])
    async def test_is_not_tried_on_a_connection_that_the_engine_has_closed(
        self, end: str, transport: EngineTransport, engine: Engine
    ) -> None:
        peer = await exchange(transport, engine)
        getattr(peer, end)()
        await until(lambda: not transport._open)
        await next_one_is_good(transport, engine)

    async def test_is_not_tried_on_a_connection_whose_end_is_in_but_not_yet_noticed(
        self, transport: EngineTransport, engine: Engine
    ) -> None:
        peer = await exchange(transport, engine)
        with socket.socket(fileno=os.dup(peer.writer.get_extra_info("socket").fileno())) as sock:
            sock.shutdown(socket.SHUT_RDWR)
        await next_one_is_good(transport, engine)

    @pytest.mark.parametrize("more", [b"x", OK, b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n"])
    async def test_is_not_tried_after_an_answer_that_nobody_asked_for(
        self, more: bytes, transport: EngineTransport, engine: Engine
    ) -> None:
        peer = await exchange(transport, engine)
        await peer.send(more)
        await peer.gone()
        await next_one_is_good(transport, engine)

    @pytest.mark.parametrize("more", [b"x", OK.replace(b"ok", b"no"), b"HTTP/1.1 500 No\r\nset-cookie: x"])
    async def test_what_follows_an_answer_at_once_is_not_taken_for_a_part_of_it_or_of_the_next(
        self, more: bytes, transport: EngineTransport, engine: Engine
    ) -> None:
        asking = ask(transport)
        peer = await engine.peer()
        await peer.request()
        await peer.send(OK + more)
        answer = await asking
        assert answer.headers == [(b"content-length", b"2")]
        assert (answer.status, await read(answer)) == (200, b"ok")
        await peer.gone()
        await next_one_is_good(transport, engine)

    async def test_an_answer_that_is_closed_twice_is_over_once(
        self, transport: EngineTransport, engine: Engine
    ) -> None:
        asking = ask(transport)
        peer = await engine.peer()
        await peer.request()
        await peer.send(OK)
        first = await asking
        await read(first)
        first.stream.close()
        both = [ask(transport), ask(transport)]
        other = await engine.peer()  # not two requests on one connection
        for one in (peer, other):
            await one.request()
            first.stream.close()
            await one.send(OK)
        assert [await read(answer) for answer in await asyncio.gather(*both)] == [b"ok", b"ok"]


class TestAbort:
    async def test_closing_an_unfinished_answer_cuts_the_connection(
        self, transport: EngineTransport, engine: Engine
    ) -> None:
        asking = ask(transport)
        peer = await engine.peer()
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
        answer = await asking
        assert await answer.stream.read() == b"hello"
        answer.stream.close()
        await peer.gone()
        await next_one_is_good(transport, engine)

    @pytest.mark.parametrize("body", [b"{}", b"x" * 8_000_000], ids=["small", "large"])
    async def test_giving_up_the_wait_for_a_head_cuts_the_connection(
        self, body: bytes, transport: EngineTransport, engine: Engine
    ) -> None:
        asking = ask(transport, body)
        peer = await engine.peer()
        await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await peer.gone()
        await next_one_is_good(transport, engine)

    async def test_closing_the_transport_cuts_every_connection(
        self, transport: EngineTransport, engine: Engine
    ) -> None:
        idle = await exchange(transport, engine)
        asking = [ask(transport), ask(transport)]
        await idle.request()
        busy = await engine.peer()
        await busy.request()
        await transport.aclose()
        for task in asking:
            with pytest.raises(httpx.RemoteProtocolError):
                await task
        await idle.gone()
        await busy.gone()


class TestFlow:
    async def test_an_answer_that_nobody_reads_is_not_piled_up(
        self, transport: EngineTransport, engine: Engine
    ) -> None:
        size = 32 * 1024 * 1024
        asking = ask(transport)
        peer = await engine.peer()
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        stream = (await asking).stream
        for _ in range(size // 65536):
            peer.writer.write(b"0123456789abcdef" * 4096)
        await asyncio.sleep(0.1)
        assert stream._connection._unread <= HIGH_WATER_BYTES + 512 * 1024
        got = 0
        while data := await stream.read():
            got += len(data)
        assert got == size
        stream.close()
        asking = ask(transport)
        await peer.request()
        await peer.send(OK)
        assert await read(await asking) == b"ok"

    async def test_a_body_is_held_until_the_engine_has_it_and_not_longer(
        self, transport: EngineTransport, engine: Engine
    ) -> None:
        sent: list[bool] = []
        body = bytes(8_000_000)
        asking = ask(transport, body, on_sent=lambda: sent.append(True))
        peer = await engine.peer()
        await asyncio.sleep(0.05)
        assert sent == []
        _, received = await peer.request()
        assert len(received) == len(body)
        await until(lambda: sent)
        assert held_by_nobody_else(body)
        await peer.send(OK)
        assert await read(await asking) == b"ok"
        assert sent == [True]

    @pytest.mark.parametrize("size", [0, 2, 60_000])
    async def test_a_small_body_counts_as_sent_before_the_answer(
        self, size: int, transport: EngineTransport, engine: Engine
    ) -> None:
        sent: list[bool] = []
        asking = ask(transport, bytes(size), on_sent=lambda: sent.append(True))
        peer = await engine.peer()
        await peer.request()
        assert sent == [True]
        await peer.send(OK)
        await read(await asking)
        assert sent == [True]

    async def test_a_body_that_the_engine_never_takes_is_let_go_with_the_connection(
        self, transport: EngineTransport, engine: Engine
    ) -> None:
        body = bytes(8_000_000)
        asking = ask(transport, body)
        peer = await engine.peer()
        peer.close()
        with pytest.raises(httpx.RemoteProtocolError):
            await asking
        del asking
        await until(lambda: held_by_nobody_else(body))
