"""The audit of dependencies tells a clean answer from no answer."""

from typing import Any

import pytest

from scripts import audit

CLEAN = {"name": "click", "version": "1", "vulns": []}
KNOWN = {"name": "click", "version": "1", "vulns": [{"id": "GHSA-1", "fix_versions": ["2"]}]}
SKIPPED = {"name": "click", "skip_reason": "Dependency not found"}


@pytest.mark.parametrize(
    ("answer", "licence", "code", "says"),
    [
        (CLEAN, "MIT", 0, "nothing known"),
        (KNOWN, "MIT", 1, "GHSA-1 (mended in 2)"),
        (SKIPPED, "MIT", 2, "not answered"),
        ({}, "MIT", 2, "not answered"),
        (CLEAN, "GPL-3.0-only OR MIT", 1, "look at this licence"),
        (CLEAN, "Proprietary", 1, "look at this licence"),
    ],
)
def test_no_answer_is_not_taken_for_a_clean_one(
    answer: dict[str, Any],
    licence: str,
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(audit, "pinned", lambda _: [("click", "1")])
    monkeypatch.setattr(audit, "licence_of", lambda _: licence)
    monkeypatch.setattr(audit, "ask", lambda *_: {"click": answer} if answer else {})
    assert audit.main([]) == code
    assert says in capsys.readouterr().out


def test_licences_alone_are_not_held_up_by_what_was_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(["--service", "none"]) == 0
    assert "0 licences to look at" in capsys.readouterr().out


def test_every_pin_of_a_lock_file_is_looked_at_and_each_licence_of_the_gateway_is_free() -> None:
    findings = audit.audit("gateway", "none")
    assert {"fastapi", "uvicorn", "httptools"} <= {one.name for one in findings}
    assert [one.name for one in findings if not one.free] == []
    assert not any(one.asked for one in findings)


@pytest.mark.parametrize("lock", sorted(path.stem for path in (audit.ROOT / "requirements").glob("*.txt")))
def test_a_package_that_is_pinned_with_extras_is_looked_at_like_any_other(lock: str) -> None:
    text = (audit.ROOT / "requirements" / f"{lock}.txt").read_text()
    assert len(audit.pinned(lock)) == sum(line[:1].isalnum() for line in text.splitlines())
