"""What the relay must know of server-sent events: where one ends, what the first one says, whether a stream is whole.

Events are looked at only while a stream's head is held, and at its end; in between bytes pass through.
"""

import json
import re
from typing import Any, Final

import httpx

from app.routes import Family

KEEP_ALIVE: Final = b": keep-alive\n\n"
LOOKED_AT_TOGETHER: Final = 32  # reads of at most the following, which bounds what a stream holds
SMALL_BYTES: Final = 1024
KEPT_BYTES: Final = 4096  # of the end of a stream: an end mark with an error before it fits in
END_BYTES: Final = 512  # an end mark fits in

_BOUNDARY: Final = re.compile(rb"\r?\n\r?\n|\r\r")
_PREAMBLE: Final = ("response.created", "response.in_progress")
_NAMED: Final = rb'[\r\n](?:event: ?%b[\r\n]|data: ?\{\s*"type":\s*"%b")'  # not every engine names its events
_RESPONSES_END: Final = re.compile(_NAMED % ((rb"response\.(?:completed|incomplete|failed)",) * 2))
_MESSAGES_END: Final = re.compile(_NAMED % ((rb"message_stop",) * 2))
_DONE: Final = re.compile(rb"[\r\n]data: ?\[DONE\][ \t]*[\r\n]+(?::[^\r\n]*[\r\n]+)*$")  # comments may follow
_ERROR_NAMES: Final = (b"event: error", b"event:error")
_ERROR: Final = re.compile(rb'[\r\n]data: ?\{\s*(?:"type":\s*"error"|"error":\s*\{)')
_OUTPUT_TOKENS: Final = re.compile(rb'"(?:completion|output)_tokens":\s*(\d+)')


class EngineErrorEvent(Exception):
    """The first event of a stream is an error: it becomes a status, with the event's JSON as the body."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


class FirstEvent:
    """Looks at the beginning of a stream until its first event is complete."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._open = b""  # the beginning of an event whose end has not come

    def feed(self, data: bytes) -> bool:
        """Take more in; true once the first event is complete. Comments and the preamble of a response are none.

        Raises:
            EngineErrorEvent: the first event is an error.
            httpx.RemoteProtocolError: it is one that says nothing which could be passed on.
        """
        if b"\n" not in data and b"\r" not in data:  # no end in it: a large event is not searched again and again
            self._open += data
            return False
        data, begin = self._open + data, 0
        end = _BOUNDARY.search(data, max(0, len(self._open) - 3))  # a boundary may be cut in two
        while end:
            lines = [line for line in data[begin : end.start()].splitlines() if line and not line.startswith(b":")]
            payload = b"\n".join(line[5:].lstrip() for line in lines if line.startswith(b"data:"))
            if lines and not self._is_preamble(lines, payload):
                _raise_error_event(payload, named=any(line in _ERROR_NAMES for line in lines))
                return True
            begin = end.end()
            end = _BOUNDARY.search(data, begin)
        self._open = data[begin:]
        return False

    def _is_preamble(self, lines: list[bytes], payload: bytes) -> bool:
        if self._family is not Family.RESPONSES:
            return False
        names = [line[6:].strip().decode("utf-8", "replace") for line in lines if line.startswith(b"event:")]
        return (names[0] if names else _parse(payload).get("type")) in _PREAMBLE


class Tail:
    """The end of what has been relayed so far."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._new: list[bytes] = []  # relayed and not looked at yet
        self._kept = b"\n\n"  # as if an event had just ended
        self._ended = False
        self._events = 0

    def feed(self, data: bytes) -> None:
        """Take in what is relayed. It is looked at many reads at a time, which is what makes an event cheap."""
        self._new.append(data)
        if len(self._new) >= LOOKED_AT_TOGETHER or len(data) > SMALL_BYTES:
            self._look()

    def _look(self) -> None:
        if not self._new:
            return
        new = b"".join(self._new)  # no copy where it is one read: copies are most of what a large one costs
        self._new.clear()
        self._events += _count(new) + _count(self._kept[-5:] + new[:5])  # none is whole in either half of the seam
        if self._family is Family.RESPONSES and not self._ended:
            seam = self._kept[-END_BYTES:] + new[:END_BYTES]
            self._ended = any(_RESPONSES_END.search(text) for text in (seam, new))
        self._kept = new[-KEPT_BYTES:] if len(new) >= KEPT_BYTES else (self._kept + new)[-KEPT_BYTES:]

    @property
    def events(self) -> int:
        """How many events there were."""
        self._look()
        return self._events

    @property
    def failed(self) -> bool:
        """Whether the engine itself has put an error at the end of the stream."""
        self._look()
        return b'"error"' in self._kept and _ERROR.search(self._kept) is not None

    @property
    def between_events(self) -> bool:
        """Whether something may be put in here."""
        self._look()
        return self._kept.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))

    @property
    def whole(self) -> bool:
        """Whether the end mark of the route's kind of stream has been relayed."""
        if not self.between_events:
            return False
        if self._family is Family.RESPONSES:
            return self._ended
        return (_MESSAGES_END if self._family is Family.MESSAGES else _DONE).search(self._kept[-END_BYTES:]) is not None

    @property
    def reported_output(self) -> int | None:
        """Output tokens by the usage at the end of a plain answer, where it says so."""
        self._look()
        found = _OUTPUT_TOKENS.findall(self._kept)
        return int(found[-1]) if found else None


def _count(text: bytes) -> int:
    return text.count(b"\ndata:") + (text.count(b"\rdata:") if b"\r" in text else 0)


def _raise_error_event(data: bytes, *, named: bool) -> None:
    if not named and b'"error"' not in data:
        return
    parsed = _parse(data)
    error = parsed.get("error")
    if named and not parsed:
        raise httpx.RemoteProtocolError("the engine's first event is an error that isn't JSON")
    if named or isinstance(error, dict) or (isinstance(error, str) and error) or parsed.get("type") == "error":
        code = (error if isinstance(error, dict) else parsed).get("code")
        status = code if type(code) is int and 400 <= code <= 599 else 502
        raise EngineErrorEvent(status, data)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
