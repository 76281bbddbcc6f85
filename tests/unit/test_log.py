"""The log: one line a request, in either format, and of a storm only a part."""

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from app.call import Call
from app.log import LINES_PER_S, RequestLog, configure
from tests.unit.virtual_time import loops

LOOPS = loops()


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """The logging of whoever runs the tests."""
    root, uvicorn, httpx = (logging.getLogger(name) for name in ("root", "uvicorn.error", "httpx"))
    kept = root.handlers[:], root.level, uvicorn.filters[:], httpx.level
    yield
    root.handlers, root.level, uvicorn.filters, httpx.level = kept


def call(request_id: bytes, outcome: str = "", traceparent: bytes = b"") -> Call:
    """One that ended before its route was known."""

    async def nothing(*_: object) -> None:
        raise AssertionError

    scope = {"headers": [(b"x-request-id", request_id), (b"traceparent", traceparent)], "raw_path": b"/"}
    made = Call(scope, nothing, nothing)  # type: ignore[arg-type]
    made.outcome = outcome
    return made


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


async def test_as_json_each_line_is_an_object_with_the_fields_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json")
    ended = call(b"me")
    RequestLog().write(ended, now=1001.5)
    [line] = lines(capsys)
    written = json.loads(line)
    assert written.items() >= ended.log_fields(1001.5).items()
    assert written.items() >= {"level": "info", "logger": "tidegate.request", "message": "request"}.items()
    assert len(written["time"]) == len("2025-01-01T00:00:00.000Z")


async def test_on_a_console_fields_follow_the_message_and_those_without_a_value_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure("console")
    RequestLog().write(call(b"me"), now=1001.5)
    [line] = lines(capsys)
    assert " INFO tidegate.request: request id=me lane=- " in line
    assert " total_ms=1500.0 " in line
    assert "None" not in line


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_an_exception_is_shown(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure(log_format)
    try:
        raise ValueError("who knows")
    except ValueError:
        logging.getLogger("tidegate").exception("unexpected: %s", "thing")
    shown = lines(capsys)
    assert any("unexpected: thing" in line for line in shown)
    assert any("ValueError: who knows" in line for line in shown)
    assert log_format == "console" or len(shown) == 1


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("ASGI callable returned without completing response.", False),
        ("Invalid HTTP request received.", False),
        ("Unsupported upgrade request.", False),
        (ValueError("an exception as the message"), True),
    ],
)
def test_an_answer_broken_off_on_purpose_is_no_error(
    message: Any, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("console")
    logging.getLogger("uvicorn.error").error(message)
    assert bool(lines(capsys)) is shown


def test_libraries_do_not_report_each_request(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json")
    logging.getLogger("httpx").info("HTTP Request: GET http://engine/health")
    assert lines(capsys) == []


async def test_of_a_storm_a_part_is_shown_and_the_rest_counted_also_when_nobody_comes_any_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure("console")
    log = RequestLog()
    for number in range(LINES_PER_S + 200):
        log.write(call(b"%d" % number, "refused"), now=1000)
    assert len(lines(capsys)) == LINES_PER_S
    await asyncio.sleep(1.1)
    [counted] = lines(capsys)
    assert counted.endswith("lines about requests left out refused=200")
    log.write(call(b"next", "refused"), now=1001)
    await asyncio.sleep(1.1)
    [following] = lines(capsys)
    assert "id=next" in following


async def test_a_storm_of_refusals_hides_no_other_request(capsys: pytest.CaptureFixture[str]) -> None:
    configure("console")
    log = RequestLog()
    for number in range(LINES_PER_S + 1):
        log.write(call(b"%d" % number, "refused"), now=1000)
    lines(capsys)
    log.write(call(b"good", "completed"), now=1000)
    [shown] = lines(capsys)
    assert "id=good" in shown


@pytest.mark.parametrize(
    ("traceparent", "trace_id"),
    [
        (b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "4bf92f3577b34da6a3ce929d0e0e4736"),
        (b"cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-later", "4bf92f3577b34da6a3ce929d0e0e4736"),
        (b"00-4bf92f3577b34da6a3ce929d0e0e4736", None),
        (b"line\nbreak", None),
        (b"", None),
    ],
)
async def test_a_line_names_the_trace_that_the_client_named(traceparent: bytes, trace_id: str | None) -> None:
    assert call(b"me", traceparent=traceparent).log_fields(1001)["trace_id"] == trace_id
