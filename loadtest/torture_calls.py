"""Calls of clients as they are in the field: they leave, read slowly, send slowly, and their engine misbehaves."""

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from loadtest.chaos import ENDS, ERROR
from tests.harness import body_for
from tests.wire import Answer, Cut, Wire

DEADLINE_S: Final = 3.0  # the gateway's own; clients ask for less
OVERDUE_S: Final = 20.0  # after its deadline a client without an end is a defect
LEAVE: Final = 0.3  # share of clients that leave at a random moment
SLOW: Final = 0.05  # share of slow readers, and of slow senders
SMALL_BUFFER: Final = 4096
KEYS: Final = {"many": "secret-of-many", "few": "secret-of-few"}
FAULTS: Final = ("stall", "reset", "close", "garbage")
FOR_EVER: Final = None  # a time-out around a call bounds it; two within each other lose cancellations on Python 3.11
DEFECTS: Final = ("no end", "no head", "wrong")


@dataclass(frozen=True, slots=True)
class Call:
    """One call: what is asked, what the engine does to it, and how its client behaves. Times in seconds."""

    index: int
    route: str
    stream: bool
    weight: int
    key: str
    deadline_s: float
    script: dict[str, Any]  # of the stand-in engine
    manner: str  # waits, closes, resets, reads slowly, sends slowly
    leaves_s: float | None
    chunked: bool

    @property
    def id(self) -> str:
        return f"call-{self.index}"


def draw(seed: int, count: int) -> Iterator[Call]:
    """The calls of a run. Pure."""
    dice = random.Random(f"{seed} calls")
    for index in range(count):
        manner = dice.choices(
            ["closes", "resets", "reads slowly", "sends slowly", "waits"],
            [LEAVE / 2, LEAVE / 2, SLOW, SLOW, 1 - LEAVE - 2 * SLOW],
        )[0]
        yield Call(
            index=index,
            route=dice.choice(list(ENDS)),
            stream=dice.random() < 0.6,
            weight=dice.choice((1, 1, 1, 2, 3)),
            key="many" if dice.random() < 0.8 else "few",
            deadline_s=dice.choice((0.3, 1.0, DEADLINE_S)),
            script=_script(dice, manner),
            manner=manner,
            leaves_s=dice.choice((0, dice.uniform(0, 0.02), dice.uniform(0, 0.3)))
            if manner in ("closes", "resets")
            else None,
            chunked=dice.random() < 0.3,
        )


def _script(dice: random.Random, manner: str) -> dict[str, Any]:
    events = dice.randint(1, 30)
    script: dict[str, Any] = {"events": events, "gap_ms": dice.choice((0, 0, 1, 5))}
    script["first_ms"] = dice.choice((0, 0, 5, 20))
    if manner == "reads slowly":
        return {"events": 200, "size": 4000}
    fate = dice.random()
    if fate < 0.12:
        at = dice.choice(("head", "mid_head", dice.randint(0, events)))
        return script | {"fault": dice.choice(FAULTS), "at": at, "half": dice.random() < 0.5}
    if fate < 0.15:
        return script | {"status": 500, "body": {"error": {"message": "scripted", "code": 500}}}
    if fate < 0.17:
        return script | {"error": {"message": "scripted", "code": 500}, "error_at": dice.randint(0, events)}
    return script | {"done": fate > 0.2}


def endless(index: int, manner: str, leaves_s: float | None, deadline_s: float) -> Call:
    """A call that cannot end before its client leaves or its deadline passes. Pure."""
    script = {"events": 100_000, "gap_ms": 5}
    return Call(index, "/v1/chat/completions", True, 1, "many", deadline_s, script, manner, leaves_s, chunked=False)


async def play(call: Call, port: int) -> tuple[str, int]:
    """Make a call; how it ended, in a word, and the status (0: none came)."""
    small = SMALL_BUFFER if call.manner == "reads slowly" else None
    headers = {"authorization": f"Bearer {KEYS[call.key]}", "x-request-id": call.id}
    headers["x-request-timeout-ms"] = f"{call.deadline_s * 1000:.0f}"
    async with await Wire.open(port, headers=headers, receive_buffer=small) as wire:
        try:
            async with asyncio.timeout(call.deadline_s + OVERDUE_S if call.leaves_s is None else call.leaves_s):
                await _send(wire, call)
                answer = await wire.answer(FOR_EVER, pause_s=0.005 if call.manner == "reads slowly" else 0)
                return judge(call, answer), answer.status_code
        except TimeoutError:
            if call.manner == "resets":
                wire.reset()
            return ("no end" if call.leaves_s is None else "left"), 0
        except Cut:
            return "no head", 0
        except ConnectionError:
            return "broken off", 0


async def leave_in_answer(call: Call, port: int) -> bool:
    """Make a call whose client leaves once its answer has begun, or waits for its deadline; whether it was let in."""
    headers = {"authorization": f"Bearer {KEYS[call.key]}", "x-request-timeout-ms": f"{call.deadline_s * 1000:.0f}"}
    async with await Wire.open(port, headers=headers) as wire:
        await _send(wire, call)
        status, head = await wire.read_head(FOR_EVER)
        if status != 200:
            return status == 504
        with contextlib.suppress(TimeoutError, Cut):
            async with asyncio.timeout(call.leaves_s):
                async for _ in wire.pieces(head, FOR_EVER):
                    pass
        if call.manner == "resets":
            wire.reset()
        return True


async def _send(wire: Wire, call: Call) -> None:
    body = json.dumps(body_for(call.route, fake=call.script, stream=call.stream, n=call.weight)).encode()
    pause_s = 0.02 if call.manner == "sends slowly" else 0
    size = max(1, len(body) // 5) if call.manner == "sends slowly" else len(body)
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    if call.chunked:
        await wire.start_chunked(call.route)
    else:
        await wire.request(call.route, b"", length=len(body))
    for part in parts:
        await asyncio.sleep(pause_s)
        await (wire.chunk(part) if call.chunked else wire.send(part))
    if call.chunked:
        await wire.chunk(b"")


def judge(call: Call, answer: Answer) -> str:
    """What an answer says of its call. Pure."""
    if not answer.whole:
        return "broken off"  # the client sees it
    if answer.status_code == 503:
        return "refused" if "retry-after" in answer.headers else "wrong"
    if answer.status_code != 200:
        expected = {504: "deadline", 502: "engine error"}
        if "status" in call.script or "error" in call.script:
            expected[500] = "engine error"
        return expected.get(answer.status_code, "wrong")
    if not call.stream:
        return "whole" if "usage" in answer.json() else "wrong"
    text = answer.body.decode()
    if ERROR.search(text) or "response.failed" in text:
        return "deadline" if "deadline_exceeded" in text else "engine error"
    return "whole" if ENDS[call.route] in text and text.count("data: ") >= call.script["events"] else "wrong"
