"""Requests of mixed kinds while the engine is killed and stopped at random moments: what becomes of each.

    make chaos [ARGS=--help]

Real vLLM with a tiny model under the real launcher. In each round some requests come at random moments, one process of
the engine is killed or stopped at another, and the next round begins when the engine serves again. All is drawn from
the seed, which is printed; what the machine makes of it differs from run to run.

The exit code is 0 only if every client got an end that it can tell from success, every slot came back, no process of a
dead engine was alive when the next one served, and the launcher ended with 0 and left nothing.
"""

import argparse
import asyncio
import contextlib
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from loadtest.processes import end_in_order
from loadtest.report import aligned, facts, progress, write_json
from tests.engine.launched import START_S, Launcher, processes, session_of
from tests.engine.tiny_model import tiny_model
from tests.harness import wait_until

SLOTS: Final = 8
SPREAD_S: Final = 4.0  # over which a round's requests and its fault are spread
STALL_S: Final = 10.0
DEADLINE_S: Final = 60.0
OVERDUE_S: Final = 15.0  # after its deadline a client without an end is a defect
CLEAR_S: Final = 30.0  # for gauges to be back at 0 after the last client's end
VICTIMS: Final = ("API server", "VLLM::EngineCore", "VLLM::Worker")
ENDS: Final = {  # of a whole stream
    "/v1/chat/completions": "data: [DONE]",
    "/v1/completions": "data: [DONE]",
    "/v1/responses": "response.completed",
    "/v1/messages": "message_stop",
}
ERROR: Final = re.compile(r'"error": ?\{')
REPORT: Final = Path("reports", "chaos.json")


@dataclass(frozen=True, slots=True)
class Shot:
    """One request: when in its round it is sent, and how its client behaves. Times in seconds."""

    at_s: float
    route: str
    stream: bool
    tokens: int
    deadline_s: float
    leaves_s: float | None  # after which the client goes away


@dataclass(frozen=True, slots=True)
class Round:
    """What happens between two states of rest; `victim` is stopped instead of killed if so."""

    shots: list[Shot]
    victim: str
    stopped: bool
    fault_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round has shown."""

    fault: str
    ends: dict[str, int]
    leaked: dict[str, float]
    orphans: list[int]
    back_s: float  # from the fault to the next answer

    @property
    def defects(self) -> int:
        return self.ends.get("no end", 0) + self.ends.get("wrong", 0) + len(self.leaked) + len(self.orphans)


def draw(seed: int, requests: int, kills: int, stops: int) -> list[Round]:
    """The rounds of a run. Pure."""
    dice = random.Random(seed)
    faults = [(VICTIMS[number % len(VICTIMS)], False) for number in range(kills)]
    faults += [("VLLM::EngineCore", True)] * stops
    dice.shuffle(faults)
    rounds = []
    for number, (victim, stopped) in enumerate(faults):
        share = requests // len(faults) + (number < requests % len(faults))
        shots = [_shot(dice) for _ in range(share)]
        fault_s = dice.uniform(0.1, 1) * SPREAD_S
        rounds.append(Round(sorted(shots, key=lambda shot: shot.at_s), victim, stopped, fault_s))
    return rounds


def _shot(dice: random.Random) -> Shot:
    return Shot(
        at_s=dice.uniform(0, SPREAD_S),
        route=dice.choice(list(ENDS)),
        stream=dice.random() < 0.6,
        tokens=dice.choice((4, 32, 128, 512)),
        deadline_s=dice.choice((1.0, 5.0, DEADLINE_S, DEADLINE_S)),
        leaves_s=dice.uniform(0.05, 2) if dice.random() < 0.15 else None,
    )


def _body(shot: Shot) -> dict[str, Any]:
    body: dict[str, Any] = {"model": tiny_model().name, "stream": shot.stream}
    messages = [{"role": "user", "content": "Tell me something."}]
    match shot.route:
        case "/v1/completions":
            return body | {"prompt": "a", "max_tokens": shot.tokens, "ignore_eos": True}
        case "/v1/responses":
            return body | {"input": "a", "max_output_tokens": shot.tokens}
        case _:
            return body | {"messages": messages, "max_tokens": shot.tokens}


async def fire(client: httpx.AsyncClient, shot: Shot) -> str:
    """Send a request at its time; how it ended, in a word."""
    await asyncio.sleep(shot.at_s)
    headers = {"x-request-timeout-ms": f"{shot.deadline_s * 1000:.0f}"}
    limit_s = shot.deadline_s + OVERDUE_S if shot.leaves_s is None else shot.leaves_s
    try:
        async with asyncio.timeout(limit_s):
            return judge(shot, await client.post(shot.route, json=_body(shot), headers=headers))
    except TimeoutError:
        return "no end" if shot.leaves_s is None else "left"
    except httpx.HTTPError:
        return "broken off"  # the client sees it


def judge(shot: Shot, answer: httpx.Response) -> str:
    """What a complete answer says of the request. Pure."""
    if answer.status_code == 503:
        return "refused" if "retry-after" in answer.headers else "wrong"
    if answer.status_code != 200:
        return {504: "deadline", 502: "engine error", 500: "engine error"}.get(answer.status_code, "wrong")
    if not shot.stream:
        return "whole" if "usage" in answer.json() else "wrong"
    if ERROR.search(answer.text) or "response.failed" in answer.text:
        return "deadline" if "deadline_exceeded" in answer.text else "engine error"
    return "whole" if ENDS[shot.route] in answer.text else "wrong"


async def play(one: Launcher, what: Round) -> Outcome:
    """One round, from rest to rest."""
    before, ups = one.engine(), one.ups()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=one.base_url, timeout=START_S, trust_env=False, limits=limits) as client:
        clients = [asyncio.create_task(fire(client, shot)) for shot in what.shots]
        await asyncio.sleep(what.fault_s)
        pids = one.engine(what.victim) or [pid for pid in before if session_of(pid) == pid]
        began = time.monotonic()
        os.kill(pids[0], signal.SIGSTOP if what.stopped else signal.SIGKILL)
        if what.stopped:  # a stall takes a request to be seen
            clients.append(asyncio.create_task(fire(client, Shot(0, "/v1/completions", True, 512, DEADLINE_S, None))))
        ends = Counter(await asyncio.gather(*clients))
    await asyncio.to_thread(one.next_engine, ups + 1)
    orphans = [pid for pid in before if pid in processes()]
    await asyncio.to_thread(wait_until, one.answers, "an answer", within=START_S)
    back_s = time.monotonic() - began
    with contextlib.suppress(AssertionError):  # then it is told as leaked
        await asyncio.to_thread(wait_until, lambda: not one.metrics().held(), "gauges at 0", within=CLEAR_S)
    fault = f"{'stop' if what.stopped else 'kill'} {what.victim} at {what.fault_s:.1f} s"
    return Outcome(fault, dict(ends), one.metrics().held(), orphans, back_s)


def table(done: Sequence[Outcome]) -> str:
    """One line for each round, and their sum."""
    words = sorted({word for outcome in done for word in outcome.ends} | {"no end", "wrong"})
    lines = [["fault", *words, "leaked", "orphans", "serves again after"]]
    for one in done:
        counts = [str(one.ends.get(word, 0)) for word in words]
        lines.append([one.fault, *counts, str(len(one.leaked)), str(len(one.orphans)), f"{one.back_s:.0f} s"])
    sums = [str(sum(one.ends.get(word, 0) for one in done)) for word in words]
    leaked, orphans = (str(sum(map(len, parts))) for parts in ([o.leaked for o in done], [o.orphans for o in done]))
    lines.append(["all", *sums, leaked, orphans, ""])
    return aligned(lines)


async def run(rounds: Sequence[Round]) -> tuple[list[Outcome], str]:
    """All rounds with one launcher; what they have shown, and what was wrong with the launcher's end."""
    settings = {"MAX_IN_FLIGHT": SLOTS, "MAX_QUEUE": 24, "STALL_S": STALL_S, "MAX_RESTARTS": len(rounds)}
    one = Launcher(environment={f"TIDEGATE_{name}": str(value) for name, value in settings.items()})
    done: list[Outcome] = []
    try:
        await asyncio.to_thread(one.ready)
        for number, what in enumerate(rounds, 1):
            done.append(await play(one, what))
            progress(f"{number} of {len(rounds)}: {done[-1].fault}, back after {done[-1].back_s:.0f} s")
        session = one.engine()
        one.signal(signal.SIGTERM)
        code = await asyncio.to_thread(one.exit_code, 60)
        await asyncio.to_thread(one.leaves_nothing, session)
        return done, f"the launcher ended with {code}" if code else ""
    except AssertionError as error:
        return done, str(error)
    finally:
        one.close()


def main(argv: Sequence[str]) -> int:
    """Run, print the table, write the report; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="default: a new one, printed")
    parser.add_argument("--requests", type=int, default=200, help="in all [%(default)s]")
    parser.add_argument("--kills", type=int, default=5, help="of the engine [%(default)s]")
    parser.add_argument("--stops", type=int, default=1, help="of the engine, by SIGSTOP [%(default)s]")
    given = parser.parse_args(argv)
    progress(f"seed {given.seed}; about {40 * (given.kills + given.stops + 1)} s on two cores")
    rounds = draw(given.seed, given.requests, given.kills, given.stops)
    done, wrong = asyncio.run(run(rounds))
    about = facts(argv, "loadtest.chaos") | {"seed": given.seed}
    print(table(done))
    REPORT.parent.mkdir(exist_ok=True)
    write_json(REPORT, about | {"rounds": [asdict(one) for one in done], "wrong": wrong})
    good = not wrong and not any(one.defects for one in done) and len(done) == len(rounds)
    print(f"seed {given.seed}: {'all well' if good else f'DEFECTS {wrong}'.strip()}; {about['machine']}; {about['at']}")
    return 0 if good else 1


if __name__ == "__main__":
    end_in_order()
    sys.exit(main(sys.argv[1:]))
