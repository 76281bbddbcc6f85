"""Server-sent events, however their bytes are cut: the first one, the last one, and where one may be put in between."""

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routes import GENERATION, Family
from app.sse import KEEP_ALIVE, KEPT_BYTES, EngineErrorEvent, FirstEvent, Tail

CHAT, COMPLETIONS, RESPONSES, MESSAGES = Family.CHAT, Family.COMPLETIONS, Family.RESPONSES, Family.MESSAGES
DONE = b"data: [DONE]\n\n"
CHUNK = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
CREATED = b'event: response.created\ndata: {"type":"response.created"}\n\n'
IN_PROGRESS = b'event: response.in_progress\ndata: {"type":"response.in_progress"}\n\n'
DELTA = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"hi"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
families = pytest.mark.parametrize("family", sorted(GENERATION, key=str), ids=str)


def event(value: Any, name: str = "") -> bytes:
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(value).encode() + b"\n\n"


def crlf(stream: bytes) -> bytes:
    return stream.replace(b"\n", b"\r\n")


def cr(stream: bytes) -> bytes:
    return stream.replace(b"\n", b"\r")


def first(family: Family, *parts: bytes) -> bool | EngineErrorEvent:
    """What a stream that comes in these parts begins with: an event, none yet, or an error."""
    found = FirstEvent(family)
    try:
        return any(found.feed(part) for part in parts)
    except EngineErrorEvent as error:
        return error


def tail(family: Family, *parts: bytes) -> Tail:
    seen = Tail(family)
    for part in parts:
        seen.feed(part)
    return seen


LINE_ENDS: list[Callable[[bytes], bytes]] = [bytes, crlf, cr]


class TestFirstEvent:
    @families
    @pytest.mark.parametrize(
        ("stream", "complete"),
        [
            (b"", False),
            (b"data: {", False),
            (b"data: {}\n", False),
            (b"data: {}\n\n", True),
            (b"data: [DONE]\n\n", True),
            (b": ping\n\n", False),
            (b": ping\n\n: ping\n\ndata: {}\n", False),
            (b": ping\ndata: {}\n\n", True),
            (b"\n\n\n\n", False),
            (b"event: ping\n\n", True),
            (b"data: {}\n\ndata: {", True),
        ],
    )
    def test_is_complete_with_the_first_empty_line_that_ends_more_than_comments(
        self, family: Family, stream: bytes, complete: bool
    ) -> None:
        for ends in LINE_ENDS:
            assert first(family, ends(stream)) is complete

    @pytest.mark.parametrize("named", [True, False])
    @pytest.mark.parametrize("kind", ["response.created", "response.in_progress"])
    def test_the_preamble_of_a_response_is_none(self, kind: str, named: bool) -> None:
        preamble = event({"type": kind}, kind if named else "")
        assert first(RESPONSES, preamble, preamble) is False
        assert first(RESPONSES, preamble, DELTA) is True
        assert first(CHAT, preamble) is True

    @pytest.mark.parametrize(
        ("family", "payload", "status"),
        [
            (CHAT, {"error": {"message": "busy", "code": 503}}, 503),
            (CHAT, {"error": {"message": "bad", "code": 400}}, 400),
            (COMPLETIONS, {"error": {"code": 599}}, 599),
            (CHAT, {"error": {"code": 200}}, 502),
            (CHAT, {"error": {"code": 399}}, 502),
            (CHAT, {"error": {"code": 600}}, 502),
            (CHAT, {"error": {"code": "503"}}, 502),
            (CHAT, {"error": {"code": True}}, 502),
            (CHAT, {"error": {"code": 500.0}}, 502),
            (CHAT, {"error": {"code": None}}, 502),
            (CHAT, {"error": {}}, 502),
            (CHAT, {"error": "busy"}, 502),
            (MESSAGES, {"type": "error", "error": {"type": "overloaded_error", "code": 503}}, 503),
            (MESSAGES, {"type": "error", "error": {"type": "overloaded_error"}}, 502),
            (RESPONSES, {"type": "error", "code": 500, "message": "no"}, 500),
            (RESPONSES, {"type": "error", "code": "server_error", "message": "no"}, 502),
        ],
    )
    @pytest.mark.parametrize("name", ["", "error"])
    def test_an_error_becomes_its_status_with_its_json_as_the_body(
        self, family: Family, payload: Any, status: int, name: str
    ) -> None:
        found = first(family, b": ping\n\n", event(payload, name) + DONE)
        assert isinstance(found, EngineErrorEvent)
        assert found.status == status
        assert json.loads(found.body) == payload

    @pytest.mark.parametrize(("payload", "status"), [({"message": "no", "code": 503}, 503), ({"message": "no"}, 502)])
    def test_an_event_that_is_named_so_is_an_error(self, payload: Any, status: int) -> None:
        found = first(CHAT, event(payload, "error"))
        assert isinstance(found, EngineErrorEvent)
        assert found.status == status

    @pytest.mark.parametrize("data", [b"data: CUDA out of memory\n", b"", b'data: ["x"]\n', b"data: {}\n"])
    def test_an_event_that_is_named_so_and_says_nothing_is_an_answer_that_broke_off(self, data: bytes) -> None:
        with pytest.raises(httpx.RemoteProtocolError):
            first(CHAT, b"event: error\n" + data + b"\n")

    def test_an_error_after_the_preamble_of_a_response_is_the_first_event(self) -> None:
        assert isinstance(
            first(RESPONSES, CREATED, IN_PROGRESS, event({"type": "error", "code": 500})), EngineErrorEvent
        )

    def test_an_error_over_several_lines_is_put_together(self) -> None:
        found = first(CHAT, b'data: {"error":\ndata: {"code": 503}}\n\n')
        assert isinstance(found, EngineErrorEvent)
        assert json.loads(found.body) == {"error": {"code": 503}}

    @pytest.mark.parametrize(
        "data",
        [
            b'{"choices":[{"delta":{"content":"\\"error\\""}}]}',
            b'{"error":null,"choices":[]}',
            b'{"error":"","choices":[]}',
            b'[{"error":{"code":503}}]',
            b'"error"',
            b'{"error":{',
            b'{"error": ' + b"[" * 100_000,
            b'{"choices":[{"delta":{"error":{"code":503}}}]}',
            b'"error" \xff\xfe',
        ],
    )
    @families
    def test_what_only_looks_like_an_error_passes_as_an_event(self, family: Family, data: bytes) -> None:
        assert first(family, b"data: " + data + b"\n\n") is True

    def test_nothing_after_the_first_event_is_looked_at(self) -> None:
        assert first(CHAT, CHUNK + event({"error": {"code": 503}})) is True

    @given(st.binary(max_size=30).map(lambda junk: junk + b"\n\n"))
    def test_junk_never_ends_in_anything_unforeseen(self, junk: bytes) -> None:
        assert first(RESPONSES, b"data: " + junk) in (True, False)


class TestTail:
    @pytest.mark.parametrize(
        ("family", "stream", "whole"),
        [
            (CHAT, CHUNK + DONE, True),
            (COMPLETIONS, CHUNK + b"data:[DONE]\n\n", True),
            (CHAT, DONE, True),
            (CHAT, DONE + b"\n", True),
            (CHAT, CHUNK + DONE + b": bye\n\n: and again\n\n", True),
            (CHAT, b": data: [DONE]\n\n", False),
            (CHAT, CHUNK + b"data: [DONE] \n\n", True),
            (CHAT, b"", False),
            (CHAT, CHUNK, False),
            (CHAT, CHUNK + b"data: [DON", False),
            (CHAT, DONE + CHUNK, False),
            (CHAT, b'data: {"content":"data: [DONE]"}\n\n', False),
            (CHAT, b"data: say data: [DONE]\n\n", False),
            (CHAT, STOP, False),
            (RESPONSES, DELTA + event({}, "response.completed"), True),
            (RESPONSES, DELTA + event({}, "response.incomplete"), True),
            (RESPONSES, DELTA + event({}, "response.failed"), True),
            (RESPONSES, DELTA + event({"type": "response.completed"}), True),
            (RESPONSES, DELTA + event({"type": "response.output_text.delta", "delta": "response.completed"}), False),
            (RESPONSES, event({"text": "x" * 5000}, "response.completed"), True),
            (RESPONSES, event({}, "response.completed") + DONE, True),
            (RESPONSES, DELTA + DONE, False),
            (RESPONSES, CREATED + IN_PROGRESS, False),
            (RESPONSES, event({}, "response.completed_soon"), False),
            (RESPONSES, event({"delta": "event: response.completed\n"}, "response.output_text.delta"), False),
            (MESSAGES, STOP, True),
            (MESSAGES, event({"type": "message_stop"}), True),
            (MESSAGES, event({"delta": "event: message_stop"}, "content_block_delta"), False),
            (MESSAGES, DONE, False),
        ],
    )
    def test_a_stream_is_whole_with_the_end_mark_of_its_kind(self, family: Family, stream: bytes, whole: bool) -> None:
        for ends in LINE_ENDS[:2]:
            assert tail(family, ends(stream)).whole is whole
            assert tail(family, *(bytes([byte]) for byte in ends(stream))).whole is whole

    @pytest.mark.parametrize(
        ("family", "end"),
        [(RESPONSES, event({"response": {"output": "x" * 900}}, "response.completed")), (MESSAGES, STOP)],
    )
    def test_a_stream_cut_inside_its_last_event_is_not_whole(self, family: Family, end: bytes) -> None:
        places = [*range(1, min(60, len(end) - 1)), len(end) // 2, len(end) - 3, len(end) - 2]
        cuts = [cut for cut in places if tail(family, DELTA, end[:cut]).whole]
        assert cuts == []

    @pytest.mark.parametrize("ends", LINE_ENDS)
    def test_something_may_be_put_in_only_between_events(self, ends: Callable[[bytes], bytes]) -> None:
        stream, boundaries = b"", {0}
        for part in (CHUNK, CREATED, KEEP_ALIVE, DONE):
            stream += ends(part)
            boundaries.add(len(stream))
        between = {cut for cut in range(len(stream) + 1) if tail(CHAT, stream[:cut]).between_events}
        assert between == boundaries

    @pytest.mark.parametrize("size", [511, 512, 513, 5000, 100_000])
    def test_large_events_do_not_hide_the_end(self, size: int) -> None:
        large = b"data: " + b"x" * size
        assert not tail(CHAT, large).between_events
        assert tail(CHAT, large, b"\n\n").between_events
        assert tail(CHAT, large + b"\n\n" + DONE).whole
        assert tail(CHAT, large, b"\n\ndata: [DO", b"NE]\n\n").whole

    @pytest.mark.parametrize(
        ("family", "stream", "failed"),
        [
            (CHAT, CHUNK + event({"error": {"message": "EngineCore died", "code": 500}}) + DONE, True),
            (CHAT, CHUNK + event({"error": {"message": "m" * 2000, "code": 500}}) + DONE, True),
            (MESSAGES, event({"type": "error", "error": {"type": "api_error"}}, "error"), True),
            (RESPONSES, DELTA + event({"type": "error", "code": "500", "message": "no"}, "error"), True),
            (CHAT, CHUNK + DONE, False),
            (CHAT, event({"choices": [{"delta": {"content": 'data: {"error": {'}}]}) + DONE, False),
            (CHAT, event({"error": None, "choices": []}) + DONE, False),
        ],
    )
    def test_an_error_of_the_engine_at_the_end_is_noticed(self, family: Family, stream: bytes, failed: bool) -> None:
        assert tail(family, stream).failed is failed

    @pytest.mark.parametrize(
        ("answer", "tokens"),
        [
            ({"choices": [{"text": "x" * 3000}], "usage": {"prompt_tokens": 9, "completion_tokens": 41}}, 41),
            ({"usage": {"input_tokens": 9, "output_tokens": 42, "output_tokens_details": {"reasoning_tokens": 3}}}, 42),
            ({"choices": [{"text": '"completion_tokens": 5'}], "usage": {"completion_tokens": 43}}, 43),
            ({"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 9, "total_tokens": 9}}, None),
            ({"error": {"message": "no"}}, None),
        ],
    )
    def test_the_length_of_a_plain_answer_is_what_its_usage_says(self, answer: Any, tokens: int | None) -> None:
        assert tail(CHAT, json.dumps(answer).encode()).reported_output == tokens

    def test_only_the_end_is_kept(self) -> None:
        seen = tail(CHAT, *([CHUNK] * 1000))
        assert len(pickle.dumps(seen)) < 2 * KEPT_BYTES


@dataclass(frozen=True)
class Stream:
    family: Family
    data: bytes
    parts: list[bytes]


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    """Events of any kind with any line ends, cut anywhere."""
    kinds = [KEEP_ALIVE, CHUNK, CREATED, IN_PROGRESS, DELTA, STOP, DONE, event({"error": {"code": 503}})]
    kinds += [event({"text": "x" * size}, "response.completed") for size in (1, 600)]
    data = b"".join(draw(st.lists(st.sampled_from(kinds), max_size=6)))
    data = LINE_ENDS[draw(st.integers(0, 2))](data)[draw(st.integers(0, 3)) :]
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=12)))
    return Stream(
        draw(st.sampled_from(sorted(GENERATION, key=str))),
        data,
        [data[begin:end] for begin, end in pairwise([0, *cuts, len(data)])],
    )


class TestCuts:
    @given(streams())
    def test_do_not_change_the_first_event(self, stream: Stream) -> None:
        whole, cut = (first(stream.family, *parts) for parts in ([stream.data], stream.parts))
        assert repr(whole) == repr(cut)

    @given(streams())
    def test_do_not_change_the_end(self, stream: Stream) -> None:
        whole, cut = (tail(stream.family, *parts) for parts in ([stream.data], stream.parts))
        assert (whole.whole, whole.failed, whole.between_events) == (cut.whole, cut.failed, cut.between_events)

    @pytest.mark.parametrize("ends", LINE_ENDS)
    def test_do_not_hide_an_event_from_the_count(self, ends: Callable[[bytes], bytes]) -> None:
        stream = ends(CHUNK * 3 + DONE)
        counts = {tail(CHAT, stream[:cut], stream[cut:]).events for cut in range(len(stream))}
        assert counts == {4}
