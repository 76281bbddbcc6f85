"""Why batches: the same 16 requests one after another and together, on the embedded model.

One after another through the naive server, one after another through Tidegate, and together through Tidegate. Each way
is measured after a request that doesn't count, with prompts that no cache has seen.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from loadtest.arms import Stage, Target
from loadtest.client import Address, Exchange, NotServed, Shot, load
from loadtest.naive_arms import ALL_ARMS
from loadtest.report import progress
from loadtest.runs import disturbed, salts, shares, spent_s
from loadtest.workload import Kind, Request

REQUESTS: Final = 16
WORDS: Final = 12
PATIENCE_S: Final = 600.0  # for one request, which waits for all others at worst
WAYS: Final = {  # name of the figure: arm, and how many at once
    "naive_one_by_one_s": ("one-at-a-time", 1),
    "tidegate_one_by_one_s": ("tidegate", 1),
    "tidegate_together_s": ("tidegate", REQUESTS),
}


async def measure(stage: Stage, way: str, tokens: int) -> dict[str, float]:
    """`seconds` that the 16 requests of so many tokens take one of the ways, and `others_cores` that others used.

    Raises:
        NotServed, ServerFailed: a request failed, or a server did not start.
    """
    arm, at_once = WAYS[way]
    async with ALL_ARMS[arm](stage) as target:
        await send(target.address, shots(target, 1, 2), 1)
        before = spent_s(target)
        seconds = await send(target.address, shots(target, REQUESTS, tokens), at_once)
        others = shares({party: total - before[party] for party, total in spent_s(target).items()})["others_cpu_s"]
    progress(f"{way}: {seconds:.1f} s{disturbed(others / seconds)}")
    return {"seconds": seconds, "others_cores": others / seconds}


def shots(target: Target, count: int, tokens: int) -> list[Shot]:
    """So many requests, with texts of their own."""
    kind = Kind("short", (WORDS, WORDS), (tokens, tokens), PATIENCE_S)
    salt = next(salts)
    return [load(Request(n, 0.0, kind, WORDS, tokens, f"together {n}"), target.model, salt) for n in range(count)]


async def send(address: Address, ready: Sequence[Shot], at_once: int) -> float:
    """Seconds from the first request to the end of the last, with `at_once` of them open.

    Raises:
        NotServed: one of them did not end whole, or all took too long.
    """
    start = time.monotonic()
    left = iter(ready)

    async def work() -> None:
        for shot in left:
            exchange = Exchange(shot, start)
            await exchange.run(address)
            if not exchange.record.whole:
                record = exchange.record
                raise NotServed(f"one of {len(ready)}: status {record.status}, {record.error or 'no end mark'}")

    try:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(work() for _ in range(at_once)))
    except TimeoutError as error:
        raise NotServed(f"{len(ready)} requests took more than {PATIENCE_S:g} s") from error
    return time.monotonic() - start
