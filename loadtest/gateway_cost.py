"""`python -m loadtest.gateway_cost`: what a gateway costs for each streamed event and for each call.

A scripted engine answers at once, so that all time and CPU beyond those of the direct arm belong to what stands in the
middle. The arms take turns, round by round; CPU time is what the operating system has booked on all processes of an
arm. Figures of one run can be compared with each other, and with nothing else.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import uvloop

from launcher.model import ModelFailed
from loadtest import cost_report, through_vllm, traffic
from loadtest.client import Address, NotServed
from loadtest.cost_report import Figures
from loadtest.outcomes import percentile
from loadtest.peers import PEERS, Launch, Missing, Place, tidegate
from loadtest.processes import Child, ServerFailed, end_in_order
from loadtest.report import facts, progress
from tests.harness import FakeEngine, free_port

DIRECT: Final = "direct"
START_S: Final = 120.0  # LiteLLM imports for half a minute
STREAMS: Final = 100
EVENTS: Final = {"events": 200, "gap_ms": 20}
COALESCED: Final = {"events": 100_000, "coalesce": 50}
COALESCED_STREAMS: Final = 20
FEW_EVENTS: Final = 5_000  # in such a stream, for an arm that takes a millisecond for one
PLAIN: Final = {"events": 16}
WARM_UP: Final = 100
IN_FLIGHT: Final = 32
CALLS: Final = 2000
FEW_CALLS: Final = 200  # for an arm that takes tens of milliseconds for one
SLOW_S: Final = 0.7  # for the calls to warm up
REFUSALS: Final = 4000
REFUSALS_A_SECOND: Final = 1000
LONGER: Final = {"events": 400, "gap_ms": 20}
STORM_S: Final = 7  # within the time that such streams take
SETTLE_S: Final = 0.5  # until all streams have begun
MANY_STREAMS: Final = 500
MANY_CALLS: Final = 100_000
KILO: Final = 1024


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 done, 1 something of ours failed, 2 usage, 130 interrupted."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(given)
    out: Path = arguments.out or Path("reports", "cost", datetime.now(UTC).strftime("%Y%m%d-%H%M%S"))
    out.mkdir(parents=True, exist_ok=True)
    out = out.resolve()
    about = facts(given, "loadtest.gateway_cost") | {"rounds": arguments.rounds}
    try:
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        arms, missing, own = runner.run(
            _benchmark(arguments.arms, arguments.rounds, out, quick=arguments.quick, vllm=arguments.vllm)
        )
    except (ServerFailed, NotServed, ModelFailed) as error:
        progress(f"gateway_cost: {error}")
        return 1
    except KeyboardInterrupt:
        progress("gateway_cost: interrupted")
        return 130
    print(cost_report.table(arms, missing))
    if own:
        print(cost_report.own_table(own))
    print(f"\n{cost_report.footer(about)}\nWritten to {out}")
    cost_report.write(out, about, {name: [asdict(one) for one in seen] for name, seen in arms.items()}, missing, own)
    cost_report.draw(out / "cost.png", arms, about)
    return 0


async def _benchmark(
    names: Sequence[str], rounds: int, out: Path, *, quick: bool, vllm: bool
) -> tuple[dict[str, list[Figures]], dict[str, str], dict[str, list[float]]]:
    arms: dict[str, list[Figures]] = {name: [] for name in (DIRECT, *names)}
    missing: dict[str, str] = {}
    refusals: list[dict[str, float]] = []
    own: dict[str, list[float]] = {}
    with FakeEngine(tcp=True) as engine:
        assert engine.port is not None
        for number in range(1, rounds + 1):
            for name in arms:
                if name in missing:
                    continue
                progress(f"round {number} of {rounds}: {name}")
                try:
                    arms[name].append(await _round(engine, name, out, quick=quick))
                except (Missing, ServerFailed, NotServed) as why:
                    if name in (DIRECT, cost_report.OURS):
                        raise
                    missing[name] = str(why).splitlines()[0]
                    progress(f"  {name} is missing: {why}")
            if cost_report.OURS in arms:
                progress(f"round {number} of {rounds}: refusals")
                refusals.append(await _refusals(engine, out))
        if refusals:
            progress("memory")
            own = {name: [one[name] for one in refusals] for name in refusals[0]}
            own |= await _memory(engine, out, MANY_CALLS // 20 if quick else MANY_CALLS)
    if own and vllm and not quick:
        try:
            own |= await through_vllm.measure(rounds, out)
        except (Missing, ModelFailed, ServerFailed, NotServed) as why:
            missing["real vLLM"] = str(why)
    return {name: seen for name, seen in arms.items() if seen}, missing, own


async def _round(engine: FakeEngine, name: str, out: Path, *, quick: bool) -> Figures:
    assert engine.port is not None
    if name == DIRECT:
        return await _measure(engine, Address(port=engine.port), lambda: 0.0, quick=quick)
    with tempfile.TemporaryDirectory(prefix="tg-") as folder:
        place = Place(free_port(), engine.port, Path(folder))
        launch = await asyncio.to_thread(PEERS[name].prepare, place, lambda text: progress(f"  {text}"))
        engine.defaults(**PLAIN)
        child = await _start(name, launch, place, out)
        try:
            return await _measure(engine, Address(port=place.port), child.cpu_s, quick=quick)
        finally:
            child.stop()


async def _start(name: str, launch: Launch, place: Place, out: Path) -> Child:
    child = Child(name, launch.argv, launch.env, place.folder, out / f"{name}.log")
    address = Address(port=place.port)

    async def answers() -> bool:
        try:
            await traffic.calls(address, 1, 1)
        except NotServed:
            return False
        return True

    try:
        await child.until(answers, "ready", START_S)
    except BaseException:
        child.stop()
        raise
    return child


async def _measure(engine: FakeEngine, address: Address, cpu_s: Callable[[], float], *, quick: bool) -> Figures:
    engine.defaults(**PLAIN)
    warm = await traffic.calls(address, WARM_UP, IN_FLIGHT // 2)
    slow = warm.took_s > SLOW_S
    before = cpu_s()
    plain = await traffic.calls(address, FEW_CALLS if slow or quick else CALLS, IN_FLIGHT)
    plain_cpu = cpu_s() - before

    alone = await traffic.calls(address, FEW_CALLS, 1)

    engine.defaults(**EVENTS)
    before = cpu_s()
    streamed = await traffic.streams(address, STREAMS // 5 if slow or quick else STREAMS)
    streamed_cpu = cpu_s() - before

    engine.defaults(**COALESCED | ({"events": FEW_EVENTS} if slow else {}))
    before = cpu_s()
    coalesced = await traffic.streams(address, 2 if slow or quick else COALESCED_STREAMS)
    coalesced_cpu = cpu_s() - before
    return Figures(
        event_us=1e6 * streamed_cpu / streamed.events,
        coalesced_us=1e6 * coalesced_cpu / coalesced.events,
        call_us=1e6 * plain_cpu / len(plain.latencies),
        call_p50_ms=1e3 * statistics.median(alone.latencies),
        busy_p50_ms=1e3 * statistics.median(plain.latencies),
        calls_s=len(plain.latencies) / plain.took_s,
        gap_p99_ms=1e3 * (percentile(streamed.gaps, 0.99) or 0.0),
    )


async def _refusals(engine: FakeEngine, out: Path) -> dict[str, float]:
    """What a refusal costs, and what many of them do to streams beside them.

    Sending and answering them takes CPU time from everybody on the machine. What is the gateway's own share of it shows
    beside the same refusals by a second gateway, which has nothing else to do.
    """
    async with (
        _ours(engine, "tidegate-full", out, MAX_IN_FLIGHT=str(STREAMS), MAX_QUEUE="0") as (child, address),
        _ours(engine, "tidegate-other", out, MAX_IN_FLIGHT="1", MAX_QUEUE="0") as (_, other),
        _held_streams(engine, other, 1),
    ):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as sender:
            engine.defaults(**LONGER)
            quiet = await traffic.streams(address, STREAMS)
            elsewhere = await _beside_a_storm(address, sender, other)
            beside = await _beside_a_storm(address, sender, address)

        async with _held_streams(engine, address, STREAMS):
            before = child.cpu_s()
            await traffic.refusals(address, REFUSALS, IN_FLIGHT)
            kept = child.cpu_s() - before
            await traffic.calls(address, REFUSALS, IN_FLIGHT, status=503)
            fresh = child.cpu_s() - before - kept
    gaps = {"quiet": quiet, "elsewhere": elsewhere, "refusing": beside}
    return {
        "refusal_us": 1e6 * kept / REFUSALS,
        "refusal_connection_us": 1e6 * fresh / REFUSALS,
    } | {f"gap_p99_{name}_ms": 1e3 * (percentile(seen.gaps, 0.99) or 0.0) for name, seen in gaps.items()}


async def _beside_a_storm(address: Address, sender: Executor, target: Address) -> traffic.Seen:
    """Streams on one gateway while another, or the same, refuses."""
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(sender, traffic.storm, target, 0, 0, 0.0)  # the process is there
    streams = asyncio.create_task(traffic.streams(address, STREAMS))
    await asyncio.sleep(SETTLE_S)  # every slot is taken
    send = (target, REFUSALS_A_SECOND * STORM_S, STREAMS, REFUSALS_A_SECOND)
    seen, _ = await asyncio.gather(streams, loop.run_in_executor(sender, traffic.storm, *send))
    return seen


async def _memory(engine: FakeEngine, out: Path, calls: int) -> dict[str, list[float]]:
    """What it holds after few and many calls, and for an open stream; once, as it is nothing that scatters."""
    async with _ours(engine, "tidegate-memory", out, MAX_IN_FLIGHT=str(MANY_STREAMS)) as (child, address):
        await traffic.calls(address, calls // 5, IN_FLIGHT)
        early = child.memory_bytes()
        for _ in range(8):
            await traffic.calls(address, calls // 10, IN_FLIGHT)
        late = child.memory_bytes()
        async with _held_streams(engine, address, MANY_STREAMS):
            await asyncio.sleep(3)  # the last of it is allocated
            holds = child.memory_bytes()
    return {
        "stream_kib": [(holds - late) / KILO / MANY_STREAMS],
        "early_mib": [early / KILO**2],
        "late_mib": [late / KILO**2],
        "calls": [calls],
    }


@contextlib.asynccontextmanager
async def _ours(engine: FakeEngine, name: str, out: Path, **settings: str) -> AsyncIterator[tuple[Child, Address]]:
    """A gateway of ours, in one lane."""
    assert engine.port is not None
    with tempfile.TemporaryDirectory(prefix="tg-") as folder:
        place = Place(free_port(), engine.port, Path(folder))
        engine.defaults(**PLAIN)
        child = await _start(name, tidegate(place, LANES='[{"name": "all"}]', **settings), place, out)
        try:
            yield child, Address(port=place.port)
        finally:
            child.stop()


@contextlib.asynccontextmanager
async def _held_streams(engine: FakeEngine, address: Address, count: int) -> AsyncIterator[None]:
    """Streams that only hold their slots."""
    engine.defaults(events=EVENTS["events"], gap_ms=1e3 * traffic.WAIT_S)
    holding = asyncio.create_task(traffic.streams(address, count))
    try:
        await asyncio.sleep(SETTLE_S)
        yield
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)


def parser() -> argparse.ArgumentParser:
    """The flags of the command line."""
    about = "\n".join(f"  {peer.name:<12} {peer.about}" for peer in PEERS.values())
    flags = argparse.ArgumentParser(
        prog="python -m loadtest.gateway_cost",
        description=__doc__,
        epilog=f"arms, besides no gateway at all:\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument("--arms", type=_arms, default=tuple(PEERS), help="comma-separated (default: all)")
    flags.add_argument("--rounds", type=int, choices=range(1, 11), default=3, metavar="N", help="1 to 10 (default: 3)")
    flags.add_argument(
        "--quick",
        action="store_true",
        help="a tenth of the calls, a fifth of the streams: for a look, not for a judgement",
    )
    flags.add_argument(
        "--vllm", action=argparse.BooleanOptionalAction, default=True, help="in front of real vLLM too (four minutes)"
    )
    flags.add_argument("--out", type=Path, help="folder for JSON, picture and logs (default: reports/cost/TIME)")
    return flags


def _arms(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - PEERS.keys():
        known = ", ".join(PEERS)
        raise argparse.ArgumentTypeError(f"no such arm: {', '.join(sorted(unknown))} (there are: {known})")
    return names


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
