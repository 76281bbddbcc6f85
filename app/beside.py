"""Calls that take no slot, such as the list of models: forwarded beside the gate, behind a small cap of their own."""

import asyncio
from typing import Final

from app.call import Call
from app.errors import QUEUE_FULL, Refused
from app.forward import Forwarder, content_length
from app.house import House
from app.status import EngineStatus

MAX_AT_A_TIME: Final = 16
LIMIT_S: Final = 10.0


class Beside:
    """Serves them while the engine is up, at most `MAX_AT_A_TIME`, each within `LIMIT_S` seconds."""

    def __init__(self, status: EngineStatus, house: House, forwarder: Forwarder) -> None:
        self._status = status
        self._house = house
        self._forwarder = forwarder
        self._running = 0

    async def serve(self, call: Call) -> None:
        """Serve one call to its end.

        Raises:
            Refused: it is not served, or its end is an error.
            ClientLeft: nobody waits for an answer.
        """
        self._house.check_open()
        self._status.check_ready()
        if self._running >= MAX_AT_A_TIME:
            raise Refused(QUEUE_FULL, f"There are {self._running} calls of this kind already. Retry later.")
        visitor = self._house.visit(content_length(call))
        self._running += 1
        try:
            call.deadline.tighten(call.deadline.arrived + LIMIT_S)
            with call.interruptible():
                body = await self._forwarder.read_body(call, visitor, call.deadline.at)
                call.phase = "first byte"
                watcher = asyncio.create_task(call.watch())
                try:
                    await self._forwarder.send(call, body, visitor)
                finally:
                    watcher.cancel()
        finally:
            self._running -= 1
            visitor.leave()
