"""One budget per request: the tightest limit wins, and nothing a client says can loosen it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.deadline import from_headers, stainless_read_timeout_s
from app.errors import INVALID, Refused

ARRIVED, CEILING_S = 1000.0, 600.0
TIMEOUT, ENVOY, TTFT, STAINLESS = (
    b"x-request-timeout-ms",
    b"x-envoy-expected-rq-timeout-ms",
    b"x-slo-ttft-ms",
    b"x-stainless-read-timeout",
)


@pytest.mark.parametrize(
    ("headers", "budget_s"),
    [
        ({}, 600),
        ({TIMEOUT: b"2000"}, 2),
        ({ENVOY: b"1500"}, 1.5),
        ({TIMEOUT: b"2000", ENVOY: b"1500"}, 1.5),
        ({TIMEOUT: b"1000", ENVOY: b"15000"}, 1),
        ({TIMEOUT: b"0.5"}, 0.0005),
        ({TIMEOUT: b"9000000"}, 600),
        ({TIMEOUT: b"3000, 2000,9000000"}, 2),  # repeated: each proxy on the way may have added one
        ({STAINLESS: b"1"}, 600),
        ({TTFT: b"1"}, 600),
    ],
)
def test_the_tightest_limit_wins(headers: dict[bytes, bytes], budget_s: float) -> None:
    deadline = from_headers(headers, ARRIVED, CEILING_S)
    assert deadline.at == pytest.approx(ARRIVED + budget_s)
    assert deadline.left(ARRIVED + 1) == pytest.approx(budget_s - 1)


@pytest.mark.parametrize(("headers", "limit_s"), [({}, math.inf), ({TTFT: b"250"}, 0.25), ({TTFT: b"700000"}, 700)])
def test_the_first_event_has_a_limit_of_its_own(headers: dict[bytes, bytes], limit_s: float) -> None:
    assert from_headers(headers, ARRIVED, CEILING_S).first_event_at == ARRIVED + limit_s


@pytest.mark.parametrize(("value", "seconds"), [(None, math.inf), (b"600", 600), (b"0.25", 0.25)])
def test_the_sdks_read_timeout_is_in_seconds(value: bytes | None, seconds: float) -> None:
    assert stainless_read_timeout_s({} if value is None else {STAINLESS: value}) == seconds


BAD = [
    b"",
    b"0",
    b"0.0",
    b"-1",
    b"+1",
    b"1e3",
    b"1_000",
    b"inf",
    b"nan",
    b"0x10",
    b"1s",
    b"1.",
    b"1 2",
    b"1;2",
    b"10,",
    b"10,0",
]


@pytest.mark.parametrize("value", [*BAD, b"\xd9\xa3", b"9" * 400])
@pytest.mark.parametrize("name", [TIMEOUT, ENVOY, TTFT, STAINLESS])
def test_a_malformed_limit_is_a_400_that_names_the_header(name: bytes, value: bytes) -> None:
    with pytest.raises(Refused) as caught:
        stainless_read_timeout_s({name: value}) if name == STAINLESS else from_headers({name: value}, 0, CEILING_S)
    assert caught.value.kind is INVALID
    assert caught.value.param == name.decode()


@given(
    st.dictionaries(
        st.sampled_from([TIMEOUT, ENVOY, TTFT]), st.binary(max_size=12) | st.from_regex(rb"\A\d+(\.\d+)?\Z")
    )
)
def test_no_header_loosens_the_deadline_or_ends_in_anything_but_a_400(headers: dict[bytes, bytes]) -> None:
    try:
        deadline = from_headers(headers, ARRIVED, CEILING_S)
    except Refused as refused:
        assert refused.kind is INVALID  # noqa: PT017 - one of two good ends
    else:
        assert deadline.at <= ARRIVED + CEILING_S
        assert deadline.at > ARRIVED or headers  # so small a limit may vanish beside the clock's reading


@given(st.lists(st.floats(0, 2000), min_size=1))
def test_tightening_never_loosens(moments: list[float]) -> None:
    deadline = from_headers({}, ARRIVED, CEILING_S)
    for moment in moments:
        deadline.tighten(moment)
    assert deadline.at == min(ARRIVED + CEILING_S, *moments)
