"""`python -m loadtest.overload`: what becomes of requests when more arrive than the engine can serve.

Open loop: requests arrive on a schedule fixed beforehand, as they do from many people who don't know of each other,
and every time is counted from the scheduled moment. First the engine's capacity is measured by keeping it full; then
each arm gets the same schedule at `--load` times that capacity, seed by seed, the arms in turn. Every client names its
limit in `x-request-timeout-ms`, which only Tidegate understands, and waits on beyond it, as clients that are told
nothing do. This process is the client; engines and gateway are others.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import uvloop

from launcher.model import ModelFailed
from loadtest import report
from loadtest.arms import ARMS, Options, Stage
from loadtest.client import NotServed
from loadtest.naive_arms import ALL_ARMS
from loadtest.outcomes import Metrics
from loadtest.processes import ServerFailed
from loadtest.report import progress
from loadtest.runs import allow_many_connections, measure_capacity, run
from loadtest.workload import LONG_SHARE, schedule

INTERRUPTED, TERMINATED = 130, 143
MOST_SEEDS: Final = 20
FULL: Final[dict[str, Any]] = {"seeds": "1,2,3", "seconds": 20.0, "grace": 60.0, "measure": 15.0}
QUICK: Final[dict[str, Any]] = {"seeds": "1", "seconds": 8.0, "grace": 12.0, "measure": 8.0}


@dataclass(frozen=True, slots=True)
class Plan:
    """One experiment. Times are seconds, `capacity` is requests a second (None: measure it)."""

    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    mix: str
    load: float
    seconds: float
    grace_s: float
    measure_s: float
    capacity: float | None
    spread: float = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; 0 done, 1 a server failed, 2 usage, 130 or 143 interrupted."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(given)
    plan = make_plan(arguments)
    out = arguments.out or Path("reports", "overload", datetime.now(UTC).strftime("%Y%m%d-%H%M%S"))
    out.mkdir(parents=True, exist_ok=True)
    settings = dict(arguments.set)
    options = Options(settings, out.resolve(), arguments.in_turn, arguments.url, progress)
    about = report.facts(given) | asdict(plan) | {"settings": settings}
    allow_many_connections()
    try:
        asyncio.Runner(loop_factory=uvloop.new_event_loop).run(_experiment(plan, options, about))
    except (ServerFailed, NotServed, ModelFailed) as error:
        progress(f"overload: {error}")
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError) as end:
        progress(f"overload: interrupted; finished runs are in {out}")
        return INTERRUPTED if isinstance(end, KeyboardInterrupt) else TERMINATED
    return 0


async def _experiment(plan: Plan, options: Options, about: dict[str, Any]) -> None:
    from tests.engine.tiny_model import tiny_model

    this = asyncio.current_task()
    assert this
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    at_most = len(plan.seeds) * len(plan.arms) * (plan.seconds + plan.grace_s)
    seeds = ", ".join(map(str, plan.seeds))
    progress(f"arms {', '.join(plan.arms)}; seeds {seeds}; {at_most / 60:.1f} min of load at most, and engine starts")
    runs: dict[str, list[Metrics]] = {arm: [] for arm in plan.arms}
    async with Stage(await asyncio.to_thread(tiny_model), options) as stage:
        about["capacity"] = capacity = plan.capacity or await measure_capacity(
            stage, plan.mix, plan.seeds[0], plan.measure_s
        )
        about["rate"] = rate = plan.load * capacity
        progress(f"capacity {capacity:.1f} req/s ({plan.mix}); offered {rate:.1f} req/s for {plan.seconds:g} s")
        for seed in plan.seeds:
            requests = schedule(plan.mix, rate, plan.seconds, seed, spread=plan.spread)
            for arm in plan.arms:
                async with ALL_ARMS[arm](stage) as target:
                    metrics, records = await run(target, requests, plan.seconds, plan.grace_s, f"seed {seed}, {arm}")
                runs[arm].append(metrics)
                report.write_run(
                    options.out / f"{arm}-{seed}.json", about | {"arm": arm, "seed": seed}, metrics, records
                )
    report.write_summary(options.out / "summary.json", about, runs)
    offered = f"{plan.load:g} x capacity ({rate:.1f} of {capacity:.1f} req/s)"
    print(f"\n{plan.mix}, {offered}, {plan.seconds:g} s of arrivals\n\n{report.table(runs)}")
    print(f"\n{report.legend(plan.grace_s)}\n{report.footer(about)}\nRecords: {options.out}")


def parser() -> argparse.ArgumentParser:
    """The flags of the command line."""
    flags = argparse.ArgumentParser(
        prog="python -m loadtest.overload",
        description="Open-loop overload: the same requests, on the same schedule, against several ways to serve one "
        "real vLLM engine with a tiny model. Prints one table; writes each run with every request's record as JSON.",
        epilog="Examples:  python -m loadtest.overload --quick  |  python -m loadtest.overload --load 0.25  |  "
        "python -m loadtest.overload --mix long --seeds 1 --arms own-limit,tidegate --set MAX_QUEUE=50",
    )
    add = flags.add_argument
    add("--quick", action="store_true", help="one seed and short times: for a look, not for a judgement")
    add(
        "--arms",
        type=_names,
        default=tuple(ARMS),
        help=f"in this order (default: {','.join(ARMS)}; all: {','.join(ALL_ARMS)})",
    )
    add("--seeds", type=_seeds, help=f"comma-separated (default: {FULL['seeds']}; quick: {QUICK['seeds']})")
    add("--load", type=_within(0.01, 10), default=2.5, help="offered load, in capacities (default: 2.5)")
    add("--mix", choices=list(LONG_SHARE), default="mixed", help="mixed is 80%% short, 20%% long (default: mixed)")
    add(
        "--spread", type=_within(0.1, 10), default=1.0, help="of arrivals: 1 is Poisson, 3 comes in bursts (default: 1)"
    )
    add("--url", default="", help="http://host:port of a server of yours, for --arms url")
    add("--seconds", type=_within(1, 300), help=f"of arrivals{_defaults('seconds')}")
    add("--grace", type=_within(1, 300), help=f"seconds that the client waits on after them{_defaults('grace')}")
    add("--measure", type=_within(1, 300), help=f"seconds for measuring capacity{_defaults('measure')}")
    add("--capacity", type=_within(0.1, 1000), help="requests per second; given, it is not measured")
    add("--set", action="append", type=_setting, default=[], metavar="NAME=VALUE", help="a TIDEGATE_ setting to try")
    add("--in-turn", action="store_true", help="one engine at a time: less memory, half a minute more for each change")
    add("--out", type=Path, help="folder for JSON and the servers' logs (default: reports/overload/TIME)")
    return flags


def make_plan(arguments: argparse.Namespace) -> Plan:
    """What the flags ask for; `--quick` changes defaults only."""
    default = QUICK if arguments.quick else FULL
    return Plan(
        arms=arguments.arms,
        seeds=arguments.seeds or _seeds(default["seeds"]),
        mix=arguments.mix,
        load=arguments.load,
        seconds=arguments.seconds or default["seconds"],
        grace_s=arguments.grace or default["grace"],
        measure_s=arguments.measure or default["measure"],
        capacity=arguments.capacity,
        spread=arguments.spread,
    )


def _defaults(name: str) -> str:
    return f" (default: {FULL[name]:g}; quick: {QUICK[name]:g})"


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - ALL_ARMS.keys():
        raise argparse.ArgumentTypeError(
            f"no such arm: {', '.join(sorted(unknown))} (there are: {', '.join(ALL_ARMS)})"
        )
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError("an arm is named twice")
    return names


def _seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError("must be whole numbers, separated by commas") from None
    if len(set(seeds)) < len(seeds) or len(seeds) > MOST_SEEDS:
        raise argparse.ArgumentTypeError(f"must be at most {MOST_SEEDS} different numbers")
    return seeds


def _within(low: float, high: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low:g} to {high:g}")
        return value

    return number


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError("must be NAME=VALUE")
    return "TIDEGATE_" + name.upper().removeprefix("TIDEGATE_"), value


if __name__ == "__main__":
    sys.exit(main())
