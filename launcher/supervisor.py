"""Keeps an engine running: starts it, waits until it is ready, starts it again when it dies, and ends all of it."""

import asyncio
import contextlib
import os
import random
import re
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from app.status import EngineStatus
from launcher.command import Plan
from launcher.device import oom_kills
from launcher.guard import GONE_S, Guard, kill_all
from launcher.niceness import give_way

WINDOW_S: Final = 600.0  # in which restarts are counted
LONGEST_DELAY_S: Final = 20.0  # between two starts, before jitter
START_S: Final = 7200.0  # for one start; a large model may have to be downloaded
GRACE_S: Final = 5.0  # for an engine without requests to end by itself
PROBE_S: Final = 0.25
LOOK_EVERY_S: Final = 1.0
OOM_LOOKS: Final = 30  # a busy machine takes 10 s to end an API server whose worker was killed
TELL_EVERY_S: Final = 5.0
LAST_LINES: Final = 40
LONGEST_LINE: Final = 2000  # characters; the rest of a line is left out
USAGE: Final = 2  # argparse's exit code: a second start would not like the arguments better
# A child runs only once the guard knows it: if the launcher ends before that, `read` fails.
GATED: Final = ("/bin/sh", "-c", 'read -r go && exec "$@" </dev/null', "engine")
ERROR: Final = re.compile(r"(?:^|[\s\]])((?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?::\s.+)?|error: .+)$")
HEARSAY: Final = re.compile(r"root cause|EngineDeadError|initialization failed|Engine process failed")


class EngineFailed(Exception):
    """The engine will not be started again; the text says why, `lines` holds its last output."""

    def __init__(self, text: str, lines: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.lines = list(lines)


class Output:
    """What an engine says: its last lines, and the error among them that is a cause, not the consequence of one."""

    def __init__(self, show: Callable[[str], None], secrets: Sequence[str] = ()) -> None:
        self._show = show
        self._secrets = [secret for secret in secrets if secret]
        self._unfinished = False
        self.muted = False
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        self.reason = ""

    async def read(self, pipe: int) -> None:
        """Take in and close a whole pipe; a progress bar's carriage returns end lines too."""
        stream, rest = asyncio.StreamReader(), b""
        protocol = asyncio.StreamReaderProtocol(stream)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(pipe, "rb", 0))
        try:
            while data := await stream.read(65536):
                *lines, rest = re.split(rb"[\r\n]+", rest + data)
                for line in lines:
                    self.add(line)
                rest = rest[: 4 * LONGEST_LINE]
            self.add(rest)
        finally:
            transport.close()

    def add(self, raw: bytes) -> None:
        """Take in one line."""
        line = raw.decode(errors="replace")[:LONGEST_LINE].rstrip()
        for secret in self._secrets:
            line = line.replace(secret, "***")
        if not line:
            return
        if self._unfinished:
            self.reason += ": " + line.rpartition("] ")[2].strip()
        found = ERROR.search(line)
        if found and not HEARSAY.search(line):
            self.reason = found[1]
        self._unfinished = found is not None and "validation error" in line  # pydantic says in the next line which
        self.lines.append(line)
        if not self.muted:
            self._show(line)


@dataclass(kw_only=True)
class Supervisor:
    """One engine after another. `say` gets lines for people, `show` the engine's own, `greet` its model when ready."""

    plan: Plan
    status: EngineStatus
    guard: Guard
    max_restarts: int
    say: Callable[[str], None]
    show: Callable[[str], None]
    greet: Callable[[str], None]
    secrets: Sequence[str] = ()
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep  # between two starts
    clock: Callable[[], float] = time.monotonic
    oom_kills: Callable[[], int] = oom_kills
    _restarts: deque[float] = field(default_factory=deque)
    _was_ready: bool = False
    _pause_s: float = 0.0
    _oom_kills: int = 0  # before this engine, later a little while ago

    async def run(self) -> None:
        """Keep an engine running until cancelled, then end it and all its processes.

        Raises:
            EngineFailed: it could not start, or has died too often.
        """
        while True:
            output = Output(self.show, self.secrets)
            process, reading = await self._start(output)
            gently = True
            try:
                cause, how = await self._watch(process)
                gently = False
                last = self._judge(process, cause, how)  # so the gateway knows before the remains are cleared away
            finally:
                output.muted = gently  # vLLM's complaints about being ended would alarm without reason
                await _whole(self._end(process, reading, gently=gently))
            if last:
                raise EngineFailed(f"{how}: {output.reason}" if output.reason else how, output.lines)
            await self.sleep(self._pause_s)

    async def _start(self, output: Output) -> tuple[Process, asyncio.Task[None]]:
        self.status.start_begins()
        self._oom_kills = self.oom_kills()
        self.plan.socket.unlink(missing_ok=True)  # vLLM never removes one
        # Not asyncio's pipe: it would not tell of the end of a process while a child of that holds the other side.
        mouth, tail = os.pipe()
        process = await asyncio.create_subprocess_exec(
            *GATED, *self.plan.argv, env=self.plan.env, stdin=PIPE, stdout=tail, stderr=tail, start_new_session=True
        )
        os.close(tail)
        reading = asyncio.create_task(output.read(mouth))
        assert process.stdin is not None
        self.guard.watch(process.pid)
        give_way(process.pid, self.plan.niceness)
        process.stdin.write(b"go\n")
        process.stdin.close()
        return process, reading

    async def _watch(self, process: Process) -> tuple[str, str]:
        """Wait until this engine has to be given up; a word for the metrics, and how it came about."""
        stall, loss = asyncio.Event(), asyncio.Event()
        self.status.on_stall, self.status.on_loss = stall.set, loss.set
        exited = asyncio.create_task(process.wait())
        stalled, lost = asyncio.create_task(stall.wait()), asyncio.create_task(loss.wait())
        ready = asyncio.create_task(self._until_ready())
        looks = asyncio.create_task(self._look_around(process.pid))
        try:
            await asyncio.wait([exited, ready], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                how = (
                    f"could not start ({self._ending(exited.result())[1]})"
                    if exited.done()
                    else f"was not ready after {START_S:.0f} s"
                )
                return "start", f"the engine {how}"
            self._was_ready = True
            self.status.start_succeeded()
            self.greet(ready.result())
            await asyncio.wait([exited, stalled, lost], return_when=asyncio.FIRST_COMPLETED)
            if lost.done():  # its server tells the open requests, then ends by itself
                await asyncio.wait([exited], timeout=GRACE_S)
                if not exited.done():
                    cause = "oom" if self.oom_kills() > self._oom_kills else "exit"
                    return cause, "the engine is dead, its server is not"
            if stalled.done():
                return "stalled", "the engine has stalled: it holds requests and does nothing for them"
            cause, ending = self._ending(exited.result())
            return cause, f"the engine has ended ({ending})"
        finally:
            for task in (exited, stalled, lost, ready, looks):
                task.cancel()

    async def _look_around(self, group: int) -> None:
        """Replace a guard that was killed, and forget kills for memory that this engine has outlived."""
        counts = deque([self._oom_kills], OOM_LOOKS)
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.guard.stay(group)
            counts.append(self.oom_kills())
            self._oom_kills = counts[0]

    def _ending(self, code: int) -> tuple[str, str]:
        """What an exit code stands for, as a word for the metrics and for people.

        The kernel may have killed a worker for its memory; the API server then ends by itself."""
        name = signal.Signals(-code).name if code < 0 else ""
        ending = f"killed by {name}" if name else f"exit code {code}"
        if self.oom_kills() > self._oom_kills:
            return "oom", f"{ending}: out of memory"
        return "killed" if name else "exit", ending + (": out of memory?" if name == "SIGKILL" else "")

    async def _until_ready(self) -> str:
        """Wait until the engine is healthy and lists its model, whose name is returned."""
        began = told = time.monotonic()
        key = self.plan.env.get("VLLM_API_KEY")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        transport = httpx.AsyncHTTPTransport(uds=str(self.plan.socket))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", headers=headers) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError, ValueError, LookupError, TypeError):
                    if (await client.get("/health")).status_code == 200:
                        return str((await client.get("/v1/models")).json()["data"][0]["id"])
                await asyncio.sleep(PROBE_S)
                if time.monotonic() - told > TELL_EVERY_S:
                    told = time.monotonic()
                    last = self.status.last_start_s
                    usual = f" (last time it took {last:.0f} s)" if last else ""
                    self.say(f"the engine is starting: {told - began:.0f} s{usual}")

    def _judge(self, process: Process, cause: str, how: str) -> bool:
        """Whether this was the last engine."""
        now = self.clock()
        while self._restarts and now - self._restarts[0] > WINDOW_S:
            self._restarts.popleft()
        hopeless = not self._was_ready or (cause == "start" and process.returncode == USAGE)
        if hopeless or len(self._restarts) >= self.max_restarts:
            self.status.gave_up()
            return True
        # About 1 s at first, doubled with each restart in the window; several launchers don't start in step.
        self._pause_s = min(LONGEST_DELAY_S, 2.0 ** len(self._restarts)) * random.uniform(1, 1.5)
        self._restarts.append(now)
        self.status.engine_died(cause, self._pause_s)
        count = f"{len(self._restarts)} of at most {self.max_restarts} in {WINDOW_S / 60:.0f} minutes"
        self.say(f"{how}; restart {count}, in {self._pause_s:.0f} s")
        return False

    async def _end(self, process: Process, reading: asyncio.Task[None], *, gently: bool) -> None:
        """See the whole process group gone, and its socket; the next engine needs the memory of this one."""
        if gently and process.returncode is None:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await process.wait()
                    # Its helpers remove their shared memory when they end by themselves.
                    while kill_all(process.pid, 0):  # noqa: ASYNC110  nobody tells of their end
                        await asyncio.sleep(0.02)
        end = time.monotonic() + GONE_S
        while left := kill_all(process.pid):
            if time.monotonic() > end:
                raise EngineFailed(f"the engine's processes {left} cannot be killed: is a driver holding them?")
            await asyncio.sleep(0.02)
        await process.wait()
        self.guard.watch(0)
        await asyncio.wait([reading], timeout=1)  # whoever has left the group may hold the pipe open
        reading.cancel()
        self.plan.socket.unlink(missing_ok=True)


async def _whole(work: Coroutine[Any, Any, None]) -> None:
    """Do all of it, and be cancelled only then."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
