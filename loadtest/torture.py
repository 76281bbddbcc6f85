"""Calls as in the field, ten times as many at once as there are slots, to an engine that dies and stands still.

    make torture [ARGS=--help]

The gateway is a process of its own, and so is the stand-in engine behind it (`tests.fake_engine`), which is killed,
stopped, made to hang and cut off at random moments. Each call comes from a socket of its own: three in ten leave at a
random moment (half of these by a reset), some read slowly, some send slowly, and what the engine does to a call is
drawn too. Calls and troubles come from the seed, which is printed; what the machine makes of them differs.

At the end everybody is gone, and the gateway must look as it did before. The exit code is 1 if a client got no end that
it can tell from success, if a call reached the engine twice or in spite of its refusal, or was whole only for its
client, if slots, bytes, descriptors, tasks or objects are left, if memory grows, if counters do not add up, or if the
engine was told of fewer or more ends than the gateway says.
"""

import argparse
import asyncio
import contextlib
import random
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import uvloop

from app.connection import LINGER_S
from loadtest.observed_gateway import ObservedGateway
from loadtest.processes import end_in_order
from loadtest.report import facts, progress, write_json
from loadtest.runs import allow_many_connections
from loadtest.slope import Slope, slope
from loadtest.torture_calls import DEADLINE_S, KEYS, Call, draw, endless, leave_in_answer, play
from loadtest.torture_tally import Tally, table
from tests.harness import FakeEngine, wait_until

CLIENTS_A_SLOT: Final = 10
PAUSE_S: Final = 0.6  # at most, after a refusal
WARM_CALLS: Final = 200
ENDS_A_SLOT: Final = 20  # calls in the count of ends at the end, for each slot
TELL_S: Final = 10.0
SAMPLE_S: Final = 1.0
REST_S: Final = 30.0
ENDS_S: Final = 300.0  # for the count of ends
SETTLED: Final = 0.2  # of the run, after which memory is looked at
LEAK_BYTES: Final = 64.0  # a call: less than the smallest object of a call that could be left
TROUBLES: Final = ("kill", "stop", "hang", "cut")
ABORTS: Final = "tidegate_engine_aborts_total"
REPORT: Final = Path("reports", "torture.json")


class Torture:
    """One run."""

    def __init__(self, seed: int, calls: int, limit: int, every_s: float) -> None:
        self.seed = seed
        self.calls = calls
        self.limit = limit
        self.every_s = every_s
        self.tally = Tally()
        self.engine = FakeEngine(tcp=True)
        self.gate = ObservedGateway(
            self.engine,
            max_in_flight=limit,
            max_queue=2 * limit,
            max_wait_s=2,
            deadline_s=DEADLINE_S,
            body_s=1,
            keepalive_s=0.2,
            stall_s=1,
            api_keys=",".join(f"{name}:{value}" for name, value in KEYS.items()),
        )

    def close(self) -> None:
        self.gate.close()
        self.engine.close()

    async def run(self) -> dict[str, Any]:
        """Everything; the figures."""
        await self._crowd(draw(self.seed + 1, WARM_CALLS), Tally())
        before = await self._at_rest()
        self.engine.reset()  # its log
        began = time.monotonic()
        sent = await self._torture()
        took_s = time.monotonic() - began
        self.tally.add_life(await asyncio.to_thread(self.engine.entries))
        after = await self._at_rest()
        self._compare(before, after)
        metrics = await asyncio.to_thread(self.gate.metrics)
        arrived, ended = self.gate.stats()["total_requests"], metrics.total("tidegate_requests_total")
        self._check(arrived == ended, f"{arrived} calls arrived at the gateway, {ended:g} ended")
        aborts_in_torture = metrics.total(ABORTS)
        ends = await self._count_ends()
        self._compare(before, await self._at_rest())
        self._check(self.gate.running, "the gateway has ended")
        self._check("Traceback" not in self.gate.log, "a traceback in the gateway's log")
        growth = self._growth()
        return {
            "calls": sent,
            "took_s": round(took_s, 1),
            "calls_a_second": round(sent / took_s, 1),
            "ends": dict(self.tally.ends),
            "by_manner": {manner: dict(ends) for manner, ends in self.tally.by_manner.items()},
            "statuses": dict(self.tally.statuses),
            "troubles": dict(self.tally.troubles),
            "at_engine": dict(self.tally.at_engine),
            "aborts_counted_by_gateway": aborts_in_torture,
            "ends_told": ends,
            "before": before,
            "after": after,
            "most_descriptors": self.tally.most_descriptors,
            "memory_mib": [round(self.tally.memory[at][1] / 2**20, 1) for at in (0, -1)] if self.tally.memory else [],
            "memory_bytes_a_call": None if growth is None else [growth.value, growth.error],
            "defects": self.tally.defects,
        }

    # the torture

    async def _torture(self) -> int:
        beside = [asyncio.create_task(work()) for work in (self._trouble, self._sample, self._tell)]
        try:
            await self._crowd(draw(self.seed, self.calls), self.tally)
        finally:
            for task in beside:
                task.cancel()
            results = await asyncio.gather(*beside, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return self.tally.done

    async def _crowd(self, calls: Iterable[Call], tally: Tally) -> None:
        waiting = iter(calls)
        pauses = random.Random(f"{self.seed} pauses")

        async def client() -> None:
            for call in waiting:
                word, status = await play(call, self.gate.port)
                tally.add(call, word, status)
                if word == "refused":  # else most calls would be those of clients that don't wait before they come back
                    await asyncio.sleep(pauses.uniform(0, PAUSE_S))

        await asyncio.gather(*(client() for _ in range(CLIENTS_A_SLOT * self.limit)))

    async def _trouble(self) -> None:
        """One after the other, for as long as it is let; each is whole, so that none is left at the end."""
        dice = random.Random(f"{self.seed} troubles")
        deck: list[str] = []
        while True:
            await asyncio.sleep(dice.uniform(0.5, 1.5) * self.every_s)
            deck = deck or dice.sample(TROUBLES, len(TROUBLES))
            what, length_s = deck.pop(), dice.uniform(0.1, 1.5)
            doing = asyncio.ensure_future(asyncio.to_thread(self._do, what, length_s))
            try:
                await asyncio.shield(doing)
            except asyncio.CancelledError:
                await doing
                raise
            finally:
                self.tally.troubles[what] += 1

    def _do(self, what: str, length_s: float) -> None:
        engine = self.engine
        match what:
            case "kill":
                self.tally.add_life(engine.entries())
                engine.kill()
                time.sleep(length_s)
                engine.start()
            case "stop":
                engine.signal(signal.SIGSTOP)
                time.sleep(length_s)
                engine.signal(signal.SIGCONT)
            case "hang":
                engine.set(hang=True)
                time.sleep(2 * length_s)
                engine.set(hang=False)
            case "cut":
                engine.cut("reset")

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.tally.memory.append((self.tally.done, self.gate.memory_bytes()))
            self.tally.most_descriptors = max(self.tally.most_descriptors, self.gate.descriptors())

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(TELL_S)
            tally = self.tally
            ends = ", ".join(f"{count} {word}" for word, count in tally.ends.most_common())
            progress(
                f"{tally.done} of {self.calls}, {tally.troubles.total()} troubles, {len(tally.defects)} defects, "
                f"{self.gate.memory_bytes() / 2**20:.0f} MiB: {ends}"
            )

    # the end

    async def _at_rest(self) -> dict[str, Any]:
        """Wait until nobody is there; what is open and alive then."""
        return await asyncio.to_thread(self._wait_for_rest)

    def _wait_for_rest(self) -> dict[str, Any]:
        engine, gate = self.engine, self.gate
        with contextlib.suppress(AssertionError):  # then it is told as left over
            wait_until(lambda: not gate.leftovers(), "gauges at 0", within=REST_S)
            wait_until(lambda: gate.get("/readyz").status_code == 200, "a ready engine", within=REST_S)
        end, last = time.monotonic() + LINGER_S + 3, None
        while True:  # the last of the clients, and our own looks, are closing
            engine.cut("close", "idle")  # two looks at once leave two connections
            time.sleep(0.2)
            seen = self._snapshot()
            if time.monotonic() > end or (seen == last and not sum(seen["objects"].values())):
                return seen
            last = seen

    def _snapshot(self) -> dict[str, Any]:
        counts = self.engine.counts()
        gauges = self.gate.leftovers()
        look = self.gate.look()
        objects = look["objects"]
        to_engine = objects["EngineConnection"]  # the scrape's comes and goes
        return {
            "gauges": gauges,
            "descriptors": self.gate.descriptors() - to_engine,
            "tasks": look["tasks"],
            "objects": objects | {"EngineConnection": max(0, to_engine - 1)},
            "at_engine": {name: counts[name] for name in ("running", "queued")},
        }

    def _compare(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        for what in before:
            self._check(before[what] == after[what], f"{what}: {before[what]} before, {after[what]} after")

    def _check(self, holds: bool, defect: str) -> None:
        if not holds:
            self.tally.defects.append(defect)

    async def _count_ends(self) -> dict[str, float]:
        """Calls that cannot end by themselves, on a calm engine: each end must be told to it, once."""
        told_before = await asyncio.to_thread(self.gate.metrics)
        seen_before = self.engine.counts()["aborted"]
        dice = random.Random(f"{self.seed} ends")
        manners = [dice.choice(("closes", "resets", "waits")) for _ in range(ENDS_A_SLOT * self.limit)]
        waiting = iter(enumerate(manners))

        async def client() -> int:
            began = 0
            for index, manner in waiting:
                leaves_s = None if manner == "waits" else dice.uniform(0, 0.05)
                began += await leave_in_answer(endless(index, manner, leaves_s, 0.5 if leaves_s is None else 3), port)
            return began

        port = self.gate.port
        async with asyncio.timeout(ENDS_S):
            began = sum(await asyncio.gather(*(client() for _ in range(self.limit // 2))))
        await self._at_rest()
        metrics = await asyncio.to_thread(self.gate.metrics)
        told = metrics.total(ABORTS) - told_before.total(ABORTS)
        seen = self.engine.counts()["aborted"] - seen_before
        self._check(began == told == seen, f"{began} calls were ended, the gateway says {told:g}, the engine {seen}")
        by_deadline = metrics.total(ABORTS, cause="deadline") - told_before.total(ABORTS, cause="deadline")
        return {"ended": began, "told": told, "seen": seen, "by_deadline": by_deadline}

    def _growth(self) -> Slope | None:
        settled = [(calls, held) for calls, held in self.tally.memory if calls > SETTLED * self.calls]
        growth = slope(settled)
        if growth is not None and len(settled) > 20:
            grows = growth.value - 2 * growth.error > LEAK_BYTES
            self._check(not grows, f"memory grows by {growth} bytes a call")
        return growth


def torture(seed: int, calls: int, limit: int, every_s: float) -> dict[str, Any]:
    """A whole run with servers of its own."""
    one = Torture(seed, calls, limit, every_s)
    try:
        return asyncio.Runner(loop_factory=uvloop.new_event_loop).run(one.run())
    finally:
        one.close()


def main(argv: Sequence[str]) -> int:
    """Run, print, write the report; 1 if there was a defect."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.torture", description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=100_000, help="[%(default)s]")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="default: a new one, printed")
    parser.add_argument("--limit", type=int, default=16, help="slots; ten times as many clients [%(default)s]")
    parser.add_argument("--trouble-every", type=float, default=5.0, help="seconds between the engine's [%(default)g]")
    given = parser.parse_args(argv)
    allow_many_connections()
    progress(f"seed {given.seed}: {given.calls} calls, {CLIENTS_A_SLOT * given.limit} at once, {given.limit} slots")
    found = torture(given.seed, given.calls, given.limit, given.trouble_every)
    about = facts(argv, "loadtest.torture") | {"seed": given.seed, "limit": given.limit}
    REPORT.parent.mkdir(exist_ok=True)
    write_json(REPORT, about | found)
    print(table(found["by_manner"]))
    for name, value in found.items():
        if name not in ("calls", "ends", "by_manner", "defects"):
            print(f"{name}: {value}")
    for defect in found["defects"][:20]:
        print(f"DEFECT {defect}")
    verdict = f"{len(found['defects'])} DEFECTS" if found["defects"] else "all well"
    print(f"seed {given.seed}: {verdict}; {about['machine']}; {about['at']}")
    return 1 if found["defects"] else 0


if __name__ == "__main__":
    end_in_order()
    sys.exit(main(sys.argv[1:]))
