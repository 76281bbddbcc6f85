"""The page at `/` in a real browser."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.browser import Tab, chromium, tab
from tests.gateway.conftest import Start
from tests.harness import ONE_LANE, Gateway, chat, occupied, queued, until
from tests.wire import CHAT

if TYPE_CHECKING:
    from playwright.async_api import Browser

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
LOOKS: list[dict[str, Any]] = [
    {"color_scheme": "light", "viewport": {"width": 1280, "height": 800}},
    {"color_scheme": "dark", "viewport": {"width": 1280, "height": 800}},
    {"color_scheme": "light", "viewport": {"width": 360, "height": 740}, "has_touch": True},
    {"color_scheme": "dark", "viewport": {"width": 320, "height": 640}, "reduced_motion": "reduce"},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator["Browser"]:
    async with chromium() as one:
        yield one


async def test_it_shows_who_runs_and_who_waits_and_reaches_nowhere_else(gateway: Start, browser: "Browser") -> None:
    gate = gateway(max_in_flight=2, max_queue=5, lanes=ONE_LANE)
    async with tab(browser, gate.base_url) as one:
        await one.shows("#state", "Engine ready")
        async with occupied(gate, 2), gate.client() as client:
            waiting = asyncio.create_task(client.post(CHAT, json=chat()))
            await queued(gate, 1)
            await one.shows("figure", "2 of 2 slots")
            await one.shows("figure", "1 in the queue")
            await one.shows("#lanes tr", "1 of 5")
            gate.engine.cut(which="busy")
            await waiting
        await one.shows("figure", "0 of 2 slots")
        label = await one.page.locator("svg").first.get_attribute("aria-label")
        assert label == "In flight over the last five minutes: now 0, at most 2"
        assert (one.errors, one.elsewhere) == ([], [])


async def test_what_happened_before_it_was_opened_is_in_the_charts(gateway: Start, browser: "Browser") -> None:
    gate = gateway(fresh=True, max_in_flight=2, lanes=ONE_LANE)
    async with occupied(gate, 2):
        await asyncio.sleep(1.5)
    await until(lambda: gate.stats()["in_flight"] == 0)
    async with tab(browser, gate.base_url) as one:
        await one.shows("#state", "Engine ready")
        await one.page.locator("svg[aria-label$='at most 2']").first.wait_for()


async def test_a_prompt_streams_its_answer_and_tells_how_it_went(gateway: Start, browser: "Browser") -> None:
    gate = gateway()
    gate.engine.defaults(events=30, gap_ms=50, first_ms=100)
    async with tab(browser, gate.base_url) as one:
        await one.ask("Tell me.", tokens=30)
        await one.until("document.getElementById('answer').textContent.length > 10")
        assert await one.page.locator("#send").is_disabled(), "the answer came at once, not as a stream"
        await one.shows("#outcome", "Done: 30 tokens in")
        assert await one.text("#t-lane") == "short"
        assert (await one.text("#t-queue")).endswith(" ms")
        assert int((await one.text("#t-first")).removesuffix(" ms")) >= 100
        assert 1 < float(await one.text("#t-rate")) < 200
        assert await one.page.locator("#send").is_enabled()
        assert one.errors == []


async def test_keys_alone_do(gateway: Start, browser: "Browser") -> None:
    gate = gateway()
    async with tab(browser, gate.base_url) as one:
        await one.ready()
        for _ in range(4):
            await one.page.keyboard.press("Tab")
            if await one.page.evaluate("document.activeElement.id") == "prompt":
                break
        await one.page.keyboard.type("Hello?")
        await one.page.keyboard.press("Control+Enter")
        await one.shows("#outcome", "Done: ")


async def test_stop_ends_the_work_at_the_engine(gateway: Start, browser: "Browser") -> None:
    gate = gateway()
    async with tab(browser, gate.base_url) as one:
        await one.ready()
        gate.engine.defaults(events=10_000, gap_ms=20, tag="long")
        await one.ask(tokens=10_000)
        await one.until("document.getElementById('answer').textContent.length > 10")
        await one.page.click("#stop")
        await one.shows("#outcome", "Stopped")
        await until(lambda: gate.engine.entry("long")["outcome"] == "aborted")


async def test_a_refusal_is_told_with_its_reason_and_when_to_come_back(gateway: Start, browser: "Browser") -> None:
    gate = gateway(fresh=True, max_in_flight=1, max_queue=0, lanes=ONE_LANE)
    async with tab(browser, gate.base_url) as one:
        async with occupied(gate):
            await one.ask()
            await one.shows("#outcome", "Queue full (503). ")
            await one.shows("#outcome", "It may be sent again in ")
            await one.shows("#refusals", "Queue full")
            await one.until("document.querySelector('#refusals dd').textContent === '1'")
        assert await one.row("outcomes", "Refused") == "1"


@pytest.mark.parametrize(
    "fake", [{"fault": "close", "at": 5, "events": 50}, {"error": {"message": "no", "code": 500}, "error_at": 5}]
)
async def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(
    gateway: Start, browser: "Browser", fake: dict[str, Any]
) -> None:
    gate = gateway()
    async with tab(browser, gate.base_url) as one:
        await one.ready()
        gate.engine.defaults(**fake)
        await one.ask()
        await one.shows("#outcome", "The answer broke off")
        assert await one.text("#answer")


async def test_it_says_that_the_engine_is_away_and_recovers(gateway: Start, browser: "Browser") -> None:
    gate = gateway(fresh=True)
    async with tab(browser, gate.base_url) as one:
        await one.shows("#state", "Engine ready")
        await one.ready()
        gate.engine.kill()
        await one.shows("#state", "Engine restarting")
        await one.shows("#notice", "The engine is away")
        await one.ask()
        await one.shows("#outcome", "Engine away (503)")
        gate.engine.start()
        await one.shows("#state", "Engine ready")
        assert await one.page.locator("#notice").is_hidden()
        await one.until("document.querySelector('#engine').textContent.includes('cause unknown')")
        assert await one.row("engine", "Restarts") == "1"
        await one.ask()
        await one.shows("#outcome", "Done: ")


async def test_it_says_that_the_gateway_is_away_and_recovers(gateway: Start, browser: "Browser") -> None:
    gate = gateway(fresh=True)
    async with tab(browser, gate.base_url) as one:
        await one.shows("#state", "Engine ready")
        gate.kill()
        await one.shows("#state", "Gateway away")
        await one.shows("#notice", "recovers by itself")
        await one.ask()
        await one.shows("#outcome", "The gateway does not answer")
        with Gateway(gate.engine, port=gate.port):
            await one.shows("#state", "Engine ready")
            assert await one.page.locator("#notice").is_hidden()
            assert not [error for error in one.errors if not error.startswith("Failed to load resource")]


async def test_a_gateway_that_hangs_is_away_too(gateway: Start, browser: "Browser") -> None:
    gate = gateway(fresh=True)
    async with tab(browser, gate.base_url) as one:
        await one.shows("#state", "Engine ready")
        gate.signal(19)
        await one.shows("#state", "Gateway away")
        gate.signal(18)
        await one.shows("#state", "Engine ready")


async def test_a_key_is_asked_for_and_kept_in_the_tab_only(gateway: Start, browser: "Browser") -> None:
    gate = gateway(api_keys="alice:sesame")
    async with tab(browser, gate.base_url) as one:
        await one.shows("#state", "Locked")
        await one.page.fill("#key", "wrong")
        await one.page.keyboard.press("Enter")
        await one.shows("#unlock-error", "This key is not known here.")
        await one.page.fill("#key", "sesame")
        await one.page.keyboard.press("Enter")
        await one.shows("#state", "Engine ready")
        assert await one.page.locator("#unlock").is_hidden()
        await one.ask()
        await one.shows("#outcome", "Done: ")
        await one.page.reload()
        await one.shows("#state", "Engine ready")
        assert "sesame" not in await one.page.content()
        assert await one.page.evaluate("JSON.stringify([localStorage, document.cookie])") == '[{},""]'
        other = await Tab(await one.page.context.new_page(), gate.base_url).open()
        await other.shows("#state", "Locked")


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: f"{look['color_scheme']}-{look['viewport']['width']}")
async def test_everyone_can_use_it(gateway: Start, browser: "Browser", look: dict[str, Any]) -> None:
    gate = gateway()
    async with tab(browser, gate.base_url, **look) as one:
        await one.shows("#state", "Engine ready")
        await one.ask()
        await one.shows("#outcome", "Done: ")
        assert await one.faults() == []
        width = await one.page.evaluate("document.documentElement.scrollWidth")
        assert width <= look["viewport"]["width"], "it is wider than the screen"
        assert one.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_everyone_can_use_it_while_something_is_away(gateway: Start, browser: "Browser", scheme: Any) -> None:
    gate = gateway(fresh=True)
    async with tab(browser, gate.base_url, color_scheme=scheme) as one:
        await one.shows("#state", "Engine ready")
        gate.engine.kill()
        await one.shows("#notice", "The engine is away")
        assert await one.faults() == []
        gate.kill()
        await one.shows("#notice", "The gateway does not answer")
        assert await one.faults() == []


async def test_markup_in_an_answer_is_only_text(gateway: Start, browser: "Browser") -> None:
    gate = gateway()
    text = "<img src=x onerror=alert(1)><b>bold</b>"
    body = f'data: {{"choices": [{{"delta": {{"content": "{text}"}}}}]}}\n\ndata: [DONE]\n\n'
    async with tab(browser, gate.base_url) as one:
        await one.page.route(
            "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body)
        )
        await one.ask()
        await one.shows("#outcome", "Done: ")
        assert await one.text("#answer") == text
        assert await one.page.locator("#answer *").count() == 0
