"""The estimated cost against a real tokenizer: requests land in the lane that their true token count names.

`python -m tests.engine.test_lane_accuracy` prints the shares by kind of text.
"""

import json
import random
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from app.lanes import Demand, Lanes
from app.routes import FORWARDED
from app.settings import DEFAULT_LANES
from launcher.model import prepare
from tests.engine.prompt_sample import KINDS, Case, Messages, Sample

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]  # a first run fetches the model

COSTS = (50, 3000)  # tokens, prompt and answer
OF_EACH_KIND = 100
READING = 1000  # estimated tokens in one reading of the engine's counter
RIGHT = 0.95  # of all requests
RIGHT_OF_EACH_KIND = 0.9
ROUTES = {route.name: route for route in FORWARDED}


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(prepare(lambda line: print(line, file=sys.stderr)))


def size(text: str) -> int:
    return len(tokenizer().encode(text, add_special_tokens=False))


def render(messages: Messages) -> str:
    return str(tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


@cache
def true_prompt(prompt: str) -> int:
    return size(prompt)


def prompt_tokens(case: Case) -> int:
    return true_prompt(case.prompt) if isinstance(case.prompt, str) else len(case.prompt)


@cache
def sample(seed: int) -> dict[str, list[Case]]:
    source = Sample(seed, size, render, COSTS)
    return {kind: source.take(kind, OF_EACH_KIND) for kind in KINDS}


def classify(lanes: Lanes, case: Case) -> Demand:
    return lanes.classify(ROUTES[case.path], json.dumps(case.body).encode())


def share_right(lanes: Lanes, cases: Sequence[Case]) -> float:
    right = [
        classify(lanes, case).lane == lanes.lane_for(prompt_tokens(case) + case.body["max_tokens"]) for case in cases
    ]
    return sum(right) / len(right)


def learned_from(cases: Sequence[Case]) -> Lanes:
    """What the gateway knows after such traffic, in a random order."""
    lanes = Lanes(DEFAULT_LANES)
    text = counted = 0.0
    for case in random.Random(3).sample(cases, len(cases)):
        demand = classify(lanes, case)
        text += demand.text_tokens
        counted += prompt_tokens(case) - demand.exact_tokens
        if text >= READING:
            lanes.learn_scale(text, counted)
            text = counted = 0.0
    return lanes


def everything(seed: int) -> list[Case]:
    return [case for cases in sample(seed).values() for case in cases]


def small_talk() -> list[Case]:
    """Chats so short that most of their tokens are the template's."""
    rng = random.Random(4)
    chats = []
    for _ in range(2000):
        words = "hello there thanks a lot what about you good bye see you yes please no".split()
        messages = [{"role": "user", "content": " ".join(rng.sample(words, rng.randint(1, 6)))}]
        body = {"messages": messages, "max_tokens": 16}
        chats.append(Case("small talk", "/v1/chat/completions", body, render(messages)))
    return chats


TRAFFIC: dict[str, Callable[[], Sequence[Case]]] = {
    "nothing": lambda: (),
    "a mix": lambda: everything(2),
    "english": lambda: sample(2)["english"],
    "chinese": lambda: sample(2)["chinese"],
    "code": lambda: sample(2)["code"],
    "tools": lambda: sample(2)["tools"],
    "small talk": small_talk,
}


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_requests_land_in_the_lane_of_their_true_token_count_whatever_came_before(traffic: str) -> None:
    assert share_right(learned_from(TRAFFIC[traffic]()), everything(1)) >= RIGHT


@pytest.mark.parametrize("kind", KINDS)
def test_after_mixed_traffic_no_kind_is_left_behind(kind: str) -> None:
    assert share_right(learned_from(everything(2)), sample(1)[kind]) >= RIGHT_OF_EACH_KIND


def test_the_sample_is_spread_evenly_over_the_costs() -> None:
    costs = sorted(prompt_tokens(case) + case.body["max_tokens"] for case in everything(1))
    quarters = [costs[len(costs) * part // 4] for part in (1, 2, 3)]
    assert costs[0] < 200
    assert quarters == pytest.approx([787, 1525, 2262], rel=0.15)


def main() -> None:
    """Print the shares as a table."""
    print(f"{'learned from':14}{'scale':>6}", *(f"{kind:>8}" for kind in (*KINDS, "all")))
    for name, traffic in TRAFFIC.items():
        lanes = learned_from(traffic())
        shares = [share_right(lanes, sample(1)[kind]) for kind in KINDS]
        print(f"{name:14}{lanes.scale:6.2f}", *(f"{share:8.1%}" for share in (*shares, sum(shares) / len(shares))))


if __name__ == "__main__":
    main()
