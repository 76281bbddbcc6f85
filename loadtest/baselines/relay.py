"""The least that Python can do between client and engine: raw ASGI on one side, aiohttp on the other, no admission.

ENGINE_URL=http://127.0.0.1:8001 uvicorn loadtest.baselines.relay:app --port 8000 --no-access-log
"""

import os
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

PASSED_ON = ("content-type",)


class Relay:
    """An ASGI application that sends every request to one engine and its answer back."""

    def __init__(self, engine_url: str) -> None:
        self._url = engine_url
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._relay(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        async with aiohttp.ClientSession(
            self._url, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        ) as self._session:
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._session is not None
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {"content-type": "application/json"}
        async with self._session.request(scope["method"], scope["path"], data=body, headers=headers) as answer:
            head = [
                (name.lower().encode(), answer.headers[name].encode()) for name in PASSED_ON if name in answer.headers
            ]
            await send({"type": "http.response.start", "status": answer.status, "headers": head})
            async for data in answer.content.iter_any():
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


app = Relay(os.environ.get("ENGINE_URL", "http://127.0.0.1:8001"))
