"""The client against a small server in the same process: it keeps its schedule and notices how answers end."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import pytest
import uvloop

from loadtest.client import Address, NotServed, Shot, closed_loop, load, open_loop
from loadtest.outcomes import Outcome, Record
from loadtest.workload import SHORT, Request, endless

pytestmark = pytest.mark.slow

HEAD: Final = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN: Final = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
DONE: Final = b"data: [DONE]\n\n"
EARLY_S: Final = 0.002  # the timers of the loop count in milliseconds

Answering = Callable[[asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def shot(index: int, at_s: float) -> Shot:
    return load(Request(index, at_s, SHORT, 24, 8, str(index)), "tiny", "salt")


def serve_and(answer: Answering, socket: Path, act: Callable[[Address], Awaitable[list[Record]]]) -> list[Record]:
    """Run `act` against a server that gives `answer` to every request, on the loop that the experiment uses."""

    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        this = asyncio.current_task()
        assert this
        handlers.add(this)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):  # a client may give up at any time
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            await answer(writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def run() -> list[Record]:
        async with await asyncio.start_unix_server(handle, socket):
            records = await act(Address(socket=str(socket)))
            await asyncio.gather(*handlers)
            return records

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def ask(answer: Answering, socket: Path, *times: float, give_up_s: float = 5.0) -> list[Record]:
    shots = [shot(index, at_s) for index, at_s in enumerate(times)]
    return serve_and(answer, socket, lambda address: open_loop(address, shots, give_up_s, lambda _: None))


async def whole(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunk(TOKEN) + chunk(TOKEN + DONE) + chunk(b""))


def test_an_answer_is_read_to_its_end(tmp_path: Path) -> None:
    (record,) = ask(whole, tmp_path / "s", 0.0)
    assert record.outcome is Outcome.GOOD
    assert (record.status, record.events, record.done, record.error) == (200, 2, True, "")
    assert record.sent is not None
    assert record.first is not None
    assert record.end is not None
    assert -EARLY_S <= record.sent <= record.first <= record.end


def test_a_slow_answer_does_not_hold_up_the_requests_after_it(tmp_path: Path) -> None:
    async def slow(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(1.0)
        await whole(writer)

    times = [0.1 * number for number in range(6)]
    records = ask(slow, tmp_path / "s", *times)
    assert [record.scheduled for record in records] == times
    assert all(record.sent is not None and record.sent >= record.scheduled - EARLY_S for record in records)
    assert all((record.sent or 0.0) < (records[0].first or 0.0) for record in records)  # none waited for the first


def test_a_stream_that_the_server_drops_is_broken(tmp_path: Path) -> None:
    async def drops(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(TOKEN))

    (record,) = ask(drops, tmp_path / "s", 0.0)
    assert record.outcome is Outcome.BROKEN
    assert record.first is not None
    assert record.error.startswith("connection lost")


def test_a_refusal_keeps_its_status_and_reason(tmp_path: Path) -> None:
    async def refuses(writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 503 Service Unavailable\r\nX-Tidegate-Reason: queue_full\r\ncontent-length: 2\r\n\r\n{}"
        )

    (record,) = ask(refuses, tmp_path / "s", 0.0)
    assert (record.outcome, record.reason) == (Outcome.REFUSED, "queue_full")


def test_what_has_not_ended_when_the_client_gives_up_is_cut_and_the_server_sees_it_leave(tmp_path: Path) -> None:
    left: list[Exception] = []

    async def stalls(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(TOKEN))
        await asyncio.sleep(1.5)
        try:
            for _ in range(10):
                writer.write(chunk(TOKEN))
                await writer.drain()
                await asyncio.sleep(0.02)
        except ConnectionError as error:
            left.append(error)

    records = ask(stalls, tmp_path / "s", 0.0, 0.1, give_up_s=0.5)
    assert [record.outcome for record in records] == [Outcome.CUT, Outcome.CUT]
    assert all(record.events == 1 for record in records)
    assert len(left) == 2


def test_nobody_listening_is_broken_and_not_an_exception(tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        nowhere = Address(socket=str(tmp_path / "none"))
        (record,) = runner.run(open_loop(nowhere, [shot(0, 0.0)], 5.0, lambda _: None))
    assert record.outcome is Outcome.BROKEN
    assert record.error.startswith("connect: ")


def test_the_closed_loop_counts_what_ended_after_its_warm_up(tmp_path: Path) -> None:
    async def slowly(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)
        await whole(writer)

    shots = (load(request, "tiny", "salt") for request in endless("short", 1))
    ended = serve_and(slowly, tmp_path / "s", lambda address: closed_loop(address, shots, 3, 0.2, 3.0))
    assert ended
    assert all(record.whole and 0.2 <= (record.end or 0.0) < 3.2 for record in ended)


def test_the_closed_loop_refuses_to_measure_a_server_that_fails(tmp_path: Path) -> None:
    async def fails(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n")

    shots = (load(request, "tiny", "salt") for request in endless("short", 1))
    with pytest.raises(NotServed, match="500"):
        serve_and(fails, tmp_path / "s", lambda address: closed_loop(address, shots, 3, 0.2, 30.0))
