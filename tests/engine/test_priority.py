"""Short requests overtake long ones, inside the engine too."""

import asyncio
import random

from tests.engine.clients import BUSY_S, ENDLESS, Watch, held, raw, words
from tests.engine.conftest import Measure, Start
from tests.engine.real import SLOTS
from tests.harness import COMPLETIONS, Gateway, queued, until
from tests.wire import Json

LONG = 1000  # tokens: more than the short lane takes
SHORT = 8


async def begin(gate: Gateway, body: Json, order: list[str], name: str) -> None:
    """Read a stream's first token, note the order of arrival, and leave."""
    async with await gate.wire() as wire:
        await wire.request(COMPLETIONS, {**body, "stream": True})
        assert (await wire.read_head(BUSY_S))[0] == 200
        order.append(name)


async def test_a_short_request_overtakes_long_ones_that_wait_inside_the_engine(gateway: Start) -> None:
    gate, order = gateway(max_in_flight=4 * SLOTS), list[str]()
    async with held(gate, SLOTS) as wires, Watch(gate) as watch:
        calls = [asyncio.create_task(begin(gate, words(LONG), order, "long")) for _ in range(6)]
        await watch.back_to((SLOTS, 6))
        calls += [asyncio.create_task(begin(gate, words(SHORT), order, "short")) for _ in range(3)]
        await watch.back_to((SLOTS, 9))
        assert gate.stats()["queue_depth"] == 0, "they wait at the gate, so this shows nothing of the engine"
        await wires[0].close()
        await asyncio.gather(*calls)
    assert order == ["short"] * 3 + ["long"] * 6


async def test_a_clients_own_priority_does_not_help_it(gateway: Start) -> None:
    gate, order = gateway(max_in_flight=4 * SLOTS), list[str]()
    async with held(gate, SLOTS) as wires, Watch(gate) as watch:
        pushy = words(LONG, priority=-100)
        calls = [asyncio.create_task(begin(gate, pushy, order, "pushy"))]
        await watch.back_to((SLOTS, 1))
        calls.append(asyncio.create_task(begin(gate, words(SHORT), order, "short")))
        await watch.back_to((SLOTS, 2))
        await wires[0].close()
        await asyncio.gather(*calls)
    assert order == ["short", "pushy"]


async def test_short_prompts_are_answered_while_long_ones_are_read(gateway: Start, measure: Measure) -> None:
    """Twelve prompts of 8,000 tokens in one call keep the engine busy for seconds; short calls pass them by."""
    gate = gateway()
    prompts = [[random.randrange(100, 40_000) for _ in range(8000)] for _ in range(12)]
    loop = asyncio.get_running_loop()
    async with Watch(gate) as watch, raw(gate) as client:
        long = asyncio.create_task(client.post(COMPLETIONS, json=words(1, prompts)))
        await watch.reaches(lambda running, waiting: running + waiting > 0, "prefill")
        sent = loop.time()
        times = []
        for call in asyncio.as_completed([client.post(COMPLETIONS, json=words(1)) for _ in range(20)]):
            assert (await call).status_code == 200
            times.append(loop.time() - sent)
        assert not long.done(), "a short call came last"
        measure("slowest of 20 short calls", times[-1])
        assert (await long).status_code == 200
        measure("the long call", loop.time() - sent)


async def test_the_gate_itself_lets_a_short_request_overtake(gateway: Start) -> None:
    """With the limit at the engine's own nothing waits inside the engine, and the gate orders alone."""
    gate, order = gateway(fresh=True), list[str]()
    async with held(gate, SLOTS) as wires, Watch(gate) as watch:
        calls = []
        for name, body, count in (("long", words(ENDLESS), 3), ("short", words(SHORT), 2)):
            calls += [asyncio.create_task(begin(gate, body, order, name)) for _ in range(count)]
            await queued(gate, len(calls))
        assert watch.now == (SLOTS, 0)
        await wires[0].close()
        await until(lambda: len(order) == 2, "two answers", within=BUSY_S)
        assert order == ["short"] * 2
        for wire in wires:
            await wire.close()
        await asyncio.gather(*calls)
