"""Watches the engine from outside: scrapes its counters, judges a stall, and infers its state when nobody tells it."""

import asyncio
import logging
import re
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import httpx

from app.lanes import Demand, Lanes
from app.relay import Activity
from app.status import EngineState, EngineStatus

PERIOD_S: Final = 1.0
SCRAPE_S: Final = 2.0  # time limit of one scrape
PROBE_S: Final = 5.0  # time limit of one probe of /health
DOUBT_S: Final = 1.0  # and of one for which requests wait
WINDOW_S: Final = 60.0
LEARN_TOKENS: Final = 1000  # estimated prompt tokens that make one reading of the scale

_SAMPLE: Final = re.compile(
    rb"^(vllm:num_requests_running|vllm:num_requests_waiting|vllm:kv_cache_usage_perc|vllm:prompt_tokens_total"
    rb"|vllm:generation_tokens_total|vllm:iteration_tokens_total_count|vllm:prefix_cache_queries_total"
    rb"|process_start_time_seconds)(?:\{.*\})? (\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)$",
    re.MULTILINE,
)

log = logging.getLogger("tidegate.engine")


@dataclass(frozen=True, slots=True)
class Reading:
    """One scrape's counters, summed over the engine's label sets."""

    running: float
    waiting: float
    kv_cache_usage: float  # share of 1, of the fullest engine
    prompt_tokens: float
    generation_tokens: float
    iterations: float
    prefix_queries: float
    started: float  # Unix time

    @property
    def progress(self) -> tuple[float, float, float]:
        """What moves whenever the engine works."""
        return self.iterations, self.kv_cache_usage, self.prefix_queries


class Monitor:
    """One loop a second beside the requests; `alone` when no launcher tells the engine's state."""

    def __init__(
        self, engine: httpx.AsyncBaseTransport, status: EngineStatus, lanes: Lanes, stall_s: float, *, alone: bool
    ) -> None:
        self.activity = Activity()
        self.reading: Reading | None = None
        self.name_calls: Callable[[], str] = str  # those at the engine, for the log
        self._client = httpx.AsyncClient(transport=engine, base_url="http://engine", trust_env=False)
        self._status = status
        self._lanes = lanes
        self._stall_s = stall_s
        self._alone = alone
        self._loop = asyncio.get_running_loop()
        self._scraping: asyncio.Task[bytes | None] | None = None
        self._changed_at = 0.0
        self._stalled_at = 0.0
        self._history: deque[tuple[float, Reading]] = deque()
        self._at_engine = 0
        self._busy_since = 0.0
        self._text_tokens = 0.0
        self._exact_tokens = 0
        self._learned_at = 0.0  # the engine's prompt tokens at the last reading of the scale
        self._seen_down = False
        self._doubt: asyncio.Task[None] | None = None

    # told by the requests

    def request_sent(self) -> None:
        """A request goes to the engine."""
        if not self._at_engine:
            self._busy_since = self._loop.time()
        self._at_engine += 1

    def request_over(self) -> None:
        """A request has left the engine."""
        self._at_engine -= 1

    def prompt_counted(self, demand: Demand) -> None:
        """The engine has begun to answer, so its counter holds this prompt."""
        self._text_tokens += demand.text_tokens
        self._exact_tokens += demand.exact_tokens

    def refused_connection(self) -> None:
        """A request could not connect."""
        if self._alone and self._status.ready:
            self._went_away("does not take connections")

    def request_failed(self) -> None:
        """The engine failed a request: it may be dead behind a server that takes more of them for a while."""
        if self._status.ready and (self._doubt is None or self._doubt.done()):
            self._doubt = asyncio.create_task(self._ask_whether_dead())

    async def settle(self) -> None:
        """Wait while it is asked whether the engine is dead, so that no request is handed to a dead one meanwhile."""
        if self._doubt is not None and not self._doubt.done():
            await asyncio.wait([self._doubt])

    # asked by the routes

    async def metrics_text(self) -> bytes | None:
        """The engine's metrics, fetched now; callers at the same time share one scrape. None: no answer in time."""
        if self._scraping is None or self._scraping.done():
            self._scraping = asyncio.create_task(self._scrape())
        return await asyncio.shield(self._scraping)

    def average_batch_size(self) -> float | None:
        """Mean sequences per producing step over the last minute; None without data."""
        if not self._history or self._history[-1][0] < self._loop.time() - WINDOW_S:
            return None
        first, last = self._history[0][1], self._history[-1][1]
        steps = last.iterations - first.iterations
        return (last.generation_tokens - first.generation_tokens) / steps if steps > 0 else None

    # the loop

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            try:
                await self._look()
            except Exception:
                # Without this loop nobody would see a stall any more.
                log.exception("the look at the engine failed; the next is in %g s", PERIOD_S)
            await asyncio.sleep(PERIOD_S)

    async def _look(self) -> None:
        if self._alone:
            await self._probe()
        if self._status.state in (EngineState.READY, EngineState.STALLED):
            await self.metrics_text()
            self._judge()

    async def aclose(self) -> None:
        """Let go of what is under way."""
        for task in (self._scraping, self._doubt):
            if task is not None:
                task.cancel()

    async def _scrape(self) -> bytes | None:
        try:
            async with asyncio.timeout(SCRAPE_S):
                response = await self._client.get("/metrics")
        except (httpx.HTTPError, TimeoutError):
            return None
        if response.status_code != 200:
            return None
        try:
            self._take(response.content)
        except Exception:
            log.exception("the engine's metrics cannot be used; they are passed on as they are")
        return response.content

    def _take(self, text: bytes) -> None:
        sums: defaultdict[bytes, float] = defaultdict(float)
        for name, value in _SAMPLE.findall(text):
            number = float(value)
            sums[name] = max(sums[name], number) if b"usage" in name else sums[name] + number
        if b"vllm:iteration_tokens_total_count" not in sums:
            return
        reading = Reading(
            running=sums[b"vllm:num_requests_running"],
            waiting=sums[b"vllm:num_requests_waiting"],
            kv_cache_usage=sums[b"vllm:kv_cache_usage_perc"],
            prompt_tokens=sums[b"vllm:prompt_tokens_total"],
            generation_tokens=sums[b"vllm:generation_tokens_total"],
            iterations=sums[b"vllm:iteration_tokens_total_count"],
            prefix_queries=sums[b"vllm:prefix_cache_queries_total"],
            started=sums[b"process_start_time_seconds"],
        )
        now = self._loop.time()
        before, self.reading = self.reading, reading
        if before is None or before.progress != reading.progress:
            self._changed_at = now
        if before is not None and before.started != reading.started:
            self._history.clear()
            self._learned_at = self._text_tokens = self._exact_tokens = 0
            if self._alone:
                self._status.count_restart("unknown")
        self._history.append((now, reading))
        while self._history[0][0] < now - WINDOW_S:
            self._history.popleft()
        self._learn(reading)

    def _learn(self, reading: Reading) -> None:
        if self._text_tokens >= LEARN_TOKENS or not self._learned_at:
            counted = reading.prompt_tokens - self._learned_at - self._exact_tokens
            if self._learned_at and counted > 0:
                self._lanes.learn_scale(self._text_tokens, counted)
            self._learned_at = reading.prompt_tokens
            self._text_tokens = self._exact_tokens = 0

    def _judge(self) -> None:
        """Stalled: requests at the engine all the while, and neither bytes nor moving counters for `STALL_S`."""
        if self.reading is None:  # no vLLM counters were ever seen: silence means nothing
            return
        moved_at = max(self.activity.last_bytes_at, self._changed_at)
        if self._status.ready:
            silent_s = self._loop.time() - max(self._busy_since, moved_at)
            if self._at_engine and silent_s >= self._stall_s:
                log.error(
                    "engine stalled: %d requests at it (%s), silent for %.0f s; it says %g run, %g wait, KV %.0f%%",
                    self._at_engine,
                    self.name_calls(),
                    silent_s,
                    self.reading.running,
                    self.reading.waiting,
                    100 * self.reading.kv_cache_usage,
                )
                self._stalled_at = self._loop.time()
                self._status.stall_begins()
        elif self._status.state is EngineState.STALLED:
            idle = not self._at_engine and not self.reading.running and self._history[-1][0] > self._stalled_at
            if idle or moved_at > self._stalled_at:
                log.warning("engine moves again")
                self._status.start_succeeded(seen_whole=False)

    async def _probe(self) -> None:
        """Infer the state from `/health`. A slow answer says nothing: a busy engine may take its time."""
        try:
            async with asyncio.timeout(PROBE_S):
                response = await self._client.get("/health")
        except TimeoutError:
            return
        except httpx.HTTPError as error:
            if not self._status.ready:
                if not self._seen_down:
                    log.warning("engine (TIDEGATE_ENGINE_URL) cannot be reached: %s; answering 503 until it can", error)
                self._seen_down = True
            elif isinstance(error, httpx.ConnectError):
                self._went_away("does not take connections")
            return
        if response.status_code >= 500:
            self._seen_down = True
            if self._status.ready:
                self._went_away(f"says it is not healthy ({response.status_code})")
        elif self._status.state in (EngineState.STARTING, EngineState.RESTARTING):
            log.info("engine ready")
            self._status.start_succeeded(seen_whole=self._seen_down)

    async def _ask_whether_dead(self) -> None:
        try:
            async with asyncio.timeout(DOUBT_S):
                response = await self._client.get("/health")
        except (httpx.HTTPError, TimeoutError):  # no proof; whoever watches the process, or the next probe, will see
            return
        if response.status_code >= 500 and self._status.ready:
            self._went_away(f"says it is not healthy ({response.status_code})")

    def _went_away(self, why: str) -> None:
        log.warning("engine %s", why)
        self._seen_down = True
        self._status.lost()
