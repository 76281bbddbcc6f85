"""At ten times the load the shipped autoscaler's query asks for more pods, while vLLM's own queue stays empty."""

import asyncio
import time

from tests.engine.clients import raw, words
from tests.engine.conftest import Note, Start
from tests.engine.real import SLOTS
from tests.harness import COMPLETIONS, Metrics
from tests.kubernetes.scaling import trigger, value, wanted_pods

QUEUE = 2 * SLOTS


async def test_query_fires_where_vllms_waiting_requests_do_not(gateway: Start, note: Note) -> None:
    gate = gateway(fresh=True, max_queue=QUEUE)
    began, idle = time.monotonic(), gate.metrics()
    assert value(trigger()["query"], idle, idle, 15) == 0, "every series is there without traffic, and 0"
    looks: list[tuple[float, Metrics]] = []
    async with raw(gate) as client:
        calls = [asyncio.create_task(client.post(COMPLETIONS, json=words(300))) for _ in range(10 * SLOTS)]
        while not all(call.done() for call in calls):
            looks.append((time.monotonic(), Metrics((await client.get("/metrics")).text)))
            await asyncio.sleep(0.1)
        statuses = {call.result().status_code for call in calls}
    assert statuses == {200, 503}
    seen = [(wanted_pods(idle, look, max(15, at - began)), look) for at, look in looks]
    wanted, _ = max(seen, key=lambda one: one[0])
    waiting = max(look.total("vllm:num_requests_waiting") for _, look in seen)
    note("pods that the query asks for at ten times the load", wanted)
    note("most requests waiting inside vLLM meanwhile", int(waiting))
    assert wanted >= 5
    assert waiting <= 1, "vLLM's queue is no signal behind a gate"
