"""What goes out to a client together, and in which order."""

import asyncio
from typing import Any

import pytest

from app.connection import JOINED_BYTES, JoinedWrites


class Transport:
    """Notes what is written to it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closing = False
        self.aborted = False

    def write(self, data: bytes) -> None:
        assert not self.closing
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True

    def nothing(self, *_: Any) -> None:
        """Not used here."""

    get_extra_info = pause_reading = resume_reading = set_protocol = nothing


@pytest.fixture
def transport() -> Transport:
    return Transport()


@pytest.fixture
async def joined(transport: Transport) -> JoinedWrites:
    return JoinedWrites(transport, asyncio.get_running_loop())


async def test_head_and_body_written_in_one_turn_go_out_together(joined: JoinedWrites, transport: Transport) -> None:
    joined.write(b"head ")
    joined.write(b"body")
    assert transport.written == []
    await asyncio.sleep(0)
    assert transport.written == [b"head body"]


async def test_head_without_a_body_goes_out_at_the_end_of_the_turn(joined: JoinedWrites, transport: Transport) -> None:
    joined.write(b"head ")
    joined.write(b"")
    await asyncio.sleep(0)
    joined.write(b"body")
    await asyncio.sleep(0)
    assert transport.written == [b"head ", b"body"]


async def test_an_event_goes_out_at_once_but_after_what_was_written_before(
    joined: JoinedWrites, transport: Transport
) -> None:
    joined.write(b"head ")
    joined.write_now(b"event")
    assert transport.written == [b"head ", b"event"]
    await asyncio.sleep(0)
    assert len(transport.written) == 2


async def test_a_large_body_is_not_copied(joined: JoinedWrites, transport: Transport) -> None:
    large = bytes(JOINED_BYTES)
    joined.write(b"head ")
    joined.write(large)
    assert transport.written == [b"head ", large]
    assert transport.written[1] is large


async def test_what_was_written_goes_out_before_the_connection_closes(
    joined: JoinedWrites, transport: Transport
) -> None:
    joined.write(b"the end")
    joined.close()
    assert (transport.written, transport.closing) == ([b"the end"], True)


async def test_an_aborted_connection_takes_no_more(joined: JoinedWrites, transport: Transport) -> None:
    joined.write(b"too late")
    joined.abort()  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    assert (transport.written, transport.aborted) == ([], True)
