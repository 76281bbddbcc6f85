"""`make report`: every load test in turn, then one page with pictures. Interrupted, it goes on where it was.

Each run is a file in the `runs` folder; one that is there, made by the same plan, is not made again.
"""

import argparse
import asyncio
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import uvloop

from launcher.model import ModelFailed, prepare
from loadtest import report
from loadtest.arms import ROOT, Options, Stage
from loadtest.client import NotServed, open_loop
from loadtest.experiments import GROUPS, Step, Together, expected_s, steps
from loadtest.insisting import insisting
from loadtest.naive_arms import ALL_ARMS
from loadtest.page import write_page
from loadtest.processes import ServerFailed
from loadtest.report import progress
from loadtest.runs import allow_many_connections, measure_capacity, run
from loadtest.together import measure
from loadtest.workload import KINDS, SLOW_KINDS, varying

OUT: Final = ROOT / "loadtest" / "report"
BAR: Final = 30
MEASURE_S: Final = {True: 6.0, False: 15.0}  # for the capacity, by whether it is quick
KINDS_OF: Final = {"tiny": KINDS, "embedded": SLOW_KINDS}
INTERRUPTED, TERMINATED = 130, 143


class Campaign:
    """The runs of one report and where they are kept."""

    def __init__(self, out: Path, argv: Sequence[str], *, quick: bool, only: Sequence[str] = GROUPS) -> None:
        self.runs = out / "runs"
        self.runs.mkdir(parents=True, exist_ok=True)
        self.quick = quick
        self.plan = steps(quick=quick, only=only)
        self.argv = argv
        self.out = out

    def left(self) -> list[Step | Together]:
        """What is still to be done."""
        return [step for step in self.plan if not self.done(step)]

    def done(self, step: Step | Together) -> dict[str, Any] | None:
        """A run that was made by just this plan."""
        found = self.read(step.name)
        return found if found is not None and found["step"] == _plain(step) else None

    def read(self, name: str) -> dict[str, Any] | None:
        """A run's file, None if there is none."""
        file = self.runs / f"{name}.json"
        return dict(json.loads(file.read_text())) if file.exists() else None

    def write(self, name: str, content: dict[str, Any]) -> None:
        """A run's file, with where it comes from."""
        report.write_json(self.runs / f"{name}.json", report.facts(self.argv, "loadtest.campaign") | content)

    async def run(self) -> None:
        """Whatever is left."""
        this = asyncio.current_task()
        assert this
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
        for model in ("tiny", "embedded"):
            left = [step for step in self.left() if step.model == model]
            if left:
                options = Options({}, self.out.resolve(), tell=progress)
                async with Stage(await asyncio.to_thread(_folder, model), options) as stage:
                    await self._run_with(stage, left)

    async def _run_with(self, stage: Stage, left: Sequence[Step | Together]) -> None:
        for step in left:
            self._show(step)
            began = time.monotonic()
            if isinstance(step, Step):
                content = await self._open_loop(stage, step, await self._capacity(stage, step.model))
            else:
                content = dict(await measure(stage, step.way, step.tokens))
            self.write(step.name, {"step": _plain(step), "took_s": time.monotonic() - began, **content})

    async def _capacity(self, stage: Stage, model: str) -> float:
        """Measured once for all runs with a model."""
        name = f"capacity-{model}"
        if (found := self.read(name)) is None or found["quick"] != self.quick:
            value = await measure_capacity(stage, "mixed", 1, MEASURE_S[self.quick], KINDS_OF[model])
            self.write(name, {"quick": self.quick, "capacity": value})
            return value
        return float(found["capacity"])

    async def _open_loop(self, stage: Stage, step: Step, capacity: float) -> dict[str, Any]:
        phases = [(seconds, load * capacity) for seconds, load in step.phases]
        requests = varying("mixed", phases, step.seed, spread=step.spread, kinds=KINDS_OF[step.model])
        async with ALL_ARMS[step.arm](stage) as target:
            send = insisting if step.retries else open_loop
            metrics, records = await run(target, requests, step.seconds, step.grace_s, step.name, send)
        rows = [asdict(record) | {"outcome": record.outcome} for record in records]
        return {"capacity": capacity, "metrics": metrics, "records": rows}

    def _show(self, step: Step | Together) -> None:
        left = expected_s(self.left())
        share = 1 - left / expected_s(self.plan)
        bar = "#" * round(BAR * share)
        count = len(self.plan) - len(self.left())
        progress(f"[{bar:.<{BAR}}] {count} of {len(self.plan)} runs, about {left / 60:.0f} min left; now {step.name}")


def _plain(step: Step | Together) -> dict[str, Any]:
    """A step as JSON gives it back."""
    return dict(json.loads(json.dumps(asdict(step))))


def _folder(model: str) -> Path:
    from tests.engine.tiny_model import tiny_model

    return tiny_model() if model == "tiny" else prepare(progress)


def _groups(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(GROUPS):
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(sorted(unknown))} (there are: {', '.join(GROUPS)})")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is left and write the page; 0 done, 1 a server failed, 2 usage, 130 or 143 interrupted."""
    given = list(sys.argv[1:] if argv is None else argv)
    flags = argparse.ArgumentParser(prog="python -m loadtest.campaign", description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--quick", action="store_true", help="fewer and shorter runs: some 5 minutes instead of 29")
    flags.add_argument("--only", type=_groups, default=GROUPS, help=f"some of {','.join(GROUPS)} (default: all)")
    flags.add_argument("--fresh", action="store_true", help="forget the runs of an earlier, interrupted report")
    flags.add_argument("--out", type=Path, default=OUT, help="folder (default: loadtest/report)")
    arguments = flags.parse_args(given)
    if arguments.fresh:
        shutil.rmtree(arguments.out / "runs", ignore_errors=True)
    campaign = Campaign(
        arguments.out, [flag for flag in given if flag != "--fresh"], quick=arguments.quick, only=arguments.only
    )
    allow_many_connections()
    try:
        asyncio.Runner(loop_factory=uvloop.new_event_loop).run(campaign.run())
    except (ServerFailed, NotServed, ModelFailed) as error:
        progress(f"report: {error}")
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError) as end:
        progress("report: interrupted; run it again and it goes on from here")
        return INTERRUPTED if isinstance(end, KeyboardInterrupt) else TERMINATED
    results = {step.name: found for step in steps(quick=arguments.quick) if (found := campaign.done(step))}
    page = write_page(arguments.out, results)
    progress(f"report: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
