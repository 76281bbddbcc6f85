"""Half an hour of more than the engine can take: does anything drift, and does what is counted add up?

    make soak [ARGS=--help]

Real vLLM with a tiny model behind the gateway. Its capacity is measured first; then requests arrive at a multiple of
it, at random times fixed beforehand (Poisson), short and long ones, each with a deadline, and a few clients leave. Each
minute is a row. At the end come straight lines through the rows after the fifth minute, with their standard errors (a
figure that doesn't drift has a slope within two of them), and the gateway's counters: what was accepted must be what
was completed, or ended by its deadline, its client or the engine. The exit code is 1 if they don't add up.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import uvloop

from loadtest.arms import ARMS, Options, Stage, Target
from loadtest.client import Exchange, NotServed, load
from loadtest.outcomes import Outcome, Record, percentile
from loadtest.processes import ServerFailed, end_in_order
from loadtest.report import aligned, facts, progress, write_json
from loadtest.runs import allow_many_connections, measure_capacity
from loadtest.slope import slope
from loadtest.workload import KINDS, Request, schedule
from tests.engine.tiny_model import tiny_model
from tests.harness import Metrics

MIX: Final = "mixed"
MINUTE_S: Final = 60.0
SETTLED: Final = 5  # minutes that are left out of the lines
LEAVE: Final = 0.03  # share of clients that leave
GRACE_S: Final = 60.0  # for the last answers, beyond every deadline
COUNT_AGAIN, COUNT_EVERY_S = 50, 0.2  # until the gateway has noticed the last ones that left
LEFT: Final = "left"
OUTCOMES: Final = ("completed", "deadline", "client_left", "engine_error", "refused", "invalid")
ENDS: Final = OUTCOMES[:4]  # of what was accepted
REPORT: Final = Path("reports", "soak")


@dataclass(slots=True)
class Minute:
    """What became of the requests that were scheduled in it, and the memory at its end."""

    number: int
    ends: Counter[str] = field(default_factory=Counter)
    first_s: dict[str, list[float]] = field(default_factory=lambda: {kind.name: [] for kind in KINDS})
    lag_s: list[float] = field(default_factory=list)
    gateway_bytes: int = 0
    engine_bytes: int = 0

    def add(self, record: Record, *, left: bool) -> None:
        """One request is over."""
        self.ends[LEFT if left else record.outcome.value] += 1
        if record.first is not None:
            self.first_s[record.kind].append(record.first - record.scheduled)
        if record.sent is not None:
            self.lag_s.append(record.sent - record.scheduled)

    def figures(self) -> dict[str, float | None]:
        """The row."""
        row: dict[str, float | None] = {"minute": self.number}
        row |= {end: self.ends[end] for end in (*(outcome.value for outcome in Outcome), LEFT)}
        for kind, times in self.first_s.items():
            for name, share in (("p50", 0.5), ("p99", 0.99)):
                found = percentile(times, share)
                row[f"{kind}_{name}_ms"] = None if found is None else found * 1000
        row["gateway_mib"] = self.gateway_bytes / 2**20
        row["engine_mib"] = self.engine_bytes / 2**20
        lag = percentile(self.lag_s, 0.99)
        row["client_late_p99_ms"] = None if lag is None else lag * 1000
        return row


class Soak:
    """One run against one gateway."""

    def __init__(self, target: Target, requests: Sequence[Request], minutes: int, seed: int) -> None:
        self._target = target
        self._requests = requests
        self._dice = random.Random(f"{seed} leaving")
        self._start = 0.0
        self.minutes = [Minute(number) for number in range(1, minutes + 1)]

    async def run(self) -> None:
        """All requests at their times, and the memory at the end of each minute."""
        self._start = time.monotonic()
        watch = asyncio.create_task(self._watch())
        calls: set[asyncio.Task[None]] = set()
        for request in self._requests:
            delay = self._start + request.at_s - time.monotonic()
            if delay > 0:
                await asyncio.sleep(delay)
            call = asyncio.create_task(self._call(request))
            calls.add(call)
            call.add_done_callback(calls.discard)
        if calls:
            await asyncio.wait(calls, timeout=GRACE_S)
        for call in list(calls):
            call.cancel()
        await asyncio.gather(*calls, watch, return_exceptions=True)

    async def _call(self, request: Request) -> None:
        leaves_s = self._dice.uniform(0.02, 1.0) if self._dice.random() < LEAVE else None
        exchange = Exchange(load(request, self._target.model, "soak"), self._start)
        left = False
        try:
            async with asyncio.timeout(leaves_s):
                await exchange.run(self._target.address)
        except TimeoutError:
            left = True
        finally:
            self.minutes[min(int(request.at_s / MINUTE_S), len(self.minutes) - 1)].add(exchange.record, left=left)

    async def _watch(self) -> None:
        assert self._target.gateway
        for minute in self.minutes:
            await asyncio.sleep(self._start + minute.number * MINUTE_S - time.monotonic())
            minute.gateway_bytes = self._target.gateway.child.memory_bytes()
            minute.engine_bytes = self._target.engine.child.group_bytes()  # the model is in a process of its own
            row = minute.figures()
            progress(", ".join(f"{name} {value:.0f}" for name, value in row.items() if value))


@dataclass(frozen=True, slots=True)
class Counts:
    """What the gateway has counted."""

    arrived: int
    ended: dict[str, float]

    def __sub__(self, before: "Counts") -> "Counts":
        ended = {outcome: count - before.ended[outcome] for outcome, count in self.ended.items()}
        return Counts(self.arrived - before.arrived, ended)

    @property
    def accepted(self) -> float:
        return self.arrived - self.ended["refused"] - self.ended["invalid"]

    @property
    def add_up(self) -> bool:
        return self.accepted == sum(self.ended[outcome] for outcome in ENDS)

    def __str__(self) -> str:
        ends = " + ".join(f"{self.ended[outcome]:.0f} {outcome}" for outcome in ENDS)
        return (
            f"arrived {self.arrived}, refused {self.ended['refused']:.0f}; "
            f"accepted {self.accepted:.0f} {'=' if self.add_up else '!='} {ends}"
        )


async def counts(target: Target) -> Counts:
    """Read `/metrics` and `/stats`."""
    async with httpx.AsyncClient(base_url=target.address.url, timeout=60, trust_env=False) as client:
        metrics = Metrics((await client.get("/metrics")).text)
        arrived = (await client.get("/stats")).json()["total_requests"]
    return Counts(arrived, {name: metrics.total("tidegate_requests_total", outcome=name) for name in OUTCOMES})


async def counts_since(target: Target, before: Counts) -> Counts:
    """What was counted since, once it adds up, else after a while: a call that is just ending is in neither number."""
    for _ in range(COUNT_AGAIN):
        if (counted := await counts(target) - before).add_up:
            return counted
        await asyncio.sleep(COUNT_EVERY_S)
    return await counts(target) - before


def all_there(counted: Counts, sent: int, left: int) -> bool:
    """Whether the counters add up and no request is missing but of clients that may have left before it was out."""
    return counted.add_up and sent - left <= counted.arrived <= sent


def lines(rows: Sequence[dict[str, float | None]]) -> dict[str, str]:
    """Straight lines through figures from the fifth minute on, for each minute."""
    found = {}
    for name in (*(f"{kind.name}_p99_ms" for kind in KINDS), "gateway_mib", "engine_mib", "good"):
        late = [(row["minute"] or 0, value) for row in rows[SETTLED:] if (value := row[name]) is not None]
        line = slope(late)
        if line is not None:
            found[name] = f"{line} a minute, {'within noise' if line.flat else 'DRIFTS'}"
    return found


def table(rows: Sequence[dict[str, float | None]]) -> str:
    """One line for each minute."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    text = [[name.replace("_", " ") for name in names]]
    text += [["-" if row[name] is None else f"{row[name]:.0f}" for name in names] for row in rows]
    return aligned(text)


async def soak(given: argparse.Namespace, about: dict[str, Any]) -> bool:
    """The whole; whether the counters add up."""
    options = Options({}, REPORT.resolve(), tell=progress)
    async with Stage(await asyncio.to_thread(tiny_model), options) as stage:
        capacity = given.capacity or await measure_capacity(stage, MIX, given.seed, given.measure)
        rate = given.load * capacity
        progress(f"capacity {capacity:.1f} req/s; offered {rate:.1f} req/s for {given.minutes} min")
        requests = schedule(MIX, rate, given.minutes * MINUTE_S, given.seed)
        async with ARMS["tidegate"](stage) as target:
            one = Soak(target, requests, given.minutes, given.seed)
            before = await counts(target)
            await one.run()
            rows = [minute.figures() for minute in one.minutes]
            about |= {"capacity": capacity, "rate": rate, "rows": rows}
            write_json(REPORT / "soak.json", about)  # half an hour, kept whatever comes
            await target.until_idle()
            counted = await counts_since(target, before)
    ends = Counter[str]()
    for minute in one.minutes:
        ends.update(minute.ends)
    drift = lines(rows)
    about |= {"clients_saw": dict(ends), "slopes": drift}
    about |= {"arrived": counted.arrived, "counted": counted.ended, "add_up": counted.add_up}
    write_json(REPORT / "soak.json", about)
    print(table(rows))
    for name, line in drift.items():
        print(f"{name}: {line}")
    print(f"clients saw {dict(ends)}, of {len(requests)} requests")
    print(f"counted at the gateway: {counted}")
    return all_there(counted, len(requests), ends[LEFT])


def main(argv: Sequence[str]) -> int:
    """Run; 1 if a server failed or the counters do not add up."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=int, default=30, help="[%(default)s]")
    parser.add_argument("--load", type=float, default=1.5, help="in capacities [%(default)g]")
    parser.add_argument("--seed", type=int, default=1, help="[%(default)s]")
    parser.add_argument("--measure", type=float, default=20.0, help="seconds for measuring capacity [%(default)g]")
    parser.add_argument("--capacity", type=float, help="requests a second; given, it is not measured")
    given = parser.parse_args(argv)
    REPORT.mkdir(parents=True, exist_ok=True)
    about = facts(argv, "loadtest.soak") | {"seed": given.seed, "load": given.load, "minutes": given.minutes}
    allow_many_connections()
    try:
        well = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(soak(given, about))
    except (ServerFailed, NotServed, httpx.HTTPError) as error:
        progress(f"soak: {type(error).__name__}: {error}")
        return 1
    print(f"{'counters add up' if well else 'COUNTERS DO NOT ADD UP'}; {about['machine']}; {about['at']}")
    return 0 if well else 1


if __name__ == "__main__":
    end_in_order()
    sys.exit(main(sys.argv[1:]))
