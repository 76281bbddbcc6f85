"""What became of a request, and of all requests of a run. Pure.

Each request has exactly one outcome:

    good      ended whole, within its limit, counted from its scheduled time
    late      ended whole, after that
    refused   answered with 503 or 429
    busy      answered with 200, then with "busy" in the stream before any token: a refusal too late to be a status
    expired   the server ended it for its deadline, by 504 or by an error in the stream
    broken    anything else: another status or error, a connection that ended early, a stream without its end mark
    cut       had not ended when the client gave up, long after its limit
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from app.errors import SHEDDABLE
from loadtest.workload import KINDS

REASONS: Final = tuple(sorted(kind.reason for kind in SHEDDABLE))  # that Tidegate gives for a refusal
BUSY_CODES: Final = ("503", "429")

Metrics = dict[str, float | None]  # by name; None where nothing was to be measured


class Outcome(StrEnum):
    """See above."""

    GOOD = "good"
    LATE = "late"
    REFUSED = "refused"
    BUSY = "busy"
    EXPIRED = "expired"
    BROKEN = "broken"
    CUT = "cut"


@dataclass(slots=True)
class Record:
    """What the client saw of one request. Times are seconds since the start of the run."""

    index: int
    kind: str
    tokens: int
    limit_s: float
    scheduled: float
    sent: float | None = None  # when the client began to connect
    first: float | None = None  # first event that is no error, which is the engine's first token
    end: float | None = None
    status: int | None = None
    events: int = 0
    done: bool = False  # the stream's end mark was seen
    error: str = ""  # code of an error in the stream, or what broke the connection
    reason: str = ""  # a gateway's word for its refusal
    cut: bool = False
    attempts: int = 1

    @property
    def whole(self) -> bool:
        """Whether everything that was asked for has come."""
        return self.status == 200 and self.done and not self.error and not self.cut

    @property
    def outcome(self) -> Outcome:
        if self.cut:
            return Outcome.CUT
        if self.status in (503, 429):
            return Outcome.REFUSED
        if self.status == 504 or self.error == "deadline_exceeded":
            return Outcome.EXPIRED
        if self.status == 200 and self.first is None and self.error in BUSY_CODES:
            return Outcome.BUSY
        if not self.whole or self.end is None:
            return Outcome.BROKEN
        return Outcome.GOOD if self.end - self.scheduled <= self.limit_s else Outcome.LATE


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that at least `share` of all values do not exceed; None without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def summarise(records: Sequence[Record], seconds: float, generated: float | None) -> Metrics:
    """The figures of one run: arrivals over `seconds`, for which the engine has made `generated` tokens.

    Tokens made too late are all tokens that the engine made for requests that did not end in time: `generated` (the
    engine's own count, which knows of requests that were broken off as well; None if it was not to be had) less those
    of good requests.
    """
    good_tokens = sum(record.tokens for record in records if record.outcome is Outcome.GOOD)
    metrics: Metrics = {
        "goodput": sum(record.outcome is Outcome.GOOD for record in records) / seconds,
        "tokens": generated,
        "tokens_late_share": max(0.0, 1 - good_tokens / generated) if generated else None,
        "lag_p99_ms": _ms(percentile((r.sent - r.scheduled for r in records if r.sent is not None), 0.99)),
    }
    for kind in KINDS:
        metrics |= _of_kind(kind.name, [record for record in records if record.kind == kind.name], seconds)
    return metrics


def _of_kind(kind: str, records: Sequence[Record], seconds: float) -> Metrics:
    counts = Counter(record.outcome for record in records)
    first = [record.first - record.scheduled for record in records if record.first is not None]
    refusals = (Outcome.REFUSED, Outcome.BUSY)
    refused = [r.end - r.scheduled for r in records if r.outcome in refusals and r.end is not None]
    figures: Metrics = {
        "offered": len(records),
        "started": len(first),
        "finished": counts[Outcome.GOOD] + counts[Outcome.LATE],
        **{outcome.value: counts[outcome] for outcome in Outcome},
        **{reason: sum(record.reason == reason for record in records) for reason in REASONS},
        "good_rate": counts[Outcome.GOOD] / seconds,
        "first_p50_ms": _ms(percentile(first, 0.5)),
        "first_p99_ms": _ms(percentile(first, 0.99)),
        "never_started_share": 1 - len(first) / len(records) if records else None,
        "refusal_p50_ms": _ms(percentile(refused, 0.5)),
        "refusal_p99_ms": _ms(percentile(refused, 0.99)),
    }
    return {f"{kind}.{name}": value for name, value in figures.items()}


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure over several seeds."""

    mean: float
    low: float
    high: float


def spread(runs: Sequence[Mapping[str, float | None]], name: str) -> Spread | None:
    """A figure over the runs that have it."""
    values = [value for run in runs if (value := run.get(name)) is not None]
    return Spread(sum(values) / len(values), min(values), max(values)) if values else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
