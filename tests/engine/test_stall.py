"""A hung engine is found though its `/health` is good; one that works long is left alone."""

import asyncio
import os
import random
import signal
import time

from tests.engine.clients import raw, words
from tests.engine.conftest import Note, Start
from tests.engine.launched import processes, session_of
from tests.engine.real import Vllm
from tests.harness import COMPLETIONS, refused, until

STALL_S = 3


async def test_an_engine_that_answers_health_and_makes_no_token_is_found(gateway: Start, vllm: Vllm) -> None:
    gate = gateway(fresh=True, stall_s=STALL_S)
    cores = [pid for pid, title in processes().items() if title.startswith("VLLM::EngineCore")]
    (core,) = [pid for pid in cores if session_of(pid) == vllm.pid]
    async with raw(gate) as client:
        body = words(2000, stream=True) | {"stream_options": {"include_usage": True}}
        call = asyncio.create_task(client.post(COMPLETIONS, json=body))
        await until(lambda: gate.stats()["engine"]["running"] == 1, "work at the engine")
        os.kill(core, signal.SIGSTOP)
        try:
            await until(lambda: gate.get("/enginez").status_code == 503, "the stall to be found")
            assert vllm.ask("GET", "/health").status_code == 200
            assert gate.get("/readyz").status_code == 503
            assert gate.metrics().total("tidegate_engine_stalls_total") == 1
            refused(await client.post(COMPLETIONS, json=words(4)), "engine_unavailable")
        finally:
            os.kill(core, signal.SIGCONT)
        answer = await call
        assert '"completion_tokens":2000' in answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
        await until(lambda: gate.get("/readyz").status_code == 200, "recovery")


async def test_a_long_prefill_is_no_stall(gateway: Start, note: Note) -> None:
    """No byte comes before all prompts are read, for longer than a stall may take; a fast machine gets more of them."""
    gate = gateway(fresh=True, stall_s=STALL_S)
    took_s, count = 0.0, 4
    async with raw(gate) as client:
        while took_s < 2 * STALL_S:
            count *= 2
            assert count <= 256, f"half as many prompts were read within {took_s:.1f} s: too few to show anything"
            prompts = [[random.randrange(100, 40_000) for _ in range(8000)] for _ in range(count)]
            began = time.monotonic()
            call = asyncio.create_task(client.post(COMPLETIONS, json=words(1, prompts)))
            while not call.done():
                assert gate.get("/enginez").status_code == 200
                await asyncio.sleep(0.1)
            assert (await call).status_code == 200
            took_s = time.monotonic() - began
    note(f"{count} prompts of 8,000 tokens", f"{took_s:.1f} s")
    assert gate.metrics().total("tidegate_engine_stalls_total") == 0
