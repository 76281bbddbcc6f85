"""The table and the files: what a reader compares."""

import json
from pathlib import Path

import pytest

from loadtest import overload, report
from loadtest.outcomes import Metrics, Record

RUNS: dict[str, list[Metrics]] = {
    "bare": [{"goodput": 10.0, "short.busy": 0.0, "short.first_p99_ms": 20_000.0, "tokens_late_share": 0.5}],
    "own-limit": [{"goodput": 30.0, "short.busy": 6.0, "short.first_p99_ms": None, "tokens_late_share": 0.1}],
    "tidegate": [
        {"goodput": 50.0, "short.busy": 0.0, "short.first_p99_ms": 500.0, "tokens_late_share": 0.01},
        {"goodput": 58.0, "short.busy": 0.0, "short.first_p99_ms": 700.0, "tokens_late_share": 0.02},
    ],
}


def line(runs: dict[str, list[Metrics]], label: str) -> list[str]:
    (found,) = [text for text in report.table(runs).splitlines() if text.startswith(label)]
    return found.removeprefix(label).split()


def test_the_table_shows_the_mean_with_lowest_and_highest_and_ratios_of_means() -> None:
    assert line(RUNS, "goodput, req/s") == ["10.00", "30.00", "54.00", "[50.00,", "58.00]", "1.80", "5.40"]
    assert line(RUNS, "tokens made too late, %") == ["50.0", "10.0", "1.5", "[1.0,", "2.0]"]


def test_what_was_not_to_be_measured_is_a_dash_and_not_zero() -> None:
    assert line(RUNS, "short: first token p99, ms") == ["20,000", "-", "600", "[500,", "700]", "-", "0.03"]


def test_a_figure_that_is_zero_everywhere_needs_no_line_and_one_that_is_not_does() -> None:
    assert line(RUNS, "short: 200, then busy in the stream") == ["0", "6", "0"]
    assert "broken" not in report.table(RUNS)


def test_ratios_need_both_arms() -> None:
    assert line({arm: RUNS[arm] for arm in ("bare", "own-limit")}, "goodput, req/s") == ["10.00", "30.00"]
    assert line({arm: RUNS[arm] for arm in ("own-limit", "tidegate")}, "goodput, req/s")[-1] == "1.80"


def test_every_figure_carries_machine_versions_seeds_and_command() -> None:
    text = report.footer(report.facts(["--seeds", "1,2"]) | {"seeds": (1, 2)})
    for part in ("cores", "python 3", "seeds (1, 2)", "python -m loadtest.overload --seeds 1,2"):
        assert part in text


def test_a_run_is_written_with_its_records(tmp_path: Path) -> None:
    record = Record(0, "short", 8, 2.0, 0.1, sent=0.1, first=0.2, end=0.3, status=200, events=3, done=True)
    report.write_run(tmp_path / "bare-1.json", {"arm": "bare"}, {"goodput": 1.0}, [record])
    report.write_summary(tmp_path / "summary.json", {"rate": 1.0}, RUNS)
    assert json.loads((tmp_path / "bare-1.json").read_text())["records"][0]["outcome"] == "good"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["arms"]["tidegate"]["goodput"] == {"mean": 54.0, "low": 50.0, "high": 58.0}
    assert not list(tmp_path.glob("*.part"))


def plan(*flags: str) -> overload.Plan:
    return overload.make_plan(overload.parser().parse_args(flags))


def test_quick_changes_defaults_and_nothing_that_was_given() -> None:
    assert plan().seeds == (1, 2, 3)
    assert plan("--quick").seeds == (1,)
    quick = plan("--quick", "--seeds", "4,5", "--seconds", "20")
    assert (quick.seeds, quick.seconds, quick.grace_s) == ((4, 5), 20, 12)
    assert plan("--arms", "tidegate,bare").arms == ("tidegate", "bare")


def test_settings_are_named_with_or_without_their_prefix() -> None:
    given = overload.parser().parse_args(["--set", "max_queue=50", "--set", "TIDEGATE_LANES=[]"])
    assert dict(given.set) == {"TIDEGATE_MAX_QUEUE": "50", "TIDEGATE_LANES": "[]"}


@pytest.mark.parametrize(
    "flags", ["--arms best", "--arms bare,bare", "--seeds 1,1", "--seeds one", "--load 0", "--seconds 999", "--set x"]
)
def test_what_makes_no_sense_is_a_usage_error(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        overload.parser().parse_args(flags.split())
    assert ended.value.code == 2
    assert "usage: python -m loadtest.overload" in capsys.readouterr().err
