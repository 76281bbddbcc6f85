"""What the report is made of: every run, in order, for a full report and for a quick one. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from loadtest.together import WAYS

LOADS: Final = (0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
NAIVE_LOADS: Final = (0.25, 0.5, 1.0, 2.5)  # these are far beyond their capacity soon
OVERLOAD: Final = 2.5
ARMS: Final = ("bare", "own-limit", "tidegate")
NAIVE: Final = ("one-at-a-time", "hand-batching")
GROUPS: Final = ("sweep", "bursts", "spike", "storm", "together", "embedded")
BURSTY: Final = 3.0  # standard deviation of the time between arrivals, by its mean
# For the plan and the progress bar, measured on two cores: starting and warming up, and an engine with its capacity.
OVERHEAD_S: Final = {"naive": 16.0, "other": 5.0}
ENGINE_S: Final = 50.0


@dataclass(frozen=True, slots=True)
class Step:
    """One run of the open loop. `phases` are (seconds, load), a load of 1 being the capacity of the engine."""

    name: str
    group: str  # one of GROUPS
    arm: str
    phases: tuple[tuple[float, float], ...]
    grace_s: float
    seed: int = 1
    spread: float = 1.0
    retries: bool = False
    model: str = "tiny"

    @property
    def load(self) -> float:
        """The highest of its phases."""
        return max(load for _, load in self.phases)

    @property
    def seconds(self) -> float:
        """Of arrivals."""
        return sum(seconds for seconds, _ in self.phases)

    @property
    def expected_s(self) -> float:
        """About how long it takes."""
        waits = self.grace_s if self.load > 1 or self.arm in NAIVE else 1.0
        return self.seconds + waits + OVERHEAD_S["naive" if self.arm in NAIVE else "other"]


@dataclass(frozen=True, slots=True)
class Together:
    """The 16 requests one of the ways, of so many tokens each."""

    name: str
    way: str
    tokens: int
    model: str = "embedded"
    group: str = "together"

    @property
    def expected_s(self) -> float:
        """About how long it takes on two cores."""
        return (10 if self.way.startswith("naive") else 2) + self.tokens * (0.3 if "together" in self.way else 1.4)


def expected_s(plan: Sequence[Step | Together]) -> float:
    """About how long these take with the engines that they need, from a bare start."""
    engines = {(step.model, isinstance(step, Step) and step.arm == "own-limit") for step in plan}
    return sum(step.expected_s for step in plan) + ENGINE_S * len(engines)


def steps(*, quick: bool, only: Sequence[str] = GROUPS) -> list[Step | Together]:
    """All runs of these groups, those with the same engine after each other."""
    return [step for step in (_quick() if quick else _full()) if step.group in only]


def _full() -> Iterator[Step | Together]:
    for load in LOADS:
        for arm in (*(NAIVE if load in NAIVE_LOADS else ()), *ARMS):
            yield _steady(arm, load, 15, 15)
    for seed in (2, 3):
        for arm in ARMS:
            yield _steady(arm, OVERLOAD, 15, 15, seed)
    for arm in ARMS:
        yield Step(f"bursts-{arm}", "bursts", arm, ((15, OVERLOAD),), 15, spread=BURSTY)
    shape = ((8.0, 0.5), (6.0, 3.0), (24.0, 0.5))
    for arm in ARMS:
        yield Step(f"spike-{arm}", "spike", arm, shape, 12)
    for arm in ("bare", "tidegate"):
        yield Step(f"storm-{arm}", "storm", arm, shape, 12, retries=True)
    yield from (Together(way, way, 64) for way in WAYS)
    for arm in ("bare", "tidegate"):
        yield Step(f"embedded-{arm}", "embedded", arm, ((30, OVERLOAD),), 45, model="embedded")


def _quick() -> Iterator[Step | Together]:
    for arm in ("hand-batching", "bare", "tidegate"):
        yield _steady(arm, OVERLOAD, 5, 3)
    shape = ((1.0, 0.5), (3.0, 3.0), (4.0, 0.5))
    for arm in ("bare", "tidegate"):
        yield Step(f"spike-{arm}", "spike", arm, shape, 3)
    for arm in ("bare", "tidegate"):
        yield Step(f"storm-{arm}", "storm", arm, shape, 3, retries=True)
    yield from (Together(way, way, 8) for way in WAYS)


def _steady(arm: str, load: float, seconds: float, grace_s: float, seed: int = 1) -> Step:
    return Step(f"sweep-{load:g}-{arm}-{seed}", "sweep", arm, ((seconds, load),), grace_s, seed)
