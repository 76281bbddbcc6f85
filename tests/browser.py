"""Headless Chromium on the gateway's page, and what went wrong in it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.harness import ROOT
from tests.tools import tool

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

ARGUMENTS: Final = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
AXE: Final = ROOT / "tests" / "node" / "node_modules" / "axe-core" / "axe.min.js"
PATIENCE_MS: Final = 30_000


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator["Browser"]:
    """A browser with a profile of its own; skips the test where there is none."""
    playwright = pytest.importorskip("playwright.async_api", reason="needs scripts/setup.sh tools")
    program = tool("chromium", "chromium-browser", "google-chrome")
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=program, args=ARGUMENTS)
        try:
            yield browser
        finally:
            await browser.close()


class Tab:
    """The page in one tab; `errors` are what its console complains about, `elsewhere` requests to other hosts."""

    def __init__(self, page: "Page", url: str) -> None:
        self.page = page
        self.url = url
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self._note(request.url))

    def _note(self, url: str) -> None:
        if not url.startswith((f"{self.url}/", "data:")):
            self.elsewhere.append(url)

    async def open(self) -> "Tab":
        """Load the page."""
        await self.page.goto(f"{self.url}/")
        return self

    async def shows(self, selector: str, text: str, *, within_ms: float = PATIENCE_MS) -> None:
        """Wait until an element that is seen has this text in it."""
        found = self.page.locator(selector).filter(has_text=text).filter(visible=True)
        await found.first.wait_for(timeout=within_ms)

    async def until(self, holds: str) -> None:
        """Wait until a script's value is true; Playwright's own way to do so is against the page's policy."""
        end = time.monotonic() + PATIENCE_MS / 1000
        while not await self.page.evaluate(holds):
            assert time.monotonic() < end, f"never true: {holds}"
            await asyncio.sleep(0.02)

    async def ready(self) -> None:
        """Wait until a prompt may be sent."""
        await self.page.locator("#model option").first.wait_for(state="attached")

    async def ask(self, prompt: str = "hello", tokens: int = 20) -> None:
        """Fill in a prompt and send it."""
        await self.ready()
        await self.page.fill("#prompt", prompt)
        await self.page.fill("#tokens", str(tokens))
        await self.page.click("#send")

    async def text(self, selector: str) -> str:
        """What an element says."""
        return str(await self.page.locator(selector).inner_text()).strip()

    async def row(self, listed: str, name: str) -> str:
        """A value of one of the lists at the bottom."""
        return await self.text(f"#{listed} > div:has(dt:text-is('{name}')) dd")

    async def faults(self) -> list[str]:
        """What axe finds that would keep people from using the page, serious or worse."""
        if not AXE.exists():
            pytest.skip("needs `npm ci` in tests/node")
        await self.page.evaluate(AXE.read_text())
        found: list[dict[str, Any]] = await self.page.evaluate("axe.run().then(result => result.violations)")
        return [
            f"{one['id']}: {node['html']} {node['failureSummary']}"
            for one in found
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"]
        ]


@contextlib.asynccontextmanager
async def tab(browser: "Browser", url: str, **options: Any) -> AsyncIterator[Tab]:
    """The page, open in a new context."""
    context = await browser.new_context(**options)
    try:
        yield await Tab(await context.new_page(), url).open()
    finally:
        await context.close()
