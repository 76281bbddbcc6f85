"""How the soak sorts what it has seen, and how it and the test of fairness count."""

import asyncio
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from loadtest import soak
from loadtest.fairness import TIMES, row, who
from loadtest.outcomes import Record
from loadtest.processes import Child
from loadtest.soak import OUTCOMES, SETTLED, Counts, Minute, all_there, lines, table


def record(kind: str = "short", *, first: float | None = 1.5, status: int = 200) -> Record:
    """A request that was scheduled at 1 s and had 2 s."""
    whole = status == 200
    return Record(0, kind, 8, 2.0, scheduled=1.0, sent=1.01, first=first, end=2.0, status=status, done=whole)


def counts(arrived: int, **ended: float) -> Counts:
    return Counts(arrived, dict.fromkeys(OUTCOMES, 0.0) | ended)


def test_a_minute_tells_ends_first_tokens_and_memory() -> None:
    minute = Minute(3, gateway_bytes=2**20)
    minute.add(record(), left=False)
    minute.add(record(first=None, status=503), left=False)
    minute.add(record("long", first=None), left=True)
    figures = minute.figures()
    seen = {name: figures[name] for name in ("minute", "good", "refused", "left", "short_p99_ms", "gateway_mib")}
    assert seen == {"minute": 3, "good": 1, "refused": 1, "left": 1, "short_p99_ms": 500, "gateway_mib": 1}
    assert figures["long_p99_ms"] is None
    assert figures["client_late_p99_ms"] == pytest.approx(10)
    assert table([figures]).splitlines()[0].startswith("minute  good  refused  left  short p50 ms")


def test_what_drifts_is_told_and_the_first_minutes_do_not_count() -> None:
    rows = [Minute(number).figures() for number in range(1, SETTLED + 11)]
    for place, one in enumerate(rows):
        one["gateway_mib"] = 50.0 + place + (place % 2) / 10
        one["short_p99_ms"] = 10_000 if place < SETTLED else 100 + place % 2
    found = lines(rows)
    assert found["gateway_mib"].endswith("DRIFTS")
    assert found["short_p99_ms"].endswith("within noise")
    assert "long_p99_ms" not in found, "nothing was measured"
    assert not lines(rows[:SETTLED])


def test_accepted_is_what_was_completed_or_ended_by_somebody() -> None:
    before = counts(5, completed=5)
    after = counts(25, completed=10, deadline=2, client_left=3, engine_error=1, refused=8, invalid=1)
    counted = after - before
    assert (counted.arrived, counted.accepted, counted.add_up) == (20, 11, True)
    assert str(counted).endswith("accepted 11 = 5 completed + 2 deadline + 3 client_left + 1 engine_error")
    assert not counts(3, completed=1, refused=1).add_up


def test_only_who_left_may_be_missing_at_the_gateway() -> None:
    assert all_there(counts(10, completed=10), sent=10, left=0)
    assert all_there(counts(9, completed=9), sent=10, left=1)
    assert not all_there(counts(9, completed=9), sent=10, left=0)
    assert not all_there(counts(11, completed=11), sent=10, left=1)
    assert not all_there(counts(10, completed=9), sent=10, left=1)


def test_a_call_that_is_just_ending_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = iter([counts(3, completed=2), counts(3, completed=2, client_left=1)])

    async def read(_: object) -> Counts:
        return next(reads)

    monkeypatch.setattr(soak, "counts", read)
    target: Any = None
    assert asyncio.run(soak.counts_since(target, counts(0))).add_up


def test_the_greedy_key_has_twenty_times_as_many_requests_and_each_row_its_own() -> None:
    names = who(1, 21_000)
    assert names == who(1, 21_000)
    assert Counter(names)["greedy"] / Counter(names)["polite"] == pytest.approx(TIMES, rel=0.1)
    seen = row("apart", "polite", [record(), record(first=None, status=503)])
    assert seen == ["apart", "polite", "2", "1", "50%", "1", "0", "500", "500"]
    assert row("apart", "polite", [])[4:] == ["0%", "0", "0", "-", "-"]


def test_the_memory_of_a_group_is_that_of_all_its_processes(tmp_path: Path) -> None:
    child = Child("two", ["sh", "-c", "sleep 60 & sleep 60; :"], os.environ, tmp_path, tmp_path / "log")
    try:
        for _ in range(200):
            if child.group_bytes() > child.memory_bytes() > 0:
                break
            time.sleep(0.05)
        assert child.group_bytes() > child.memory_bytes() > 0
    finally:
        child.stop()
