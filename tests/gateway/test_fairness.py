"""One greedy key in front of everybody else's: it gets its turns, and they get theirs."""

import asyncio
from functools import partial
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Pair, Start
from tests.harness import ONE_LANE, chat, occupied, queued, refused, until
from tests.wire import CHAT

pytestmark = pytest.mark.slow

KEYS = "greedy:secret-g,polite:secret-p"


def ask(gate: Pair, client: httpx.AsyncClient, key: str, **more: Any) -> "asyncio.Task[httpx.Response]":
    """A call in the name of a key."""
    headers = {"authorization": f"Bearer secret-{key[0]}"}
    return asyncio.create_task(client.post(CHAT, json=chat(fake={"tag": key}, **more), headers=headers))


def are_over(calls: "list[asyncio.Task[httpx.Response]]", count: int) -> bool:
    return sum(call.done() for call in calls) == count


async def test_a_client_finds_room_in_a_queue_that_another_has_filled(gateway: Start) -> None:
    gate = gateway(max_in_flight=1, max_queue=4, lanes=ONE_LANE, api_keys=KEYS)
    async with gate.client() as client:
        async with occupied(gate):
            greedy = [ask(gate, client, "greedy") for _ in range(4)]
            await queued(gate, 4)
            assert refused(await ask(gate, client, "greedy"), "queue_full"), "the house is full"
            polite = []
            for count in (1, 2):
                polite.append(ask(gate, client, "polite"))
                await until(partial(are_over, greedy, count), "a place")
            message = refused(await ask(gate, client, "polite"), "queue_full")
            assert "The server is full" in message, "both have two"
            assert gate.stats()["queue_depth"] == 4
        answers = await asyncio.gather(*greedy, *polite)
    assert [answer.status_code for answer in answers[4:]] == [200, 200]
    displaced = [answer for answer in answers[:4] if answer.status_code == 503]
    assert len(displaced) == 2
    for answer in displaced:
        assert "another key's" in refused(answer, "queue_full")


async def test_with_heavy_requests_a_client_gets_no_more_slots(gateway: Start) -> None:
    gate = gateway(max_in_flight=4, max_queue=40, lanes=ONE_LANE, api_keys=KEYS)
    async with gate.client() as client:
        async with occupied(gate, 4):
            calls = [ask(gate, client, "greedy", n=4) for _ in range(6)]
            await queued(gate, 6)
            calls += [ask(gate, client, "polite") for _ in range(8)]
            await queued(gate, 14)
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
    tags = [entry["tag"] for entry in gate.engine.entries() if entry["tag"] != "occupier"]
    assert tags[:10].count("polite") == 8, f"four of them for each heavy one: {tags}"


async def test_a_clients_long_queue_does_not_make_anothers_request_infeasible(gateway: Start) -> None:
    """Twenty of a greedy key wait, for longer than a polite one's deadline; but they don't go before it."""
    gate = gateway(max_in_flight=1, max_queue=40, lanes=ONE_LANE, api_keys=KEYS, fresh=True)
    slow = {"first_ms": 200}
    async with gate.client() as client:
        for _ in range(5):
            await client.post(CHAT, json=chat(fake=slow))
        async with occupied(gate):
            greedy = [ask(gate, client, "greedy") for _ in range(20)]
            await queued(gate, 20)
            hurry = {"authorization": "Bearer secret-g", "x-request-timeout-ms": "3000"}
            refused(await client.post(CHAT, json=chat(), headers=hurry), "deadline_infeasible")
            hurry["authorization"] = "Bearer secret-p"
            polite = asyncio.create_task(client.post(CHAT, json=chat(), headers=hurry))
            await queued(gate, 21)
        assert (await polite).status_code == 200
        await asyncio.gather(*greedy)
