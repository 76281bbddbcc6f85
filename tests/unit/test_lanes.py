"""From a body to a cost, a weight and a lane, for whatever a client may send."""

import json
import math
import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.errors import INVALID, Refused
from app.lanes import (
    FIRST_OUTPUT_GUESS,
    MEDIA_PARTS,
    MEDIA_TOKENS,
    MOST_CHOICES,
    MOST_VALUES,
    OUTPUT_GUESS,
    PROMPT_FIELDS,
    SCALE_RANGE,
    Demand,
    Lanes,
    text_tokens,
)
from app.routes import FORWARDED, Family, Route, Way
from app.settings import DEFAULT_LANES, Lane

ROUTES = {route.name: route for route in FORWARDED if route.way is Way.GATED}
JSON_ROUTES = [route for route in ROUTES.values() if route.family is not Family.AUDIO]
CHAT, COMPLETIONS = ROUTES["/v1/chat/completions"], ROUTES["/v1/completions"]
RESPONSES, MESSAGES = ROUTES["/v1/responses"], ROUTES["/v1/messages"]
EMBEDDINGS = ROUTES["/v1/embeddings"]
UNKNOWN_SHAPE = Demand("long")
any_route = pytest.mark.parametrize("route", JSON_ROUTES, ids=lambda route: route.name)


def lanes() -> Lanes:
    return Lanes(DEFAULT_LANES)


def classify(route: Route, body: Any) -> Demand:
    return lanes().classify(route, json.dumps(body).encode())


def message(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1} | more


class TestLane:
    def test_is_the_tightest_that_takes_the_cost_whatever_their_order(self) -> None:
        given_lanes = [Lane(name="rest"), Lane(name="m", max_cost=100), Lane(name="s", max_cost=10)]
        for _ in range(6):
            random.shuffle(given_lanes)
            made = Lanes(given_lanes)
            assert [made.lane_for(cost) for cost in (0, 10, 11, 100, 101, 10**400)] == [
                "s",
                "s",
                "m",
                "m",
                "rest",
                "rest",
            ]

    def test_the_work_is_that_of_one_sequence_and_an_output_token_is_most_of_it(self) -> None:
        body = {"prompt": [1] * 32, "max_tokens": 10}
        assert classify(COMPLETIONS, body).work == 12
        assert classify(COMPLETIONS, body | {"n": 4}).work == 12
        assert classify(COMPLETIONS, body | {"max_tokens": 10**4000}).work == pytest.approx(10**9)
        assert classify(COMPLETIONS, {"prompt": "hi", "n": 10**4000}).weight == 10**4000
        assert float(classify(COMPLETIONS, {"prompt": [1, 2], "n": 10**400}).exact_tokens) == 2 * 10**6
        assert classify(COMPLETIONS, {"what": "else"}).work == 0

    def test_the_bound_itself_is_still_inside(self) -> None:
        assert [classify(COMPLETIONS, {"prompt": [1] * 12, "max_tokens": n}).lane for n in (500, 501)] == [
            "short",
            "long",
        ]


class TestCost:
    def test_a_text_counts_four_bytes_a_token_and_less_outside_ascii(self) -> None:
        assert text_tokens("") == 0
        assert text_tokens("a" * 400) == 100
        assert text_tokens("é" * 9) == pytest.approx(10)
        assert text_tokens("鸡" * 6 + "a" * 4) == pytest.approx(11)
        assert text_tokens("\ud800") == pytest.approx(3 / 1.8)

    @pytest.mark.parametrize("field", PROMPT_FIELDS)
    @any_route
    def test_text_counts_in_every_field_that_may_reach_the_prompt(self, route: Route, field: str) -> None:
        body = {"prompt": "x", "max_tokens": 1, "max_output_tokens": 1}
        costs = [classify(route, body | {field: "a" * size}).cost for size in (40, 4040)]
        assert costs[1] - costs[0] == 1000

    @pytest.mark.parametrize(
        "shape",
        [
            lambda text: message(text),
            lambda text: message([{"type": "text", "text": text}]),
            lambda text: message(None, tools=[{"type": "function", "function": {"name": "f", "description": text}}]),
            lambda text: message(
                "", tools=[{"type": "function", "function": {"parameters": {"properties": {text: {}}}}}]
            ),
            lambda text: message(
                "", response_format={"type": "json_schema", "json_schema": {"schema": {"enum": [text]}}}
            ),
            lambda text: message("", system=text),
            lambda text: message([{"type": "tool_result", "content": [{"type": "text", "text": text}]}]),
            lambda text: message([{"type": text, "text": ""}]),
            lambda text: message("") | {"messages": text},
            lambda text: message("") | {"messages": {"content": {"deeper": [[text]]}}},
        ],
    )
    def test_text_counts_wherever_it_stands_in_a_chat(self, shape: Any) -> None:
        costs = [classify(CHAT, shape("a" * size)).cost for size in (40, 4040)]
        assert costs[1] - costs[0] == 1000

    def test_fifty_kilobytes_of_tools_make_a_request_long(self) -> None:
        tools = [{"type": "function", "function": {"name": f"f{n}", "description": "a" * 500}} for n in range(100)]
        assert classify(CHAT, message("hi")).lane == "short"
        assert classify(CHAT, message("hi", tools=tools)).cost > 12_500

    @pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]], [[1], [2, 3]], [[1, 2], [3]]])
    def test_token_ids_count_as_they_are(self, prompt: Any) -> None:
        made = lanes()
        made.learn_scale(1, 4)
        for route, field in ((COMPLETIONS, "prompt"), (EMBEDDINGS, "input")):
            demand = made.classify(route, json.dumps({field: prompt, "max_tokens": 0}).encode())
            assert (demand.cost, demand.exact_tokens, demand.text_tokens) == (3, 3, 0)

    @pytest.mark.parametrize("kind", sorted(MEDIA_PARTS))
    def test_a_picture_or_sound_counts_the_same_whatever_its_size(self, kind: str) -> None:
        costs = [
            classify(CHAT, message([{"type": kind, kind: {"url": f"data:x/y;base64,{'A' * size}"}}])).cost
            for size in (4, 400_000)
        ]
        assert costs[0] == costs[1]
        assert costs[0] == pytest.approx(MEDIA_TOKENS, rel=0.1)

    @pytest.mark.parametrize(
        ("route", "body", "output"),
        [
            (CHAT, {"max_tokens": 7}, 7),
            (CHAT, {"max_tokens": 7, "max_completion_tokens": 5}, 5),
            (CHAT, {"max_tokens": 7, "max_completion_tokens": None}, 7),
            (CHAT, {"max_tokens": 0}, 0),
            (CHAT, {}, OUTPUT_GUESS),
            (CHAT, {"max_tokens": None}, OUTPUT_GUESS),
            (COMPLETIONS, {"max_tokens": 7, "max_completion_tokens": 5}, 7),
            (COMPLETIONS, {}, FIRST_OUTPUT_GUESS[Family.COMPLETIONS]),
            (RESPONSES, {"max_output_tokens": 7, "max_tokens": 5}, 7),
            (MESSAGES, {"max_tokens": 7}, 7),
            (EMBEDDINGS, {"max_tokens": 7}, 0),
        ],
    )
    def test_the_answer_counts_as_long_as_it_may_become(self, route: Route, body: dict[str, Any], output: int) -> None:
        none = {"input": [1, 2], "max_tokens": 0, "max_output_tokens": 0}
        assert classify(route, {"input": [1, 2]} | body).cost - classify(route, none).cost == output

    def test_a_huge_limit_is_only_a_long_request(self) -> None:
        assert classify(CHAT, message("hi", max_tokens=10**4000)).lane == "long"

    @given(st.text(), st.text())
    def test_more_text_never_costs_less(self, text: str, more: str) -> None:
        costs = [classify(COMPLETIONS, {"prompt": part, "max_tokens": 1}).cost for part in (text, text + more)]
        assert costs[0] <= costs[1]


NO_NUMBERS: list[Any] = [None, 0, -2, True, "0", "x", 2.5, [3], {}]


AS_THREE: list[Any] = ["3", " 3 ", 3.0, "3.0"]  # what vLLM takes for 3


class TestWeight:
    @pytest.mark.parametrize(
        ("body", "weight"),
        [
            ({"prompt": "a"}, 1),
            ({"prompt": "a", "n": 3}, 3),
            ({"prompt": ["a"], "n": 3}, 3),
            ({"prompt": ["a", "b"], "n": 3}, 6),
            ({"prompt": [1, 2, 3]}, 1),
            ({"prompt": [1, 2, 3], "n": 2}, 2),
            ({"prompt": [[1], [2, 3]]}, 2),
            ({"prompt": [[1], [2, 3]], "n": 2}, 4),
            ({"prompt": []}, 1),
            ({"prompt": "a", "best_of": 5}, 1),
            ({"prompt_embeds": ["AA", "AA", "AA"]}, 3),
            ({"prompt": "", "prompt_embeds": "AA", "n": 2}, 2),
            ({"prompt": ["a", "b"], "prompt_embeds": "AA"}, 3),
            ({"prompt": "a", "n": 10**30}, 10**30),
            *[({"prompt": "a", "n": n}, 1) for n in NO_NUMBERS],
            *[({"prompt": "a", "n": n}, 3) for n in AS_THREE],
        ],
    )
    def test_is_the_number_of_sequences(self, body: dict[str, Any], weight: int) -> None:
        assert classify(COMPLETIONS, body).weight == weight

    @pytest.mark.parametrize("unknown", [{"max_tokens": "x"}, {"prompt": None}, {"max_tokens": -1}])
    def test_is_the_same_whatever_else_is_odd(self, unknown: dict[str, Any]) -> None:
        assert classify(COMPLETIONS, {"prompt": "a", "n": 3} | unknown).weight == 3

    def test_counts_the_choices_of_a_chat(self) -> None:
        assert classify(CHAT, message("hi", n=4)).weight == 4

    @pytest.mark.parametrize("route", [route for route in JSON_ROUTES if route.family is Family.POOLING])
    def test_of_pooling_is_one(self, route: Route) -> None:
        assert classify(route, {"input": ["a", "b"], "documents": ["c"] * 9, "n": 5}).weight == 1


class TestStream:
    @pytest.mark.parametrize(
        ("value", "stream"),
        [(True, True), (False, False), (None, False), ("true", True), (1, True), ("no", False), ([], False)],
    )
    def test_is_what_the_body_asks_for(self, value: Any, stream: bool) -> None:
        assert classify(CHAT, message("hi", stream=value)).stream is stream
        assert classify(CHAT, {"stream": value}).stream is stream


class TestUnknownShapes:
    @pytest.mark.parametrize(
        "body", [None, True, 5, 1.5, "text", [], [{"prompt": "a"}], {}, {"prompt": None}, {"model": "m"}]
    )
    @any_route
    def test_go_to_the_rest_lane_as_one_request(self, route: Route, body: Any) -> None:
        assert classify(route, body) == UNKNOWN_SHAPE

    @pytest.mark.parametrize("limit", ["x", 7.5, -1, [7], {}, math.inf, math.nan])
    def test_a_limit_that_is_no_number_goes_to_the_rest_lane(self, limit: Any) -> None:
        assert classify(CHAT, message("hi", max_tokens=limit)) == UNKNOWN_SHAPE

    @pytest.mark.parametrize("limit", ["7", 7.0])
    def test_a_limit_is_what_the_engine_takes_it_for(self, limit: Any) -> None:
        assert classify(CHAT, message("hi", max_tokens=limit)) == classify(CHAT, message("hi", max_tokens=7))

    @pytest.mark.parametrize("body", [b"", b"--boundary\r\n", b"{", b"\xff", b"{}"])
    def test_sound_is_not_read_at_all(self, body: bytes) -> None:
        for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
            assert lanes().classify(ROUTES[path], body) == UNKNOWN_SHAPE


class TestOutOfScope:
    @pytest.mark.parametrize("value", [True, 1, "true", "on"])
    def test_a_background_response_is_refused(self, value: Any) -> None:
        with pytest.raises(Refused) as caught:
            classify(RESPONSES, {"input": "a", "background": value})
        assert (caught.value.kind, caught.value.param) == (INVALID, "background")

    @pytest.mark.parametrize("value", [False, None, "false", 0, "x", []])
    def test_one_that_is_not_in_the_background_is_not(self, value: Any) -> None:
        classify(RESPONSES, {"input": "a", "background": value})
        classify(CHAT, message("a", background=True))

    @any_route
    def test_a_priority_is_refused_only_where_the_engine_would_read_it(self, route: Route) -> None:
        classify(route, {"input": "a", "priority": None})
        if route.family is Family.POOLING:
            with pytest.raises(Refused) as caught:
                classify(route, {"input": "a", "priority": 0})
            assert (caught.value.kind, caught.value.param) == (INVALID, "priority")
        else:
            classify(route, {"input": "a", "priority": 0})


def decoded_by_python(body: bytes) -> bool:
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def accepted(body: bytes) -> bool:
    try:
        lanes().classify(CHAT, body)
    except Refused as refused:
        assert refused.kind is INVALID  # noqa: PT017 - one of two good ends
        return False
    return True


texts = st.text(st.characters(codec=None, categories=None))  # lone surrogates too
numbers = st.integers() | st.integers(-(10**400), 10**400) | st.floats()
token_ids = st.lists(st.integers(0, 50_000), max_size=3)
leaves = st.none() | st.booleans() | numbers | texts | token_ids | st.sampled_from(sorted(MEDIA_PARTS))
keys = texts | st.sampled_from(["type", "text", "role", "content", "function", "parameters"])
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=12
)
known = [
    *PROMPT_FIELDS,
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "n",
    "stream",
    "priority",
    "background",
]
requests = st.dictionaries(st.sampled_from(known), values, max_size=5)
NOISE = [
    b"",
    b" ",
    b"\x00",
    b"\xff",
    b",",
    b"}",
    b"]",
    b'"',
    b"\\",
    b"0",
    b"-",
    b".",
    b"e",
    b"NaN",
    b"\\ud800",
    b"\xed\xa0\x80",
]


class TestDecoding:
    @given(route=st.sampled_from(JSON_ROUTES), request=requests)
    @example(route=CHAT, request={"messages": [{"type": {}}, {"type": ["image"]}, {"type": None}]})
    @example(route=COMPLETIONS, request={"prompt": [[], [[]], {}, None, True], "n": [], "tools": {"type": 5}})
    @settings(max_examples=100)
    def test_no_json_is_refused_for_its_shape_or_ends_in_anything_unforeseen(
        self, route: Route, request: dict[str, Any]
    ) -> None:
        try:
            demand = lanes().classify(route, json.dumps(request).encode())
        except Refused as refused:
            assert refused.param in ("priority", "background")  # noqa: PT017 - one of two good ends
        else:
            assert demand.lane in ("short", "long")
            assert demand.weight >= 1
            assert demand.cost >= 0
            assert demand.exact_tokens >= 0
            assert 0 <= demand.text_tokens < math.inf

    @settings(max_examples=100)
    @given(requests | values, st.randoms(use_true_random=False), st.sampled_from(NOISE))
    def test_refuses_exactly_what_pythons_json_refuses(self, value: Any, rng: random.Random, noise: bytes) -> None:
        body = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
        cut, until = sorted(rng.randint(0, len(body)) for _ in range(2))
        for mutant in (body, body[:cut] + noise + body[cut:], body[:cut] + noise + body[until:]):
            assert accepted(mutant) == decoded_by_python(mutant)

    @given(st.binary(max_size=12))
    def test_refuses_exactly_the_bytes_that_pythons_json_refuses(self, body: bytes) -> None:
        assert accepted(body) == decoded_by_python(body)

    @pytest.mark.parametrize(
        ("body", "good"),
        [
            (b"", False),
            (b"{'a': 1}", False),
            (b'{"a": 1,}', False),
            (b'{"a": 1} x', False),
            (b'{"a": 01}', False),
            (b'{"a": "\x01"}', False),
            (b'{"a": -NaN}', False),
            (b'{"a": "\xff"}', False),
            (b"[" * 100_000, False),
            (b"[" * 100_000 + b"]" * 100_000, False),
            (b'{"a": ' + b"1" * 5000 + b"}", False),  # more digits than Python reads
            (b'{"a": ' + b"1" * 4000 + b"}", True),
            (b'{"a": NaN, "b": -Infinity, "c": 1e999}', True),
            (b'{"a": 1, "a": 2}', True),
            (b'{"a": "\\ud800"}', True),
            (b'{"\\ud800": "\xed\xa0\x80"}', True),
            (b"[" * 500 + b"]" * 500, True),
            (b'\xef\xbb\xbf{"a": 1}', True),
            ('{"a": "鸡"}'.encode("utf-16"), True),
            ('{"a": "鸡"}'.encode("utf-32-le"), True),
        ],
    )
    def test_of_odd_bodies(self, body: bytes, good: bool) -> None:
        assert (accepted(body), decoded_by_python(body)) == (good, good)

    def test_a_mistake_is_told_with_its_place(self) -> None:
        with pytest.raises(Refused, match=r"not valid JSON \(.+ at character 7\)"):
            lanes().classify(CHAT, b'{"a": 1')

    def test_of_two_equal_names_the_last_one_counts_as_in_the_engine(self) -> None:
        demand = lanes().classify(COMPLETIONS, b'{"prompt": "a", "n": 9, "max_tokens": 900, "max_tokens": 9, "n": 2}')
        assert (demand.lane, demand.weight) == ("short", 2)

    @pytest.mark.parametrize(
        "many",
        [b"[]," * 600_000 + b"[]", b"{" + b",".join(b'"%d":1' % n for n in range(600_000)) + b"}"],
        ids=["containers", "names"],
    )
    def test_millions_of_containers_are_not_decoded_but_forwarded_with_all_the_slots_they_might_take(
        self, many: bytes
    ) -> None:
        body = b'{"max_tokens": 1, "n": 3, "messages": [' + many + b"]}"
        assert lanes().classify(CHAT, body) == Demand("long", weight=MOST_CHOICES)
        assert lanes().classify(EMBEDDINGS, body) == Demand("long")

    def test_millions_of_values_are_not_looked_at_one_by_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """At a third of a microsecond or more for each, they would hold up everybody for seconds."""
        looked_at = 0

        def look(text: str) -> float:
            nonlocal looked_at
            looked_at += 1
            return 0.25

        monkeypatch.setattr("app.lanes.text_tokens", look)
        body = b'{"max_tokens": 1, "prompt": ["a"' + b',"a"' * 2_000_000 + b"]}"
        demand = lanes().classify(COMPLETIONS, body)
        assert (demand.lane, demand.weight) == ("long", 2_000_001)
        assert looked_at <= MOST_VALUES

    def test_nesting_that_the_engine_can_read_is_read(self) -> None:
        body = b'{"max_tokens": 1, "prompt": ' + b"[" * 900 + b'"' + b"a" * 400 + b'"' + b"]" * 900 + b"}"
        assert lanes().classify(COMPLETIONS, body).cost == 101


class TestLearning:
    def test_the_scale_follows_what_the_engine_counts_and_costs_follow_the_scale(self) -> None:
        made = lanes()
        body = json.dumps({"prompt": "a" * 1200, "max_tokens": 100}).encode()
        assert made.classify(COMPLETIONS, body).cost == 400
        for _ in range(50):
            made.learn_scale(1000, 1500)
        demand = made.classify(COMPLETIONS, body)
        assert (demand.cost, demand.lane, demand.text_tokens) == (550, "long", 300)

    def test_one_odd_reading_moves_it_little(self) -> None:
        made = lanes()
        made.learn_scale(1000, 1e9)
        assert 1 < made.scale < 2

    @given(st.lists(st.tuples(st.floats(1000, 1e6), st.floats(0, 1e9)), max_size=30))
    def test_the_scale_stays_within_bounds(self, readings: list[tuple[float, float]]) -> None:
        made = lanes()
        for text, counted in readings:
            made.learn_scale(text, counted)
        low, high = SCALE_RANGE
        assert low <= made.scale <= high

    def test_an_unstated_limit_costs_what_answers_on_that_route_have_had(self) -> None:
        made = lanes()
        for _ in range(200):
            made.learn_output(Family.CHAT, 1000)
        none = made.classify(CHAT, b'{"messages": [], "max_tokens": 0}').cost
        assert made.classify(CHAT, b'{"messages": []}').cost - none == pytest.approx(1000, abs=2)
        assert made.classify(RESPONSES, b'{"input": []}').cost == OUTPUT_GUESS
