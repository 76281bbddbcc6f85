"""Figures of the gateway-cost benchmark: a table, JSON, and a picture."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from loadtest.peers import RUST
from loadtest.report import aligned, write_json


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm in one round: CPU in microseconds, times in milliseconds."""

    event_us: float
    coalesced_us: float
    call_us: float
    call_p50_ms: float
    busy_p50_ms: float
    calls_s: float
    gap_p99_ms: float


COLUMNS: Final = {
    "event_us": "CPU µs/event",
    "coalesced_us": "coalesced µs/event",
    "call_us": "CPU µs/call",
    "call_p50_ms": "one call alone p50 ms",
    "busy_p50_ms": "32 in flight p50 ms",
    "calls_s": "calls/s",
    "gap_p99_ms": "event gap p99 ms",
}
OURS: Final = "tidegate"


def mean(runs: Sequence[Figures], name: str) -> float:
    """Of one figure over the rounds."""
    values: list[float] = [getattr(run, name) for run in runs]
    return sum(values) / len(values)


def table(arms: Mapping[str, Sequence[Figures]], missing: Mapping[str, str]) -> str:
    """One line for each arm, then the ratios of ours."""
    lines = [["", *COLUMNS.values()]]
    for arm, runs in arms.items():
        lines.append([arm, *(_cell(arm, name, runs) for name in COLUMNS)])
    gone = [f"{arm}: missing, {why}" for arm, why in missing.items()]
    return "\n".join(["", aligned(lines), *gone, "", *ratios(arms)])


def ratios(arms: Mapping[str, Sequence[Figures]]) -> list[str]:
    """Ours over that of others, where both were measured."""
    if OURS not in arms:
        return []
    lines = []
    rust = [arm for arm in RUST if arm in arms]
    for name, label in (("event_us", "event"), ("call_us", "call"), ("coalesced_us", "coalesced event")):
        ours = mean(arms[OURS], name)
        found = {arm: ours / value for arm in arms if arm != OURS and (value := mean(arms[arm], name))}
        if rust:
            best = min(rust, key=lambda arm: mean(arms[arm], name))
            found = {f"the better of the Rust gateways ({best})": found[best]} | found
        text = ", ".join(f"{ratio:.2f} x {arm}" for arm, ratio in found.items())
        lines.append(f"CPU per {label}: tidegate is {text}")
    if "direct" in arms:
        added = mean(arms[OURS], "call_p50_ms") - mean(arms["direct"], "call_p50_ms")
        busy = mean(arms[OURS], "busy_p50_ms") - mean(arms["direct"], "busy_p50_ms")
        lines.append(
            f"A plain call takes {added:.2f} ms longer through tidegate than direct when it is alone, "
            f"{busy:.2f} ms with 32 in flight (p50)"
        )
    return lines


def own_table(own: Mapping[str, Sequence[float]]) -> str:
    """What was asked of this gateway alone."""
    said = {name: _spread(values) for name, values in own.items()}
    calls, early, late = (own[name][0] for name in ("calls", "early_mib", "late_mib"))
    lines = [
        "",
        f"A refusal costs {said['refusal_us']} µs CPU, {said['refusal_connection_us']} µs on a new connection.",
        f"Gap between the events of 100 streams, p99: {said['gap_p99_quiet_ms']} ms,",
        f"beside 1,000 refusals a second {said['gap_p99_refusing_ms']} ms,",
        f"beside as many by another gateway {said['gap_p99_elsewhere_ms']} ms.",
        f"An open stream holds {said['stream_kib']} KiB.",
        f"Memory: {early:.1f} MiB after {calls / 5:,.0f} calls, {late:.1f} after {calls:,.0f}.",
    ]
    if "vllm_tokens_s_through" in own:
        direct, through = (sum(own[f"vllm_tokens_s_{name}"]) for name in ("direct", "through"))
        lines += [
            "Real vLLM, its default model, 16 in flight:",
            f"{said['vllm_tokens_s_direct']} tokens/s direct,",
            f"{said['vllm_tokens_s_through']} through tidegate ({100 * through / direct:.1f}%),",
            f"first token p50 {said['vllm_first_ms_direct']} ms direct, {said['vllm_first_ms_through']} ms through.",
        ]
    return "\n".join(lines)


def footer(about: Mapping[str, Any]) -> str:
    """Where the figures come from."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return f"{about['machine']}; {versions}; means of {about['rounds']} rounds; {about['at']}; {about['command']}"


def write(
    folder: Path,
    about: Mapping[str, Any],
    arms: Mapping[str, Any],
    missing: Mapping[str, str],
    own: Mapping[str, Sequence[float]],
) -> None:
    """Everything, as JSON."""
    content = {
        **about,
        "arms": arms,
        "missing": dict(missing),
        "tidegate_alone": {name: [*values] for name, values in own.items()},
    }
    write_json(folder / "cost.json", content)


def draw(file: Path, arms: Mapping[str, Sequence[Figures]], about: Mapping[str, Any]) -> None:
    """Bars of CPU per event and per call; the slowest arm is cut off where it would flatten the others."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [arm for arm in arms if arm != "direct"]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for axis, name, title in zip(
        axes, ("event_us", "call_us"), ("CPU per streamed event, µs", "CPU per plain call, µs"), strict=True
    ):
        values = [mean(arms[arm], name) for arm in shown]
        ordered = sorted(values)
        top = 1.25 * (ordered[-2] if len(ordered) > 1 and ordered[-1] > 4 * ordered[-2] else ordered[-1])
        bars = axis.barh(shown, [min(value, top) for value in values])
        bars[shown.index(OURS)].set_color("tab:orange") if OURS in shown else None
        axis.bar_label(bars, labels=[f"{value:,.0f}{' (cut)' * (value > top)}" for value in values], padding=3)
        axis.set(title=title, xlim=(0, 1.3 * top))
        axis.invert_yaxis()
    figure.suptitle(f"{about['machine']}, {about['at'][:10]}", fontsize=8)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def _cell(arm: str, name: str, runs: Sequence[Figures]) -> str:
    if arm == "direct" and name.endswith("_us"):
        return "-"
    return _spread([getattr(run, name) for run in runs])


def _spread(values: Sequence[float]) -> str:
    """Mean [lowest, highest]; of one value that alone."""
    decimals: Callable[[float], str] = lambda value: f"{value:,.2f}" if value < 10 else f"{value:,.0f}"  # noqa: E731
    mean_of = decimals(sum(values) / len(values))
    return mean_of if len(values) == 1 else f"{mean_of} [{decimals(min(values))}, {decimals(max(values))}]"
