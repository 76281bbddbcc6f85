"""The pictures of the report, each a PNG. What is drawn comes from `findings`."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from loadtest.findings import SPOKEN, Run, Runs, arms_of, ended, good_over_time, load_of, of_group, series, sources
from loadtest.outcomes import Outcome

NOTE_WIDTH: Final = 150  # characters that fit under the narrowest picture
COLOURS: Final = {
    "one-at-a-time": "#9e9e9e",
    "hand-batching": "#8d6e63",
    "bare": "#c62828",
    "own-limit": "#f9a825",
    "tidegate": "#1565c0",
}
OUTCOME_COLOURS: Final = dict(
    zip(Outcome, ("#2e7d32", "#ef6c00", "#90a4ae", "#ab47bc", "#5c6bc0", "#c62828", "#212121"), strict=True)
)
WAYS: Final = {
    "naive_one_by_one_s": "naive server,\none by one",
    "tidegate_one_by_one_s": "Tidegate,\none by one",
    "tidegate_together_s": "Tidegate,\ntogether",
}


def draw(folder: Path, runs: Runs) -> dict[str, str]:
    """Draw what the runs allow; titles by file name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sweep = of_group(runs, "sweep")
    pictures: dict[str, tuple[str, Any]] = {
        "goodput.png": ("Goodput against offered load", lambda: _lines(pyplot, sweep, ["goodput"], "req/s in time")),
        "outcomes.png": ("What became of the requests, at the highest load of all", lambda: _stacks(pyplot, sweep)),
        "first_token.png": (
            "Time to the first token (line p50, dashes p99)",
            lambda: _by_lane(pyplot, sweep, "first_p50_ms", "first_p99_ms"),
        ),
        "refusal.png": (
            "Time to a refusal (line p50, dashes p99)",
            lambda: _by_lane(pyplot, sweep, "refusal_p50_ms", "refusal_p99_ms"),
        ),
        "late_tokens.png": (
            "Tokens made for requests that did not end in time",
            lambda: _lines(pyplot, sweep, ["tokens_late_share"], "share of all tokens"),
        ),
        "spike.png": ("Recovery after a spike", lambda: _over_time(pyplot, of_group(runs, "spike"))),
        "storm.png": ("The same spike with retries", lambda: _over_time(pyplot, of_group(runs, "storm"))),
        "together.png": ("16 requests, one by one and together", lambda: _together(pyplot, runs)),
    }
    drawn = {}
    for name, (title, make) in pictures.items():
        figure = make()
        if figure is not None:
            figure.suptitle(title)
            said = "\n".join(textwrap.fill(line, NOTE_WIDTH) for line in sources(runs))
            figure.supxlabel(said, fontsize=5, color="#616161")
            figure.savefig(folder / name, dpi=110)
            pyplot.close(figure)
            drawn[name] = title
    return drawn


def _lines(pyplot: Any, runs: Sequence[Run], metrics: Sequence[str], label: str) -> Any:
    if not runs:
        return None
    figure, axis = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    _plot(axis, runs, metrics)
    axis.set(xlabel="offered load, in capacities of the engine", ylabel=label)
    axis.set_ylim(0, 1.08 * max((max(line.get_ydata()) for line in axis.lines), default=0) or 1)
    if axis.lines:
        axis.legend()
    return figure


def _by_lane(pyplot: Any, runs: Sequence[Run], *names: str) -> Any:
    if not runs:
        return None
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharey=True)
    for axis, lane in zip(axes, ("short", "long"), strict=True):
        _plot(axis, runs, [f"{lane}.{name}" for name in names])
        axis.set(xlabel="offered load", title=lane)
    axes[0].set_ylabel("ms")
    if axes[0].lines or axes[1].lines:
        axes[0].set_yscale("log")
        axes[0 if axes[0].lines else 1].legend()
    return figure


def _plot(axis: Any, runs: Sequence[Run], metrics: Sequence[str]) -> None:
    for arm in arms_of(runs):
        for number, metric in enumerate(metrics):
            points = series(runs, arm, metric)
            if points:
                axis.plot(
                    *zip(*points, strict=True),
                    ("o-", "o--")[number],
                    color=COLOURS[arm],
                    label=None if number else SPOKEN[arm],
                    markersize=4,
                )
    axis.grid(alpha=0.3)


def _stacks(pyplot: Any, runs: Sequence[Run]) -> Any:
    if not runs:
        return None
    common = min(max(load_of(run) for run in runs if run["step"]["arm"] == arm) for arm in arms_of(runs))
    there = [run for run in runs if load_of(run) == common]
    shown = {arm: ended(run for run in there if run["step"]["arm"] == arm) for arm in arms_of(there)}
    figure, axis = pyplot.subplots(figsize=(9, 0.7 * len(shown) + 1.6), layout="constrained")
    left = dict.fromkeys(shown, 0.0)
    for outcome in Outcome:
        widths = [shown[arm][outcome] / max(1, sum(shown[arm].values())) for arm in shown]
        if any(widths):
            axis.barh(
                [SPOKEN[arm] for arm in shown],
                widths,
                left=list(left.values()),
                label=outcome.value,
                color=OUTCOME_COLOURS[outcome],
            )
            left = {arm: left[arm] + width for arm, width in zip(shown, widths, strict=True)}
    axis.set(xlabel=f"share of the requests, at {common:g} times the capacity", xlim=(0, 1))
    axis.invert_yaxis()
    axis.legend(ncols=len(Outcome), loc="upper center", bbox_to_anchor=(0.45, -0.28), fontsize=8)
    return figure


def _over_time(pyplot: Any, runs: Sequence[Run]) -> Any:
    if not runs:
        return None
    figure, axis = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    for run in runs:
        points = [(at, 100 * share) for at, share in good_over_time(run) if share is not None]
        arm = run["step"]["arm"]
        if points:
            axis.step(*zip(*points, strict=True), where="post", color=COLOURS[arm], label=SPOKEN[arm])
    (before, _), (spike, load), *_ = runs[0]["step"]["phases"]
    axis.axvspan(before, before + spike, alpha=0.12, color="black", label=f"{load:g} times the capacity")
    axis.set(xlabel="second of arrival", ylabel="% that ended well", ylim=(-3, 103))
    axis.grid(alpha=0.3)
    axis.legend()
    return figure


def _together(pyplot: Any, runs: Runs) -> Any:
    shown = {label: float(runs[way]["seconds"]) for way, label in WAYS.items() if way in runs}
    if not shown:
        return None
    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    bars = axis.bar(list(shown), list(shown.values()), color=["#9e9e9e", "#90caf9", "#1565c0"][: len(shown)])
    axis.bar_label(bars, fmt="%.1f s", padding=2)
    axis.set(ylabel="seconds until all have their answer")
    axis.margins(y=0.12)
    return figure
