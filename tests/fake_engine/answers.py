"""The bytes of vLLM-shaped answers: events of a stream and bodies of plain calls, per family of routes."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

GENERATION = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
WORK = {
    **GENERATION,
    "/v1/embeddings": "embeddings",
    "/pooling": "embeddings",
    "/v1/score": "score",
    "/score": "score",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
    "/classify": "classify",
    "/v1/audio/transcriptions": "audio",
    "/v1/audio/translations": "audio",
}
SIDE = {
    "/v1/messages/count_tokens": "count_tokens",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
    "/v1/models": "models",
    "/version": "version",
}
CREATED = 1_700_000_000


@dataclass(frozen=True, slots=True)
class Shape:
    """All that the bytes of an answer depend on."""

    family: str
    model: str
    tag: str
    events: int
    size: int
    prompt_tokens: int
    usage: bool = False
    done: bool = True
    end: str = "completed"
    crlf: bool = False
    comments: int = 0
    error: str | None = None
    error_at: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A stream's events by when they go out: with the head, before the first token, one per token, after the last."""

    early: tuple[bytes, ...]
    opening: tuple[bytes, ...]
    tokens: tuple[bytes, ...]
    closing: tuple[bytes, ...]


def dumps(value: Any) -> str:
    """JSON as vLLM writes it: without spaces."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def word(shape: Shape, index: int) -> str:
    """The text of token `index`."""
    return f" {shape.tag}w{index}".ljust(shape.size, "x")


def text(shape: Shape) -> str:
    """The whole answer's text."""
    return "".join(word(shape, index) for index in range(shape.events))


def ident(shape: Shape, prefix: str) -> str:
    """An id in vLLM's form."""
    return f"{prefix}-fake{shape.tag}"


def _usage(shape: Shape) -> dict[str, Any]:
    return {
        "prompt_tokens": shape.prompt_tokens,
        "total_tokens": shape.prompt_tokens + shape.events,
        "completion_tokens": shape.events,
        "prompt_tokens_details": None,
    }


def _data(value: Any) -> str:
    return f"data: {dumps(value)}\n\n"


def _named(value: dict[str, Any]) -> str:
    return f"event: {value['type']}\ndata: {dumps(value)}\n\n"


def _chat_chunk(shape: Shape, choices: list[dict[str, Any]], **more: Any) -> str:
    head = {"id": ident(shape, "chatcmpl"), "object": "chat.completion.chunk", "created": CREATED, "model": shape.model}
    return _data({**head, "choices": choices, **more})


def _choice(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}


def _chat(shape: Shape) -> tuple[list[str], list[str], list[str], list[str]]:
    tokens = [_chat_chunk(shape, [_choice({"content": word(shape, index)})]) for index in range(shape.events)]
    closing = [_chat_chunk(shape, [_choice({}, "stop")])]
    if shape.usage:
        closing.append(_chat_chunk(shape, [], usage=_usage(shape)))
    return [], [_chat_chunk(shape, [_choice({"role": "assistant", "content": ""})])], tokens, closing


def _completion(shape: Shape) -> tuple[list[str], list[str], list[str], list[str]]:
    def chunk(choices: list[dict[str, Any]], **more: Any) -> str:
        head = {"id": ident(shape, "cmpl"), "object": "text_completion", "created": CREATED, "model": shape.model}
        return _data({**head, "choices": choices, **more})

    def choice(piece: str, finish: str | None = None) -> dict[str, Any]:
        return {"index": 0, "text": piece, "logprobs": None, "finish_reason": finish, "stop_reason": None}

    tokens = [chunk([choice(word(shape, index))]) for index in range(shape.events)]
    closing = [chunk([choice("", "length")])]
    if shape.usage:
        closing.append(chunk([], usage=_usage(shape)))
    return [], [], tokens, closing


def _response(shape: Shape, status: str) -> dict[str, Any]:
    whole = status not in ("in_progress", "failed")
    part = {"type": "output_text", "text": text(shape) if whole else "", "annotations": [], "logprobs": []}
    item = {"id": "msg_0", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    return {
        "id": ident(shape, "resp"),
        "object": "response",
        "created_at": CREATED,
        "model": shape.model,
        "status": status,
        "error": {"code": "server_error", "message": "scripted"} if status == "failed" else None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "metadata": {},
        "output": [item] if whole else [],
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "usage": {
            "input_tokens": shape.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": shape.events,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": shape.prompt_tokens + shape.events,
        }
        if whole
        else None,
    }


def _responses(shape: Shape) -> tuple[list[str], list[str], list[str], list[str]]:
    numbers = iter(range(shape.events + 100))

    def event(kind: str, **more: Any) -> str:
        return _named({"type": kind, "sequence_number": next(numbers), **more})

    at: dict[str, Any] = {"item_id": "msg_0", "output_index": 0, "content_index": 0}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    item = {"id": "msg_0", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
    going = _response(shape, "in_progress")
    early = [event("response.created", response=going), event("response.in_progress", response=going)]
    opening = [
        event("response.output_item.added", output_index=0, item=item),
        event("response.content_part.added", **at, part=part),
    ]
    tokens = [
        event("response.output_text.delta", **at, delta=word(shape, index), logprobs=[])
        for index in range(shape.events)
    ]
    whole = {**part, "text": text(shape)}
    closing = [
        event("response.output_text.done", **at, text=text(shape), logprobs=[]),
        event("response.content_part.done", **at, part=whole),
        event("response.output_item.done", output_index=0, item={**item, "status": "completed", "content": [whole]}),
        event(f"response.{shape.end}", response=_response(shape, shape.end)),
    ]
    return early, opening, tokens, closing


def _message(shape: Shape, content: list[dict[str, Any]], stop: str | None, output: int) -> dict[str, Any]:
    return {
        "id": ident(shape, "msg"),
        "type": "message",
        "role": "assistant",
        "content": content,
        "model": shape.model,
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": {"input_tokens": shape.prompt_tokens, "output_tokens": output},
    }


def _messages(shape: Shape) -> tuple[list[str], list[str], list[str], list[str]]:
    opening = [
        _named({"type": "message_start", "message": _message(shape, [], None, 0)}),
        _named({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
    ]
    tokens = [
        _named({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word(shape, index)}})
        for index in range(shape.events)
    ]
    closing = [
        _named({"type": "content_block_stop", "index": 0}),
        _named(
            {
                "type": "message_delta",
                "delta": {"stop_reason": "end_turn", "stop_sequence": None},
                "usage": {"input_tokens": shape.prompt_tokens, "output_tokens": shape.events},
            }
        ),
        _named({"type": "message_stop"}),
    ]
    return [], opening, tokens, closing


_STREAMS: dict[str, Callable[[Shape], tuple[list[str], list[str], list[str], list[str]]]] = {
    "chat": _chat,
    "completion": _completion,
    "responses": _responses,
    "messages": _messages,
}


@lru_cache(maxsize=64)
def stream_plan(shape: Shape) -> Plan:
    """The events of a stream; equal shapes share them, so that a benchmark pays for their making once."""
    early, opening, tokens, closing = _STREAMS[shape.family](shape)
    sentinel = shape.family in ("chat", "completion")
    if shape.error is not None:
        failure = f'data: {{"error":{shape.error}}}\n\n'
        if shape.family == "messages":
            failure = f'event: error\ndata: {{"type":"error","error":{shape.error}}}\n\n'
        tokens = [*tokens[: shape.error_at], failure]
        opening = opening if shape.error_at else []
        closing = []
    elif not shape.done and not sentinel:
        closing = closing[:-1]
    if sentinel and shape.done:
        closing = [*closing, "data: [DONE]\n\n"]
    if shape.comments:
        comment = ": scripted comment\n\n" * shape.comments
        early = [comment, *early]
        tokens = [comment + token for token in tokens]

    def encode(events: list[str]) -> tuple[bytes, ...]:
        return tuple((event.replace("\n", "\r\n") if shape.crlf else event).encode() for event in events)

    return Plan(encode(early), encode(opening), encode(tokens), encode(closing))


def plain_body(shape: Shape, request: dict[str, Any]) -> Any:
    """The JSON of a whole answer, or of a call beside the gate."""
    usage = _usage(shape)
    match shape.family:
        case "chat":
            message: dict[str, Any] = {"role": "assistant", "content": text(shape), "refusal": None, "tool_calls": []}
            choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
            head = {"id": ident(shape, "chatcmpl"), "object": "chat.completion", "created": CREATED}
            return {**head, "model": shape.model, "choices": [choice], "usage": usage}
        case "completion":
            choice = {"index": 0, "text": text(shape), "logprobs": None, "finish_reason": "length"}
            head = {"id": ident(shape, "cmpl"), "object": "text_completion", "created": CREATED}
            return {**head, "model": shape.model, "choices": [choice], "usage": usage}
        case "responses":
            return _response(shape, shape.end)
        case "messages":
            return _message(shape, [{"type": "text", "text": text(shape)}], "end_turn", shape.events)
        case "embeddings":
            given = request.get("input")
            count = len(given) if isinstance(given, list) and given and not isinstance(given[0], int) else 1
            data = [{"index": index, "object": "embedding", "embedding": [0.5, -0.25]} for index in range(count)]
            return {"id": ident(shape, "embd"), "object": "list", "model": shape.model, "data": data, "usage": usage}
        case "score":
            data = [{"index": 0, "object": "score", "score": 0.5}]
            return {"id": ident(shape, "score"), "object": "list", "model": shape.model, "data": data, "usage": usage}
        case "rerank":
            results = [{"index": 0, "document": {"text": "d"}, "relevance_score": 0.5}]
            return {"id": ident(shape, "rerank"), "model": shape.model, "results": results, "usage": usage}
        case "classify":
            data = [{"index": 0, "label": "A", "probs": [0.75, 0.25], "num_classes": 2}]
            return {"id": ident(shape, "classify"), "object": "list", "model": shape.model, "data": data}
        case "audio":
            return {"text": text(shape), "usage": {"type": "duration", "seconds": 1}}
        case "count_tokens":
            return {"input_tokens": shape.prompt_tokens}
        case "tokenize":
            return {"count": shape.prompt_tokens, "max_model_len": 4096, "tokens": list(range(shape.prompt_tokens))}
        case "detokenize":
            return {"prompt": text(shape)}
        case "models":
            card = {"id": shape.model, "object": "model", "created": CREATED, "owned_by": "vllm", "max_model_len": 4096}
            return {"object": "list", "data": [card]}
        case "version":
            return {"version": "0.0.0-fake"}
    raise KeyError(shape.family)


def prompt_tokens(request: dict[str, Any]) -> int:
    """A rough count: ids as they are, a quarter of all other characters."""
    count = 0
    for name in ("messages", "prompt", "input", "system", "tools", "query", "documents"):
        value = request.get(name)
        if isinstance(value, list) and value and isinstance(value[0], int):
            count += len(value)
        elif value:
            count += len(value if isinstance(value, str) else json.dumps(value)) // 4
    return max(1, count)
