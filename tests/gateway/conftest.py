"""Gateways for tests: started once per set of settings, and proved to be empty after every test."""

import json
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Protocol

import pytest

from tests.harness import FakeEngine, Gateway

KEPT = 8  # gateways that stay up between tests


class Start(Protocol):
    """Gives a gateway with an engine of its own (`gate.engine`); `engine` holds the fake engine's options."""

    def __call__(self, *, engine: dict[str, Any] | None = None, fresh: bool = False, **settings: Any) -> "Pair": ...


class Pair(Gateway):
    """A gateway that always has an engine."""

    engine: FakeEngine


class Pool:
    """Running pairs by their settings, the least recently used one ends first."""

    def __init__(self) -> None:
        self.pairs: OrderedDict[str, Pair] = OrderedDict()

    def get(self, engine: dict[str, Any], settings: dict[str, Any]) -> Pair:
        """A shared pair."""
        key = json.dumps([engine, settings], sort_keys=True)
        pair = self.pairs.pop(key, None)
        if pair is None or not pair.running or not pair.engine.running:
            self.drop(pair)
            while len(self.pairs) >= KEPT:
                self.drop(next(iter(self.pairs.values())))
            pair = start(engine, settings)
        self.pairs[key] = pair
        return pair

    def drop(self, pair: Pair | None) -> None:
        """End a pair and forget it."""
        for key in [key for key, value in self.pairs.items() if value is pair]:
            del self.pairs[key]
        if pair is not None:
            pair.close()
            pair.engine.close()


def start(engine_options: dict[str, Any], settings: dict[str, Any]) -> Pair:
    """Start an engine, then a gateway."""
    engine = FakeEngine(**engine_options)
    try:
        return Pair(engine, **settings)
    except BaseException:
        engine.close()
        raise


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """All shared pairs of this run."""
    pool = Pool()
    yield pool
    for pair in list(pool.pairs.values()):
        pool.drop(pair)


@pytest.fixture
def gateway(pool: Pool) -> Iterator[Start]:
    """Start (or reuse) a gateway; after the test every gauge of a shared one must be back at 0.

    `fresh` gives one that is ended with the test and not looked at, for tests that stop or break it.
    """
    shared: list[Pair] = []
    own: list[Pair] = []

    def get(*, engine: dict[str, Any] | None = None, fresh: bool = False, **settings: Any) -> Pair:
        pair = start(engine or {}, settings) if fresh else pool.get(engine or {}, settings)
        (own if fresh else shared).append(pair)
        return pair

    try:
        yield get
        for pair in shared:
            try:
                assert pair.running, f"the gateway ended with {pair.exit_code()}; its output:\n{pair.log}"
                pair.quiet()
                assert "Traceback" not in pair.log, pair.log
                assert not pair.engine.log.strip().partition("\n")[2], pair.engine.log
                pair.engine.reset()
            except BaseException:
                pool.drop(pair)
                raise
    finally:
        for pair in own:
            with suppress(OSError):
                pair.engine.close()
            pair.close()


@pytest.fixture
def fake() -> Iterator[FakeEngine]:
    """An engine without a gateway, on TCP."""
    with FakeEngine(tcp=True) as engine:
        yield engine
