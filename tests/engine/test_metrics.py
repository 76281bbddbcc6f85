"""What monitoring sees of a real engine through the gateway."""

import asyncio
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from tests.engine.clients import Watch, raw, words
from tests.engine.conftest import Start
from tests.engine.real import SLOTS, Vllm
from tests.harness import COMPLETIONS, until

USED_HERE = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions",
    "vllm:iteration_tokens_total",
    "vllm:generation_tokens",
    "vllm:prompt_tokens",
    "vllm:prefix_cache_queries",
    "vllm:cache_config_info",
}


async def test_the_metrics_of_gateway_and_engine_are_one_valid_text(gateway: Start) -> None:
    gate = gateway()
    async with raw(gate) as client:
        assert (await client.post(COMPLETIONS, json=words(4))).status_code == 200
    answer = gate.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    text = answer.body.decode()
    families = Counter(family.name for family in text_string_to_metric_families(text))
    assert not [name for name, times in families.items() if times > 1], "families that appear twice"
    samples = Counter(
        (sample.name, *sorted(sample.labels.items()))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    )
    assert not [sample for sample, times in samples.items() if times > 1], "samples that appear twice"
    assert {name.partition("_")[0].partition(":")[0] for name in families} == {"tidegate", "vllm"}
    assert not USED_HERE - families.keys(), "what the gateway, dashboards and alerts rest on is not there"
    assert gate.metrics().total("tidegate_engine_up") == 1


async def test_the_engines_own_series_pass_untouched(gateway: Start, vllm: Vllm) -> None:
    gate = gateway()
    seen = [line for line in gate.get("/metrics").body.splitlines() if b"vllm:" in line]
    own = [line for line in vllm.ask("GET", "/metrics").body.splitlines() if b"vllm:" in line]
    assert seen == own


async def test_requests_at_once_run_as_one_batch(gateway: Start) -> None:
    gate = gateway(fresh=True)
    await until(lambda: gate.stats()["engine"]["running"] is not None, "a first look at the engine")
    async with raw(gate) as client, Watch(gate) as watch:
        answers = await asyncio.gather(*(client.post(COMPLETIONS, json=words(150)) for _ in range(SLOTS)))
    assert {answer.status_code for answer in answers} == {200}
    assert SLOTS * 0.75 <= max(running for _, running, _ in watch.seen) <= SLOTS
    stats = gate.stats()
    assert SLOTS * 0.75 <= stats["avg_batch_size"] <= SLOTS
    assert stats["total_requests"] == SLOTS
    assert (stats["limit"], stats["engine"]["state"]) == (SLOTS, "ready")


async def test_one_stream_alone_is_a_batch_of_one(gateway: Start) -> None:
    gate = gateway(fresh=True)
    await until(lambda: gate.stats()["engine"]["running"] is not None, "a first look at the engine")
    async with raw(gate) as client:
        assert (await client.post(COMPLETIONS, json=words(50))).status_code == 200
    gate.metrics()  # takes a reading
    assert gate.stats()["avg_batch_size"] == 1
