"""What `/stats` and `/metrics` say, at rest, at work and without an engine."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Start
from tests.harness import ONE_LANE, ROOT, TERM, Gateway, Metrics, chat, occupied, queued, until
from tests.wire import CHAT, Json

OWN = {
    "tidegate_requests_total",
    "tidegate_refusals_total",
    "tidegate_in_flight",
    "tidegate_in_flight_limit",
    "tidegate_queue_depth",
    "tidegate_queue_wait_seconds",
    "tidegate_time_to_first_byte_seconds",
    "tidegate_request_seconds",
    "tidegate_deadline_exceeded_total",
    "tidegate_engine_aborts_total",
    "tidegate_engine_up",
    "tidegate_engine_restarts_total",
    "tidegate_engine_start_seconds",
    "tidegate_engine_stalls_total",
    "tidegate_draining",
}


def declared(metrics: Metrics) -> set[str]:
    """Names in `# TYPE` lines."""
    return {line.split()[2] for line in metrics.text.splitlines() if line.startswith("# TYPE")}


async def test_stats_hold_what_is_promised(gateway: Start) -> None:
    gate = gateway(max_in_flight=2, max_queue=5, lanes=ONE_LANE)
    before = gate.stats()
    async with occupied(gate, 2), gate.client() as client:
        waiting = asyncio.create_task(client.post(CHAT, json=chat()))
        await queued(gate, 1)
        stats = gate.stats()
        assert (stats["in_flight"], stats["queue_depth"], stats["limit"]) == (2, 1, 2)
        assert stats["total_requests"] - before["total_requests"] == 3
        assert stats["uptime_s"] >= before["uptime_s"] > 0
        assert set(stats["lanes"]) == {"all"}
        assert stats["engine"].keys() >= {"state", "running", "waiting", "kv_cache_usage", "restarts"}
        assert stats["engine"]["state"] == "ready"
        await until(lambda: gate.stats()["engine"]["running"] == 2, "the engine's own count")
        gate.engine.cut(which="busy")
        await waiting


async def test_refused_requests_count_as_arrivals(gateway: Start) -> None:
    gate = gateway(max_in_flight=1, max_queue=0)
    async with occupied(gate), gate.client() as client:
        before = gate.stats()["total_requests"]
        await client.post(CHAT, json=chat())
        await client.get("/v1/models")
        await client.post("/nowhere", json={})
        assert gate.stats()["total_requests"] - before == 1, "gated arrivals only"


@pytest.mark.slow
async def test_batch_size_is_the_engines_mean(gateway: Start) -> None:
    gate = gateway(fresh=True)
    assert gate.stats()["avg_batch_size"] is None
    async with gate.client() as client:
        script = {"events": 100, "gap_ms": 20}
        await asyncio.gather(*(client.post(CHAT, json=chat(stream=True, fake=script)) for _ in range(8)))
    await until(lambda: 4 < (gate.stats()["avg_batch_size"] or 0) <= 8, "mean batch size")


async def test_every_promised_series_is_there_before_any_traffic(gateway: Start) -> None:
    metrics = gateway(fresh=True).metrics()
    assert declared(metrics) >= OWN
    for name in ("tidegate_in_flight", "tidegate_queue_depth", "tidegate_refusals_total"):
        assert metrics.of(name), f"{name} has no sample: an autoscaler would see nothing"
    assert metrics.total("tidegate_engine_up") == 1


async def test_engines_series_pass_unchanged_and_alone(gateway: Start) -> None:
    gate = gateway()
    async with gate.client() as client:
        await client.post(CHAT, json=chat())
    text = gate.metrics().text
    for line in text.splitlines():
        name = line.split()[2] if line.startswith("#") else line
        assert name.startswith(("vllm:", "tidegate_")), line
    assert 'vllm:iteration_tokens_total_bucket{engine="0",model_name="fake-model",le="1.0"}' in text
    assert "# TYPE vllm:iteration_tokens_total histogram" in text
    for line in text.splitlines():
        assert text.count(f"{line}\n") == 1, f"twice: {line}"


async def test_metrics_answer_without_an_engine(gateway: Start) -> None:
    gate = gateway(fresh=True)
    gate.engine.kill()
    await until(lambda: gate.metrics().total("tidegate_engine_up") == 0)
    answer = gate.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert not any(name.startswith("vllm:") for name in gate.metrics().names)
    stats = gate.stats()["engine"]
    assert stats["state"] in ("starting", "restarting")
    assert stats["running"] is stats["kv_cache_usage"] is None


@pytest.mark.slow
async def test_restart_of_the_engine_is_counted(gateway: Start) -> None:
    gate = gateway(fresh=True)
    gate.engine.kill()
    await until(lambda: gate.get("/readyz").status_code == 503)
    gate.engine.start()
    await until(lambda: gate.get("/readyz").status_code == 200)
    await until(lambda: gate.stats()["engine"]["restarts"] == 1)
    assert gate.metrics().total("tidegate_engine_restarts_total") == 1


OUTCOMES: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("completed", {}, {}),
    ("invalid", {"status": 400, "body": {"error": {}}}, {}),
    ("engine_error", {"status": 500, "body": {"error": {}}}, {}),
    ("deadline", {"first_ms": 60_000}, {"x-request-timeout-ms": "200"}),
    ("engine_error", {"fault": "close"}, {}),
    ("invalid", {}, {"x-request-timeout-ms": "soon"}),
]


@pytest.mark.parametrize(("outcome", "fake", "headers"), OUTCOMES, ids=lambda value: str(value))
async def test_each_request_counts_under_its_outcome(
    gateway: Start, outcome: str, fake: dict[str, Any], headers: dict[str, str]
) -> None:
    gate = gateway()
    before = gate.metrics()
    async with gate.client() as client:
        await client.post(CHAT, json=chat(fake=fake), headers=headers)
    await until(lambda: changes(gate, before) == {outcome: 1})


async def test_clients_that_left_and_aborts_are_counted(gateway: Start) -> None:
    gate = gateway()
    before = gate.metrics()
    aborts = before.total("tidegate_engine_aborts_total")
    async with occupied(gate, 3) as wires:
        for wire in wires:
            wire.reset()
    await until(lambda: changes(gate, before) == {"client_left": 3})
    assert gate.metrics().total("tidegate_engine_aborts_total") - aborts == 3


async def test_refusals_are_counted_by_reason(gateway: Start) -> None:
    gate = gateway(max_in_flight=1, max_queue=0)
    before = gate.metrics()
    async with occupied(gate), gate.client() as client:
        await client.post(CHAT, json=chat())
        now = gate.metrics()
    name = "tidegate_refusals_total"
    assert now.total(name, reason="queue_full") - before.total(name, reason="queue_full") == 1
    assert changes(gate, before)["refused"] == 1


async def test_gauges_show_slots_and_waiters_by_lane(gateway: Start) -> None:
    gate = gateway(max_in_flight=1, max_queue=5)
    async with occupied(gate), gate.client() as client:
        waiting = asyncio.create_task(client.post(CHAT, json=chat(max_tokens=5000, fake={"events": 1})))
        await queued(gate, 1)
        metrics = gate.metrics()
        assert metrics.total("tidegate_in_flight", lane="short") == 1
        assert metrics.total("tidegate_queue_depth", lane="long") == 1
        assert metrics.total("tidegate_in_flight_limit") == 1
        gate.engine.cut(which="busy")
        await waiting


def changes(gate: Gateway, before: Metrics) -> dict[str, float]:
    """By how much each outcome's count has grown."""
    now = gate.metrics()
    name = "tidegate_requests_total"
    outcomes = ("completed", "refused", "deadline", "client_left", "engine_error", "invalid")
    grown = {outcome: now.total(name, outcome=outcome) - before.total(name, outcome=outcome) for outcome in outcomes}
    return {outcome: count for outcome, count in grown.items() if count}


def test_page_is_three_files_that_reach_nowhere_else(gateway: Start) -> None:
    gate = gateway()
    for path, kind in (("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")):
        part = gate.get(path)
        assert part.status_code == 200
        assert part.headers["content-type"].startswith(kind)
        assert part.headers["cache-control"] == "no-cache", "an upgrade must be seen at once"
        policy = part.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        assert not re.findall(rb"https?://(?!www\.w3\.org/)", part.body), "nothing is loaded from elsewhere"
    for path in ("/page.html", "/page/index.html", "/page.css/", "/..%2fmain.py"):
        assert gate.get(path).status_code == 404


def test_the_wheel_holds_the_page(tmp_path: Path) -> None:
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert uv, "setup installs it"
    subprocess.run([uv, "build", "--wheel", "--offline", "--quiet", "-o", tmp_path, ROOT], check=True)
    [wheel] = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"app/page/index.html", "app/page/page.js", "app/page/page.css"} <= names


async def test_watching_gives_the_same_object_every_second(gateway: Start) -> None:
    gate = gateway(max_in_flight=1, lanes=ONE_LANE)
    async with gate.client() as client, client.stream("GET", "/stats?watch=1") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        events = looks(answer)
        first, second = await anext(events), await anext(events)
        assert first.keys() == second.keys() == gate.stats().keys()
        async with occupied(gate):
            while (await anext(events))["in_flight"] != 1:
                pass
        third, fourth = await anext(events), await anext(events)
        assert 0.5 < fourth["uptime_s"] - third["uptime_s"] < 10


async def test_watching_begins_with_the_last_minutes_when_asked(gateway: Start) -> None:
    gate = gateway()
    await until(lambda: gate.stats()["uptime_s"] > 1.5)
    async with gate.client() as client, client.stream("GET", "/stats?watch=1&history=1") as answer:
        lines = answer.aiter_lines()
        assert await anext(lines) == "event: history"
        history = json.loads((await anext(lines)).removeprefix("data: "))
    assert 1 <= len(history) <= 300
    times = [point["uptime_s"] for point in history]
    assert times == sorted(times)
    assert history[-1].keys() >= {"in_flight", "queue_depth", "refused", "first_byte_p50_s", "kv_cache_usage"}


async def test_who_watches_holds_up_no_end(gateway: Start) -> None:
    gate = gateway(fresh=True)
    async with gate.client() as client, client.stream("GET", "/stats?watch=1") as answer:
        events = looks(answer)
        assert not (await anext(events))["draining"]
        gate.signal(TERM)
        with suppress(httpx.RemoteProtocolError):
            assert [event async for event in events][-1]["draining"]
        assert gate.exit_code() == 0
    assert "ERROR" not in gate.log
    assert "Traceback" not in gate.log


async def looks(answer: httpx.Response) -> AsyncIterator[Json]:
    """The objects of the events."""
    async for line in answer.aiter_lines():
        if line:
            yield json.loads(line.removeprefix("data: "))


async def test_stats_say_how_the_last_minute_was(gateway: Start) -> None:
    gate = gateway(fresh=True, max_in_flight=1, max_queue=0, lanes=ONE_LANE)
    before = gate.stats()
    assert before["last_minute"] == {"first_byte_s": None, "total_s": None}
    assert set(before["refusals"].values()) == set(before["outcomes"].values()) == {0}
    async with gate.client() as client:
        await client.post(CHAT, json=chat(stream=True, fake={"first_ms": 50}))
        async with occupied(gate):
            await client.post(CHAT, json=chat())
            after = gate.stats()
    assert after["last_minute"]["first_byte_s"]["p50"] >= 0.05
    assert after["lanes"]["all"]["total_s"] == after["last_minute"]["total_s"]
    assert after["refusals"]["queue_full"] == after["outcomes"]["refused"] == after["outcomes"]["completed"] == 1


async def test_an_answer_names_its_lane_and_its_wait(gateway: Start) -> None:
    gate = gateway(max_in_flight=1, lanes=ONE_LANE)
    async with occupied(gate) as wires, gate.client() as client:
        waiting = asyncio.create_task(client.post(CHAT, json=chat()))
        await queued(gate, 1)
        await asyncio.sleep(0.05)
        wires[0].reset()
        answer = await waiting
        assert answer.headers["x-tidegate-lane"] == "all"
        assert float(answer.headers["x-tidegate-queue-ms"]) >= 50
        assert "x-tidegate-lane" not in (await client.get("/v1/models")).headers


async def test_gaps_between_events_are_sampled(gateway: Start) -> None:
    gate = gateway(fresh=True)
    async with gate.client() as client:
        await client.post(CHAT, json=chat(stream=True, fake={"events": 33, "gap_ms": 10}))
        await client.post(CHAT, json=chat(fake={"events": 33}))
    metrics = gate.metrics()
    name = "tidegate_inter_event_gap_seconds"
    assert 1 <= metrics.total(f"{name}_count") <= 3
    assert 0.001 < metrics.total(f"{name}_sum") / metrics.total(f"{name}_count") < 1
    assert metrics.total("tidegate_overhead_seconds_count") == 2


async def test_the_trace_of_a_client_goes_on_to_the_engine_and_into_the_log(gateway: Start) -> None:
    gate = gateway()
    trace = {
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "tracestate": "congo=t61rcWkgMzE",
    }
    async with gate.client() as client:
        await client.post(CHAT, json=chat(fake={"tag": "traced"}), headers=trace)
    assert dict(gate.engine.entry("traced")["headers"]).items() >= trace.items()
    await until(lambda: "trace_id=4bf92f3577b34da6a3ce929d0e0e4736" in gate.log)


async def test_no_label_takes_a_value_from_a_client(gateway: Start) -> None:
    gate = gateway(api_keys="alice:sesame", lanes=ONE_LANE)
    async with gate.client() as client:
        for number in range(3):
            said = f"zzz{number}"
            strange = {
                "x-stainless-retry-count": said,
                "x-request-id": said,
                "user-agent": said,
                "x-tidegate-lane": said,
            }
            answers = [
                await client.post(CHAT, json=chat(model=said, user=said), headers=strange),
                await client.post(f"{CHAT}?{said}", json=chat(model=said, stream=True), headers=strange),
                await client.post(CHAT, content=said.encode(), headers=strange),
                await client.post(CHAT, json=chat(), headers={"authorization": f"Bearer {said}"}),
                await client.post(f"/v1/{said}", json=chat()),
            ]
            assert [answer.status_code for answer in answers] == [200, 200, 400, 401, 404]
    own = [line for line in gate.metrics().text.splitlines() if line.startswith("tidegate_")]
    assert any('route="/v1/chat/completions"' in line for line in own)
    assert not [line for line in own if "zzz" in line or "sesame" in line]


async def test_one_line_of_json_tells_how_each_request_went(gateway: Start) -> None:
    gate = gateway(api_keys="alice:sesame", log_format="json", lanes=ONE_LANE, max_in_flight=4)
    async with gate.client() as client:
        good = await client.post(CHAT, json=chat("secret words", n=2), headers={"x-request-id": "good"})
        await client.post(CHAT, json=chat(), headers={"x-request-id": "thief", "authorization": "Bearer guess"})
        await client.post("/nowhere", json=chat(), headers={"x-request-id": "lost"})
        await client.get("/stats", headers={"x-request-id": "own"})
    lines: dict[str, Json] = {}

    def read() -> bool:
        for line in gate.log.splitlines():
            written = json.loads(line)
            if written["message"] == "request":
                lines[written["id"]] = written
        return lines.keys() >= {"good", "thief", "lost"}

    await until(read)
    told = lines["good"]
    assert (told["lane"], told["weight"], told["status"], told["outcome"]) == ("all", 2, 200, "completed")
    assert told["bytes"] == len(good.content)
    assert told["queue_ms"] <= told["first_byte_ms"] <= told["total_ms"]
    assert (lines["thief"]["status"], lines["lost"]["status"]) == (401, 404)
    assert "own" not in lines
    assert not [word for word in ("secret", "sesame", "guess", "nowhere") if word in gate.log]


async def test_a_storm_of_refusals_leaves_few_lines_and_a_count(gateway: Start) -> None:
    gate = gateway(fresh=True, max_in_flight=1, max_queue=0)
    async with occupied(gate), gate.client() as client:
        for _ in range(4):
            await asyncio.gather(*(client.post(CHAT, json=chat()) for _ in range(100)))

    def counted() -> int:
        return sum(int(count) for count in re.findall(r"left out refused=(\d+)", gate.log))

    await until(lambda: gate.log.count("outcome=refused") + counted() == 400)
    assert counted() > 0
