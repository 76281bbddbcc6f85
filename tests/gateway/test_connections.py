"""Hundreds of connections at once: the same program as for thousands."""

import pytest

from loadtest.connections import good, measure

pytestmark = pytest.mark.slow


@pytest.mark.timeout(120)
def test_every_call_on_hundreds_of_connections_is_answered_by_the_contract() -> None:
    found = measure(500)
    assert all(good(words) for words in found["answers"]), found
    assert sum(found["answers"].values()) == 1000
    assert found["answers"]["200"] >= 2 * 264, "as many as there are slots and places, in both rounds"
    assert found["most_descriptors"] > 500
    assert found["alive_meanwhile"]
    assert not found["traceback"]


def test_only_whole_answers_of_the_contract_are_good() -> None:
    assert good("503 queue_full")
    assert not any(
        good(words) for words in ("200, not whole", "500", "503", "503 queue_full, no retry", "no answer: Cut")
    )
