"""From runs to what the report shows: series over the load, recovery after a spike, headline figures. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from loadtest.outcomes import Outcome

Run = Mapping[str, Any]
Runs = Mapping[str, Run]

BIN_S: Final = 1.0
RECOVERED: Final = 0.75  # share of a second's requests that end well once a server is itself again
SPOKEN: Final = {
    "one-at-a-time": "one at a time",
    "hand-batching": "batching by hand",
    "bare": "bare vLLM",
    "own-limit": "vLLM, own limit",
    "tidegate": "Tidegate",
}


def of_group(runs: Runs, group: str) -> list[Run]:
    """The runs of the open loop that belong together."""
    return [run for run in runs.values() if run["step"].get("group") == group]


def arms_of(runs: Iterable[Run]) -> list[str]:
    """The arms among these runs, in the order of the table above."""
    there = {run["step"]["arm"] for run in runs}
    return [arm for arm in SPOKEN if arm in there]


def load_of(run: Run) -> float:
    """The highest offered load of a run, in capacities."""
    return float(max(load for _, load in run["step"]["phases"]))


def series(runs: Iterable[Run], arm: str, metric: str) -> list[tuple[float, float]]:
    """(load, mean over the seeds) for each load with a figure."""
    found: dict[float, list[float]] = {}
    for run in runs:
        value = run["metrics"].get(metric)
        if run["step"]["arm"] == arm and value is not None:
            found.setdefault(load_of(run), []).append(float(value))
    return [(load, sum(values) / len(values)) for load, values in sorted(found.items())]


def outcomes(run: Run) -> dict[str, int]:
    """How many requests ended how."""
    ended = [record["outcome"] for record in run["records"]]
    return {str(outcome.value): ended.count(outcome.value) for outcome in Outcome}


def ended(runs: Iterable[Run]) -> dict[str, int]:
    """The same of several runs together."""
    whole = Counter[str]()
    for run in runs:
        whole.update(outcomes(run))
    return dict(whole)


def good_over_time(run: Run) -> list[tuple[float, float | None]]:
    """(second, share of the requests that arrived in it and ended well); None for a second without requests."""
    last = int(sum(seconds for seconds, _ in run["step"]["phases"]) / BIN_S)
    bins: list[list[bool]] = [[] for _ in range(last)]
    for record in run["records"]:
        bins[min(last - 1, int(record["scheduled"] / BIN_S))].append(record["outcome"] == Outcome.GOOD)
    return [(number * BIN_S, sum(each) / len(each) if each else None) for number, each in enumerate(bins)]


def recovery_s(run: Run) -> float | None:
    """Seconds from the end of the spike until requests end well again, and stay so; None if they don't."""
    begin = sum(seconds for seconds, _ in run["step"]["phases"][:2])
    after = [(at, share) for at, share in good_over_time(run) if at >= begin and share is not None]
    if not after or after[-1][1] < RECOVERED:
        return None
    bad = [at for at, share in after if share < RECOVERED]
    return bad[-1] + BIN_S - begin if bad else 0.0


def served(run: Run) -> float:
    """Share of the users who got what they wanted."""
    return outcomes(run)[Outcome.GOOD] / max(1, len(run["records"]))


def attempts(run: Run) -> float:
    """Requests sent for each user."""
    return float(sum(record["attempts"] for record in run["records"])) / max(1, len(run["records"]))


def sources(runs: Runs) -> list[str]:
    """Machine, versions, command and seeds of the runs, each different one once, with their times."""
    found: dict[str, list[Run]] = {}
    for run in runs.values():
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        found.setdefault(f"{run['machine']}; {versions}; {run['command']}", []).append(run)
    lines = []
    for text, those in found.items():
        seeds = sorted({run["step"].get("seed", 1) for run in those})
        times = [run["at"] for run in those]
        lines.append(f"{text}; seeds {', '.join(map(str, seeds))}; {min(times)} to {max(times)}")
    return lines


def headline(runs: Runs) -> list[tuple[str, str]]:
    """The figures in one line each, those that were measured."""
    lines: list[tuple[str, str]] = []
    ways = {name: float(run["seconds"]) for name, run in runs.items() if "seconds" in run}
    together = ways.get("tidegate_together_s")
    for way, label in (("naive_one_by_one_s", "the naive server"), ("tidegate_one_by_one_s", "Tidegate")):
        if together and way in ways:
            text = f"{ways[way]:.1f} s against {together:.1f} s: {ways[way] / together:.1f} times as fast"
            tokens = runs[way]["step"]["tokens"]
            lines.append(
                (f"16 requests of {tokens} tokens, one by one through {label} / together through Tidegate", text)
            )
    for group, model in (("embedded", "SmolLM2"), ("sweep", "tiny model")):
        lines += _overload(of_group(runs, group), model)
    for run in of_group(runs, "spike"):
        found = recovery_s(run)
        text = "not within the run" if found is None else f"{found:.0f} s"
        lines.append((f"well again after a spike to 3 times the capacity, {SPOKEN[run['step']['arm']]}", text))
    for run in of_group(runs, "storm"):
        text = f"{100 * served(run):.0f}% of the users served, {attempts(run):.2f} attempts each, "
        text += f"{100 * (run['metrics']['tokens_late_share'] or 0):.0f}% of the tokens for nobody"
        lines.append((f"the same spike with retries, {SPOKEN[run['step']['arm']]}", text))
    return lines


def _overload(runs: Sequence[Run], model: str) -> list[tuple[str, str]]:
    """Bare vLLM against Tidegate at 2.5 times the capacity."""
    of: dict[str, dict[str, float]] = {}
    for metric in ("goodput", "short.first_p99_ms", "tokens_late_share"):
        for arm in ("bare", "tidegate"):
            found = dict(series(runs, arm, metric)).get(2.5)
            if found is not None:
                of.setdefault(metric, {})[arm] = found
    lines = []
    for metric, label, unit, factor in (
        ("goodput", "goodput", "req/s", 1.0),
        ("short.first_p99_ms", "first token of short requests, p99", "s", 0.001),
        ("tokens_late_share", "tokens made too late", "%", 100.0),
    ):
        if len(pair := of.get(metric, {})) == 2:
            bare, ours = pair["bare"] * factor, pair["tidegate"] * factor
            text = f"bare vLLM {bare:.2f} {unit}, Tidegate {ours:.2f} {unit}"
            if metric == "goodput" and bare:
                text += f": {ours / bare:.1f} times"
            lines.append((f"{label} at 2.5 times the capacity, {model}", text))
    return lines
