"""From a request body to a cost (tokens), a weight (slots) and a lane. Pure: no I/O, no clock."""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from app.errors import INVALID, Refused
from app.routes import GENERATION, Family, Route
from app.settings import Lane

ASCII_BYTES_PER_TOKEN: Final = 4.0
OTHER_BYTES_PER_TOKEN: Final = 1.8
MEDIA_TOKENS: Final = 1000  # one image, sound or document, whatever its base64 length
FIELD_TOKENS: Final = 3.0  # the punctuation of one field of an object
TEMPLATE_TOKENS: Final = 20  # what a chat template adds to a conversation
PROMPT_TOKENS_PER_OUTPUT_TOKEN: Final = 16  # read all at once, they cost an engine about as much as one that it writes
MOST_TOKENS: Final = 10**9  # of an answer; a body may name any number
MOST_CHOICES: Final = 10**6  # likewise
# Decoded, a container takes thirty times its bytes, and a name of an object a microsecond: such a body would hold up
# everybody and fill the memory. So would a look at each of ten million values of a list.
LARGE_BYTES: Final = 2**20
MOST_CONTAINERS: Final = 500_000
MOST_VALUES: Final = 500_000
MEDIA_PARTS: Final = frozenset(
    "image_url input_image image image_pil image_embeds input_audio audio_url audio "
    "video_url video input_file file document".split()
)
# vLLM reads with pydantic's leave: "8" and 8.0 are 8 to it, "yes" and 1 are true.
_NUMBER: Final = TypeAdapter(int)
_TRUTH: Final = TypeAdapter(bool)
# Everything that an engine may put into a prompt, on any route.
PROMPT_FIELDS: Final = (
    "messages prompt input instructions system tools functions response_format text suffix "
    "query queries documents text_1 text_2 data_1 data_2"
).split()
OUTPUT_LIMITS: Final = {
    Family.CHAT: ("max_completion_tokens", "max_tokens"),
    Family.COMPLETIONS: ("max_tokens",),
    Family.RESPONSES: ("max_output_tokens",),
    Family.MESSAGES: ("max_tokens",),
}
# vLLM's own default for completions; the others run to the end of the answer, which is learned.
FIRST_OUTPUT_GUESS: Final = {Family.COMPLETIONS: 16.0}
OUTPUT_GUESS: Final = 256.0
OUTPUT_SHARE: Final = 0.05  # what one more answer moves the running mean
SCALE_SHARE: Final = 0.2  # what one more reading of the engine's counter moves the scale
SCALE_RANGE: Final = (0.5, 2.0)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of the engine. Costs in tokens, weight in slots before the gate's cap."""

    lane: str
    cost: int = 0
    weight: int = 1
    stream: bool = False
    work: float = 0.0  # of one sequence, in output tokens; 0: not known
    text_tokens: float = 0.0  # as the engine will count them, estimated before scaling: what the scale is learned from
    exact_tokens: int = 0  # the same, of prompts that are token ids


class Lanes:
    """Classifies requests; learns what the formula gets wrong for the model at hand."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        bounded = [(lane.max_cost, lane.name) for lane in lanes if lane.max_cost is not None]
        self._bounded = sorted(bounded)
        self._rest = next(lane.name for lane in lanes if lane.max_cost is None)
        self._output = {family: FIRST_OUTPUT_GUESS.get(family, OUTPUT_GUESS) for family in Family}
        self.scale = 1.0

    def lane_for(self, cost: float) -> str:
        """The tightest lane that takes this cost."""
        return next((name for limit, name in self._bounded if cost <= limit), self._rest)

    def classify(self, route: Route, body: bytes) -> Demand:
        """Read what matters out of a body; JSON of a shape unknown here goes to the rest lane as it is.

        Raises:
            Refused: `invalid_request` for a body that is not JSON, or that asks for what the gate cannot keep.
        """
        if route.family is Family.AUDIO:
            return Demand(self._rest)
        if len(body) > LARGE_BYTES and sum(map(body.count, (b"[", b"{", b":"))) > MOST_CONTAINERS:
            return Demand(self._rest, weight=MOST_CHOICES if route.family in GENERATION else 1)
        request = _decode(body)
        if not isinstance(request, dict):
            return Demand(self._rest)
        _refuse_out_of_scope(route, request)
        stream = _truth(request.get("stream"))
        copies, prompts = _sequences(request) if route.family in GENERATION else (1, 1)
        parts = [request[name] for name in PROMPT_FIELDS if request.get(name) is not None]
        limit = self._output_limit(route, request)
        if not parts or limit is None:
            return Demand(self._rest, weight=copies * prompts, stream=stream)
        text, ids = _prompt_tokens(parts)
        if "messages" in request:
            text += TEMPLATE_TOKENS
        prompt = round(text * self.scale) + ids
        cost = prompt + limit
        work = prompt / PROMPT_TOKENS_PER_OUTPUT_TOKEN + min(limit, MOST_TOKENS)
        bounded = min(copies, MOST_CHOICES)
        return Demand(self.lane_for(cost), cost, copies * prompts, stream, work, text * bounded, ids * bounded)

    def learn_output(self, family: Family, tokens: int) -> None:
        """Take one finished answer into the route's running mean."""
        self._output[family] += OUTPUT_SHARE * (tokens - self._output[family])

    def learn_scale(self, text_tokens: float, counted: float) -> None:
        """Compare what was estimated from text with what the engine counted for the same requests."""
        low, high = SCALE_RANGE
        seen = min(high, max(low, counted / text_tokens))
        self.scale += SCALE_SHARE * (seen - self.scale)

    def _output_limit(self, route: Route, request: dict[str, Any]) -> int | None:
        """Tokens that the answer may have; None when the request names something that is no number."""
        if route.family not in GENERATION:
            return 0
        for name in OUTPUT_LIMITS[route.family]:
            value = request.get(name)
            if value is not None:
                number = _number(value)
                return number if number is not None and number >= 0 else None
        return round(self._output[route.family])


def _decode(body: bytes) -> Any:
    """What `json.loads` makes of a body; the fast parser goes first and is the stricter of the two."""
    try:
        return from_json(body)
    except ValueError:
        pass
    try:
        return json.loads(body)
    except RecursionError:
        raise Refused(INVALID, "The body is nested too deeply.") from None
    except ValueError as error:
        where = f" ({error.msg} at character {error.pos})" if isinstance(error, json.JSONDecodeError) else ""
        raise Refused(INVALID, f"The body is not valid JSON{where}.") from None


def _refuse_out_of_scope(route: Route, request: dict[str, Any]) -> None:
    if route.family is Family.RESPONSES and _truth(request.get("background")):
        message = "Background responses are out of scope for Tidegate; send the request without `background`."
        raise Refused(INVALID, message, param="background")
    if route.family is Family.POOLING and request.get("priority") is not None:
        message = "The gateway sets the priority; send the request without `priority`."
        raise Refused(INVALID, message, param="priority")


def _sequences(request: dict[str, Any]) -> tuple[int, int]:
    """`n`, and the number of prompts: the engine will run their product at once."""
    n = _number(request.get("n"))
    prompts = 0
    for given in (request.get("prompt"), request.get("prompt_embeds")):
        if isinstance(given, list) and not _is_token_ids(given):
            prompts += len(given)
        elif given:
            prompts += 1
    return max(1, n or 1), max(1, prompts)


def _number(value: Any) -> int | None:
    """The whole number that the engine will read here; None where it will refuse the request."""
    if type(value) is int or value is None:
        return value
    try:
        return _NUMBER.validate_python(value)
    except ValidationError:
        return None


def _truth(value: Any) -> bool:
    """Whether the engine will read this as true."""
    if value is None or value is True or value is False:
        return value is True
    try:
        return _TRUTH.validate_python(value)
    except ValidationError:
        return False


def _is_token_ids(value: list[Any]) -> bool:
    return bool(value) and type(value[0]) is int


def _prompt_tokens(parts: Iterable[Any]) -> tuple[float, int]:
    """Estimated tokens of all text in a nested value, and the number of token ids in it.

    Names and values of objects count alike, so that tools and schemas do. Walks without recursion, and counts what is
    beyond `MOST_VALUES` by its number.
    """
    text, ids, left = 0.0, 0, MOST_VALUES
    todo: deque[Any] = deque(parts)
    while todo:
        value = todo.pop()
        if isinstance(value, str):
            text += text_tokens(value)
        elif isinstance(value, list):
            if _is_token_ids(value):
                ids += len(value)
            elif len(value) > left:
                text += len(value)
            else:
                left -= len(value)
                todo.extend(value)
        elif isinstance(value, dict):
            kind = value.get("type")
            if isinstance(kind, str) and kind in MEDIA_PARTS:
                text += MEDIA_TOKENS
            else:
                for name, inner in value.items():
                    text += FIELD_TOKENS + text_tokens(name)
                    todo.append(inner)
        elif value is not None:
            text += 1
    return text, ids


def text_tokens(text: str) -> float:
    """Tokens of a text, estimated: four bytes each for ASCII, less for every other script."""
    if text.isascii():
        return len(text) / ASCII_BYTES_PER_TOKEN
    encoded = text.encode("utf-8", "surrogatepass")
    ascii_bytes = len(text.encode("ascii", "ignore"))
    return ascii_bytes / ASCII_BYTES_PER_TOKEN + (len(encoded) - ascii_bytes) / OTHER_BYTES_PER_TOKEN
