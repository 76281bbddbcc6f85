"""People who don't take no for an answer: each request with its own time limit and an SDK's retries."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from loadtest.client import Address, Exchange, Shot, open_loop
from loadtest.outcomes import Record
from loadtest.retries import pause

ANY_TIME_S: Final = 86_400.0


class Heard(Exchange):
    """An exchange that keeps the answer's headers, names in lower case."""

    def __init__(self, shot: Shot, start: float) -> None:
        super().__init__(shot, start)
        self.headers: dict[str, str] = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        super().on_header(name, value)


class Insisting:
    """One user. An attempt that takes longer than the request's limit is given up, as by a client's time-out, and sent
    again; so are refusals and failures, after the pause that the server asks for.

    `record` is that of the last attempt, with the first one's schedule. Its limit is gone: an attempt that ended whole
    was within it, and that is what the user waited for.
    """

    def __init__(self, shot: Shot, start: float) -> None:
        self._shot = shot
        self._start = start
        self._random = random.Random(shot.request.seed)
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.record: Record = Exchange(shot, start).record

    async def run(self, address: Address) -> None:
        """Attempt after attempt."""
        try:
            attempt = 0
            while (again := await self._attempt(address, attempt)) is not None:
                await asyncio.sleep(again)
                attempt += 1
        except asyncio.CancelledError:
            self.record.cut = True
            raise
        finally:
            if not self.over.done():
                self.over.set_result(None)

    async def _attempt(self, address: Address, attempt: int) -> float | None:
        """One attempt; seconds until the next, None for no other."""
        exchange = Heard(self._shot, self._start)
        self.record.attempts = attempt + 1  # counts even if it is cut in its middle
        try:
            async with asyncio.timeout(self._shot.request.kind.limit_s):
                await exchange.run(address)
        except TimeoutError:
            pass  # the record says so
        seen = exchange.record
        self.record = replace(
            seen, attempts=attempt + 1, limit_s=ANY_TIME_S, sent=seen.sent if attempt == 0 else self.record.sent
        )
        if seen.whole:
            return None
        return pause(None if seen.cut else seen.status, exchange.headers, attempt, self._random.random())


async def insisting(
    address: Address, shots: Sequence[Shot], give_up_s: float, tell: Callable[[str], None]
) -> list[Record]:
    """The open loop, with such users."""
    return await open_loop(address, shots, give_up_s, tell, Insisting)
