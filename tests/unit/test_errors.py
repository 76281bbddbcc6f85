"""What a client is told, row by row."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import errors
from app.errors import Kind, Refused

BUSY = "service_unavailable_error"
INVALID = "invalid_request_error"
TABLE = [
    (errors.QUEUE_FULL, 503, BUSY, "server_is_overloaded", "queue_full", "refused"),
    (errors.QUEUE_TIMEOUT, 503, BUSY, "server_is_overloaded", "queue_timeout", "refused"),
    (errors.INFEASIBLE, 503, BUSY, "server_is_overloaded", "deadline_infeasible", "refused"),
    (errors.ENGINE_UNAVAILABLE, 503, BUSY, "engine_unavailable", "engine_unavailable", "refused"),
    (errors.DRAINING, 503, BUSY, "server_draining", "draining", "refused"),
    (errors.DEADLINE, 504, "timeout_error", "deadline_exceeded", "deadline", "deadline"),
    (errors.ENGINE_ERROR, 502, "server_error", "engine_error", "engine_error", "engine_error"),
    (errors.TOO_LARGE, 413, INVALID, "request_too_large", "request_too_large", "invalid"),
    (errors.INVALID, 400, INVALID, "invalid_request", "invalid_request", "invalid"),
    (errors.INVALID_KEY, 401, INVALID, "invalid_api_key", "invalid_api_key", "invalid"),
    (errors.NOT_FOUND, 404, INVALID, "not_found", "not_found", "invalid"),
    (errors.METHOD, 405, INVALID, "method_not_allowed", "method_not_allowed", "invalid"),
]
KINDS = [row[0] for row in TABLE]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=[kind.reason for kind in KINDS])


def headers(refused: Refused) -> dict[bytes, bytes]:
    pairs = refused.headers()
    assert len(dict(pairs)) == len(pairs), "a header stands twice"
    return dict(pairs)


@pytest.mark.parametrize(("kind", "status", "type_", "code", "reason", "outcome"), TABLE)
def test_status_object_and_reason_follow_from_the_row(
    kind: Kind, status: int, type_: str, code: str, reason: str, outcome: str
) -> None:
    refused = Refused(kind, "Why.", param="p")
    assert (kind.status, kind.outcome, str(refused)) == (status, outcome, "Why.")
    assert headers(refused)[b"x-tidegate-reason"] == reason.encode()
    error = {"message": "Why.", "type": type_, "param": "p", "code": code}
    assert json.loads(refused.body(anthropic=False)) == {"error": error}
    assert json.loads(refused.body(anthropic=True)) == {"type": "error", "error": error}


def test_every_kind_is_in_the_table() -> None:
    assert {value for value in vars(errors).values() if isinstance(value, Kind)} == set(KINDS)


@each_kind
def test_a_busy_status_says_when_to_come_back_and_no_other_does(kind: Kind) -> None:
    told = headers(Refused(kind, "", retry_after_s=7))
    assert {b"retry-after", b"retry-after-ms"} <= told.keys() if kind.status == 503 else b"retry-after" not in told
    assert told.get(b"retry-after", b"7") == b"7"


@each_kind
def test_sdks_are_told_not_to_repeat_what_has_cost_the_engine_its_work(kind: Kind) -> None:
    told = headers(Refused(kind, "")).get(b"x-should-retry")
    assert told == (b"false" if kind.status in (502, 504) else None)


def test_a_405_lists_what_is_allowed() -> None:
    assert headers(Refused(errors.METHOD, "", allow="POST, OPTIONS"))[b"allow"] == b"POST, OPTIONS"


def test_only_shed_load_may_become_a_429() -> None:
    assert {kind.reason for kind in errors.SHEDDABLE} == {"queue_full", "queue_timeout", "deadline_infeasible"}


@given(st.integers(1, 30))
def test_retries_spread_over_half_as_long_again(seconds: int) -> None:
    told = [int(headers(Refused(errors.QUEUE_FULL, "", retry_after_s=seconds))[b"retry-after-ms"]) for _ in range(50)]
    assert min(told) >= seconds * 1000
    assert max(told) <= seconds * 1500
    assert max(told) - min(told) > seconds * 100


def events(frame: bytes) -> list[dict[bytes, Any]]:
    assert frame.endswith(b"\n\n")
    return [dict(line.split(b": ", 1) for line in event.split(b"\n")) for event in frame[:-2].split(b"\n\n")]


@each_kind
def test_a_stream_ends_with_the_error_as_its_last_event_but_done(kind: Kind) -> None:
    refused = Refused(kind, "Line one.\nLine \u2028two.")
    assert events(refused.frame(anthropic=False)) == [
        {b"data": refused.body(anthropic=False)},
        {b"data": b"[DONE]"},
    ]
    assert events(refused.frame(anthropic=True)) == [{b"event": b"error", b"data": refused.body(anthropic=True)}]
