"""One monotonic budget per request: from its headers to the moment when it must have ended."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from app.errors import INVALID, Refused

TOTAL_HEADERS_MS: Final = (b"x-request-timeout-ms", b"x-envoy-expected-rq-timeout-ms")
FIRST_EVENT_HEADER_MS: Final = b"x-slo-ttft-ms"
STAINLESS_HEADER_S: Final = b"x-stainless-read-timeout"
NUMBER: Final = re.compile(rb"\d+(\.\d+)?")


@dataclass(slots=True)
class Deadline:
    """Points in time on the event loop's clock, in seconds. `first_event_at` applies to streams alone."""

    arrived: float
    at: float
    first_event_at: float

    def left(self, now: float) -> float:
        """Seconds left of the whole budget."""
        return self.at - now

    def tighten(self, at: float) -> None:
        """End earlier; a later time changes nothing."""
        self.at = min(self.at, at)


def from_headers(headers: Mapping[bytes, bytes], arrived: float, ceiling_s: float) -> Deadline:
    """The tightest of the ceiling and the client's headers; none can loosen it.

    Raises:
        Refused: `invalid_request` for a header that is not a positive number of milliseconds.
    """
    deadline = Deadline(arrived, arrived + ceiling_s, math.inf)
    for name in TOTAL_HEADERS_MS:
        if name in headers:
            deadline.tighten(arrived + _smallest(name, headers[name], "milliseconds") / 1000)
    if FIRST_EVENT_HEADER_MS in headers:
        limit = _smallest(FIRST_EVENT_HEADER_MS, headers[FIRST_EVENT_HEADER_MS], "milliseconds")
        deadline.first_event_at = arrived + limit / 1000
    return deadline


def stainless_read_timeout_s(headers: Mapping[bytes, bytes]) -> float:
    """The SDK's time between bytes, which bounds a call that does not stream; infinite when absent."""
    value = headers.get(STAINLESS_HEADER_S)
    return math.inf if value is None else _smallest(STAINLESS_HEADER_S, value, "seconds")


def _smallest(name: bytes, value: bytes, unit: str) -> float:
    """The number in a header, or the smallest one where the header was repeated."""
    parts = [part.strip() for part in value.split(b",")]
    numbers = [float(part) if NUMBER.fullmatch(part) else math.nan for part in parts]
    if not all(0 < number < math.inf for number in numbers):
        raise Refused(INVALID, f"The header {name.decode()} must be a positive number of {unit}.", param=name.decode())
    return min(numbers)
