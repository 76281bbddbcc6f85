"""`/stats`: what is going on now, as one JSON object or as one a second. What is not known is null."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.errors import QUEUE_FULL, Refused
from app.gate import Gate
from app.house import House
from app.metrics import VERSION, Metrics
from app.monitor import Monitor
from app.recent import Recent
from app.status import EngineStatus

PERIOD_S: Final = 1.0
HEADERS: Final = {"cache-control": "no-store", "x-accel-buffering": "no"}  # of an answer that goes on
WATCHERS: Final = 100  # at a time; each costs a connection and a frame a second
HISTORY: Final = 300  # looks that are kept for charts, one each `PERIOD_S`


class Stats:
    """Reads what others count. `run` keeps a short history, for whoever opens the page after something happened."""

    def __init__(
        self, gate: Gate, house: House, metrics: Metrics, monitor: Monitor, status: EngineStatus, recent: Recent
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._gate = gate
        self._house = house
        self._metrics = metrics
        self._monitor = monitor
        self._status = status
        self._recent = recent
        self.watchers = 0
        self._frame = b""  # shared by all who watch
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY)

    def snapshot(self) -> dict[str, Any]:
        """The object of the contract: `in_flight` counts slots, `total_requests` gated arrivals, refused ones too."""
        now = self._loop.time()
        gate, status = self._gate, self._status
        reading = self._monitor.reading if status.ready else None
        average = self._monitor.average_batch_size()
        return {
            "avg_batch_size": None if average is None else round(average, 3),
            "queue_depth": gate.queued,
            "total_requests": self._metrics.total_requests,
            "in_flight": gate.in_flight,
            "limit": gate.limit,
            "lanes": {
                name: {
                    "in_flight": lane.in_flight,
                    "queue_depth": lane.queued,
                    "max_queue": min(lane.max_queued, gate.max_queue),
                    **self._recent.times(now, name),
                }
                for name, lane in gate.lanes.items()
            },
            "engine": {
                "state": str(status.state),
                "running": reading and round(reading.running),
                "waiting": reading and round(reading.waiting),
                "kv_cache_usage": reading and reading.kv_cache_usage,
                "restarts": sum(status.restarts.values()),
                "last_restarts": [{"at": round(at), "cause": cause} for at, cause in status.last_restarts],
                "last_start_s": status.last_start_s and round(status.last_start_s, 1),
            },
            "last_minute": self._recent.times(now),
            "outcomes": dict(self._metrics.outcomes),
            "refusals": dict(self._metrics.refusals),
            "draining": self._house.draining,
            "uptime_s": round(now - self._began, 3),
            "version": VERSION,
        }

    async def run(self) -> None:
        """Look once a second until cancelled."""
        while True:
            self._look()
            await asyncio.sleep(PERIOD_S)

    def _look(self) -> None:
        shown = self.snapshot()
        self._frame = _event(shown)
        first_byte = shown["last_minute"]["first_byte_s"] or {}
        self._history.append(
            {name: shown[name] for name in ("uptime_s", "in_flight", "queue_depth", "avg_batch_size", "total_requests")}
            | {
                "refused": sum(shown["refusals"].values()),
                "kv_cache_usage": shown["engine"]["kv_cache_usage"],
                "first_byte_p50_s": first_byte.get("p50"),
                "first_byte_p95_s": first_byte.get("p95"),
            }
        )

    async def watch(self, over: asyncio.Event, *, history: bool = False) -> AsyncIterator[bytes]:
        """One `data:` event a second with the object, until `over`; `history` begins with an event of that name."""
        if history:
            yield b"event: history\n" + _event(list(self._history))
        yield _event(self.snapshot())
        while not over.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await over.wait()
            yield _event(self.snapshot()) if over.is_set() else self._frame


class Watch(StreamingResponse):
    """An answer that goes on; only so many at a time."""

    def __init__(self, stats: Stats, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, headers=HEADERS, media_type="text/event-stream")
        self._stats = stats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Called by the framework. Raises: Refused: `queue_full`."""
        if self._stats.watchers >= WATCHERS:
            raise Refused(QUEUE_FULL, f"{WATCHERS} clients are watching already. Ask without `watch`, or retry later.")
        self._stats.watchers += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stats.watchers -= 1


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
