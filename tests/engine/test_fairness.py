"""One greedy key in front of a real engine: who asks for little is neither refused nor last."""

import asyncio

from tests.engine.clients import BUSY_S, held, words
from tests.engine.conftest import Note, Start
from tests.harness import COMPLETIONS, ONE_LANE, Gateway, queued, until
from tests.wire import Json, Wire

SLOTS = 4
QUEUE = 40
GREEDY, POLITE = 100, 5  # requests: twenty times as many
KEYS = {"greedy": "secret-of-greedy", "polite": "secret-of-polite"}


async def begin(gate: Gateway, key: str, body: Json, order: list[str], statuses: list[tuple[str, int]]) -> None:
    """Read a stream to its end; note when it began, and its status."""
    async with await Wire.open(gate.port, headers={"authorization": f"Bearer {KEYS[key]}"}) as wire:
        await wire.request(COMPLETIONS, {**body, "stream": True})
        status, headers = await wire.read_head(BUSY_S)
        statuses.append((key, status))
        if status == 200:
            order.append(key)
        async for _ in wire.pieces(headers, BUSY_S):
            pass


async def test_a_greedy_key_with_twenty_times_the_requests_does_not_starve_another(gateway: Start, note: Note) -> None:
    pairs = ",".join(f"{name}:{value}" for name, value in KEYS.items())
    gate = gateway(fresh=True, max_in_flight=SLOTS, max_queue=QUEUE, lanes=ONE_LANE, api_keys=pairs)
    order, statuses = list[str](), list[tuple[str, int]]()
    async with held(gate, SLOTS):
        calls = [asyncio.create_task(begin(gate, "greedy", words(8), order, statuses)) for _ in range(GREEDY)]
        await until(lambda: len(statuses) == GREEDY - QUEUE, "a full queue", within=BUSY_S)
        await queued(gate, QUEUE)
        calls += [asyncio.create_task(begin(gate, "polite", words(8), order, statuses)) for _ in range(POLITE)]
        await until(lambda: len(statuses) == GREEDY - QUEUE + POLITE, "room for the others", within=BUSY_S)
        assert {key for key, _ in statuses} == {"greedy"}, "only the greedy one was refused"
    await asyncio.gather(*calls)
    assert statuses.count(("polite", 200)) == POLITE
    assert statuses.count(("greedy", 503)) == GREEDY - QUEUE + POLITE
    last = len(order) - order[::-1].index("polite")
    note("of 40 that were let in, the last of the polite key's five began as number", last)
    assert last <= 2 * POLITE + 2 * SLOTS, f"every second turn was the polite one's: {order}"
