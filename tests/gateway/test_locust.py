"""locust itself against a gateway with a scripted engine: what it counts as good, and what its exit code says."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gateway.conftest import Start
from tests.harness import ONE_LANE, ROOT, free_port

pytestmark = pytest.mark.slow

Rows = dict[tuple[str, str], dict[str, str]]


def locust(url: str, folder: Path, *flags: str, users: int = 6, seconds: int = 5) -> tuple[int, str, Rows]:
    """Run it; exit code, what it said, and its rows by type and name."""
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest" / "locustfile.py"), "--headless"]
    command += ["--only-summary", "--stop-timeout", "5", "--host", url, "-u", str(users), "-t", f"{seconds}s"]
    command += ["--csv", str(folder / "run"), "--html", str(folder / "run.html"), "--shape", "soak", *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    file = folder / "run_stats.csv"
    rows: Rows = {}
    if file.exists():
        with file.open() as lines:
            rows = {(row["Type"], row["Name"]): row for row in csv.DictReader(lines)}
    return ended.returncode, ended.stdout + ended.stderr, rows


def count(rows: Rows, kind: str, what: str = "Request Count") -> int:
    return sum(int(row[what]) for (found, _), row in rows.items() if found == kind)


def test_whole_answers_are_timed_by_token_and_end_with_0(gateway: Start, tmp_path: Path) -> None:
    gate = gateway(engine={}, max_in_flight=16)
    gate.engine.defaults(first_ms=300, gap_ms=20, events=10)
    code, said, rows = locust(gate.base_url, tmp_path)
    assert code == 0, said
    assert count(rows, "chat") > 0
    assert count(rows, "chat", "Failure Count") == 0
    first, between = rows["first token", "short"], rows["between tokens", "short"]
    assert float(first["Min Response Time"]) >= 300
    assert float(between["Average Response Time"]) >= 15  # a token at a time, not blocks of them
    assert (tmp_path / "run.html").stat().st_size > 10_000
    assert "calls: " in said


def test_refusals_are_a_row_of_their_own_and_no_failures(gateway: Start, tmp_path: Path) -> None:
    gate = gateway(engine={}, max_in_flight=1, max_queue=1, lanes=ONE_LANE)
    gate.engine.defaults(first_ms=3000, events=4)  # so that not all find room within their retries
    code, said, rows = locust(gate.base_url, tmp_path, "--slo-refused", "0", "--slo-first-ms", "60000", seconds=8)
    assert int(rows["refused", "queue_full"]["Request Count"]) > 0
    assert count(rows, "refused", "Failure Count") == count(rows, "chat", "Failure Count") == 0
    assert code == 1, said  # they were to be none, so
    assert said.count("SLO not kept") == said.count("calls were refused to the end") == 1


def test_a_stream_without_its_end_mark_is_a_failure(gateway: Start, tmp_path: Path) -> None:
    gate = gateway(engine={}, max_in_flight=16)
    gate.engine.defaults(events=4, done=False)
    code, said, rows = locust(gate.base_url, tmp_path, seconds=3)
    assert code == 1, said
    assert count(rows, "chat", "Failure Count") > 0
    assert "SLO not kept: no call ended whole" in said


def test_slow_first_tokens_break_the_promise_and_people_who_leave_do_not(gateway: Start, tmp_path: Path) -> None:
    gate = gateway(engine={}, max_in_flight=16)
    gate.engine.defaults(first_ms=900, events=4)
    code, said, rows = locust(gate.base_url, tmp_path, "--slo-first-ms", "100", "--impatient", "0.5", users=20)
    assert code == 1, said
    assert "first token of short calls: p99" in said
    assert count(rows, "left") > 0
    assert count(rows, "chat", "Failure Count") == 0


def test_a_server_that_is_not_there_ends_it_with_2_and_says_so(tmp_path: Path) -> None:
    code, said, _ = locust(f"http://127.0.0.1:{free_port()}", tmp_path)
    assert (code, "Does the server run?" in said) == (2, True), said
