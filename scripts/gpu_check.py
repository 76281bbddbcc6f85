"""What scripts/gpu_check.sh runs: start, answer, batch, deadline and drain with a real model, as one table.

The launcher runs as a user would start it; everything is asked of its gateway over HTTP.
"""

import argparse
import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

LIMIT_S: Final = 290.0  # for everything
ENGINE_GONE_S: Final = 10.0
BATCH: Final = 16
TOKENS: Final = {"cuda": 128, "cpu": 16}  # of an answer
SPEEDUP: Final = {"cuda": 4.0, "cpu": 1.5}  # of a batch of 16 over one by one, at least; usual are 10 and 3
ABORTED: Final = 4
ABORT_S: Final = 2.0  # for the engine to stop after a deadline; usual are 0.05
DRAINED: Final = 8
RUNNING: Final = re.compile(r"^vllm:num_requests_running(?:\{.*\})? (\S+)$", re.MULTILINE)
DRAIN_TOKENS: Final = {"cuda": 2000, "cpu": 64}


class Failed(Exception):
    """A check has failed; the text says how."""


@dataclass
class Run:
    """A launcher, its gateway, and what was found out."""

    process: subprocess.Popen[bytes]
    client: httpx.AsyncClient
    model: str = ""
    rows: list[tuple[str, str, str]] = field(default_factory=list)

    async def complete(self, tokens: int, *, stream: bool = False, timeout_ms: int = 120_000) -> httpx.Response:
        """One completion of exactly that many tokens."""
        body = {"model": self.model, "prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True}
        headers = {"x-request-timeout-ms": str(timeout_ms)}
        return await self.client.post("/v1/completions", json=body | {"stream": stream}, headers=headers)

    async def running(self) -> int:
        """Sequences at work in the engine, by its own count, now."""
        return sum(int(float(count)) for count in RUNNING.findall((await self.client.get("/metrics")).text))


async def starts(run: Run) -> str:
    """The gateway answers at once, the engine when it has loaded."""
    began = time.monotonic()
    while True:
        if run.process.poll() is not None:
            raise Failed(f"the launcher ended with {run.process.returncode}")
        try:
            if (await run.client.get("/readyz")).status_code == 200:
                break
        except httpx.HTTPError:
            pass  # it does not listen yet
        await asyncio.sleep(0.2)
    run.model = (await run.client.get("/v1/models")).json()["data"][0]["id"]
    return f"ready after {time.monotonic() - began:.0f} s"


async def answers(run: Run) -> str:
    """A question gets an answer."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": run.model, "messages": question, "max_tokens": 24, "temperature": 0}
    answer = await run.client.post("/v1/chat/completions", json=body)
    text = answer.json()["choices"][0]["message"]["content"] if answer.status_code == 200 else answer.text
    if answer.status_code != 200 or not text:
        raise Failed(f"status {answer.status_code}: {text[:80]}")
    return str(text).split("\n")[0][:50]


def batches(device: str) -> Callable[[Run], Awaitable[str]]:
    """Sixteen at once take far less time than one after another."""

    async def check(run: Run) -> str:
        tokens = TOKENS[device]
        await run.complete(tokens)
        began = time.monotonic()
        for _ in range(BATCH):
            await run.complete(tokens)
        one_by_one = time.monotonic() - began
        began = time.monotonic()
        done = await asyncio.gather(*(run.complete(tokens) for _ in range(BATCH)))
        together = time.monotonic() - began
        figures = f"{one_by_one:.2f} s one by one, {together:.2f} s as one batch: {one_by_one / together:.1f} times"
        if any(one.status_code != 200 or one.json()["usage"]["completion_tokens"] != tokens for one in done):
            raise Failed("not every answer was whole")
        if one_by_one < SPEEDUP[device] * together:
            raise Failed(figures)
        return figures

    return check


async def aborts(run: Run) -> str:
    """At a deadline the client is told, and the engine stops working on it."""
    calls = [asyncio.create_task(run.complete(4000, stream=True, timeout_ms=1500)) for _ in range(ABORTED)]
    peak = 0
    while not all(call.done() for call in calls):
        peak = max(peak, await run.running())
        await asyncio.sleep(0.05)
    began = time.monotonic()
    if told := sum("deadline_exceeded" not in call.result().text for call in calls):
        raise Failed(f"{told} of {ABORTED} were not told of their deadline")
    if not peak:
        raise Failed("nothing was seen at work in the engine, so nothing can have stopped there")
    while await run.running():
        if time.monotonic() - began > ABORT_S:
            raise Failed("the engine goes on with what nobody waits for")
        await asyncio.sleep(0.02)
    return f"{ABORTED} told; the engine, {peak} at work, was idle {1000 * (time.monotonic() - began):.0f} ms later"


def drains(device: str) -> Callable[[Run], Awaitable[str]]:
    """SIGTERM: what runs ends whole, newcomers are told, the exit code is 0."""

    async def check(run: Run) -> str:
        calls = [asyncio.create_task(run.complete(DRAIN_TOKENS[device], stream=True)) for _ in range(DRAINED)]
        while await run.running() < DRAINED:
            if any(call.done() for call in calls):
                raise Failed("an answer ended before the drain began")
        run.process.send_signal(signal.SIGTERM)
        while (await run.client.get("/readyz")).status_code == 200:
            if any(call.done() for call in calls):
                raise Failed("readiness did not fail at once")
        if (late := await run.complete(1)).status_code != 503:
            raise Failed(f"a newcomer got {late.status_code}")
        texts = [one.text for one in await asyncio.gather(*calls)]
        whole = sum(text.endswith("data: [DONE]\n\n") and '"error": {' not in text for text in texts)
        code = await asyncio.to_thread(run.process.wait, 60)
        if (whole, code) != (DRAINED, 0):
            raise Failed(f"{whole} of {DRAINED} streams whole, exit code {code}")
        return f"{whole} of {DRAINED} streams whole, newcomers got 503, exit code 0"

    return check


def leaves_nothing(folder: Path) -> Callable[[Run], Awaitable[str]]:
    """No process of the engine and no socket is left."""

    async def check(_: Run) -> str:
        end = time.monotonic() + ENGINE_GONE_S
        while left := _left(folder):
            if time.monotonic() > end:
                raise Failed(f"left: {left}")
            await asyncio.sleep(0.1)
        return "no process, no socket"

    return check


def _left(folder: Path) -> list[str]:
    """Sockets in the folder, and processes that know of it."""
    found = [str(path) for path in folder.iterdir()]
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and entry.name != str(os.getpid()):
            try:
                held = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            except OSError:
                continue  # it has ended, or belongs to another user
            if os.fsencode(folder) in held:
                found.append(f"process {entry.name}")
    return found


async def check_all(process: subprocess.Popen[bytes], url: str, device: str, folder: Path) -> Run:
    """Each check builds on those before it, so the first failure is the last row."""
    checks: list[tuple[str, Callable[[Run], Awaitable[str]]]] = [
        ("starts", starts),
        ("answers", answers),
        ("batch of 16", batches(device)),
        ("deadline aborts", aborts),
        ("drain", drains(device)),
        ("leaves nothing", leaves_nothing(folder)),
    ]
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False) as client:
        run, name = Run(process, client), ""
        try:
            async with asyncio.timeout(LIMIT_S):
                for name, check in checks:
                    print(f"{name} ...", file=sys.stderr, flush=True)
                    run.rows.append((name, "ok", await check(run)))
        except TimeoutError:
            run.rows.append((name, "FAILED", f"all took more than {LIMIT_S:.0f} s"))
        except (Failed, httpx.HTTPError, subprocess.TimeoutExpired) as error:
            run.rows.append((name, "FAILED", str(error) or repr(error)))
    return run


def main() -> int:
    """Run the checks and print the table; 0 if all went well."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", description=__doc__)
    parser.add_argument("model", nargs="?", help="default: the embedded one")
    parser.add_argument("--device", choices=tuple(SPEEDUP), default="cuda")
    given = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="tg-") as name:
        folder, log = Path(name, "run"), Path(name, "log")
        folder.mkdir()
        command = [sys.executable, "-m", "launcher", *([given.model] if given.model else [])]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--device", given.device, "--port", str(port)],
                env=os.environ | {"XDG_RUNTIME_DIR": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            run = asyncio.run(check_all(process, f"http://127.0.0.1:{port}", given.device, folder))
        finally:
            process.kill()  # if it still runs; its guard ends the engine
            process.wait()
        lines = log.read_text(errors="replace").splitlines()
    device = next((line for line in lines if "| device " in line), "")
    widths = [max(len(row[column]) for row in run.rows) for column in (0, 1)]
    print("\n".join(f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}" for row in run.rows))
    print(f"{run.model or given.model or 'embedded model'} on {device.partition('device')[2].strip() or given.device}")
    good = run.rows[-1][1] == "ok"
    if not good:
        print("\n".join(["the launcher's last lines:", *lines[-20:]]), file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
