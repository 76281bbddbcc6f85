"""What is asked of a server, and when: requests on a schedule that a seed determines. Pure."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

WORDS: Final = (
    "river stone garden window market letter summer winter morning evening bridge forest mountain village harbour "
    "kitchen machine engine signal paper silver copper iron glass wool cotton bread butter apple orange pepper salt "
    "doctor farmer sailor teacher painter writer singer driver table chair carpet candle mirror basket hammer ladder "
    "travel listen follow gather carry build repair answer measure compare remember forget begin finish open close "
    "quiet bright narrow heavy gentle honest early distant common simple strange modern useful careful hollow steady"
).split()


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request: how many words its prompt has, how many tokens it asks for (both ends of a range), and within
    how many seconds of its scheduled time its answer must have ended."""

    name: str
    words: tuple[int, int]
    tokens: tuple[int, int]
    limit_s: float


SHORT: Final = Kind("short", words=(24, 24), tokens=(8, 32), limit_s=2.0)
LONG: Final = Kind("long", words=(600, 1200), tokens=(128, 320), limit_s=10.0)
KINDS: Final = (SHORT, LONG)
# For the embedded model on a CPU, which makes 200 tokens a second for all together: less to do, and more time.
SLOW_KINDS: Final = (
    Kind("short", words=(24, 24), tokens=(8, 32), limit_s=10.0),
    Kind("long", words=(100, 200), tokens=(48, 96), limit_s=40.0),
)
LONG_SHARE: Final = {"mixed": 0.2, "short": 0.0, "long": 1.0}  # by the name of the mix


@dataclass(frozen=True, slots=True)
class Request:
    """One request to come, `at_s` seconds after the start of its run."""

    index: int
    at_s: float
    kind: Kind
    words: int
    tokens: int
    seed: str  # of its text

    def body(self, model: str, salt: str) -> bytes:
        """A streaming chat completion that ends after exactly `tokens` tokens.

        `salt` becomes the first word: with another one for each run, no run finds the prompts of an earlier run in the
        engine's prefix cache.
        """
        text = " ".join([salt, *random.Random(self.seed).choices(WORDS, k=self.words - 1)])
        request: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        return json.dumps(request).encode()


def schedule(
    mix: str,
    rate: float,
    seconds: float,
    seed: int,
    *,
    spread: float = 1.0,
    kinds: tuple[Kind, Kind] = KINDS,
) -> list[Request]:
    """Arrivals at `rate` a second over `seconds`; each is long with the share of the mix.

    `spread` is the standard deviation of the time between two arrivals, measured by its mean: 1 is Poisson, more comes
    in bursts (gamma-distributed times).
    """
    return varying(mix, [(seconds, rate)], seed, spread=spread, kinds=kinds)


def varying(
    mix: str,
    phases: Sequence[tuple[float, float]],
    seed: int,
    *,
    spread: float = 1.0,
    kinds: tuple[Kind, Kind] = KINDS,
) -> list[Request]:
    """The same with phases of (seconds, rate), one after the other."""
    times, which, sizes = (random.Random(f"{seed} {what}") for what in ("times", "kinds", "sizes"))
    requests: list[Request] = []
    begin = 0.0
    for seconds, rate in phases:
        at_s = begin + _gap(times, rate, spread)
        while at_s < begin + seconds:
            kind = kinds[which.random() < LONG_SHARE[mix]]
            requests.append(_request(len(requests), at_s, kind, sizes, f"{seed}"))
            at_s += _gap(times, rate, spread)
        begin += seconds
    return requests


def _gap(times: random.Random, rate: float, spread: float) -> float:
    if spread == 1:
        return times.expovariate(rate)
    shape = spread**-2
    return times.gammavariate(shape, 1 / (rate * shape))


def endless(mix: str, seed: int, kinds: tuple[Kind, Kind] = KINDS) -> Iterator[Request]:
    """The same requests without a schedule, evenly mixed, so that a short measurement sees the right share of each."""
    sizes = random.Random(f"{seed} endless")
    share = LONG_SHARE[mix]
    index = 0
    while True:
        kind = kinds[int((index + 1) * share) > int(index * share)]
        yield _request(index, 0.0, kind, sizes, f"{seed} endless")
        index += 1


def _request(index: int, at_s: float, kind: Kind, sizes: random.Random, seed: str) -> Request:
    return Request(index, at_s, kind, sizes.randint(*kind.words), sizes.randint(*kind.tokens), f"{seed} {index}")
