"""What one request experiences: every field of the `fake` object."""

import json
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal

Fault = Literal["stall", "reset", "close", "garbage", "exit"]


class ScriptError(ValueError):
    """A script has an unknown field, or isn't an object."""


def opt(default: Any, text: str) -> Any:
    """A field with its line for `--help`."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class Script:
    """How the engine treats one request; the defaults make a quick, whole and correct answer."""

    tag: str = opt("", "text that every event and the log entry of this request carry")
    events: int | None = opt(None, "tokens of the answer, one event each; absent: max_tokens of the body, else 16")
    size: int = opt(0, "bytes of text in each token (at least a short word)")
    first_ms: float = opt(0, "silence before the first token")
    prefill_ms: float = opt(0, "the same, while the KV-cache metric rises (a long prompt at work)")
    gap_ms: float = opt(0, "time between tokens, kept against an absolute schedule")
    coalesce: int = opt(1, "tokens per write")
    prompt_tokens: int | None = opt(None, "usage and metrics; absent: a quarter of the prompt's characters")

    status: int = opt(200, "other than 200: a complete answer with this status and `body`, streaming or not")
    body: Any = opt(None, "the answer's JSON, instead of the usual one (a string is sent as it is)")
    headers: Any = opt(None, "more response headers: an object, or a list of pairs")
    content_type: str = opt("", "instead of the usual one")
    gzip: bool = opt(False, "compress, whatever the request accepts")
    framing: str = opt("", "chunked, length or close (neither); absent: chunked for streams, length for the rest")
    head_ms: float = opt(0, "time before the head (a stream's head otherwise goes out at once, as vLLM's does)")
    drip_ms: float = opt(0, "write the head 16 bytes at a time, this far apart")
    chunk_bytes: int = opt(0, "cut what is written into pieces of this size, whatever events they belong to")
    chunk_ms: float = opt(0, "time between such pieces")
    crlf: bool = opt(False, "events end their lines with CRLF")
    comments: int = opt(0, "comment lines after the head and before each token")
    usage: bool = opt(False, "a usage chunk at the end (`stream_options.include_usage` asks for it as well)")
    done: bool = opt(True, "false: leave out the event that ends a stream ([DONE], message_stop, response.completed)")
    end: str = opt("completed", "how /v1/responses ends: completed, incomplete or failed")
    error: Any = opt(None, 'an object sent as a `data: {"error": …}` event instead of token `error_at` and all later')
    error_at: int = opt(0, "see `error`")

    fault: Fault | None = opt(
        None, "stall (until the client goes), reset (RST; on a Unix socket like close), close, garbage, exit"
    )
    at: int | str = opt(
        "head", "when: read (before the body; header or defaults only), head (before it), mid_head, or after N tokens"
    )
    half: bool = opt(False, "before the fault, write half of what comes next")
    early: bool = opt(False, "answer before the body has come (header or defaults only)")
    end_ms: float = opt(0, "silence after the last event, before the body is closed")
    after: str = opt("", "close or reset: end the connection after a whole answer, without having said so")
    exit_code: int = opt(1, "for the fault `exit`")

    def merged(self, given: Any) -> "Script":
        """This script with `given`, a parsed JSON object, on top.

        Raises:
            ScriptError: a typing mistake in a test should not pass for a well-behaved engine.
        """
        if given is None:
            return self
        if not isinstance(given, dict):
            raise ScriptError("the script must be a JSON object")
        unknown = given.keys() - NAMES
        if unknown:
            raise ScriptError(f"unknown field {min(unknown)!r}; known: {', '.join(sorted(NAMES))}")
        return replace(self, **given)


NAMES = frozenset(entry.name for entry in fields(Script))


def parse(text: bytes | str, base: Script) -> Script:
    """`base` with the script in `text` on top."""
    try:
        return base.merged(json.loads(text))
    except ValueError as error:
        raise ScriptError(str(error)) from error


def help_text() -> str:
    """All fields with default and meaning, for `--help`."""
    lines = []
    for entry in fields(Script):
        default = "" if entry.default in (None, "", MISSING) else f" [{json.dumps(entry.default)}]"
        lines.append(f"  {entry.name:<14}{entry.metadata['help']}{default}")
    return "\n".join(lines)
