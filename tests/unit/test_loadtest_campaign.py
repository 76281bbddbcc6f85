"""The report: what it runs, that it goes on where it was, and that its figures are those of the runs."""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from loadtest import campaign, findings, page, together
from loadtest.client import Address, NotServed, Shot
from loadtest.client import load as ready
from loadtest.experiments import Step, Together, expected_s, steps
from loadtest.naive_arms import ALL_ARMS
from loadtest.outcomes import Record, summarise
from loadtest.together import WAYS
from loadtest.workload import SHORT, Request

FACTS = {"machine": "2 cores of X", "versions": {"python": "3"}, "command": "python -m c", "at": "2026-01-01"}


def result(step: Step, records: list[Record], generated: float = 100) -> dict[str, Any]:
    rows = [asdict(record) | {"outcome": record.outcome} for record in records]
    metrics = summarise(records, step.seconds, generated)
    return dict(json.loads(json.dumps({**FACTS, "step": asdict(step), "metrics": metrics, "records": rows})))


def good(at_s: float, kind: str = "short") -> Record:
    first, end = at_s + 0.1, at_s + 0.2
    return Record(0, kind, 8, 2, at_s, sent=at_s, first=first, end=end, status=200, events=8, done=True)


def refused(at_s: float, kind: str = "short") -> Record:
    return Record(0, kind, 8, 2, at_s, sent=at_s, end=at_s + 0.01, status=503, reason="queue_full", attempts=3)


def late(at_s: float, kind: str = "short") -> Record:
    return Record(0, kind, 8, 2, at_s, sent=at_s, first=at_s + 3, end=at_s + 4, status=200, events=8, done=True)


@pytest.mark.parametrize(("quick", "minutes"), [(True, 4.5), (False, 40)])
def test_the_plan_is_made_for_its_time_and_names_no_run_twice(quick: bool, minutes: float) -> None:
    plan = steps(quick=quick)
    assert len({step.name for step in plan}) == len(plan)
    assert expected_s(plan) < 60 * minutes
    assert {step.arm for step in plan if isinstance(step, Step)} <= ALL_ARMS.keys()
    assert [step.way for step in plan if isinstance(step, Together)] == list(WAYS)


def test_the_full_plan_spans_a_quarter_to_three_times_the_capacity() -> None:
    sweep = [step for step in steps(quick=False) if isinstance(step, Step) and step.group == "sweep"]
    assert {step.load for step in sweep if step.arm == "tidegate"} == {0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0}


def test_no_request_of_the_full_plan_is_cut_within_its_limit() -> None:
    for step in steps(quick=False):
        if isinstance(step, Step):
            assert step.grace_s > max(kind.limit_s for kind in campaign.KINDS_OF[step.model]), step.name


def test_an_interrupted_report_goes_on_with_what_is_left(tmp_path: Path) -> None:
    first = campaign.Campaign(tmp_path, ["--quick"], quick=True)
    done = first.plan[0]
    assert first.left() == first.plan
    first.write(done.name, {"step": json.loads(json.dumps(campaign._plain(done)))})
    assert campaign.Campaign(tmp_path, ["--quick"], quick=True).left() == first.plan[1:]
    changed = {**campaign._plain(done), "grace_s": 99}
    first.write(done.name, {"step": changed})
    assert first.left() == first.plan  # made by another plan


def test_a_capacity_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    async def measured(*given: object) -> float:
        asked.append(given)
        return 12.5

    monkeypatch.setattr(campaign, "measure_capacity", measured)
    made = campaign.Campaign(tmp_path, [], quick=True)
    stage: Any = None
    assert asyncio.run(made._capacity(stage, "tiny")) == 12.5
    assert asyncio.run(campaign.Campaign(tmp_path, [], quick=True)._capacity(stage, "tiny")) == 12.5
    assert len(asked) == 1
    asyncio.run(campaign.Campaign(tmp_path, [], quick=False)._capacity(stage, "tiny"))
    assert len(asked) == 2


def test_requests_that_take_too_long_end_a_report_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never:
        def __init__(self, shot: Shot, start: float) -> None: ...

        async def run(self, address: Address) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(together, "Exchange", Never)
    monkeypatch.setattr(together, "PATIENCE_S", 0.01)
    shot = ready(Request(0, 0.0, SHORT, 24, 8, "1"), "tiny", "salt")
    with pytest.raises(NotServed, match="1 requests took more than"):
        asyncio.run(together.send(Address(), [shot], 1))


SPIKE = ((2.0, 0.5), (2.0, 3.0), (6.0, 0.5))


def test_recovery_counts_from_the_end_of_the_spike_to_the_last_second_that_went_badly() -> None:
    step = Step("spike-bare", "spike", "bare", SPIKE, 5)
    records = [(late if 2 <= second < 7 else good)(second + 0.5) for second in range(10)]
    run = result(step, records)
    assert findings.recovery_s(run) == 3.0
    assert findings.recovery_s(result(step, [good(second + 0.5) for second in range(10)])) == 0.0
    assert findings.recovery_s(result(step, [*records[:9], late(9.5)])) is None
    assert [share for _, share in findings.good_over_time(run)] == [1, 1, 0, 0, 0, 0, 0, 1, 1, 1]


def test_what_became_of_requests_counts_every_seed() -> None:
    runs = [result(Step("a", "sweep", "bare", ((10, 2.5),), 5, seed), [good(1), refused(2)][:seed]) for seed in (1, 2)]
    found = findings.ended(runs)
    assert (found["good"], found["refused"], found["cut"]) == (2, 1, 0)


def test_the_headline_compares_what_was_measured() -> None:
    runs: dict[str, Any] = {
        way: {**FACTS, "step": {"name": way, "tokens": 64}, "seconds": seconds}
        for way, seconds in zip(WAYS, (40.0, 60.0, 5.0), strict=True)
    }
    for arm, records in (("bare", [good(1), late(2)]), ("tidegate", [good(1), good(2), good(3), refused(4)])):
        step = Step(f"sweep-2.5-{arm}-1", "sweep", arm, ((10, 2.5),), 5)
        runs[step.name] = result(step, records, 24)
    lines = dict(findings.headline(runs))
    assert "40.0 s against 5.0 s: 8.0 times" in next(text for name, text in lines.items() if "naive" in name)
    assert "bare vLLM 0.10 req/s, Tidegate 0.30 req/s: 3.0 times" in lines.values()
    assert "bare vLLM 66.67 %, Tidegate 0.00 %" in lines.values()
    assert not any("spike" in name for name in lines)


def test_the_page_needs_nothing_else_and_every_figure_says_where_it_comes_from(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs: dict[str, Any] = {}
    for arm in ("bare", "tidegate"):
        for load in (0.5, 2.5):
            step = Step(f"sweep-{load}-{arm}", "sweep", arm, ((10, load),), 5)
            runs[step.name] = result(step, [good(1), refused(2), good(3, "long"), late(4, "long")])
        for group in ("spike", "storm"):
            step = Step(f"{group}-{arm}", group, arm, SPIKE, 5, retries=group == "storm")
            runs[step.name] = result(step, [good(0.5), refused(3), good(5.5), good(9.5)])
    runs |= {way: {**FACTS, "step": {"name": way, "tokens": 64}, "seconds": 9.0} for way in WAYS}
    text = page.write_page(tmp_path, runs).read_text()
    assert "http" not in text.replace("http://www.w3.org", "")
    assert text.count("data:image/png;base64,") == len(list(tmp_path.glob("*.png"))) == 8
    assert text.count("2 cores of X; python 3; python -m c; seeds 1; 2026") == 9
    summary = (tmp_path / "summary.md").read_text()
    assert (
        "| Tidegate | 2.5 | 1 | 4 | 3 | 3 | 2 | 1 | 1 |" in summary
    )  # offered, started, finished, good, late, refused
    assert "storm.png" in summary
    assert "1.50" in summary  # attempts


def test_a_page_of_the_whole_plan_stands_though_arms_have_nothing_to_show(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cut = Record(0, "short", 8, 2, 0.5, sent=0.5, cut=True)  # not even a head, nor an end
    of: dict[str, list[Record]] = {"one-at-a-time": [], "hand-batching": [cut], "bare": [cut], "own-limit": [good(1)]}
    runs: dict[str, Any] = {}
    for step in steps(quick=False):
        if isinstance(step, Step):
            records = [] if step.name == "spike-bare" else of.get(step.arm, [refused(1)])
            runs[step.name] = result(step, records, 0)
        else:
            runs[step.name] = json.loads(json.dumps({**FACTS, "step": asdict(step), "seconds": 9.0, "others_cores": 0}))
    assert "Tidegate" in page.write_page(tmp_path, runs).read_text()
