"""What a request counts as, and the figures made of that: a server must not look better by how it fails."""

from dataclasses import replace

import pytest

from loadtest.client import Answer
from loadtest.outcomes import Outcome, Record, Spread, percentile, spread, summarise

HEAD = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
BUSY = b'data: {"error":{"message":"The engine is currently busy","type":"ServiceUnavailable","code":503}}\n\n'
EXPIRED = b'data: {"error":{"message":"late","type":"timeout_error","code":"deadline_exceeded"}}\n\n'


def seen(*pieces: bytes, status: int = 200, limit_s: float = 2.0, scheduled: float = 1.0) -> Record:
    """The record of a request whose answer comes in these pieces, half a second apart, from the scheduled time on."""
    record = Record(0, "short", 8, limit_s, scheduled, sent=scheduled, status=status)
    answer = Answer()
    now = scheduled
    for piece in pieces:
        now += 0.5
        answer.feed(piece, now)
    record.end = now
    answer.tell(record)
    return record


def test_a_stream_with_its_end_mark_within_the_limit_is_good() -> None:
    record = seen(HEAD + TOKEN, TOKEN, DONE)
    assert record.outcome is Outcome.GOOD
    assert (record.first, record.end, record.events) == (1.5, 2.5, 3)


def test_the_limit_counts_from_the_scheduled_time() -> None:
    whole = seen(HEAD, TOKEN, TOKEN, TOKEN + DONE)
    assert whole.outcome is Outcome.GOOD  # at the limit exactly
    assert replace(whole, scheduled=0.9).outcome is Outcome.LATE


def test_a_stream_that_just_ends_is_broken_however_many_tokens_came() -> None:
    assert seen(HEAD, TOKEN).outcome is Outcome.BROKEN
    assert seen(HEAD, TOKEN, DONE[:-4]).outcome is Outcome.BROKEN


def test_an_end_mark_in_the_text_is_none() -> None:
    assert seen(HEAD, b'data: {"content":"data: [DONE]"}\n\n').outcome is Outcome.BROKEN


def test_a_200_that_turns_into_busy_is_neither_a_refusal_nor_a_start() -> None:
    record = seen(BUSY + DONE)
    assert record.outcome is Outcome.BUSY
    assert (record.first, record.events) == (None, 0)
    assert seen(BUSY).outcome is Outcome.BUSY  # without an end mark too


def test_busy_after_a_token_is_broken() -> None:
    record = seen(HEAD + TOKEN, BUSY + DONE)
    assert record.outcome is Outcome.BROKEN
    assert record.first == 1.5


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_by_status_is_refused(status: int) -> None:
    record = seen(b'{"error":{"code":"server_is_overloaded"}}', status=status)
    assert record.outcome is Outcome.REFUSED
    assert record.first is None


def test_a_deadline_is_expired_as_a_status_and_in_the_stream() -> None:
    assert seen(b"{}", status=504).outcome is Outcome.EXPIRED
    assert seen(HEAD, TOKEN, EXPIRED + DONE).outcome is Outcome.EXPIRED


@pytest.mark.parametrize("status", [400, 404, 500, 502, None])
def test_any_other_status_is_broken(status: int | None) -> None:
    assert replace(seen(b"{}"), status=status).outcome is Outcome.BROKEN


def test_a_lost_connection_is_broken() -> None:
    assert replace(seen(HEAD, TOKEN), error="connection lost").outcome is Outcome.BROKEN


def test_what_the_client_gave_up_is_cut_and_never_good() -> None:
    assert replace(seen(HEAD, TOKEN), cut=True).outcome is Outcome.CUT


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 1000])
def test_events_are_counted_the_same_however_they_are_cut_into_pieces(size: int) -> None:
    stream = HEAD + b": keep-alive\n\n" + TOKEN * 40 + EXPIRED + DONE
    record = seen(*(stream[at : at + size] for at in range(0, len(stream), size)), limit_s=1e6)
    assert record.events == 41
    assert record.outcome is Outcome.EXPIRED
    assert record.done


def test_a_keep_alive_is_no_first_token() -> None:
    assert seen(b": keep-alive\n\n", HEAD + DONE).first == 2.0


def test_an_error_larger_than_what_is_kept_of_a_stream_is_still_no_success() -> None:
    assert seen(HEAD, b'data: {"error":{"message":"' + b"x" * 9000 + b'","code":500}}\n\n').outcome is Outcome.BROKEN


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentile(reversed(values), 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile([7.0], 0.99) == percentile([7.0], 0.0) == 7
    assert percentile([1.0, 2.0], 0.99) == 2
    assert percentile([], 0.5) is None


def test_the_figures_of_a_run_keep_kinds_and_outcomes_apart() -> None:
    whole, long = seen(HEAD, TOKEN + DONE), replace(seen(HEAD, TOKEN + DONE), kind="long", limit_s=0.5)
    records = [whole, whole, seen(BUSY + DONE), seen(b"{}", status=503), replace(seen(HEAD), cut=True), long]
    figures = summarise(records, seconds=10, generated=80)
    assert figures["goodput"] == 0.2
    assert figures["tokens_late_share"] == pytest.approx(1 - 16 / 80)
    assert {name: figures[f"short.{name}"] for name in ("offered", "started", "finished", "good", "cut", "busy")} == {
        "offered": 5,
        "started": 3,
        "finished": 2,
        "good": 2,
        "cut": 1,
        "busy": 1,
    }
    assert (figures["long.late"], figures["long.good"], figures["long.finished"]) == (1, 0, 1)
    assert figures["short.never_started_share"] == pytest.approx(0.4)
    assert figures["short.refusal_p50_ms"] == 500
    assert figures["long.refusal_p50_ms"] is None


def test_every_request_has_one_outcome() -> None:
    records = [seen(HEAD, DONE), seen(BUSY), seen(b"", status=503), seen(b"", status=504), seen(HEAD), seen(status=500)]
    figures = summarise(records, seconds=1, generated=0)
    assert sum(figures[f"short.{outcome}"] or 0 for outcome in Outcome) == len(records)
    assert figures["tokens_late_share"] is None


def test_an_engine_that_does_not_say_what_it_made_has_no_figures_of_tokens() -> None:
    figures = summarise([seen(HEAD, DONE)], seconds=1, generated=None)
    assert (figures["tokens"], figures["tokens_late_share"], figures["goodput"]) == (None, None, 1)


def test_a_spread_leaves_out_runs_without_the_figure() -> None:
    assert spread([{"x": 1.0}, {"x": None}, {"x": 3.0}], "x") == Spread(2.0, 1.0, 3.0)
    assert spread([{"x": None}], "x") is None
