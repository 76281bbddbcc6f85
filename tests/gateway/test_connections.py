"""Hundreds of connections at once: the same program as for thousands."""

from typing import Any

import pytest

from loadtest.connections import good, measure, well

pytestmark = pytest.mark.slow


@pytest.mark.timeout(120)
def test_every_call_on_hundreds_of_connections_is_answered_by_the_contract() -> None:
    found = measure(500)
    assert well(found, 500), found
    assert sum(found["answers"].values()) == 1000
    assert found["most_descriptors"] > 500


@pytest.mark.parametrize(
    "change",
    [
        {"answers": {"503 queue_full": 1000}},
        {"answers": {"200": 527, "503 queue_full": 473}},
        {"answers": {"200": 999, "500": 1}},
        {"alive_meanwhile": False},
        {"traceback": True},
    ],
    ids=str,
)
def test_what_is_not_well_is_told(change: dict[str, Any]) -> None:
    found = {"answers": {"200": 528, "503 queue_full": 472}, "alive_meanwhile": True, "traceback": False}
    assert well(found, 500)
    assert not well(found | change, 500)


def test_only_whole_answers_of_the_contract_are_good() -> None:
    assert good("503 queue_full")
    assert not any(
        good(words) for words in ("200, not whole", "500", "503", "503 queue_full, no retry", "no answer: Cut")
    )
