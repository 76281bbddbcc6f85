"""Whether a run has kept its promises, and whether its figures can be believed. Pure."""

from dataclasses import dataclass, field
from typing import Final

from loadtest.outcomes import percentile

LAG_S: Final = 0.05  # a client that is late by more measures itself
BUSY_SHARE: Final = 0.9  # of one core: locust runs on one


@dataclass(frozen=True, slots=True)
class Slo:
    """What is promised: p99 of the first token of short requests, and the share of calls that may fail or be refused
    for good."""

    first_p99_s: float
    failed: float
    refused: float


@dataclass(slots=True)
class Tally:
    """What the users saw. A call may take several attempts; each call ends in one of `whole`, `failed`, `gave_up`
    (refused to the end) and `left` (the user's own doing), or not at all before the end of the run."""

    started: int = 0
    whole: int = 0
    failed: int = 0
    gave_up: int = 0
    left: int = 0
    attempts: int = 0
    refusals: int = 0
    first_s: list[float] = field(default_factory=list)  # of short requests
    lag_s: list[float] = field(default_factory=list)  # by how much the client's own timers were late

    @property
    def unfinished(self) -> int:
        return self.started - self.whole - self.failed - self.gave_up - self.left


def broken(slo: Slo, seen: Tally) -> list[str]:
    """Each promise that was not kept, in words; empty if all were."""
    found = []
    judged = seen.whole + seen.failed + seen.gave_up
    if not seen.whole:
        found.append("no call ended whole")
    if judged and seen.failed / judged > slo.failed:
        found.append(f"{seen.failed} of {judged} calls failed ({100 * slo.failed:g}% may)")
    if judged and seen.gave_up / judged > slo.refused:
        found.append(f"{seen.gave_up} of {judged} calls were refused to the end ({100 * slo.refused:g}% may)")
    p99 = percentile(seen.first_s, 0.99)
    if p99 is not None and p99 > slo.first_p99_s:
        found.append(f"first token of short calls: p99 {1000 * p99:.0f} ms, promised {1000 * slo.first_p99_s:.0f} ms")
    return found


def doubts(seen: Tally, cpu_share: float) -> list[str]:
    """What makes the figures doubtful: a client that was the bottleneck itself."""
    found = []
    lag = percentile(seen.lag_s, 0.99)
    if lag is not None and lag > LAG_S:
        found.append(f"its timers were late by {1000 * lag:.0f} ms (p99)")
    if cpu_share > BUSY_SHARE:
        found.append(f"it used {100 * cpu_share:.0f}% of the one core that it can use")
    return found


def summary(seen: Tally) -> str:
    """Started and finished apart, so that nothing vanishes at the end of the run."""
    return (
        f"calls: {seen.started} started, {seen.whole} whole, {seen.failed} failed, {seen.gave_up} refused to the end, "
        f"{seen.left} left by their user, {seen.unfinished} unfinished at the end; "
        f"{seen.attempts} attempts, {seen.refusals} of them refused"
    )
