"""SIGTERM with 50 streams on a real engine: what the drain's time doesn't suffice for gets its error, none a lie."""

import asyncio
import signal
from typing import Any

import httpx
import pytest

from tests.engine.clients import ENDLESS, raw, words
from tests.engine.real import SLOTS, Vllm, load
from tests.harness import COMPLETIONS, Gateway, until

STREAMS = 50
FEW = 60  # tokens that take a second or two
DRAINS_S = (5, 20, 80)  # the first in which the engine gets anywhere counts: a busy machine is slow
SETTINGS: Any = {"max_in_flight": SLOTS, "max_wait_s": 300, "lanes": [{"name": "all"}]}


async def end_with(gate: Gateway, tokens: list[int], *signals: int) -> list[httpx.Response]:
    """Open 50 streams, send the signals, and return what the clients got."""
    async with raw(gate) as client:
        bodies = [words(count, stream=True) for count in tokens]
        calls = [asyncio.create_task(client.post(COMPLETIONS, json=body)) for body in bodies]
        await until(lambda: gate.stats()["in_flight"] == SLOTS and gate.stats()["queue_depth"] == STREAMS - SLOTS)
        for number in signals:
            gate.signal(number)
            await until(lambda: not gate.running or "draining" in gate.log, "the drain")
        answers = await asyncio.gather(*calls)
    await until(lambda: not gate.running, "the gateway's end")
    return answers


def told(answer: httpx.Response) -> bool:
    """Whether a client that was cut can tell: by the status, or by an error event at the end."""
    if answer.status_code == 200:
        return answer.text.endswith("data: [DONE]\n\n") and "server_draining" in answer.text
    return answer.status_code == 503 and answer.json()["error"]["code"] == "server_draining"


async def test_a_drain_that_is_too_short_completes_what_it_can_and_tells_the_rest(vllm: Vllm) -> None:
    short = SLOTS // 2  # these run and can end; the others would take minutes
    for drain_s in DRAINS_S:
        with Gateway(None, engine_url=vllm.url, drain_s=drain_s, **SETTINGS) as gate:
            answers = await end_with(gate, [FEW] * short + [ENDLESS] * (STREAMS - short), signal.SIGTERM)
            assert gate.exit_code() == 3
        whole = [answer for answer in answers if answer.status_code == 200 and '"error"' not in answer.text]
        assert all(told(answer) for answer in answers if answer not in whole)
        await until(lambda: load(vllm.metrics()) == (0, 0), "an idle engine")
        if max(answer.text.count("data: ") for answer in answers) > 2 * FEW:  # as many steps as the short ones need
            break
    else:
        pytest.fail("the engine was too slow to complete anything: this shows nothing")
    assert whole == answers[:short]


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_hurries(vllm: Vllm, second: int) -> None:
    with Gateway(None, engine_url=vllm.url, **SETTINGS) as gate:
        answers = await end_with(gate, [ENDLESS] * STREAMS, signal.SIGTERM, second)
        assert gate.exit_code() == 3
    assert all(told(answer) for answer in answers)
    await until(lambda: load(vllm.metrics()) == (0, 0), "an idle engine")
