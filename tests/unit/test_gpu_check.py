"""The check for whoever has a GPU believes what the engine says, not only what the gateway does."""

import asyncio
import subprocess
from collections.abc import Callable
from typing import cast

import httpx
import pytest

from scripts.gpu_check import ABORTED, Failed, Run, aborts

TOLD = 'data: {"error": {"code": "deadline_exceeded"}}\n\n'


async def outcome(text: str, running: Callable[[int], int]) -> str:
    """What the check says where streams end in `text`, and the engine runs `running` of so many that are open."""
    open_streams = 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal open_streams
        if request.url.path == "/metrics":
            return httpx.Response(200, text=f'vllm:num_requests_running{{engine="0"}} {running(open_streams)}.0\n')
        open_streams += 1
        await asyncio.sleep(0.2)
        open_streams -= 1
        return httpx.Response(200, text=text)

    launcher = cast("subprocess.Popen[bytes]", None)  # which this check leaves alone
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://gateway") as client:
        return await aborts(Run(launcher, client))


async def test_deadlines_that_stop_the_engine_pass() -> None:
    assert f"{ABORTED} told; the engine, {ABORTED} at work" in await outcome(TOLD, lambda streams: streams)


async def test_requests_that_never_reach_the_engine_do_not_pass() -> None:
    with pytest.raises(Failed, match="nothing was seen at work"):
        await outcome(TOLD, lambda _: 0)


async def test_an_engine_that_goes_on_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.gpu_check.ABORT_S", 0.1)
    with pytest.raises(Failed, match="goes on with what nobody waits for"):
        await outcome(TOLD, lambda _: 1)


async def test_clients_that_are_not_told_do_not_pass() -> None:
    with pytest.raises(Failed, match=f"{ABORTED} of {ABORTED} were not told"):
        await outcome("data: [DONE]\n\n", lambda streams: streams)
