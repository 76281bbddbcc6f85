"""What a scrape shows: our series by their names, from the start, and the engine's as they are."""

import math
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from app.call import NO_LANE, Call
from app.errors import DEADLINE, INVALID, QUEUE_FULL, REFUSAL_KINDS, Refused
from app.gate import Gate
from app.house import House
from app.lanes import Demand
from app.metrics import ABORT_CAUSES, OUTCOMES, PHASES, Metrics
from app.relay import Relay
from app.routes import FORWARDED
from app.settings import DEFAULT_LANES
from app.status import RESTART_CAUSES, EngineStatus
from tests.tools import tool
from tests.unit.virtual_clock import VirtualClock
from tests.unit.virtual_time import loops

LOOPS = loops()
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
NAMES = {
    "tidegate_requests_total": {"lane", "route", "outcome"},
    "tidegate_key_requests_total": {"key", "outcome"},
    "tidegate_refusals_total": {"reason", "lane"},
    "tidegate_in_flight": {"lane"},
    "tidegate_in_flight_limit": set(),
    "tidegate_queue_depth": {"lane"},
    "tidegate_queue_wait_seconds": {"lane"},
    "tidegate_time_to_first_byte_seconds": {"lane"},
    "tidegate_request_seconds": {"lane", "outcome"},
    "tidegate_deadline_exceeded_total": {"lane", "phase"},
    "tidegate_engine_aborts_total": {"cause"},
    "tidegate_engine_up": set(),
    "tidegate_engine_restarts_total": {"cause"},
    "tidegate_engine_start_seconds": set(),
    "tidegate_engine_stalls_total": set(),
    "tidegate_draining": set(),
    "tidegate_client_disconnects_total": {"lane", "phase"},
    "tidegate_retries_total": {"attempt"},
    "tidegate_inter_event_gap_seconds": {"lane"},
    "tidegate_overhead_seconds": {"lane"},
    "tidegate_build_info": {"version", "python"},
}
ENGINE = b"""\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 11541.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b} vllm:c"} 3.0
# HELP vllm:e2e_request_latency_seconds Histogram of e2e request latency in seconds.
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{le="0.3"} 1.0
vllm:e2e_request_latency_seconds_bucket{le="+Inf"} 2.0
vllm:e2e_request_latency_seconds_count 2.0
vllm:e2e_request_latency_seconds_sum 1.5
# HELP http_requests_total Requests, vllm: and others.
# TYPE http_requests_total counter
http_requests_total{handler="vllm:x"} 5.0
"""


class Counted:
    """Metrics and what they look at."""

    def __init__(self) -> None:
        self.status = EngineStatus()
        self.gate = Gate(DEFAULT_LANES, 8, 10, VirtualClock())
        self.house = House(18, 1000, 1000)
        self.metrics = Metrics(self.status, self.gate, self.house)

    def scrape(self, engine: bytes | None = None) -> list[Metric]:
        return list(text_string_to_metric_families(self.metrics.render(engine).decode()))

    def samples(self) -> Samples:
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.scrape()
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float | None:
        return self.samples().get((name, frozenset(labels.items())))


@pytest.fixture
def one() -> Counted:
    return Counted()


def call(lane: str = "short", outcome: str = "completed", **headers: str) -> Call:
    """A gated call that arrived at 1,000 s."""

    async def nothing(*_: object) -> None:
        raise AssertionError

    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "headers": sent, "raw_path": b"/v1/completions"}
    made = Call(scope, nothing, nothing)  # type: ignore[arg-type]
    made.route = next(route for route in FORWARDED if route.name == "/v1/completions")
    made.key = "somebody"
    made.demand = Demand(lane)
    made.outcome = outcome
    return made


async def test_every_name_of_the_contract_is_there_with_its_labels_once_something_has_happened(one: Counted) -> None:
    one.metrics.ended(call(), 1001)
    labels: dict[str, set[str]] = {}
    for family in one.scrape():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels[name] = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert family.samples, f"{name} has no series"
        assert family.documentation.endswith(".") or family.type == "histogram", name
    assert labels.items() >= NAMES.items()
    assert all(name.startswith("tidegate_") for name in labels)


def test_series_with_known_labels_exist_before_anything_has_happened(one: Counted) -> None:
    samples = one.samples()
    reasons = {kind.reason for kind in REFUSAL_KINDS}
    for lane in ("short", "long"):
        for reason in reasons:
            assert samples["tidegate_refusals_total", frozenset({"reason": reason, "lane": lane}.items())] == 0
        for phase in PHASES:
            assert samples["tidegate_deadline_exceeded_total", frozenset({"lane": lane, "phase": phase}.items())] == 0
        for outcome in OUTCOMES:
            assert samples["tidegate_request_seconds_count", frozenset({"lane": lane, "outcome": outcome}.items())] == 0
        for name in ("in_flight", "queue_depth", "queue_wait_seconds_count", "time_to_first_byte_seconds_count"):
            assert samples[f"tidegate_{name}", frozenset({"lane": lane}.items())] == 0
    for cause in ABORT_CAUSES:
        assert samples["tidegate_engine_aborts_total", frozenset({"cause": cause}.items())] == 0
    assert {"queue_full", "queue_timeout", "deadline_infeasible", "engine_unavailable", "draining"} == reasons


def test_gauges_show_the_moment_of_the_scrape(one: Counted) -> None:
    tickets = [one.gate.enter("long", 3) for _ in range(3)]
    guest = one.house.enter(70, lambda: 1)
    one.status.start_succeeded()
    assert one.value("tidegate_in_flight", lane="long") == 6
    assert one.value("tidegate_queue_depth", lane="long") == 1
    assert one.value("tidegate_queued_weight", lane="long") == 3
    assert one.value("tidegate_in_flight_limit") == 8
    assert one.value("tidegate_house_requests") == 1
    assert one.value("tidegate_held_bytes") == 70
    assert (one.value("tidegate_engine_up"), one.value("tidegate_draining")) == (1, 0)
    for ticket in tickets:
        one.gate.release(ticket)
    guest.leave()
    one.house.draining = True
    one.status.engine_died("exit")
    one.status.stall_begins()
    assert one.value("tidegate_in_flight", lane="long") == one.value("tidegate_queue_depth", lane="long") == 0
    assert one.value("tidegate_house_requests") == one.value("tidegate_held_bytes") == 0
    assert (one.value("tidegate_engine_up"), one.value("tidegate_draining")) == (0, 1)
    restarts = {cause: one.value("tidegate_engine_restarts_total", cause=cause) for cause in RESTART_CAUSES}
    assert restarts == {cause: float(cause == "exit") for cause in RESTART_CAUSES}, (
        "each series is there from the start"
    )
    assert one.value("tidegate_engine_stalls_total") == 1


async def test_an_ended_request_is_counted_with_its_times(one: Counted) -> None:
    ended = call("long", "deadline")
    ended.queued_at, ended.admitted_at, ended.sent_at, ended.head_at = 1000.5, 1002.5, 1002.5, 1003.0
    ended.read_at = 1000.25
    ended.relay = cast(Relay, SimpleNamespace(gaps=[0.02, 0.03]))
    one.metrics.ended(ended, 1010.0)
    route = {"route": "/v1/completions"}
    assert one.value("tidegate_requests_total", lane="long", outcome="deadline", **route) == 1
    assert one.value("tidegate_request_seconds_sum", lane="long", outcome="deadline") == 10
    assert one.value("tidegate_queue_wait_seconds_sum", lane="long") == 2
    assert one.value("tidegate_time_to_first_byte_seconds_sum", lane="long") == 3
    assert one.value("tidegate_overhead_seconds_sum", lane="long") == 0.25
    assert one.value("tidegate_inter_event_gap_seconds_sum", lane="long") == 0.05
    assert one.value("tidegate_inter_event_gap_seconds_count", lane="long") == 2
    assert one.metrics.outcomes["deadline"] == 1


async def test_a_refused_request_does_not_flatter_the_waiting_and_first_byte_times(one: Counted) -> None:
    refused = call("short", "refused")
    refused.queued_at = refused.head_at = 1000.0
    one.metrics.ended(refused, 1000.0)
    assert one.value("tidegate_queue_wait_seconds_count", lane="short") == 0
    assert one.value("tidegate_time_to_first_byte_seconds_count", lane="short") == 0


async def test_refusals_are_counted_by_reason_and_deadlines_by_phase(one: Counted) -> None:
    early, late = call(NO_LANE), call("long")
    late.phase = "answer"
    one.metrics.refused(early, Refused(QUEUE_FULL, ""))
    one.metrics.refused(early, Refused(INVALID, ""))
    one.metrics.refused(early, Refused(DEADLINE, ""))
    one.metrics.refused(late, Refused(DEADLINE, ""))
    one.metrics.aborted("client_left")
    assert one.value("tidegate_refusals_total", reason="queue_full", lane="-") == 1
    assert one.metrics.refusals == {kind.reason: int(kind is QUEUE_FULL) for kind in REFUSAL_KINDS}
    assert one.value("tidegate_refusals_total", reason="deadline", lane="-") is None
    assert one.value("tidegate_deadline_exceeded_total", phase="body", lane="-") == 1
    assert one.value("tidegate_deadline_exceeded_total", phase="answer", lane="long") == 1
    assert one.value("tidegate_engine_aborts_total", cause="client_left") == 1


def test_histograms_reach_from_a_millisecond_to_the_deadline_and_have_no_second_series(one: Counted) -> None:
    samples = one.samples()
    bounds = {float(dict(labels)["le"]) for name, labels in samples if name == "tidegate_request_seconds_bucket"}
    assert (min(bounds), max(bounds - {math.inf})) == (0.001, 600)
    assert not any(name.endswith("_created") for name, _ in samples)


def test_the_engines_series_are_passed_on_untouched_and_nothing_else_of_it(one: Counted) -> None:
    ours, shown = one.metrics.render(None), one.metrics.render(ENGINE)
    lines = ENGINE.splitlines(keepends=True)
    assert shown == ours + b"".join(lines[3:12])
    assert one.scrape(ENGINE)[-1].samples[-1].value == 1.5


@pytest.mark.parametrize(
    "text", [None, b"", b"\n", b"garbage", b"\xff\xfe\x00", b"# HELP", b"# TYPE \n", b"vllm", b"#\n"]
)
def test_without_anything_of_the_engine_our_own_are_shown(text: bytes, one: Counted) -> None:
    assert one.metrics.render(text) == one.metrics.render(None)


def test_a_last_line_without_an_end_gets_one(one: Counted) -> None:
    assert one.metrics.render(b"vllm:a 1").endswith(b"\nvllm:a 1\n")


def test_two_gateways_in_one_process_count_apart(one: Counted) -> None:
    one.metrics.aborted("deadline")
    assert Counted().value("tidegate_engine_aborts_total", cause="deadline") == 0


async def test_who_left_is_counted_where_it_was(one: Counted) -> None:
    for phase in ("queue", "answer", "answer"):
        left = call("long", "client_left")
        left.phase = phase
        one.metrics.ended(left, 1001)
    one.metrics.ended(call("long"), 1001)
    counted = {phase: one.value("tidegate_client_disconnects_total", lane="long", phase=phase) for phase in PHASES}
    assert counted == {"body": 0, "queue": 1, "first byte": 0, "answer": 2}


async def test_repetitions_are_counted_under_a_few_labels_whatever_a_client_says(one: Counted) -> None:
    for said in ["0", "1", "2", "2", "3", "12", "9" * 4000, "", "-1", "1e3", "second", "\u0663", "007"]:
        one.metrics.ended(call(x_stainless_retry_count=said), 1001)
    one.metrics.ended(call(), 1001)
    counted = {attempt: one.value("tidegate_retries_total", attempt=attempt) for attempt in ("1", "2", "3+")}
    assert counted == {"1": 1, "2": 2, "3+": 4}


async def test_the_way_to_the_engine_is_told_only_of_requests_that_got_there(one: Counted) -> None:
    refused = call("short", "refused")
    refused.read_at = refused.queued_at = refused.admitted_at = 1000.0
    one.metrics.ended(refused, 1001)
    assert one.value("tidegate_overhead_seconds_count", lane="short") == 0


async def test_the_table_in_the_docs_has_every_series_with_type_and_labels_and_no_other(one: Counted) -> None:
    one.metrics.ended(call(), 1001)
    text = Path(__file__).parents[2].joinpath("docs", "metrics.md").read_text()
    told = {}
    for row in re.findall(r"^\| `(tidegate_\w+)` \| (.+) \|$", text, re.MULTILINE):
        kind, labels, unit, question = (cell.strip() for cell in row[1].split("|"))
        assert unit, row
        assert question[-1] in "?.", row
        told[row[0]] = kind, set(re.findall(r"`(\w+)`", labels))
    shown = {}
    for family in one.scrape():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        shown[f"{family.name}_total" if family.type == "counter" else family.name] = family.type, labels
    assert told == shown


def test_promtool_finds_no_fault(one: Counted) -> None:
    command = [tool("promtool"), "check", "metrics"]
    checked = subprocess.run(command, input=one.metrics.render(None), capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
