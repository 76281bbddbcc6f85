"""A few hundred cases of `make fuzz`, and that it would notice what it is there to notice."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import Start
from tests.harness import ROOT, chat
from tests.wire import CHAT, Answer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_nothing_that_must_not_happen_does(tmp_path: Path) -> None:
    out = tmp_path / "fuzz.json"
    command = [sys.executable, "-m", "loadtest.fuzz", "--cases", "300", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["cases"] == 300
    assert set(result["defects"].values()) == {0}
    assert result["at_engine"] > 50, "it must get past the door too"
    assert result["answers"]["400 invalid_request"] > 10


def test_the_same_seed_gives_the_same_cases() -> None:
    from loadtest.fuzz_cases import cases

    first, second = list(cases(60, 7)), list(cases(60, 7))
    assert first == second
    assert len(first) == 60
    assert first != list(cases(60, 8))


@pytest.mark.parametrize(
    ("status", "headers", "body", "defect"),
    [
        (500, {}, b"Internal Server Error", "unexpected"),
        (503, {}, b"", "unexpected"),
        (503, {"x-tidegate-reason": "invalid_key"}, b"", "unexpected"),
        (503, {"x-tidegate-reason": "queue_full"}, b"{}", "unexpected"),
        (200, {}, b"Traceback (most recent call last)", "told"),
        (200, {"server": "uvicorn at /tmp/engine.sock"}, b"", "told"),
        (400, {}, b"Invalid HTTP request received.", None),
        (500, {"x-fake-id": "1"}, b"the engine's own", None),
    ],
)
def test_it_judges_an_answer(status: int, headers: dict[str, str], body: bytes, defect: str | None) -> None:
    from loadtest.fuzz import Findings, look
    from loadtest.fuzz_cases import Case

    findings = Findings()
    look(Case("heads", b"case-1", b"GET / HTTP/1.1\r\n\r\n"), Answer(status, headers, body, True), findings)
    assert [name for name, count in findings.defects.items() if count] == ([defect] if defect else [])


@pytest.mark.parametrize(
    ("case_id", "kept_here", "body", "defect"),
    [
        (b"case-1", set(), None, None),
        (b"case-1", {"case-1"}, None, "reached"),
        (b"case-2", set(), None, "reached"),
        (b"case-1", set(), b"another", "altered"),
    ],
)
async def test_it_judges_what_the_engine_saw(
    gateway: Start, case_id: bytes, kept_here: set[str], body: bytes | None, defect: str | None
) -> None:
    from loadtest.fuzz import Findings, compare
    from loadtest.fuzz_cases import Case

    gate = gateway()
    given: Any = chat()
    async with gate.client() as client:
        assert (await client.post(CHAT, json=given, headers={"x-request-id": "case-1"})).status_code == 200
    findings = Findings()
    case = Case("lanes", case_id, b"", body)
    await asyncio.to_thread(compare, {case_id.decode(): case}, kept_here, gate.engine, findings)
    assert [name for name, count in findings.defects.items() if count] == ([defect] if defect else [])
