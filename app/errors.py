"""What a client is told when its request is not served.

A request can fail at each station of its way, in this order:

    route -> key -> headers -> house (draining, engine away, full) -> body -> lane and feasibility -> queue -> engine

`Refused` is raised at that station and answered in one place. Its `kind` is a row of the table below; the
status, the error object and the retry headers follow from the row.
"""

import random
from dataclasses import dataclass
from typing import Final

from pydantic_core import to_json


@dataclass(frozen=True, slots=True)
class Kind:
    """One row of the refusal table; `reason` goes into `x-tidegate-reason` and the metrics."""

    reason: str
    status: int
    type: str
    code: str
    outcome: str  # the label of tidegate_requests_total
    retry: bool = False  # a retry may succeed: tell when
    final: bool = False  # SDKs retry this status by themselves: tell them not to


_BUSY = "service_unavailable_error"
_INVALID = "invalid_request_error"

QUEUE_FULL: Final = Kind("queue_full", 503, _BUSY, "server_is_overloaded", "refused", retry=True)
QUEUE_TIMEOUT: Final = Kind("queue_timeout", 503, _BUSY, "server_is_overloaded", "refused", retry=True)
INFEASIBLE: Final = Kind("deadline_infeasible", 503, _BUSY, "server_is_overloaded", "refused", retry=True)
ENGINE_UNAVAILABLE: Final = Kind("engine_unavailable", 503, _BUSY, "engine_unavailable", "refused", retry=True)
DRAINING: Final = Kind("draining", 503, _BUSY, "server_draining", "refused", retry=True)
DEADLINE: Final = Kind("deadline", 504, "timeout_error", "deadline_exceeded", "deadline", final=True)
ENGINE_ERROR: Final = Kind("engine_error", 502, "server_error", "engine_error", "engine_error", final=True)
TOO_LARGE: Final = Kind("request_too_large", 413, _INVALID, "request_too_large", "invalid")
INVALID: Final = Kind("invalid_request", 400, _INVALID, "invalid_request", "invalid")
INVALID_KEY: Final = Kind("invalid_api_key", 401, _INVALID, "invalid_api_key", "invalid")
NOT_FOUND: Final = Kind("not_found", 404, _INVALID, "not_found", "invalid")
METHOD: Final = Kind("method_not_allowed", 405, _INVALID, "method_not_allowed", "invalid")

SHEDDABLE: Final = frozenset({QUEUE_FULL, QUEUE_TIMEOUT, INFEASIBLE})  # TIDEGATE_SHED_STATUS replaces their 503
REFUSAL_KINDS: Final = (QUEUE_FULL, QUEUE_TIMEOUT, INFEASIBLE, ENGINE_UNAVAILABLE, DRAINING)


class Refused(Exception):
    """The request ends here, with an error of ours.

    `retry_after_s` is given for kinds with `retry`; `allow` lists the methods for a 405.
    """

    def __init__(
        self, kind: Kind, message: str, *, retry_after_s: int = 1, param: str | None = None, allow: str = ""
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after_s = retry_after_s
        self.param = param
        self.allow = allow

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that this refusal adds; milliseconds carry up to 50% jitter so that clients spread."""
        headers = [(b"x-tidegate-reason", self.kind.reason.encode())]
        if self.kind.retry:
            wait_ms = int(self.retry_after_s * 1000 * random.uniform(1.0, 1.5))
            headers += [(b"retry-after", b"%d" % self.retry_after_s), (b"retry-after-ms", b"%d" % wait_ms)]
        if self.kind.final:
            headers.append((b"x-should-retry", b"false"))
        if self.allow:
            headers.append((b"allow", self.allow.encode()))
        if self.kind is INVALID_KEY:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.kind is DRAINING:
            headers.append((b"connection", b"close"))  # a retry on this connection would meet the same instance
        return headers

    def body(self, *, anthropic: bool) -> bytes:
        """The error object; on Anthropic's routes with its `"type": "error"` at the top."""
        error = {"message": self.message, "type": self.kind.type, "param": self.param, "code": self.kind.code}
        return to_json({"type": "error", "error": error} if anthropic else {"error": error})

    def frame(self, *, anthropic: bool) -> bytes:
        """The same as the end of an event stream whose head is already out."""
        body = self.body(anthropic=anthropic)
        return b"event: error\ndata: " + body + b"\n\n" if anthropic else b"data: " + body + b"\n\ndata: [DONE]\n\n"
