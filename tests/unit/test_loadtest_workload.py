"""The schedule: the same for every arm and every run with the same seed, and what the text says of its mix."""

import json
from itertools import islice, pairwise

import pytest

from app.lanes import Lanes
from app.routes import FORWARDED, Routes
from app.settings import DEFAULT_LANES
from loadtest.client import load
from loadtest.workload import LONG, SHORT, SLOW_KINDS, endless, schedule, varying


def test_a_seed_gives_the_same_requests_again_and_another_seed_others() -> None:
    once, again, other = (schedule("mixed", 70, 20, seed) for seed in (1, 1, 2))
    assert once == again
    assert [r.body("m", "run001") for r in once[:20]] == [r.body("m", "run001") for r in again[:20]]
    assert [r.at_s for r in once[:20]] != [r.at_s for r in other[:20]]


def test_arrivals_are_poisson_at_the_asked_rate_and_within_the_window() -> None:
    requests = schedule("mixed", 50, 200, 1)
    gaps = [b.at_s - a.at_s for a, b in pairwise(requests)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert len(requests) == pytest.approx(10_000, rel=0.03)
    assert deviation == pytest.approx(mean, rel=0.05)
    assert all(0 < r.at_s < 200 for r in requests)
    assert [r.index for r in requests] == list(range(len(requests)))


@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_bursts_keep_the_rate_and_spread_the_times_between(spread: float) -> None:
    requests = schedule("mixed", 50, 400, 1, spread=spread)
    gaps = [b.at_s - a.at_s for a, b in pairwise(requests)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert len(requests) == pytest.approx(20_000, rel=0.08)
    assert deviation / mean == pytest.approx(spread, rel=0.1)
    poisson = schedule("mixed", 50, 400, 1)
    assert [(r.kind, r.tokens) for r in requests[:99]] == [(r.kind, r.tokens) for r in poisson[:99]]


def test_phases_follow_each_other_each_with_its_rate() -> None:
    requests = varying("mixed", [(100, 5), (100, 30), (100, 5)], 1)
    counts = [sum(begin <= r.at_s < begin + 100 for r in requests) for begin in (0, 100, 200)]
    assert counts == pytest.approx([500, 3000, 500], rel=0.1)
    assert [r.at_s for r in requests] == sorted(r.at_s for r in requests)
    assert [r.index for r in requests] == list(range(len(requests)))


def test_other_kinds_can_be_asked_for() -> None:
    requests = schedule("mixed", 50, 10, 1, kinds=SLOW_KINDS)
    assert (
        {r.kind for r in requests}
        == set(SLOW_KINDS)
        == {next(endless(mix, 1, SLOW_KINDS)).kind for mix in ("short", "long")}
    )


def test_a_higher_load_brings_the_same_sizes_in_the_same_order() -> None:
    slow, fast = schedule("mixed", 7, 20, 1), schedule("mixed", 70, 20, 1)
    assert [(r.kind, r.words, r.tokens) for r in slow] == [(r.kind, r.words, r.tokens) for r in fast[: len(slow)]]


@pytest.mark.parametrize(("mix", "share"), [("mixed", 0.2), ("short", 0.0), ("long", 1.0)])
def test_each_mix_has_its_share_of_long_requests(mix: str, share: float) -> None:
    requests = schedule(mix, 100, 50, 1)
    assert sum(r.kind is LONG for r in requests) / len(requests) == pytest.approx(share, abs=0.02)
    assert sum(r.kind is LONG for r in islice(endless(mix, 1), 100)) == 100 * share
    for r in requests:
        assert r.kind.words[0] <= r.words <= r.kind.words[1]
        assert r.kind.tokens[0] <= r.tokens <= r.kind.tokens[1]


def test_a_request_names_its_limit_and_asks_for_an_exact_length() -> None:
    request = schedule("short", 10, 10, 1)[0]
    head, _, body = load(request, "tiny", "run001").payload.partition(b"\r\n\r\n")
    asked = json.loads(body)
    assert b"\r\nx-request-timeout-ms: 2000" in head
    assert b"\r\ncontent-length: %d\r\n" % len(body) in head
    assert asked["stream"] is asked["ignore_eos"] is True
    assert asked["max_tokens"] == request.tokens
    assert len(asked["messages"][0]["content"].split()) == 24


def test_another_salt_changes_the_first_word_alone_so_that_no_run_meets_a_warm_prefix_cache() -> None:
    request = schedule("long", 10, 10, 1)[0]
    one, two = (json.loads(request.body("tiny", salt))["messages"][0]["content"].split() for salt in ("run001", "run2"))
    assert one[0] != two[0]
    assert one[1:] == two[1:]


def test_the_gateway_sorts_short_and_long_requests_into_the_lanes_of_these_names() -> None:
    lanes = Lanes(DEFAULT_LANES)
    route = Routes(*FORWARDED).find("POST", b"/v1/chat/completions")
    for request in schedule("mixed", 50, 10, 1):
        assert lanes.classify(route, request.body("tiny", "run001")).lane == request.kind.name
    assert {SHORT.name, LONG.name} == {lane.name for lane in DEFAULT_LANES}
