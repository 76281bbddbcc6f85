"""The autoscaler's query, computed from two scrapes as Prometheus would compute it, as far as the query goes."""

import math
import re
from typing import Any

from tests.harness import Metrics
from tests.kubernetes.manifests import of_kind, parse, rendered

TERM = re.compile(r"\b(sum|avg)\((rate\()?(\w+)\{([^}]*)\}(?:\[(\w+)\]\))?\)")
MATCHER = re.compile(r'(\w+)(=~?)"([^"]*)"')
ADDED = {"namespace"}  # labels that Prometheus adds to what it scrapes


def trigger() -> dict[str, Any]:
    """The shipped trigger."""
    (scaler,) = of_kind(parse(rendered("autoscale-keda")), "ScaledObject")
    (only,) = scaler["spec"]["triggers"]
    found: dict[str, Any] = only["metadata"]
    return found


def value(query: str, before: Metrics, after: Metrics, seconds: float) -> float:
    """What the query gives after `after`; rates are over the `seconds` between both scrapes.

    Raises:
        AssertionError: a series isn't there, or the query has become more than this can compute.
    """

    def term(match: re.Match[str]) -> str:
        function, is_rate, name, matchers, _ = match.groups()
        now = _samples(after, name, matchers)
        assert now, f"no series for {match[0]}"
        total = sum(now)
        if is_rate:
            total = (total - sum(_samples(before, name, matchers))) / seconds
        return str(total / len(now) if function == "avg" else total)

    sum_of_it = TERM.sub(term, query)
    assert re.fullmatch(r"[\d.e\s()+*/-]+", sum_of_it), f"can't compute {sum_of_it}"
    return float(eval(sum_of_it))


def wanted_pods(before: Metrics, after: Metrics, seconds: float) -> int:
    """How many pods the autoscaler would ask for."""
    return max(1, math.ceil(value(trigger()["query"], before, after, seconds) / float(trigger()["threshold"])))


def _samples(metrics: Metrics, name: str, matchers: str) -> list[float]:
    wanted = {label: (sign, text) for label, sign, text in MATCHER.findall(matchers) if label not in ADDED}
    return [
        sample
        for (series, labels), sample in metrics.samples.items()
        if series == name and all(_matches(dict(labels).get(label, ""), *how) for label, how in wanted.items())
    ]


def _matches(given: str, sign: str, text: str) -> bool:
    return given == text if sign == "=" else re.fullmatch(text, given) is not None
