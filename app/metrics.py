"""Our own metrics, and the engine's passed on untouched. Counted per request, never per event."""

import platform
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from app.call import NO_LANE, Call
from app.errors import DEADLINE, REFUSAL_KINDS, Refused
from app.gate import Gate
from app.house import House
from app.status import RESTART_CAUSES, EngineStatus

SECONDS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
GAP_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 15, 60, 600)
OVERHEAD_SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
OUTCOMES: Final = ("completed", "refused", "deadline", "client_left", "engine_error", "invalid")
PHASES: Final = ("body", "queue", "first byte", "answer")
RETRIES: Final = {b"1": "1", b"2": "2"}  # what x-stainless-retry-count says, and its label; all above share the next
MORE_RETRIES: Final = "3+"
ABORT_CAUSES: Final = ("deadline", "client_left", "draining")
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def _version() -> str:
    try:
        return version("tidegate")
    except PackageNotFoundError:
        return "unknown"


VERSION: Final = _version()


class Metrics:
    """What is counted; series exist from the start wherever their labels are known."""

    def __init__(self, status: EngineStatus, gate: Gate, house: House) -> None:
        # A second series for each, of no use here. (This one call of the library is untyped.)
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=True)
        self.total_requests = 0  # gated arrivals, refused ones too
        self.outcomes = Tally(dict.fromkeys(OUTCOMES, 0))
        self.refusals = Tally({kind.reason: 0 for kind in REFUSAL_KINDS})
        self._requests = self._counter("requests", "Gated requests that have ended.", "lane", "route", "outcome")
        self._refusals = self._counter("refusals", "Refusals by what they were for.", "reason", "lane")
        self._deadlines = self._counter("deadline_exceeded", "Deadlines that passed, by phase.", "lane", "phase")
        self._aborts = self._counter("engine_aborts", "Requests whose work at the engine was cut.", "cause")
        self._queue_wait = self._histogram("queue_wait_seconds", "Time in the gate's queue.", "lane")
        self._first_byte = self._histogram("time_to_first_byte_seconds", "From arrival to the head sent.", "lane")
        self._duration = self._histogram("request_seconds", "From arrival to the end.", "lane", "outcome")
        self._gap = self._histogram(
            "inter_event_gap_seconds", "Between two pieces of a stream, a sample.", "lane", buckets=GAP_SECONDS
        )
        self._overhead = self._histogram(
            "overhead_seconds",
            "From the whole body to the engine, less the wait in the queue.",
            "lane",
            buckets=OVERHEAD_SECONDS,
        )
        self._disconnects = self._counter("client_disconnects", "Clients that left early, by phase.", "lane", "phase")
        self._by_key = self._counter("key_requests", "Gated requests that have ended, by API key.", "key", "outcome")
        self._retries = self._counter("retries", "Requests that say they are a repetition, by which one.", "attempt")
        for lane in (*gate.lanes, NO_LANE):
            for kind in REFUSAL_KINDS:
                self._refusals(kind.reason, lane)
            for phase in PHASES:
                self._deadlines(lane, phase)
                self._disconnects(lane, phase)
            for outcome in OUTCOMES:
                self._duration(lane, outcome)
        for lane in gate.lanes:
            self._queue_wait(lane)
            self._first_byte(lane)
            self._gap(lane)
            self._overhead(lane)
        for attempt in (*RETRIES.values(), MORE_RETRIES):
            self._retries(attempt)
        for cause in ABORT_CAUSES:
            self._aborts(cause)
        self.registry.register(_Live(status, gate, house))

    def _counter(self, name: str, text: str, *labels: str) -> Callable[..., Counter]:
        """Gives a series by its labels, which are few: without the cache that would cost more than to count."""
        return cache(Counter(f"tidegate_{name}", text, labels, registry=self.registry).labels)

    def _histogram(
        self, name: str, text: str, *labels: str, buckets: Sequence[float] = SECONDS
    ) -> Callable[..., Histogram]:
        return cache(Histogram(f"tidegate_{name}", text, labels, registry=self.registry, buckets=buckets).labels)

    def refused(self, call: Call, refused: Refused) -> None:
        """Count a refusal or a deadline by what it was for."""
        lane = call.demand.lane
        if refused.kind is DEADLINE:
            self._deadlines(lane, call.phase).inc()
        else:
            self._refusals(refused.kind.reason, lane).inc()
            if refused.kind in REFUSAL_KINDS:
                self.refusals[refused.kind.reason] += 1

    def aborted(self, cause: str) -> None:
        """Count work that was cut at the engine; vLLM's own metrics leave such requests out."""
        self._aborts(cause).inc()

    def ended(self, call: Call, now: float) -> None:
        """Count a gated request that is over."""
        assert call.route is not None
        lane, arrived = call.demand.lane, call.deadline.arrived
        self.outcomes[call.outcome] += 1
        self._requests(lane, call.route.name, call.outcome).inc()
        if call.key:
            self._by_key(call.key, call.outcome).inc()
        self._duration(lane, call.outcome).observe(now - arrived)
        if call.admitted_at is not None and call.queued_at is not None:
            self._queue_wait(lane).observe(call.admitted_at - call.queued_at)
        if call.head_at is not None and call.relay is not None:
            self._first_byte(lane).observe(call.head_at - arrived)
        if call.relay is not None:
            for gap_s in call.relay.gaps:
                self._gap(lane).observe(gap_s)
        if (overhead_s := _overhead_s(call)) is not None:
            self._overhead(lane).observe(overhead_s)
        if call.outcome == "client_left":
            self._disconnects(lane, call.phase).inc()
        repeated = call.headers.get(b"x-stainless-retry-count", b"0")
        if repeated.isdigit() and int(repeated[:9]):
            self._retries(RETRIES.get(repeated, MORE_RETRIES)).inc()

    def render(self, engine_text: bytes | None) -> bytes:
        """Our series and the engine's `vllm:` series in Prometheus's text format."""
        return generate_latest(self.registry) + b"".join(_vllm_lines(engine_text or b""))


def _overhead_s(call: Call) -> float | None:
    """What the way to the engine took here; None for a request that never got there."""
    if call.read_at is None or call.queued_at is None or call.admitted_at is None or call.sent_at is None:
        return None
    return call.queued_at - call.read_at + call.sent_at - call.admitted_at


class _Live:
    """What is read at the moment of the scrape."""

    def __init__(self, status: EngineStatus, gate: Gate, house: House) -> None:
        self._status = status
        self._gate = gate
        self._house = house

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        lanes, house, status = self._gate.lanes, self._house, self._status
        slots = {name: lane.in_flight for name, lane in lanes.items()}
        yield _by_lane("tidegate_in_flight", "Slots in use.", slots)
        yield GaugeMetricFamily("tidegate_in_flight_limit", "Slots there are.", self._gate.limit)
        queued = {name: lane.queued for name, lane in lanes.items()}
        yield _by_lane("tidegate_queue_depth", "Requests that wait.", queued)
        weight = {name: lane.queued_weight for name, lane in lanes.items()}
        yield _by_lane("tidegate_queued_weight", "Slots that they ask for.", weight)
        yield GaugeMetricFamily("tidegate_house_requests", "Requests uploading, queued or running.", house.guests)
        yield GaugeMetricFamily("tidegate_held_bytes", "Bytes of request bodies held.", house.held_bytes)
        yield GaugeMetricFamily("tidegate_draining", "1 while the server drains.", house.draining)
        yield GaugeMetricFamily("tidegate_engine_up", "1 while the engine takes requests.", status.ready)
        last_start_s = status.last_start_s or 0.0
        yield GaugeMetricFamily("tidegate_engine_start_seconds", "Duration of the last start.", last_start_s)
        restarts = CounterMetricFamily("tidegate_engine_restarts", "Engine restarts by cause.", labels=["cause"])
        for cause in RESTART_CAUSES:
            restarts.add_metric([cause], status.restarts[cause])
        yield restarts
        yield CounterMetricFamily("tidegate_engine_stalls", "Times the engine was found stalled.", status.stalls)
        build = GaugeMetricFamily("tidegate_build_info", "What is running.", labels=["version", "python"])
        build.add_metric([VERSION, platform.python_version()], 1)
        yield build


def _by_lane(name: str, text: str, values: Mapping[str, float]) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=["lane"])
    for lane, value in values.items():
        gauge.add_metric([lane], value)
    return gauge


def _vllm_lines(text: bytes) -> Iterator[bytes]:
    for line in text.splitlines(keepends=True):
        words = line.split(b" ", 3)
        name = words[2] if line.startswith((b"# HELP ", b"# TYPE ")) and len(words) > 2 else line
        if name.startswith(b"vllm:"):
            yield line if line.endswith(b"\n") else line + b"\n"
