"""The launcher with real vLLM: it comes up, answers, comes back, and goes without leaving anything."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny_model import tiny_model
from tests.harness import Child, free_port, wait_until

Json = dict[str, Any]
START_S = 600.0  # a busy machine needs minutes; an engine that ends is noticed at once
pytestmark = pytest.mark.timeout(4 * START_S)


class Launcher(Child):
    """`python -m launcher` with the tiny model, in a folder for its sockets that the test can look into."""

    def __init__(self, *extra: str, model: Path | None = None, environment: dict[str, str] | None = None) -> None:
        super().__init__("launcher")
        self.run = Path(self.folder.name, "run")
        self.run.mkdir()
        self.port = free_port()
        small = ("--kv-cache-memory-bytes", str(2**30))
        arguments = [str(model or tiny_model()), "--port", str(self.port), "--", *small, *extra]
        self.spawn("launcher", arguments, {"XDG_RUNTIME_DIR": str(self.run)} | (environment or {}))

    def ready(self) -> "Launcher":
        wait_until(lambda: not self.running or "ready: " in self.log, "a ready engine", within=START_S)
        assert self.running, self.log[-5000:]
        return self

    def ask(self, path: str, body: Json | None = None) -> tuple[int, Json]:
        import http.client

        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            sent = json.dumps(body) if body is not None else None
            line.request("POST" if sent else "GET", path, sent, {"content-type": "application/json"})
            answer = line.getresponse()
            return answer.status, json.loads(answer.read() or b"{}")
        except OSError:
            return 0, {}
        finally:
            line.close()

    def answers(self) -> bool:
        body = {"model": tiny_model().name, "prompt": "a", "max_tokens": 4, "ignore_eos": True}
        status, answer = self.ask("/v1/completions", body)
        return status == 200 and answer["usage"]["completion_tokens"] == 4

    def engine(self, name: str = "") -> list[int]:
        """Live processes of the engine: those of the session whose leader has our folder in its command line."""
        return [pid for pid, text in processes().items() if text.startswith(name) and pid in self.sessions()]

    def sessions(self) -> set[int]:
        leaders = {pid for pid, text in processes().items() if str(self.run) in text and "guard" not in text}
        return {pid for pid in processes() if session_of(pid) in leaders}

    def leaves_nothing(self, session: list[int]) -> None:
        wait_until(lambda: not [pid for pid in session if pid in processes()], "the end of every process", within=60)
        wait_until(lambda: not list(self.run.iterdir()), "the removal of every socket", within=60)


def processes() -> dict[int, str]:
    """Live processes and their titles."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            if title:  # a zombie has none
                found[int(entry.name)] = title
    return found


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


Launch = Callable[..., Launcher]


@pytest.fixture
def launch() -> Iterator[Launch]:
    made: list[Launcher] = []

    def start(*extra: str, model: Path | None = None, **environment: str) -> Launcher:
        made.append(Launcher(*extra, model=model, environment=environment))
        return made[-1]

    yield start
    for one in made:
        session = one.engine()
        try:
            one.kill()
            one.leaves_nothing(session)
        finally:
            one.close()


def test_it_starts_answers_outlives_its_engines_and_leaves_nothing(launch: Launch) -> None:
    """One launcher for several things, since a start takes long: each kind of process is killed, then Ctrl-C."""
    one = launch().ready()
    assert one.answers()
    assert one.ask("/v1/models")[1]["data"][0]["id"] == tiny_model().name
    for number, name in enumerate(["VLLM::EngineCore", "VLLM::Worker", ""], 1):
        before = one.engine()
        victims = one.engine(name) if name else [pid for pid in before if session_of(pid) == pid]  # the API server
        os.kill(victims[0], signal.SIGKILL)
        wait_until(lambda: one.ask("/readyz")[0] == 503, "readiness to drop", within=60)
        again = lambda wanted=number + 1: one.log.count("ready: ") == wanted or not one.running  # noqa: E731
        wait_until(again, f"an engine after the end of {name or 'the API server'}", within=START_S)
        wait_until(one.answers, "an answer", within=START_S)
        assert not set(before) & processes().keys()
        assert one.ask("/stats")[1]["engine"]["restarts"] == number

    session = one.engine()
    assert len(session) >= 3
    one.signal(signal.SIGINT)
    assert one.exit_code(60) == 0
    one.leaves_nothing(session)
    assert not re.search(r"^Traceback", one.log, re.MULTILINE)


def test_a_killed_launcher_leaves_no_engine_and_no_socket(launch: Launch) -> None:
    one = launch().ready()
    session = one.engine()
    assert len(session) >= 3
    one.kill()
    one.leaves_nothing(session)


def test_a_flag_that_vllm_does_not_know_ends_it_with_vllms_own_words(launch: Launch) -> None:
    one = launch("--no-such-flag")
    assert one.exit_code(START_S) == 1
    assert "engine   | api_server.py: error: unrecognized arguments: --no-such-flag" in one.log
    assert one.log.splitlines()[-1].endswith("error: unrecognized arguments: --no-such-flag")
    assert not re.search(r"^Traceback", one.log, re.MULTILINE)
    assert "restart" not in one.log


def test_an_engine_that_fails_deep_inside_ends_it_with_the_root_cause(launch: Launch) -> None:
    """The worker says why; what the processes above it say comes later and is only a consequence."""
    one = launch("--max-model-len", "8k", "--kv-cache-memory-bytes", str(10**6))
    began = time.monotonic()
    assert one.exit_code(START_S) == 1
    last = one.log.splitlines()[-1]
    assert "ValueError: To serve at least one request" in last, one.log[-5000:]
    assert time.monotonic() - began < START_S


def test_a_local_model_without_template_says_so_itself(launch: Launch, tmp_path: Path) -> None:
    """Offline: a local model needs no hub, and the engine's own error reaches the client word for word."""
    model = tmp_path / "plain"
    shutil.copytree(tiny_model(), model)
    (model / "chat_template.jinja").unlink()
    one = launch(model=model, HF_ENDPOINT="http://127.0.0.1:1").ready()
    status, answer = one.ask("/v1/chat/completions", {"model": "plain", "messages": [{"role": "user", "content": "a"}]})
    assert status == 400
    assert "chat template" in answer["error"]["message"]
