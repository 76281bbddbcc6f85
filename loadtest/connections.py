"""Thousands of connections at once: every call on them gets an answer of the contract, and no other.

    python -m loadtest.connections [--help]

All clients connect to a gateway at its defaults, and only then each sends a call, twice on the same connection. The
engine is a stand-in whose answers take half a second. The exit code is 1 if an answer was missing, not whole, or none
of the contract, if fewer were served than there are slots and places, or if something is left over.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import uvloop

from app.settings import Settings
from loadtest.observed_gateway import ObservedGateway
from loadtest.processes import end_in_order
from loadtest.report import facts, progress, write_json
from loadtest.runs import allow_many_connections
from tests.harness import FakeEngine, chat, wait_until
from tests.wire import CHAT, Cut, Wire

ROUNDS: Final = 2
PLACES: Final = sum(Settings.model_fields[name].default for name in ("max_in_flight", "max_queue"))
ANSWER_S: Final = 120.0
BACKLOG: Final = 200  # that connect at the same moment: a listener's queue is bounded too
SCRIPT: Final = {"events": 20, "gap_ms": 25}
REPORT: Final = Path("reports", "connections.json")


async def connections(gate: ObservedGateway, count: int) -> dict[str, Any]:
    """Connect, call and count; all stay to the end."""
    before = gate.descriptors()
    wires: list[Wire] = []
    for start in range(0, count, BACKLOG):
        wires += await asyncio.gather(*(Wire.open(gate.port) for _ in range(min(BACKLOG, count - start))))
    seen = Counter[str]()
    most = gate.descriptors()
    alive = True
    began = time.monotonic()
    for number in range(ROUNDS):
        calls = asyncio.gather(*(call(wire, stream=bool(number % 2)) for wire in wires))
        alive = await asyncio.to_thread(lambda: gate.get("/livez").status_code == 200) and alive
        seen.update(await calls)
        most = max(most, gate.descriptors())
    took_s = time.monotonic() - began
    for wire in wires:
        await wire.close()
    await asyncio.to_thread(gate.quiet)
    await asyncio.to_thread(wait_until, lambda: gate.descriptors() <= before + 64, "the end of the connections")
    return {"answers": dict(seen), "most_descriptors": most, "alive_meanwhile": alive, "took_s": round(took_s, 1)}


async def call(wire: Wire, *, stream: bool) -> str:
    """One call on a connection; what came, in words."""
    try:
        await wire.request(CHAT, chat(stream=stream, fake=SCRIPT))
        answer = await wire.answer(ANSWER_S)
    except (Cut, ConnectionError, TimeoutError) as error:
        return f"no answer: {type(error).__name__}"
    whole = answer.whole and (answer.status_code != 200 or not stream or b"[DONE]" in answer.body)
    told = answer.status_code != 503 or "retry-after-ms" in answer.headers
    reason = answer.headers.get("x-tidegate-reason", "")
    return f"{answer.status_code} {reason}".strip() + ("" if whole else ", not whole") + ("" if told else ", no retry")


def good(words: str) -> bool:
    """Whether it is an answer of the contract, and whole. Pure."""
    return words in {"200", "503 queue_full", "503 queue_timeout", "503 deadline_infeasible"}


def well(found: dict[str, Any], count: int) -> bool:
    """Whether all answers are good, and there are as many whole ones as there are slots and places. Pure."""
    served = found["answers"].get("200", 0) >= ROUNDS * min(count, PLACES)
    return served and all(map(good, found["answers"])) and found["alive_meanwhile"] and not found["traceback"]


def measure(count: int) -> dict[str, Any]:
    """A gateway and an engine of its own, and all connections."""
    with FakeEngine() as engine, ObservedGateway(engine) as gate:
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        found = runner.run(connections(gate, count))
        return found | {"traceback": "Traceback" in gate.log, "log_bytes": len(gate.log)}


def main(argv: Sequence[str]) -> int:
    """Run, print, write the report."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.connections", description=__doc__.partition("\n")[0])
    parser.add_argument("--connections", type=int, default=2000, help="at once [%(default)s]")
    given = parser.parse_args(argv)
    allow_many_connections()
    progress(f"{given.connections} connections")
    found = measure(given.connections)
    about = facts(argv, "loadtest.connections")
    REPORT.parent.mkdir(exist_ok=True)
    write_json(REPORT, about | found)
    for name, value in found.items():
        print(f"{name}: {value}")
    good_run = well(found, given.connections)
    print(f"{'all well' if good_run else 'DEFECTS'}; {about['machine']}; {about['at']}")
    return 0 if good_run else 1


if __name__ == "__main__":
    end_in_order()
    sys.exit(main(sys.argv[1:]))
