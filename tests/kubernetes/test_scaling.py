"""The scaling signal: there without traffic, beyond its target under load, where vLLM's own queue shows nothing."""

import asyncio

from tests.gateway.conftest import start
from tests.harness import ONE_LANE, ROOT, chat, gather_quietly, queued, until
from tests.kubernetes.scaling import trigger, value, wanted_pods
from tests.wire import CHAT

SLOTS = 4


def test_the_guide_shows_the_query_that_is_shipped() -> None:
    shown = trigger()["query"].replace('namespace="tidegate", ', "").replace('{namespace="tidegate"}', "")
    guide = (ROOT / "docs" / "kubernetes.md").read_text()
    assert "".join(shown.split()) in "".join(guide.split())


async def test_signal_is_zero_without_traffic_and_beyond_its_target_at_ten_times_the_load() -> None:
    gate = start({"max_num_seqs": SLOTS}, {"max_in_flight": SLOTS, "max_queue": 2 * SLOTS, "lanes": ONE_LANE})
    try:
        idle = gate.metrics()
        assert value(trigger()["query"], idle, idle, 15) == 0, "every series is there, and 0"
        async with gate.client() as client:
            slow = chat(fake={"fault": "stall", "tag": "busy"})
            calls = [asyncio.create_task(client.post(CHAT, json=slow)) for _ in range(10 * SLOTS)]
            await queued(gate, 2 * SLOTS)
            await until(lambda: gate.metrics().total("tidegate_refusals_total") == 7 * SLOTS, "the refusals")
            busy = gate.metrics()
            assert busy.total("vllm:num_requests_waiting") == 0, "the usual trigger never fires"
            # 4 run, 8 wait, 28 were refused within a scrape interval: that many pods, not just one more
            assert wanted_pods(idle, busy, 15) >= 5
            for call in calls:
                call.cancel()
            await gather_quietly(*calls)
    finally:
        gate.close()
        gate.engine.close()
