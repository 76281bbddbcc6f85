"""The supervisor with an engine that dies, hangs and leaves processes behind as told."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from app.status import EngineState, EngineStatus
from launcher import supervisor as module
from launcher.command import Plan
from launcher.guard import Guard
from launcher.supervisor import EngineFailed, Output, Supervisor
from tests.harness import until
from tests.unit.launcher_engine import is_alive

SCRIPT = Path(__file__).with_name("launcher_engine.py")
FOREVER: dict[str, Any] = {}
LOOPS = {"uvloop": uvloop.new_event_loop}  # the launcher's


class House:
    """A supervisor with everything around it."""

    def __init__(self, folder: Path, lives: list[dict[str, Any]], **options: Any) -> None:
        self.folder = folder
        self.notes_file = folder.with_name("notes")
        self.status = EngineStatus()
        self.said: list[str] = []
        self.shown: list[str] = []
        self.greeted: list[str] = []
        self.slept: list[float] = []
        env = {"FAKE_ENGINE": json.dumps(lives), "FAKE_NOTES": str(self.notes_file), "PATH": os.environ["PATH"]}
        socket = folder / "engine.sock"
        argv = [sys.executable, "-I", "-S", str(SCRIPT), "--uds", str(socket)]
        given: dict[str, Any] = {"max_restarts": 5, "sleep": self._sleep, "oom_kills": lambda: 0} | options
        self.supervisor = Supervisor(
            plan=Plan(argv, env, socket, 1, "float32"),
            status=self.status,
            guard=Guard(folder),
            say=self.said.append,
            show=self.shown.append,
            greet=self.greeted.append,
            **given,
        )

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)

    @property
    def notes(self) -> list[dict[str, Any]]:
        lines = self.notes_file.read_text().splitlines() if self.notes_file.exists() else []
        return [json.loads(line) for line in lines]

    @property
    def ready(self) -> bool:
        return self.status.state is EngineState.READY

    @property
    def survivors(self) -> list[int]:
        return [pid for note in self.notes for pid in note["pids"] if is_alive(pid)]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run it; leaving the block ends it, and must leave nothing behind."""
        task = asyncio.create_task(self.supervisor.run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert not self.survivors
            assert not (self.folder / "engine.sock").exists()

    async def fails(self) -> EngineFailed:
        with pytest.raises(EngineFailed) as caught:
            await asyncio.wait_for(self.supervisor.run(), 30)
        assert not self.survivors
        assert self.status.state is EngineState.DEAD
        return caught.value


MakeHouse = Callable[..., House]


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "PROBE_S", 0.02)
    monkeypatch.setattr(module, "GRACE_S", 1.0)
    made: list[House] = []

    def make(*lives: dict[str, Any], **options: Any) -> House:
        folder = tmp_path / "private"
        folder.mkdir()
        made.append(House(folder, list(lives), **options))
        return made[-1]

    yield make
    for one in made:
        one.supervisor.guard.close()
        assert not one.folder.exists()


async def test_a_healthy_engine_is_ready_and_leaves_nothing_behind(house: MakeHouse) -> None:
    one = house({"child": True, "say": ["hello"]})
    async with one.running():
        await until(lambda: one.ready)
        assert one.greeted == ["fake-model"]
        assert one.shown == ["hello"]
        assert one.status.last_start_s is not None
    assert len(one.notes) == 1


async def test_what_an_engine_says_when_it_is_ended_alarms_nobody(house: MakeHouse) -> None:
    one = house({"say": ["hello"], "moan": "EngineDeadError: why?"})
    async with one.running():
        await until(lambda: one.ready)
    assert one.shown == ["hello"]


@pytest.mark.parametrize(
    ("how", "text"),
    [({"exit": 0}, "exit code 0"), ({"exit": 1}, "exit code 1"), ({"signal": signal.SIGSEGV}, "killed by SIGSEGV")],
)
async def test_an_engine_that_ends_before_it_is_ready_is_not_waited_for(
    house: MakeHouse, how: dict[str, Any], text: str
) -> None:
    one = house({"child": True, "say": ["ValueError: no such dtype"]} | how)
    failed = await one.fails()
    assert text in str(failed)
    assert "ValueError: no such dtype" in str(failed)
    assert failed.lines == ["ValueError: no such dtype"]
    assert len(one.notes) == 1


async def test_out_of_memory_is_named_when_the_kernel_kills(house: MakeHouse) -> None:
    assert "out of memory?" in str(await house({"signal": signal.SIGKILL}).fails())


async def test_a_worker_that_the_kernel_killed_for_memory_is_the_cause_whatever_the_exit_code(house: MakeHouse) -> None:
    one: House = house({"after": 0.2, "exit": 0}, FOREVER, oom_kills=lambda: 7 + one.ready)
    async with one.running():
        await until(lambda: one.ready and len(one.notes) == 2)
        assert one.status.restarts == {"oom": 1}
        assert "the engine has ended (exit code 0: out of memory)" in one.said[-1]


async def test_a_kill_for_memory_that_the_engine_has_outlived_is_not_its_cause(
    house: MakeHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a container the count is the whole machine's, and an engine lives for weeks."""
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.02)
    one: House = house(FOREVER, oom_kills=lambda: 7 + one.ready)
    async with one.running():
        await until(lambda: one.supervisor._oom_kills == 8)
        os.kill(one.notes[0]["pids"][0], signal.SIGTERM)
        await until(lambda: len(one.notes) == 2)
        assert one.status.restarts == {"killed": 1}


@pytest.mark.parametrize(
    ("how", "cause"), [({"exit": 0}, "exit"), ({"exit": 1}, "exit"), ({"signal": signal.SIGSEGV}, "killed")]
)
async def test_an_engine_that_dies_is_started_again(house: MakeHouse, how: dict[str, Any], cause: str) -> None:
    one = house({"after": 0.3} | how, FOREVER)
    async with one.running():
        await until(lambda: one.status.restarts[cause] == 1)
        await until(lambda: one.ready and len(one.notes) == 2)
        assert len(one.greeted) == 2
        assert "restart 1 of at most 5" in one.said[-1]


async def test_a_dead_engines_worker_is_gone_before_the_next_start(house: MakeHouse) -> None:
    one = house({"after": 0.2, "exit": 1, "child": True}, FOREVER)
    async with one.running():
        await until(lambda: len(one.notes) == 2)
        assert one.notes[1]["leftovers"] == []


async def test_a_stalled_engine_is_killed_and_started_again(house: MakeHouse) -> None:
    one = house({"deaf": True, "child": True}, FOREVER)
    async with one.running():
        await until(lambda: one.ready)
        one.status.stall_begins()
        await until(lambda: one.ready and len(one.notes) == 2)
        assert one.status.restarts == {"stalled": 1}
        assert one.status.stalls == 1
        assert one.notes[1]["leftovers"] == []


async def test_a_server_that_outlives_its_engine_may_end_by_itself(house: MakeHouse) -> None:
    one = house({"after": 0.5, "exit": 3}, FOREVER)
    async with one.running():
        await until(lambda: one.ready)
        one.status.lost()
        assert not one.ready
        await until(lambda: one.ready and len(one.notes) == 2)
        assert one.status.restarts == {"exit": 1}
        assert "exit code 3" in one.said[-1]


async def test_a_server_that_outlives_its_engine_for_long_is_killed(house: MakeHouse) -> None:
    one = house({"deaf": True, "child": True}, FOREVER)
    async with one.running():
        await until(lambda: one.ready)
        one.status.lost()
        await until(lambda: one.ready and len(one.notes) == 2)
        assert one.status.restarts == {"exit": 1}
        assert one.notes[1]["leftovers"] == []
        assert "the engine is dead, its server is not" in one.said[-1]


async def test_an_engine_that_hangs_at_its_start_can_be_ended(house: MakeHouse) -> None:
    one = house({"hang": True, "deaf": True, "child": True})
    async with one.running():
        await until(lambda: one.notes)


async def test_a_guard_that_is_killed_is_replaced_while_the_engine_runs(
    house: MakeHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.02)
    one = house(FOREVER)
    async with one.running():
        await until(lambda: one.ready)
        killed = one.supervisor.guard._process
        killed.kill()
        await until(lambda: one.supervisor.guard._process is not killed)
        one.supervisor.guard.close()  # as after a launcher that is killed
        await until(lambda: not is_alive(one.notes[0]["pids"][0]))
        one.supervisor.guard = Guard(one.folder)


async def test_how_long_a_start_has_taken_is_told_again_and_again(
    house: MakeHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TELL_EVERY_S", 0.6)
    one = house({"hang": True})
    async with one.running():
        await until(lambda: len(one.said) == 3)
    assert all(re.fullmatch(r"the engine is starting: \d+ s", line) for line in one.said)
    assert one.said[0] != one.said[-1]


async def test_a_crash_loop_ends_after_growing_pauses(house: MakeHouse) -> None:
    one = house({"after": 0.2, "exit": 1, "say": ["RuntimeError: device lost"]})
    failed = await one.fails()
    assert "RuntimeError: device lost" in str(failed)
    assert len(one.notes) == 6  # the first start and five restarts
    assert len(set(one.slept)) == 5
    assert sum(one.status.restarts.values()) == 5
    for number, pause in enumerate(one.slept):
        assert 2**number <= pause <= min(30, 1.5 * 2**number)


async def test_restarts_are_forgotten_after_ten_minutes(house: MakeHouse) -> None:
    now = iter(range(0, 100_000, 601))
    one = house(*[{"after": 0.2, "exit": 1}] * 4, FOREVER, max_restarts=1, clock=lambda: next(now))
    async with one.running():
        await until(lambda: one.ready and len(one.notes) == 5)
        assert all(1 <= pause <= 1.5 for pause in one.slept)


async def test_no_restart_where_none_is_allowed(house: MakeHouse) -> None:
    one = house({"after": 0.2, "exit": 1}, max_restarts=0)
    await one.fails()
    assert len(one.notes) == 1


async def test_a_start_that_fails_counts_as_a_restart(house: MakeHouse) -> None:
    one = house({"after": 0.2, "exit": 1}, {"exit": 1}, FOREVER)
    async with one.running():
        await until(lambda: one.ready and len(one.notes) == 3)
        assert one.status.restarts == {"exit": 1, "start": 1}


async def test_a_usage_error_is_never_tried_again(house: MakeHouse) -> None:
    one = house({"after": 0.2, "exit": 1}, {"exit": 2, "say": ["api_server.py: error: unrecognized arguments: --x"]})
    assert "error: unrecognized arguments: --x" in str(await one.fails())
    assert len(one.notes) == 2


async def test_cancelled_during_a_pause_it_ends_at_once(house: MakeHouse) -> None:
    async def forever(_: float) -> None:
        await asyncio.sleep(600)

    sleep: Callable[[float], Awaitable[None]] = forever
    one = house({"after": 0.2, "exit": 1}, sleep=sleep)
    async with one.running():
        await until(lambda: one.status.state is EngineState.RESTARTING)


def lines_of(*lines: str, secrets: tuple[str, ...] = ()) -> Output:
    output = Output(lambda _: None, secrets)
    for line in lines:
        output.add(line.encode())
    return output


WORKER = "(Worker pid=7) ERROR 11-29 15:17:29 [multiproc_executor.py:906] "


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["usage: x", "api_server.py: error: argument --dtype: invalid"], "error: argument --dtype: invalid"),
        (
            [
                f"{WORKER}ValueError: Available memory on node 0 is less than requested memory for kv",
                "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
            ],
            "ValueError: Available memory on node 0 is less than requested memory for kv",
        ),
        (
            [
                "pydantic_core._pydantic_core.ValidationError: 1 validation error for Model",
                "  Value error, unknown [type=x]",
            ],
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for Model: Value error, unknown [type=x]",
        ),
        (
            ["OSError: a/b is not a local folder and is not a valid model"],
            "OSError: a/b is not a local folder and is not a valid model",
        ),
        ([f"{WORKER}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See"], ""),
        (["torch.OutOfMemoryError: CUDA out of memory."], "torch.OutOfMemoryError: CUDA out of memory."),
        (["INFO: nothing to see, not even an error"], ""),
    ],
)
def test_the_root_cause_is_found_in_what_vllm_says(lines: list[str], reason: str) -> None:
    assert lines_of(*lines).reason == reason


def test_secrets_are_not_shown() -> None:
    assert lines_of("non-default args: {'hf_token': 'hf_abc'}", secrets=("hf_abc", "")).lines[0].count("***") == 1


def test_only_the_last_lines_are_kept() -> None:
    assert list(lines_of(*map(str, range(100))).lines) == [str(number) for number in range(60, 100)]


async def test_a_line_without_end_stays_bounded() -> None:
    output = lines_of()
    mouth, tail = os.pipe()
    reading = asyncio.create_task(output.read(mouth))
    with os.fdopen(tail, "wb") as pipe:
        for _ in range(20):
            await asyncio.to_thread(pipe.write, b"x" * 60_000)
        pipe.write(b"\nloading 50%\rloading 100%\r\nlast")
    await reading
    assert [len(line) for line in output.lines] == [module.LONGEST_LINE, 11, 12, 4]
