"""The page in a real browser, in front of a real engine that is full, dies, and comes back."""

import json
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser import chromium, tab
from tests.engine.clients import ENDLESS
from tests.engine.launched import START_S, Launcher
from tests.harness import wait_until

if TYPE_CHECKING:
    from playwright.async_api import Route

pytestmark = pytest.mark.timeout(4 * START_S)


@pytest.fixture
def one() -> Iterator[Launcher]:
    launcher = Launcher(environment={"TIDEGATE_MAX_IN_FLIGHT": "2", "TIDEGATE_MAX_QUEUE": "0"})
    try:
        yield launcher
        session = launcher.engine()
        launcher.kill()
        launcher.leaves_nothing(session)
    finally:
        launcher.close()


async def without_an_end(route: "Route") -> None:
    """A random model may end its answer at any token, and its likeliest one may be one that isn't shown."""
    body: dict[str, Any] = {**json.loads(route.request.post_data or "{}"), "ignore_eos": True, "temperature": 1}
    await route.continue_(post_data=body)


async def test_the_page_streams_tells_a_refusal_and_survives_a_restart_of_the_engine(one: Launcher) -> None:
    async with chromium() as browser:
        wait_until(lambda: not one.running or one.ask("/livez")[0] == 200, "the gateway", within=START_S)
        url = f"http://127.0.0.1:{one.port}"
        async with tab(browser, url) as first, tab(browser, url) as second, tab(browser, url) as third:
            await third.shows("#state", "Engine starting")
            await third.shows("#state", "Engine ready", within_ms=START_S * 1000)
            assert await third.page.locator("#notice").is_hidden()
            for each in (first, second, third):
                await each.page.route("**/v1/chat/completions", without_an_end)
            await third.ask("What is the capital of France?", tokens=30)
            await third.shows("#outcome", "Done: ")
            assert await third.text("#answer")
            assert await third.text("#t-lane") == "short"
            assert float(await third.text("#t-rate")) > 0
            assert await third.faults() == []
            assert third.errors == []

            for busy in (first, second):
                await busy.ask("Go on for ever.", tokens=ENDLESS)
                await busy.until("document.getElementById('answer').textContent.length > 20")
            await third.shows("figure", "2 of 2 slots")
            await third.ask()
            await third.shows("#outcome", "Queue full (503)")
            await third.shows("#outcome", "It may be sent again in ")

            os.kill(one.engine("VLLM::EngineCore")[0], signal.SIGKILL)
            await third.shows("#state", "Engine restarting")
            for busy in (first, second):
                await busy.shows("#outcome", "The answer broke off")
            await third.shows("#state", "Engine ready", within_ms=START_S * 1000)
            await third.shows("#engine", "ago")
            assert await third.row("engine", "Restarts") == "1"
            await third.ask()
            await third.shows("#outcome", "Done: ")
            assert not [error for error in third.errors if not error.startswith("Failed to load resource")]
            assert third.elsewhere == []
