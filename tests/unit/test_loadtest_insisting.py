"""Users with an SDK's retries, against a small server: what is sent again, when, and what counts in the end."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path

import pytest
import uvloop

from loadtest.client import Address, load
from loadtest.insisting import Heard, Insisting, insisting
from loadtest.outcomes import Outcome, Record
from loadtest.workload import Kind, Request

pytestmark = pytest.mark.slow

KIND = Kind("short", (24, 24), (8, 8), limit_s=0.3)
BUSY = b"HTTP/1.1 503 Busy\r\nretry-after-ms: 50\r\ncontent-length: 0\r\n\r\n"
WHOLE = b'HTTP/1.1 200 OK\r\ncontent-length: 29\r\n\r\ndata: {"a":1}\n\ndata: [DONE]\n\n'

Reply = Callable[[int, asyncio.StreamWriter], Awaitable[None]]


def ask(reply: Reply, socket: Path, give_up_s: float = 20.0) -> tuple[Record, list[float]]:
    """One user of a server that answers the n-th request with `reply(n)`; the record, and when the requests came."""
    times: list[float] = []
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        this = asyncio.current_task()
        assert this
        handlers.add(this)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            times.append(asyncio.get_running_loop().time())
            await reply(len(times) - 1, writer)
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def run() -> list[Record]:
        shot = load(Request(0, 0.0, KIND, 24, 8, "1"), "tiny", "salt")
        async with await asyncio.start_unix_server(handle, socket):
            records = await insisting(Address(socket=str(socket)), [shot], give_up_s, lambda _: None)
            await asyncio.gather(*handlers)
            return records

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        (record,) = runner.run(run())
    return record, times


def test_a_refusal_is_sent_again_after_the_time_that_it_names_and_its_answer_counts(tmp_path: Path) -> None:
    async def reply(number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(BUSY if number < 2 else WHOLE)

    record, times = ask(reply, tmp_path / "s")
    assert (record.outcome, record.attempts) == (Outcome.GOOD, 3)
    assert all(later - earlier >= 0.045 for earlier, later in pairwise(times))


def test_after_two_retries_the_refusal_stands(tmp_path: Path) -> None:
    async def reply(_: int, writer: asyncio.StreamWriter) -> None:
        writer.write(BUSY)

    record, times = ask(reply, tmp_path / "s")
    assert (record.outcome, record.attempts, len(times)) == (Outcome.REFUSED, 3, 3)


def test_an_attempt_beyond_its_limit_is_given_up_and_sent_again(tmp_path: Path) -> None:
    async def reply(number: int, writer: asyncio.StreamWriter) -> None:
        if number == 0:
            await asyncio.sleep(0.8)
        writer.write(WHOLE)

    record, times = ask(reply, tmp_path / "s")
    assert (record.outcome, record.attempts, record.cut) == (Outcome.GOOD, 2, False)
    assert times[1] - times[0] >= 0.3


def test_a_user_who_is_cut_while_waiting_to_try_again_is_cut(tmp_path: Path) -> None:
    async def reply(_: int, writer: asyncio.StreamWriter) -> None:
        writer.write(BUSY.replace(b"ms: 50", b"ms: 60000"))

    record, _ = ask(reply, tmp_path / "s", give_up_s=0.5)
    assert (record.outcome, record.attempts) == (Outcome.CUT, 1)


def test_an_attempt_that_is_cut_in_its_middle_was_made_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cut(Heard):
        made = 0

        async def run(self, address: Address) -> None:
            Cut.made += 1
            if Cut.made == 2:
                raise asyncio.CancelledError
            self.record.status = 503
            self.headers["retry-after-ms"] = "1"

    async def run() -> Record:
        user = Insisting(load(Request(0, 0.0, KIND, 24, 8, "1"), "tiny", "salt"), 0.0)
        with contextlib.suppress(asyncio.CancelledError):
            await user.run(Address())
        return user.record

    monkeypatch.setattr("loadtest.insisting.Heard", Cut)
    record = asyncio.run(run())
    assert (record.outcome, record.attempts) == (Outcome.CUT, 2)
