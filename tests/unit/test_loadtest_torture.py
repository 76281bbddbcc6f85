"""What the torture draws from its seed, how it judges what a client got, and when a figure is flat."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from loadtest.chaos import ENDS
from loadtest.slope import slope
from loadtest.torture_calls import Call, draw, judge
from loadtest.torture_tally import Tally, table
from tests.wire import Answer

ERROR = 'data: {"error": {"code": "%s"}}\n\ndata: [DONE]\n\n'
ONE = Call(1, "/v1/completions", True, 1, "many", 1.0, {"events": 1}, "waits", None, chunked=False)
RETRY = {"retry-after": "1"}


def test_a_seed_decides_everything_and_nothing_is_left_out() -> None:
    calls = list(draw(7, 5000))
    assert calls == list(draw(7, 5000))
    assert calls != list(draw(8, 5000))
    assert {call.route for call in calls} == ENDS.keys()
    manners = Counter(call.manner for call in calls)
    assert manners.keys() == {"closes", "resets", "reads slowly", "sends slowly", "waits"}
    assert (manners["closes"] + manners["resets"]) / 5000 == pytest.approx(0.3, rel=0.1)
    assert {call.script.get("fault") for call in calls} == {None, "stall", "reset", "close", "garbage"}


@pytest.mark.parametrize(
    ("call", "answer", "word"),
    [
        (ONE, Answer(200, {}, b'data: {"choices": []}\n\ndata: [DONE]\n\n', True), "whole"),
        (ONE, Answer(200, {}, b"data: [DONE]\n\n", True), "whole"),
        (replace(ONE, script={"events": 3}), Answer(200, {}, b"data: {}\n\ndata: [DONE]\n\n", True), "wrong"),
        (ONE, Answer(200, {}, b"data: {}\n\n", True), "wrong"),
        (ONE, Answer(200, {}, b"data: {}\n\n", False), "broken off"),
        (ONE, Answer(200, {}, (ERROR % "deadline_exceeded").encode(), True), "deadline"),
        (ONE, Answer(200, {}, (ERROR % "engine_error").encode(), True), "engine error"),
        (replace(ONE, stream=False), Answer(200, {}, json.dumps({"usage": {}}).encode(), True), "whole"),
        (replace(ONE, stream=False), Answer(200, {}, b"{}", True), "wrong"),
        (ONE, Answer(503, RETRY, b"", True), "refused"),
        (ONE, Answer(503, {}, b"", True), "wrong"),
        (ONE, Answer(504, {}, b"", True), "deadline"),
        (ONE, Answer(502, {}, b"", True), "engine error"),
        (ONE, Answer(500, {}, b"", True), "wrong"),
        (replace(ONE, script={"status": 500}), Answer(500, {}, b"", True), "engine error"),
        (ONE, Answer(400, {}, b"", True), "wrong"),
    ],
)
def test_ends_are_told_apart(call: Call, answer: Answer, word: str) -> None:
    assert judge(call, answer) == word


def entry(name: str, outcome: str) -> dict[str, object]:
    return {"headers": [["x-request-id", name]], "outcome": outcome}


def test_a_call_that_reached_the_engine_twice_or_in_spite_of_its_end_is_a_defect() -> None:
    tally = Tally()
    tally.add(ONE, "whole", 200)
    tally.add_life([entry("call-1", "finished"), entry("call-2", "aborted")])
    assert not tally.defects
    tally.add_life([entry("call-1", "aborted")])
    assert [defect.partition(":")[0] for defect in tally.defects] == [
        "sent twice",
        "whole for its client, aborted at the engine",
    ]
    tally.add(ONE, "no end", 0)
    assert len(tally.defects) == 3
    tally.add(replace(ONE, index=3), "refused", 503)
    tally.add_life([entry("call-3", "finished")])
    assert tally.defects[3:] == ["refused, and sent nevertheless: call-3"]
    assert table({"waits": dict(tally.ends)}).splitlines()[-1].split() == ["all", "1", "0", "1", "1", "0"]


def test_a_line_is_found_and_its_noise_told() -> None:
    assert slope([(0, 1), (1, 3)]) is None
    assert slope([(1, 1), (1, 2), (1, 3)]) is None
    exact = slope([(0, 1), (1, 3), (2, 5)])
    assert exact is not None
    assert (exact.value, exact.error, exact.flat) == (2, 0, False)
    noisy = slope([(0, 1), (1, 0), (2, 1), (3, 0), (4, 1)])
    assert noisy is not None
    assert noisy.flat
    assert str(noisy) == "+0 ± 0.2"
