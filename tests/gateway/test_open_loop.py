"""The open loop against a server that somebody else runs, named by its URL."""

from pathlib import Path

import pytest

from loadtest.arms import Options, Stage
from loadtest.naive_arms import ALL_ARMS
from loadtest.outcomes import Outcome
from loadtest.processes import ServerFailed
from loadtest.runs import run
from loadtest.workload import schedule
from tests.gateway.conftest import Start
from tests.harness import FakeEngine, free_port


def stage(folder: Path, url: str) -> Stage:
    return Stage(folder, Options({}, folder, url=url, tell=lambda _: None))


async def test_any_url_can_be_an_arm_and_tokens_are_counted_where_it_tells_of_them(
    gateway: Start, tmp_path: Path
) -> None:
    gate = gateway(engine={}, max_in_flight=16)
    requests = schedule("short", 20, 1, 1)
    async with stage(tmp_path, gate.base_url) as here, ALL_ARMS["url"](here) as target:
        metrics, records = await run(target, requests, 1, 5, "test")
    assert {record.outcome for record in records} == {Outcome.GOOD}
    assert metrics["tokens"] == sum(request.tokens for request in requests)


async def test_a_server_without_metrics_can_be_one_too(fake: FakeEngine, tmp_path: Path) -> None:
    async with stage(tmp_path, fake.url) as here, ALL_ARMS["url"](here) as target:
        _, records = await run(target, schedule("short", 20, 1, 1), 1, 5, "test")
    assert {record.outcome for record in records} == {Outcome.GOOD}


@pytest.mark.parametrize("url", ["", "ftp://127.0.0.1", "http://127.0.0.1:{port}"])
async def test_a_url_that_leads_nowhere_is_told(url: str, tmp_path: Path) -> None:
    async with stage(tmp_path, url.format(port=free_port())) as here:
        with pytest.raises(ServerFailed):
            async with ALL_ARMS["url"](here):
                raise AssertionError("there is nothing")
