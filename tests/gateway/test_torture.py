"""A small run of `make torture`, and what its larger runs have found."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.observed_gateway import KEPT, ObservedGateway
from loadtest.torture import torture
from tests.harness import ROOT, FakeEngine, chat, occupied, wait_until
from tests.wire import CHAT, PATIENCE_S

pytestmark = pytest.mark.slow


@pytest.mark.timeout(180)
def test_nothing_is_left_of_clients_and_an_engine_that_misbehave() -> None:
    found = torture(seed=7, calls=400, limit=4, every_s=0.7)
    assert not found["defects"]
    assert sum(found["ends"].values()) == 400
    assert {"left", "refused", "whole", "engine error"} <= found["ends"].keys()
    assert found["ends_told"]["told"] > 0
    assert sum(found["troubles"].values()) > 0


def test_the_servers_of_an_experiment_end_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loadtest.torture"]
    one = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    about = Path("/proc", str(one.pid))
    try:
        wait_until(lambda: len(list(about.glob("fd/*"))) > 40, "a crowd of clients")
        servers = (about / "task" / str(one.pid) / "children").read_text().split()
        assert len(servers) == 2
        one.terminate()
        assert one.wait(PATIENCE_S) == 128 + signal.SIGTERM
        assert not [pid for pid in servers if Path("/proc", pid).exists()]
    finally:
        one.kill()
        one.wait()


async def test_what_torture_looks_for_is_seen_while_it_is_there() -> None:
    """A name of a class that no longer is would let everything be left over."""
    with FakeEngine() as engine, ObservedGateway(engine) as gate:
        async with occupied(gate):
            seen = await asyncio.to_thread(gate.look)
            assert all(seen["objects"][name] for name in KEPT), seen


async def test_a_connection_that_was_reset_is_forgotten_at_once() -> None:
    """Its keep-alive timer ran on for 11 minutes, and held it."""
    with FakeEngine() as engine, ObservedGateway(engine) as gate:
        for _ in range(5):
            async with await gate.wire() as wire:
                await wire.request(CHAT, chat())
                assert (await wire.answer()).status_code == 200
                wire.reset()
        await asyncio.to_thread(
            wait_until, lambda: not gate.look()["objects"]["BoundedConnection"], "the end of all connections"
        )
