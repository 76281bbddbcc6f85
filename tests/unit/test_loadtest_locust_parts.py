"""What locust's users are made of, without locust: shapes, retries, promises, and the reading of a stream."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from loadtest import shapes
from loadtest.outcomes import Outcome
from loadtest.retries import pause
from loadtest.slo import Slo, Tally, broken, doubts, summary
from loadtest.streaming import Call, Seen

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def test_shapes_have_their_peak_and_end_with_the_run() -> None:
    assert [shapes.users("ramp", 40, at, 40) for at in (0, 10, 30, 40)] == [1, 10, 30, None]
    assert [shapes.users("spike", 40, at, 10) for at in (0, 3.9, 4, 5.9, 6, 9)] == [10, 10, 40, 40, 10, 10]
    assert {shapes.users("soak", 40, at, 10) for at in range(10)} == {40}
    day = [shapes.users("day", 100, at, 24) or 0 for at in range(24)]
    assert (day[0], max(day), day.index(max(day)), day[23]) == (10, 100, 12, 12)


@pytest.mark.parametrize(
    ("status", "headers", "attempt", "expected"),
    [
        (503, {"retry-after-ms": "1300", "retry-after": "1"}, 0, 1.3),
        (429, {"retry-after": "3"}, 1, 3.0),
        (503, {}, 0, 0.5),
        (503, {}, 1, 1.0),
        (None, {}, 0, 0.5),
        (503, {}, 2, None),
        (504, {"x-should-retry": "false"}, 0, None),
        (400, {}, 0, None),
        (400, {"x-should-retry": "true"}, 0, 0.5),
        (503, {"retry-after": "121"}, 0, None),
        (503, {"retry-after": "soon"}, 0, 0.5),
        (200, {}, 0, None),
    ],
)
def test_retries_are_those_of_an_sdk(
    status: int | None, headers: dict[str, str], attempt: int, expected: float | None
) -> None:
    assert pause(status, headers, attempt, 0.0) == expected


def test_a_pause_of_its_own_is_jittered_and_one_that_was_told_is_not() -> None:
    assert pause(503, {}, 0, 1.0) == 0.375
    assert pause(503, {"retry-after": "2"}, 0, 1.0) == 2


def test_promises() -> None:
    slo = Slo(first_p99_s=1.0, failed=0.0, refused=0.5)
    fine = Tally(started=12, whole=9, gave_up=1, left=1, first_s=[0.5] * 9)
    assert broken(slo, fine) == []
    assert "12 started, 9 whole" in summary(fine)
    assert "1 unfinished at the end" in summary(fine)
    (failed,) = broken(slo, Tally(started=100, whole=99, failed=1, first_s=[0.5]))
    assert failed == "1 of 100 calls failed (0% may)"
    (slow,) = broken(slo, Tally(started=4, whole=4, first_s=[0.5, 0.5, 0.5, 2.0]))
    assert "p99 2000 ms" in slow
    assert len(broken(slo, Tally(started=9, gave_up=9))) == 2
    assert broken(slo, Tally()) == ["no call ended whole"]


def test_a_saturated_client_says_so() -> None:
    assert doubts(Tally(lag_s=[0.001] * 100), 0.5) == []
    (late,) = doubts(Tally(lag_s=[0.001] * 90 + [0.2] * 10), 0.5)
    assert "late by 200 ms" in late
    (busy,) = doubts(Tally(), 0.97)
    assert "97% of the one core" in busy


@contextmanager
def serving(*pieces: bytes | float) -> Iterator[str]:
    """A server that answers one request with these pieces (a number is a pause) and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            line, _ = listener.accept()
            with line:
                line.recv(65536)
                for piece in pieces:
                    if isinstance(piece, float):
                        stopped.wait(piece)
                    else:
                        line.sendall(piece)

        stopped = threading.Event()
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        stopped.set()
        thread.join(10)


def call(url: str, leave_s: float = 60.0, limit_s: float = 30.0) -> Seen:
    return Call(8).run(url, "/v1/chat/completions", {}, b"{}", leave_s, limit_s)


def test_a_stream_is_timed_at_its_tokens_and_not_at_its_head_or_its_comments() -> None:
    with serving(HEAD, b": keep-alive\n\n", 0.3, TOKEN, 0.2, TOKEN, TOKEN, DONE) as url:
        seen = call(url)
    assert seen.failure == ""
    assert seen.record.first is not None
    assert seen.record.first >= 0.3
    assert seen.record.end is not None
    lasted = seen.record.end - seen.record.first
    assert lasted / 3 <= seen.longest_gap <= lasted  # the one pause in it, however late its bytes were read
    assert seen.record.events == 3
    assert seen.between_s is not None
    assert seen.text() == "aaa"


def test_a_stream_that_just_ends_is_a_failure_and_a_refusal_is_none() -> None:
    length = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(TOKEN)
    with serving(length + TOKEN) as url:
        assert call(url).failure == "status 200, no end mark"
    refusal = b"HTTP/1.1 503 Busy\r\nX-Tidegate-Reason: queue_full\r\nRetry-After-Ms: 1200\r\ncontent-length: 0\r\n\r\n"
    with serving(refusal) as url:
        seen = call(url)
    assert (seen.failure, seen.record.outcome, seen.record.reason) == ("", Outcome.REFUSED, "queue_full")
    assert seen.headers["retry-after-ms"] == "1200"


def test_a_user_who_leaves_has_not_failed_and_one_that_waited_in_vain_has() -> None:
    with serving(HEAD, TOKEN, 9.0) as url:
        seen = call(url, leave_s=0.2)
    assert (seen.left, seen.failure) == (True, "")
    with serving(HEAD, TOKEN, 9.0) as url:
        seen = call(url, limit_s=0.2)
    assert (seen.left, seen.failure) == (False, "status 200, timed out")


def test_nobody_listening_is_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert call(url).failure.startswith("status None, connection")
