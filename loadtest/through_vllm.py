"""What the gateway costs in front of real vLLM with its default model: throughput and first token, beside direct."""

import importlib.util
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Final

from launcher import model
from loadtest.arms import MODEL, SEQUENCES, Options, Stage
from loadtest.client import Address, closed_loop, load
from loadtest.outcomes import Record
from loadtest.peers import Missing
from loadtest.report import progress
from loadtest.workload import SHORT, endless

WARM_S: Final = 4.0
SECONDS: Final = 20.0
PATIENT: Final = replace(SHORT, limit_s=300.0)  # deadlines are not what is measured here


async def measure(rounds: int, out: Path) -> dict[str, list[float]]:
    """Keep the engine full, directly and through the gateway in turn; each figure, round by round.

    Raises:
        Missing: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise Missing("vLLM is not installed (make setup)")
    seen: dict[str, list[Sequence[Record]]] = {"direct": [], "through": []}
    salts = (f"run{number:03d}" for number in count(1))
    async with Stage(model.prepare(progress), Options({}, out, tell=progress)) as stage:
        engine = await stage.engine()
        async with stage.gateway(engine) as gateway:
            for number in range(1, rounds + 1):
                for name, address in (("direct", engine.address), ("through", gateway.address)):
                    progress(f"real vLLM, round {number} of {rounds}: {name}")
                    seen[name].append(await _full(address, next(salts)))
    found = {}
    for name, runs in seen.items():
        found[f"vllm_tokens_s_{name}"] = [sum(record.events for record in run) / SECONDS for run in runs]
        found[f"vllm_first_ms_{name}"] = [1e3 * _first_p50(run) for run in runs]
    return found


async def _full(address: Address, salt: str) -> list[Record]:
    requests = (replace(request, kind=PATIENT) for request in endless(PATIENT.name, 1))
    shots = (load(request, MODEL, salt) for request in requests)
    return await closed_loop(address, shots, SEQUENCES, WARM_S, SECONDS)


def _first_p50(run: Sequence[Record]) -> float:
    return statistics.median(record.first - record.sent for record in run if record.first and record.sent)
