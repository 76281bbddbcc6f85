"""`python -m loadtest.fairness`: one key sends twenty times as much as another, more than the engine can take.

Real vLLM with a tiny model behind the gateway. The same requests arrive at the same times (open loop, Poisson) twice:
first all in the name of one key, as behind a gateway that does not tell its clients apart, then each in its own.
"""

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import uvloop

from loadtest.arms import ARMS, Options, Stage, Target
from loadtest.client import NotServed, Shot, load, open_loop
from loadtest.outcomes import Outcome, Record, percentile
from loadtest.processes import ServerFailed, end_in_order
from loadtest.report import aligned, facts, progress, write_json
from loadtest.runs import allow_many_connections, measure_capacity
from loadtest.workload import Request, schedule
from tests.engine.tiny_model import tiny_model

TIMES: Final = 20  # as many of the greedy key
KEYS: Final = {"greedy": "secret-of-greedy", "polite": "secret-of-polite"}
WAYS: Final = {"all with one key": False, "each with its own": True}
GRACE_S: Final = 20.0
REPORT: Final = Path("reports", "fairness")


def shot(request: Request, target: Target, salt: str, key: str) -> Shot:
    """The request in the name of a key."""
    ready = load(request, target.model, salt)
    head = b"host: loadtest\r\n"
    return Shot(request, ready.payload.replace(head, head + f"authorization: Bearer {KEYS[key]}\r\n".encode(), 1))


def who(seed: int, count: int) -> list[str]:
    """Whose request each is: the polite one has one in `TIMES + 1`. Pure."""
    dice = random.Random(f"{seed} who")
    return ["polite" if dice.random() < 1 / (TIMES + 1) else "greedy" for _ in range(count)]


def row(way: str, key: str, records: Sequence[Record]) -> list[str]:
    """What became of a key's requests. Pure."""
    ends = Counter(record.outcome for record in records)
    first = [record.first - record.scheduled for record in records if record.first is not None]
    times = [percentile(first, share) for share in (0.5, 0.99)]
    good = ends[Outcome.GOOD]
    shown = [f"{good}", f"{100 * good / max(1, len(records)):.0f}%", f"{ends[Outcome.REFUSED]}"]
    late = len(records) - good - ends[Outcome.REFUSED]
    return [way, key, f"{len(records)}", *shown, f"{late}", *("-" if t is None else f"{t * 1000:.0f}" for t in times)]


async def compare(given: argparse.Namespace) -> list[list[str]]:
    """Both ways, one after the other."""
    settings = {"TIDEGATE_API_KEYS": ",".join(f"{name}:{value}" for name, value in KEYS.items())}
    rows = [["", "key", "requests", "good", "", "refused", "late", "first token p50, ms", "p99"]]
    async with Stage(await asyncio.to_thread(tiny_model), Options(settings, REPORT.resolve(), tell=progress)) as stage:
        capacity = await measure_capacity(stage, given.mix, given.seed, given.measure)
        requests = schedule(given.mix, given.load * capacity, given.seconds, given.seed)
        names = who(given.seed, len(requests))
        progress(f"capacity {capacity:.1f} req/s; offered {given.load * capacity:.1f} req/s")
        for way, apart in WAYS.items():
            async with ARMS["tidegate"](stage) as target:
                shots = [
                    shot(request, target, way[:3], name if apart else "greedy")
                    for request, name in zip(requests, names, strict=True)
                ]
                records = await open_loop(target.address, shots, given.seconds + GRACE_S, progress)
                await target.until_idle()
            rows += [row(way, key, [one for one in records if names[one.index] == key]) for key in KEYS]
    return rows


def main(argv: Sequence[str]) -> int:
    """Run and print; 1 if a server failed."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.fairness", description=__doc__.partition("\n")[0])
    parser.add_argument("--load", type=float, default=2.5, help="in capacities [%(default)g]")
    parser.add_argument("--mix", choices=("mixed", "short", "long"), default="short", help="[%(default)s]")
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals, for each way [%(default)g]")
    parser.add_argument("--measure", type=float, default=8.0, help="seconds for measuring capacity [%(default)g]")
    parser.add_argument("--seed", type=int, default=1, help="[%(default)s]")
    given = parser.parse_args(argv)
    REPORT.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = facts(argv, "loadtest.fairness") | {"seed": given.seed}
    allow_many_connections()
    try:
        rows = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(compare(given))
    except (ServerFailed, NotServed) as error:
        progress(f"fairness: {error}")
        return 1
    write_json(REPORT / "fairness.json", about | {"rows": rows})
    print(aligned(rows))
    print(f"seed {given.seed}; {about['machine']}; {about['at']}")
    return 0


if __name__ == "__main__":
    end_in_order()
    sys.exit(main(sys.argv[1:]))
