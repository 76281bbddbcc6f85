"""What the chaos run draws from its seed, and how it judges what a client got."""

import json
from collections import Counter

import httpx
import pytest

from loadtest.chaos import DEADLINE_S, ENDS, Outcome, Shot, draw, judge, table

ERROR = 'data: {"error": {"code": "%s"}}\n\ndata: [DONE]\n\n'


def shot(route: str = "/v1/completions", *, stream: bool = True) -> Shot:
    return Shot(0, route, stream, 4, DEADLINE_S, None)


def test_a_seed_decides_everything_and_nothing_is_left_out() -> None:
    rounds = draw(7, 200, 5, 1)
    assert rounds == draw(7, 200, 5, 1)
    assert rounds != draw(8, 200, 5, 1)
    assert sum(len(one.shots) for one in rounds) == 200
    assert Counter(one.stopped for one in rounds) == {False: 5, True: 1}
    assert len({one.victim for one in rounds}) == 3
    assert {one.route for what in rounds for one in what.shots} == ENDS.keys()


@pytest.mark.parametrize(
    ("given", "status", "text", "word"),
    [
        (shot(), 200, 'data: {"choices": []}\n\ndata: [DONE]\n\n', "whole"),
        (shot(), 200, 'data: {"choices": []}\n\n', "wrong"),
        (shot(), 200, ERROR % "engine_error", "engine error"),
        (shot(), 200, ERROR % "deadline_exceeded", "deadline"),
        (shot("/v1/responses"), 200, 'data: {"type": "response.completed", "error": null}\n\n', "whole"),
        (shot("/v1/messages"), 200, "event: message_stop\n\n", "whole"),
        (shot(stream=False), 200, json.dumps({"usage": {}}), "whole"),
        (shot(stream=False), 200, "{}", "wrong"),
        (shot(), 502, "", "engine error"),
        (shot(), 504, "", "deadline"),
        (shot(), 503, "", "wrong"),
        (shot(), 400, "", "wrong"),
    ],
)
def test_ends_are_told_apart(given: Shot, status: int, text: str, word: str) -> None:
    assert judge(given, httpx.Response(status, text=text)) == word


def test_a_refusal_says_when_to_come_back() -> None:
    assert judge(shot(), httpx.Response(503, headers={"retry-after": "1"})) == "refused"


def test_every_kind_of_defect_counts() -> None:
    ends = {"whole": 3, "no end": 1, "wrong": 2}
    one = Outcome("kill x", ends, {"tidegate_in_flight": 1.0}, [17], 20.0)
    assert one.defects == 5
    last = table([one, one]).splitlines()[-1].split()
    assert last == ["all", "2", "6", "4", "2", "2"]  # no end, whole, wrong, leaked, orphans
