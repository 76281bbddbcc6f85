"""How these tests run: hypothesis unhurried, async tests on the event loops that their module names in `LOOPS`."""

import asyncio
from collections.abc import Callable, Mapping

import hypothesis
import pytest

USUAL = {"asyncio": asyncio.new_event_loop}

hypothesis.settings.register_profile("unit", deadline=None, max_examples=50)  # a busy machine is no failure
hypothesis.settings.load_profile("unit")


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    assert isinstance(item, pytest.Function)
    loops: Mapping[str, Callable[[], asyncio.AbstractEventLoop]] = getattr(item.module, "LOOPS", USUAL)
    return loops
