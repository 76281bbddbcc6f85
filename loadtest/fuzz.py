"""Requests of every wrong kind at the real gateway in front of a scriptable engine: what must never happen is counted.

    make fuzz [ARGS=--help]

Cases are drawn from `docs/openapi.yaml` by schemathesis, and by hypothesis from bodies that are nearly JSON, numbers
that decide about lanes, paths in disguise and heads that two parsers could read in two ways (`fuzz_cases.py`). With the
same seed, which is printed, they are the same again. The exit code is 0 only if nothing of this happened:

    unexpected   an answer that is neither the engine's nor ours by the table of refusals, a 5xx above all; a refusal of
                 a request with which nothing is wrong
    no_end       a well-formed request without a whole answer, which only its own deadline may break off
    crashed      the gateway ended, or wrote an error or a traceback
    reached      the engine saw what was refused, what nobody sent, a path off the list, or a header that ends here
    altered      a body that reached the engine otherwise than it was sent
    told         an answer with a key, a path or a stack in it
    leaked       a gauge that does not come back to 0
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import h11

from app import errors
from app.routes import FORWARDED
from loadtest.fuzz_cases import KEY, SHARES, Case, cases
from loadtest.processes import end_in_order
from loadtest.report import facts, progress, write_json
from tests.harness import FakeEngine, Gateway
from tests.wire import Answer, Cut, Wire

AT_A_TIME: Final = 16
BATCH: Final = 500
QUIET_S: Final = 0.3  # after which nothing more is expected of a connection whose request has no clear end
END_S: Final = 15.0  # for an answer to a well-formed request; the gateway's own limits are 5 s
SETTINGS: Final[dict[str, Any]] = {
    "api_keys": f"fuzz:{KEY}",
    "engine_api_key": "engine-key-that-nothing-may-tell",
    "body_s": 2,
    "deadline_s": 5,
    "max_body_bytes": 200_000,
}
DEFECTS: Final = ("unexpected", "no_end", "crashed", "reached", "altered", "told", "leaked")
KINDS: Final = {kind.reason: kind for kind in vars(errors).values() if isinstance(kind, errors.Kind)}
AFTER_SENDING: Final = frozenset(["deadline", "engine_error"])  # refusals that the engine may have seen
NOT_HTTP: Final = b"Invalid HTTP request received."
SECRETS: Final = re.compile(rb"that-nothing-may-tell|Traceback|site-packages|/tmp/|\.sock|\.py\b")
LISTED: Final = {(route.method, route.name) for route in FORWARDED}
END_HERE: Final = re.compile(
    r"x-vllm-(?!priority)|x-tidegate-|x-forwarded-|forwarded$|via$|x-real-ip$|cookie$|x-api-key$|te$"
)
HURRIED: Final = re.compile(rb"(?i)\r\nx-(?:request-timeout|envoy-expected-rq-timeout)-ms:")
REPORT: Final = Path("reports", "fuzz.json")


class Findings:
    """Counts of what came, and every defect with what it takes to see it again."""

    def __init__(self) -> None:
        self.cases: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.at_engine = 0  # requests that it saw
        self.defects: Counter[str] = Counter(dict.fromkeys(DEFECTS, 0))
        self.examples: list[dict[str, str]] = []

    def defect(self, kind: str, what: str, case: Case | None = None) -> None:
        """Note one; of many the first are kept in full."""
        self.defects[kind] += 1
        if len(self.examples) < 50:
            sent = repr(case.data[:2000]) if case else ""
            self.examples.append({"defect": kind, "what": what, "family": case.family if case else "", "sent": sent})
            progress(f"DEFECT {kind}: {what[:200]} {sent[:300]}")


async def send(port: int, case: Case) -> list[Answer] | None:
    """What comes back on a connection of its own; None when a well-formed request gets no whole answer."""
    answers: list[Answer] = []
    async with await Wire.open(port) as wire:
        wire.writer.write(case.data)
        try:
            async with asyncio.timeout(END_S):
                while True:
                    answers.append(await _answer(wire, case, END_S if case.framed else QUIET_S))
                    if case.framed:
                        break
        except (Cut, TimeoutError, ConnectionError):
            if case.framed:
                return None
        return answers if not case.framed or answers[0].whole or HURRIED.search(case.data) else None


async def _answer(wire: Wire, case: Case, within: float) -> Answer:
    if case.head_only:
        return Answer(*await wire.read_head(within), b"", True)
    return await wire.answer(within)


def look(case: Case, answer: Answer, findings: Findings) -> bool:
    """Judge one answer; true when it means that the engine must not have seen the request."""
    reason = answer.headers.get("x-tidegate-reason")
    # hypothesis takes words from the sources it finds, and "fake" is how the engine is scripted.
    engines = "x-fake-id" in answer.headers or b'"type":"fake"' in answer.body
    who = reason or ("by the engine" if engines else "by the gateway")
    findings.answers[f"{answer.status_code} {who}"] += 1
    said = answer.body + repr(answer.headers).encode()
    if SECRETS.search(said.replace(case.data, b"")) and not SECRETS.search(case.data.replace(KEY.encode(), b"")):
        findings.defect("told", repr(answer)[:500], case)
    if engines:
        return False
    if case.served:
        findings.defect("unexpected", repr(answer)[:500], case)
    if reason is None:
        not_http = answer.status_code == 400 and answer.body in (NOT_HTTP, b"")
        if not not_http and answer.status_code >= 300:
            findings.defect("unexpected", repr(answer)[:500], case)
        # After a whole request this may be about what follows it, told before that request is answered.
        return not (not_http and begins_well(case.data))
    kind = KINDS.get(reason)
    if kind is None or kind.status != answer.status_code or not (case.head_only or _is_error(answer.body, kind)):
        findings.defect("unexpected", repr(answer)[:500], case)
    return reason not in AFTER_SENDING


def begins_well(data: bytes) -> bool:
    """Whether another parser than the gateway's sees a whole request first, whatever comes after it."""
    parser = h11.Connection(h11.SERVER)
    parser.receive_data(data)
    try:
        event = parser.next_event()
        while isinstance(event, h11.Request | h11.Data):
            event = parser.next_event()
    except h11.RemoteProtocolError:
        return False
    return isinstance(event, h11.EndOfMessage)


def _is_error(body: bytes, kind: errors.Kind) -> bool:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return set(error) == {"message", "type", "param", "code"} and (error["type"], error["code"]) == (
        kind.type,
        kind.code,
    )


async def run_batch(batch: Sequence[Case], gate: Gateway, engine: FakeEngine, findings: Findings) -> None:
    """Send some, a few at a time, then compare what clients were told with what the engine saw."""
    engine.defaults(events=3)  # whatever number of tokens a body asks for
    todo = iter(batch)
    kept_here: set[str] = set()

    async def client() -> None:
        for case in todo:
            findings.cases[case.family] += 1
            answers = await send(gate.port, case)
            if answers is None:
                findings.defect("no_end", "no whole answer", case)
            for place, answer in enumerate(answers or []):
                kept = look(case, answer, findings)
                if kept and place == 0:
                    kept_here.add(case.id.decode())

    await asyncio.gather(*(client() for _ in range(AT_A_TIME)))
    if not gate.running:
        findings.defect("crashed", f"the gateway ended: {gate.log[-1000:]}")
        return
    try:
        await asyncio.to_thread(gate.quiet)
    except AssertionError as error:
        findings.defect("leaked", str(error))
    for line in gate.log.splitlines():
        if re.search(r"\bERROR\b|Traceback", line):
            findings.defect("crashed", line)
    compare({case.id.decode(): case for case in batch}, kept_here, engine, findings)
    gate.log_path.write_bytes(b"")
    engine.reset()


def compare(sent: dict[str, Case], kept_here: set[str], engine: FakeEngine, findings: Findings) -> None:
    """Every request at the engine is one that was let through, on the list, as it was sent, without what ends here."""
    for _ in range(engine.counts()["malformed"]):
        findings.defect("reached", "bytes at the engine that are no request")
    for entry in engine.entries():
        findings.at_engine += 1
        headers = [(name.lower(), value) for name, value in entry["headers"]]
        case = sent.get(dict(headers).get("x-request-id", ""))
        path = entry["target"].partition("?")[0]
        if case is None or case.id.decode() in kept_here or (entry["method"], path) not in LISTED:
            findings.defect("reached", json.dumps(entry)[:500], case)
            continue
        wrong = [name for name, value in headers if END_HERE.match(name) or KEY in value]
        if wrong or (case.family != "heads" and any(name in ("connection", "upgrade") for name, _ in headers)):
            findings.defect("reached", f"with {wrong or headers}", case)
        whole = entry["body_sha256"] and entry["outcome"] == "finished"
        if case.body is not None and whole and entry["body_sha256"] != hashlib.sha256(case.body).hexdigest():
            findings.defect("altered", json.dumps(entry)[:500], case)


async def fuzz(made: Iterable[Case], count: int) -> Findings:
    """Send all of them."""
    findings = Findings()
    began, done = time.monotonic(), 0
    with FakeEngine() as engine, Gateway(engine, **SETTINGS) as gate:
        waiting = iter(made)
        while batch := list(islice(waiting, BATCH)):
            await run_batch(batch, gate, engine, findings)
            done += len(batch)
            seconds = time.monotonic() - began
            progress(f"{done} of {count} cases, {seconds:.0f} s, defects: {sum(findings.defects.values())}")
            if not gate.running:
                break
    return findings


def main(argv: Sequence[str]) -> int:
    """Run it; 0 without defects, 1 with, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.fuzz", description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=20_000, help="how many (default: 20000)")
    parser.add_argument("--seed", type=int, default=None, help="to see the same cases again (default: drawn)")
    parser.add_argument("--out", type=Path, default=REPORT, help="the result as JSON (default: reports/fuzz.json)")
    arguments = parser.parse_args(argv)
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    progress(f"fuzz: {arguments.cases} cases, seed {seed}; shares: {SHARES}")
    began = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        findings = asyncio.run(fuzz(cases(arguments.cases, seed), arguments.cases))
        result = {
            "cases": sum(findings.cases.values()),
            "seed": seed,
            "seconds": round(time.monotonic() - began),
            "defects": dict(findings.defects),
            "at_engine": findings.at_engine,
            "by_family": dict(findings.cases),
            "answers": dict(findings.answers.most_common()),
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(arguments.out, {**facts(argv, "loadtest.fuzz"), **result, "examples": findings.examples})
        print(json.dumps(result))
        whole = result["cases"] == arguments.cases
        return 0 if whole and not sum(findings.defects.values()) else 1
    return 130


if __name__ == "__main__":
    end_in_order()
    sys.exit(main(sys.argv[1:]))
