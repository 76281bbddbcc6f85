"""Connections of clients leave descriptors for the engine, whatever the system allows."""

import logging
import resource
import sys

import pytest

from app.crowd import FEWEST, RESERVED, TELL_EVERY_S, Crowd, most_connections


@pytest.mark.parametrize(
    ("descriptors", "most"),
    [(1_048_576, 1_048_576 - 64 - RESERVED), (1024, 1024 - 64 - RESERVED), (150, FEWEST), (-1, sys.maxsize)],
)
def test_most_connections_leave_one_descriptor_for_each_slot(
    monkeypatch: pytest.MonkeyPatch, descriptors: int, most: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    assert most_connections(64) == most


def test_a_full_house_is_logged_once_a_minute_however_many_come(caplog: pytest.LogCaptureFixture) -> None:
    crowd = Crowd(5)
    with caplog.at_level(logging.WARNING):
        for now in (0.0, 1.0, TELL_EVERY_S - 1, TELL_EVERY_S, TELL_EVERY_S + 1):
            crowd.tell(now)
    assert len(caplog.records) == 2
