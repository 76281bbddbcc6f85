"""What the gateway makes of the engine from outside: its state, its counters, its stalls, and the scale of costs."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from app.lanes import Demand, Lanes
from app.monitor import DOUBT_S, SCRAPE_S, Monitor
from app.settings import DEFAULT_LANES
from app.status import EngineStatus
from tests.unit.virtual_time import loops

LOOPS = loops()
STALL_S = 20.0
GONE = httpx.ConnectError("refused")
BROKE_OFF = httpx.RemoteProtocolError("broke off")


def page(iterations: float = 0, **more: float) -> bytes:
    """A scrape of vLLM, cut down; names without their prefix."""
    counters = {"iteration_tokens_total_count": iterations, "kv_cache_usage_perc": 0.0} | more
    started = counters.pop("started", 1.7e9)
    lines = [f'vllm:{name}{{engine="0",model_name="m {{x}}"}} {value!r}' for name, value in counters.items()]
    return "\n".join([*lines, f"process_start_time_seconds {started!r}", ""]).encode()


class Engine(httpx.AsyncBaseTransport):
    """Answers `/health` and `/metrics` as told: a status, a body, an error, or after so many seconds."""

    def __init__(self) -> None:
        self.health: int | Exception = 200
        self.metrics: bytes | int | Exception = page()
        self.slow_s = 0.0
        self.scrapes = 0
        self.probes = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        is_scrape = request.url.path == "/metrics"
        self.scrapes += is_scrape
        self.probes += not is_scrape
        await asyncio.sleep(self.slow_s)
        answer = self.metrics if is_scrape else self.health
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer) if isinstance(answer, int) else httpx.Response(200, content=answer)


class Watched:
    """An engine under watch."""

    def __init__(self, *, alone: bool) -> None:
        self.engine = Engine()
        self.status = EngineStatus()
        self.lanes = Lanes(DEFAULT_LANES)
        self.monitor = Monitor(self.engine, self.status, self.lanes, STALL_S, alone=alone)

    @property
    def state(self) -> str:
        return self.status.state

    async def scrape(self, **counters: float) -> bytes | None:
        self.engine.metrics = page(**counters)
        return await self.monitor.metrics_text()


@contextlib.asynccontextmanager
async def watching(*, alone: bool = True) -> AsyncIterator[Watched]:
    watched = Watched(alone=alone)
    task = asyncio.create_task(watched.monitor.run())
    try:
        yield watched
        assert not task.done(), "the monitor has ended"
    finally:
        task.cancel()
        await watched.monitor.aclose()


async def pass_s(seconds: float) -> None:
    await asyncio.sleep(seconds + 0.01)


class TestState:
    @pytest.mark.parametrize("before", [GONE, BROKE_OFF, httpx.ReadError("reset"), 500, 503])
    async def test_an_engine_is_starting_until_its_health_is_good(self, before: int | Exception) -> None:
        async with watching() as one:
            one.engine.health = before
            await pass_s(30)
            assert one.state == "starting"
            one.engine.health = 200
            await pass_s(1)
            assert one.state == "ready"
            assert one.status.last_start_s is not None

    async def test_an_engine_that_was_up_before_us_has_no_known_start_time(self) -> None:
        async with watching() as one:
            await pass_s(1)
            assert (one.state, one.status.last_start_s) == ("ready", None)

    async def test_an_engine_without_a_health_route_counts_as_ready(self) -> None:
        async with watching() as one:
            one.engine.health = 404
            await pass_s(1)
            assert one.state == "ready"

    @pytest.mark.parametrize("trouble", [GONE, 500, 503])
    async def test_an_engine_that_goes_away_is_restarting_and_comes_back(self, trouble: int | Exception) -> None:
        async with watching() as one:
            await pass_s(1)
            one.engine.health = one.engine.metrics = trouble
            await pass_s(2)
            assert one.state == "restarting"
            one.engine.health, one.engine.metrics = 200, page()
            await pass_s(2)
            assert one.state == "ready"

    @pytest.mark.parametrize("alone", [True, False])
    async def test_a_failed_request_makes_it_look_at_once_and_requests_wait_for_that(self, alone: bool) -> None:
        """vLLM's server outlives its dead engine for seconds and fails whatever it is given."""
        told: list[bool] = []
        one = Watched(alone=alone)
        one.status.start_succeeded()
        one.status.on_loss = lambda: told.append(one.status.ready)
        one.engine.health, one.engine.slow_s = 503, 0.5
        await one.monitor.settle()
        for _ in range(9):
            one.monitor.request_failed()
        assert one.state == "ready"
        await one.monitor.settle()
        assert (one.state, one.engine.probes, told) == ("restarting", 1, [False])

    @pytest.mark.parametrize("health", [200, 404, GONE, BROKE_OFF])
    async def test_a_failed_request_proves_nothing_by_itself(self, health: int | Exception) -> None:
        one = Watched(alone=False)
        one.status.start_succeeded()
        one.engine.health = health
        one.monitor.request_failed()
        await one.monitor.settle()
        assert (one.state, one.engine.probes) == ("ready", 1)

    async def test_requests_wait_only_briefly_for_an_engine_that_does_not_say_whether_it_lives(self) -> None:
        one = Watched(alone=False)
        one.status.start_succeeded()
        one.engine.slow_s = 600
        began = asyncio.get_running_loop().time()
        one.monitor.request_failed()
        await one.monitor.settle()
        assert one.state == "ready"
        assert asyncio.get_running_loop().time() - began <= DOUBT_S + 0.01

    @pytest.mark.parametrize("trouble", ["slow", BROKE_OFF])
    async def test_a_busy_engine_that_misses_a_probe_is_not_punished(self, trouble: str | Exception) -> None:
        async with watching() as one:
            await pass_s(1)
            if isinstance(trouble, Exception):
                one.engine.health = trouble
            else:
                one.engine.slow_s = 30
            await pass_s(60)
            assert one.state == "ready"

    @pytest.mark.parametrize(("alone", "state"), [(True, "restarting"), (False, "ready")])
    async def test_a_refused_connection_counts_at_once_unless_a_launcher_knows_better(
        self, alone: bool, state: str
    ) -> None:
        one = Watched(alone=alone)
        one.status.start_succeeded()
        one.monitor.refused_connection()
        assert one.state == state

    async def test_under_a_launcher_the_engine_is_not_probed_nor_scraped_before_it_is_ready(self) -> None:
        async with watching(alone=False) as one:
            await pass_s(30)
            assert (one.state, one.engine.probes, one.engine.scrapes) == ("starting", 0, 0)
            one.status.start_succeeded()
            await pass_s(10)
            assert (one.state, one.engine.probes, one.engine.scrapes) == ("ready", 0, 10)

    @pytest.mark.parametrize(("alone", "restarts"), [(True, {"unknown": 1}), (False, {})])
    async def test_a_restart_between_two_probes_is_seen_by_the_engines_start_time(
        self, alone: bool, restarts: dict[str, int]
    ) -> None:
        one = Watched(alone=alone)
        for started in (1.0, 1.0, 2.0, 2.0):
            await one.scrape(started=started)
        assert dict(one.status.restarts) == restarts


class TestScrape:
    async def test_is_passed_on_as_it_came(self) -> None:
        one = Watched(alone=True)
        assert await one.scrape(iterations=5) == page(iterations=5)

    @pytest.mark.parametrize("trouble", [GONE, BROKE_OFF, httpx.ReadError(""), httpx.DecodingError(""), 404, 500])
    async def test_without_an_answer_is_none(self, trouble: int | Exception) -> None:
        one = Watched(alone=True)
        one.engine.metrics = trouble
        assert await one.monitor.metrics_text() is None

    async def test_waits_for_two_seconds_only(self) -> None:
        one = Watched(alone=True)
        one.engine.slow_s = 30
        began = asyncio.get_running_loop().time()
        assert await one.monitor.metrics_text() is None
        assert asyncio.get_running_loop().time() - began == pytest.approx(SCRAPE_S)

    async def test_is_shared_by_everyone_who_asks_meanwhile_and_survives_one_who_leaves(self) -> None:
        one = Watched(alone=True)
        one.engine.slow_s = 1
        asking = [asyncio.create_task(one.monitor.metrics_text()) for _ in range(5)]
        await asyncio.sleep(0.5)
        asking.pop(0).cancel()
        assert set(await asyncio.gather(*asking)) == {page()}
        assert one.engine.scrapes == 1

    @pytest.mark.parametrize(
        "text",
        [
            b"",
            b"<html>no</html>",
            b"\xff\x00\xfe",
            b"vllm:iteration_tokens_total_count",
            b"vllm:iteration_tokens_total_count many\n",
            b"vllm:iteration_tokens_total_count{\n",
            b"vllm:iteration_tokens_total_count NaN\nvllm:prompt_tokens_total NaN\n",
            b"vllm:iteration_tokens_total_count +Inf\nvllm:generation_tokens_total +Inf\n",
            b"vllm:kv_cache_usage_perc 0.5\n",
            page()[:-20],
            b'vllm:iteration_tokens_total_count{model_name="' + b"x" * 100_000 + b'"} 1\n',
        ],
        ids=range(11),
    )
    async def test_no_page_however_odd_ends_the_watch(self, text: bytes) -> None:
        async with watching() as one:
            one.engine.metrics = text
            await pass_s(5)
            assert one.state == "ready"
            assert await one.monitor.metrics_text() == text
            one.engine.metrics = page(iterations=7)
            await pass_s(2)
            assert one.monitor.reading is not None
            assert one.monitor.reading.iterations >= 7

    async def test_an_error_that_nobody_foresaw_is_told_and_does_not_end_the_watch(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with watching() as one:
            one.engine.metrics = ZeroDivisionError("a bug")
            await pass_s(1)
            assert "a bug" in caplog.text
            one.engine.metrics = page(iterations=7)
            await pass_s(2)
            assert one.monitor.reading is not None

    async def test_adds_up_the_engines_of_one_server_and_shows_the_fullest(self) -> None:
        one = Watched(alone=True)
        one.engine.metrics = b"""\
# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a} b"} 3.0
vllm:num_requests_running{engine="1",model_name="a} b"} 4.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:prompt_tokens_total{engine="0"} 1e+06
vllm:prompt_tokens_by_source_total{source="local_compute"} 9.0
vllm:generation_tokens_total{engine="0"} 20.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0"} 9.0
vllm:iteration_tokens_total_count{engine="0"} 5.0
vllm:iteration_tokens_total_count{engine="1"} 6.0
vllm:iteration_tokens_total_sum{engine="0"} 9.0
vllm:prefix_cache_queries_total{engine="0"} 8.0
process_start_time_seconds 1.7e+09
"""
        await one.monitor.metrics_text()
        reading = one.monitor.reading
        assert reading is not None
        assert (reading.running, reading.waiting, reading.kv_cache_usage) == (7, 1, 0.75)
        assert (reading.prompt_tokens, reading.generation_tokens, reading.iterations) == (1e6, 20, 11)
        assert (reading.prefix_queries, reading.started) == (8, 1.7e9)


class TestBatchSize:
    async def test_is_unknown_without_data_and_while_nothing_runs(self) -> None:
        one = Watched(alone=True)
        assert one.monitor.average_batch_size() is None
        for _ in range(3):
            await one.scrape(iterations=5, generation_tokens_total=50)
        assert one.monitor.average_batch_size() is None

    async def test_is_sequences_per_step_over_the_last_minute(self) -> None:
        one = Watched(alone=True)
        await one.scrape(iterations=0, generation_tokens_total=0)
        await asyncio.sleep(30)
        await one.scrape(iterations=100, generation_tokens_total=100)
        await asyncio.sleep(40)
        await one.scrape(iterations=110, generation_tokens_total=180)
        assert one.monitor.average_batch_size() == 8

    async def test_is_unknown_once_the_engine_has_told_nothing_for_a_minute(self) -> None:
        one = Watched(alone=True)
        await one.scrape(iterations=0, generation_tokens_total=0)
        await asyncio.sleep(30)
        await one.scrape(iterations=100, generation_tokens_total=400)
        await asyncio.sleep(59)
        assert one.monitor.average_batch_size() == 4
        await asyncio.sleep(2)
        assert one.monitor.average_batch_size() is None

    async def test_starts_anew_with_the_engine(self) -> None:
        one = Watched(alone=True)
        await one.scrape(iterations=1000, generation_tokens_total=9000)
        await one.scrape(iterations=2, generation_tokens_total=6, started=2.0)
        await one.scrape(iterations=4, generation_tokens_total=12, started=2.0)
        assert one.monitor.average_batch_size() == 3


class TestStall:
    async def test_requests_that_get_neither_bytes_nor_progress_mean_a_stall_and_it_is_told_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        told: list[float] = []
        async with watching() as one:
            one.status.on_stall = lambda: told.append(0)
            one.monitor.name_calls = lambda: "req-7"
            await pass_s(100)
            one.monitor.request_sent()
            await pass_s(STALL_S - 2)
            assert one.state == "ready"
            await pass_s(4)
            assert (one.state, one.status.stalls) == ("stalled", 1)
            await pass_s(100)
            assert (one.state, one.status.stalls, len(told)) == ("stalled", 1, 1)
            assert "1 requests at it (req-7), silent for" in caplog.text

    @pytest.mark.parametrize("sign", ["iterations", "kv_cache_usage_perc", "prefix_cache_queries_total", "bytes"])
    async def test_any_sign_of_work_is_none(self, sign: str) -> None:
        async with watching() as one:
            await pass_s(1)
            one.monitor.request_sent()
            for step in range(10):
                await pass_s(STALL_S / 2)
                if sign == "bytes":
                    one.monitor.activity.last_bytes_at = asyncio.get_running_loop().time()
                else:
                    one.engine.metrics = page(**{sign: step / 10})
            assert (one.state, one.status.stalls) == ("ready", 0)

    async def test_an_idle_engine_does_not_stall_nor_does_one_between_short_requests(self) -> None:
        async with watching() as one:
            for _ in range(10):
                await pass_s(STALL_S)
                one.monitor.request_sent()
                await pass_s(STALL_S / 2)
                one.monitor.request_over()
            assert one.status.stalls == 0

    @pytest.mark.parametrize("trouble", [BROKE_OFF, 500, "slow"])
    async def test_a_scrape_without_an_answer_counts_as_no_change(self, trouble: Any) -> None:
        async with watching(alone=False) as one:
            one.status.start_succeeded()
            await pass_s(2)
            if trouble == "slow":
                one.engine.slow_s = 30
            else:
                one.engine.metrics = trouble
            one.monitor.request_sent()
            await pass_s(STALL_S + 5)
            assert one.state == "stalled"

    async def test_an_engine_that_moves_again_is_ready_again(self) -> None:
        async with watching() as one:
            await pass_s(1)
            one.monitor.request_sent()
            await pass_s(STALL_S + 2)
            assert one.state == "stalled"
            one.engine.metrics = page(iterations=1)
            await pass_s(2)
            assert one.state == "ready"

    async def test_a_stalled_engine_that_is_restarted_is_restarting_then_ready(self) -> None:
        async with watching() as one:
            await pass_s(1)
            one.monitor.request_sent()
            await pass_s(STALL_S + 2)
            assert one.state == "stalled"
            one.engine.health = one.engine.metrics = GONE
            one.monitor.request_over()
            await pass_s(3)
            assert one.state == "restarting"
            one.engine.health, one.engine.metrics = 200, page(started=2.0)
            await pass_s(2)
            assert one.state == "ready"

    async def test_an_engine_without_counters_is_never_called_stalled(self) -> None:
        async with watching() as one:
            one.engine.metrics = 404
            await pass_s(1)
            one.monitor.request_sent()
            await pass_s(STALL_S * 5)
            assert (one.state, one.status.stalls) == ("ready", 0)


class TestScale:
    async def serve(self, one: Watched, prompts: int, text: float, counted: int, exact: int = 0) -> None:
        """So many requests, each followed by a scrape; the engine counts `counted` tokens for each."""
        total = one.monitor.reading.prompt_tokens if one.monitor.reading else 1.0
        for _ in range(prompts):
            one.monitor.prompt_counted(Demand("short", text_tokens=text, exact_tokens=exact))
            total += counted
            await one.scrape(prompt_tokens_total=total)

    async def test_follows_what_the_engine_counts_for_the_same_prompts(self) -> None:
        one = Watched(alone=True)
        await one.scrape(prompt_tokens_total=1.0)
        await self.serve(one, prompts=40, text=1000, counted=1500)
        assert one.lanes.scale == pytest.approx(1.5, abs=0.01)

    async def test_is_not_moved_by_token_ids(self) -> None:
        one = Watched(alone=True)
        await one.scrape(prompt_tokens_total=1.0)
        await self.serve(one, prompts=20, text=1000, exact=9000, counted=10_000)
        await self.serve(one, prompts=20, text=0, exact=9000, counted=9000)
        assert one.lanes.scale == pytest.approx(1)

    async def test_ignores_what_the_engine_had_counted_before_us(self) -> None:
        one = Watched(alone=True)
        await one.scrape(prompt_tokens_total=1e9)
        await self.serve(one, prompts=20, text=1000, counted=1000)
        assert one.lanes.scale == pytest.approx(1)

    async def test_survives_a_restart_of_the_engine(self) -> None:
        one = Watched(alone=True)
        await one.scrape(prompt_tokens_total=1.0)
        await self.serve(one, prompts=20, text=1000, counted=2000)
        learned = one.lanes.scale
        assert learned > 1.9
        one.monitor.prompt_counted(Demand("short", text_tokens=5000))
        await one.scrape(prompt_tokens_total=0.0, started=2.0)
        one.monitor.prompt_counted(Demand("short", text_tokens=5000))
        await one.scrape(prompt_tokens_total=5.0, started=2.0)
        assert one.lanes.scale == learned

    async def test_does_not_move_before_there_is_enough_to_go_by(self) -> None:
        one = Watched(alone=True)
        await one.scrape(prompt_tokens_total=1.0)
        await self.serve(one, prompts=1, text=999, counted=9999)
        assert one.lanes.scale == 1

    async def test_does_not_move_while_the_engine_counts_nothing(self) -> None:
        one = Watched(alone=True)
        await one.scrape(prompt_tokens_total=1.0)
        await self.serve(one, prompts=20, text=1000, counted=0)
        assert one.lanes.scale == 1
        assert math.isfinite(one.lanes.scale)
