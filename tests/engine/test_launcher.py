"""The launcher with real vLLM: it comes up, answers, comes back, and goes without leaving anything."""

import asyncio
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.engine.clients import read
from tests.engine.launched import START_S, Launcher, processes, session_of, words
from tests.engine.tiny_model import tiny_model
from tests.harness import COMPLETIONS, refused, until, wait_until
from tests.wire import data_of, events_of

pytestmark = pytest.mark.timeout(4 * START_S)


Launch = Callable[..., Launcher]


@pytest.fixture
def launch() -> Iterator[Launch]:
    made: list[Launcher] = []

    def start(*extra: str, flags: tuple[str, ...] = (), model: Path | None = None, **environment: str) -> Launcher:
        made.append(Launcher(*extra, flags=flags, model=model, environment=environment))
        return made[-1]

    yield start
    for one in made:
        session = one.engine()
        try:
            one.kill()
            one.leaves_nothing(session)
        finally:
            one.close()


async def test_it_starts_answers_outlives_its_engines_and_leaves_nothing(launch: Launch) -> None:
    """One launcher for several things, since a start takes long: each kind of process is killed, then Ctrl-C."""
    one = launch().ready()
    assert one.answers()
    assert one.ask("/v1/models")[1]["data"][0]["id"] == tiny_model().name
    for number, name in enumerate(["VLLM::Worker", ""], 1):  # the core: in test_two_engines
        before = one.engine()
        victims = one.engine(name) if name else [pid for pid in before if session_of(pid) == pid]  # the API server
        # A dead worker's API server lives long enough to say so itself, if it gets to that before its own end.
        await every_client_is_told_of_a_death(one, victims[0], {"engine_error", 500} if name else {"engine_error"})
        one.next_engine(number + 1)
        wait_until(one.answers, "an answer", within=START_S)
        assert not set(before) & processes().keys()
        assert one.ask("/stats")[1]["engine"]["restarts"] == number

    session = one.engine()
    assert len(session) >= 3
    one.signal(signal.SIGINT)
    assert one.exit_code(60) == 0
    one.leaves_nothing(session)
    assert not re.search(r"^Traceback", one.log, re.MULTILINE)


async def every_client_is_told_of_a_death(one: Launcher, victim: int, codes: set[str | int]) -> None:
    """Those whom it served get an error, later ones the time when to come back, all before the next engine is up."""
    ups, start_s = one.ups(), one.metrics().total("tidegate_engine_start_seconds")
    seen: list[bytes] = []
    async with (
        httpx.AsyncClient(base_url=one.base_url, timeout=START_S, trust_env=False) as client,
        client.stream("POST", COMPLETIONS, json=words(8000, stream=True)) as stream,
    ):
        reading = asyncio.create_task(read(stream.aiter_raw(), seen))
        plain = asyncio.create_task(client.post(COMPLETIONS, json=words(8000, stream=False)))
        await until(lambda: seen and one.ask("/stats")[1]["engine"]["running"] == 2, "work at the engine", within=60)
        assert not reading.done()
        assert not plain.done()
        killed_at = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        await reading
        *_, error, end = events_of(b"".join(seen))
        assert data_of(error)["error"]["code"] in codes
        assert end == b"data: [DONE]"
        answer = await plain
        if answer.status_code == 502:
            refused(answer, "engine_error")
        else:
            assert answer.status_code in codes
            assert answer.json()["error"]["code"] == answer.status_code
            assert answer.headers["x-should-retry"] == "false"
        await until(lambda: one.ask("/readyz")[0] == 503, "readiness to drop", within=60)
        late = await client.post(COMPLETIONS, json=words(4, stream=False))
    refused(late, "engine_unavailable")
    told_s, passed_s = int(late.headers["retry-after"]), time.monotonic() - killed_at
    # As long as the last start took, less what has passed, and the pause before it, of 3 s at most after two deaths.
    assert min(30, start_s) - passed_s <= told_s <= start_s + 3 + 1, (start_s, passed_s, told_s)
    assert one.ups() == ups, "all of this before the next engine is ready"


def test_a_flag_that_vllm_does_not_know_ends_it_with_vllms_own_words(launch: Launch) -> None:
    one = launch("--no-such-flag")
    assert one.exit_code(START_S) == 1
    shown, reason = one.log.splitlines()[-2:]
    assert shown == "engine   | api_server.py: error: unrecognized arguments: --no-such-flag"
    assert one.log.count(f"{shown}\n") == 2, "as it came, and again next to the reason"
    assert reason.startswith("tidegate: ")
    assert reason.endswith("error: unrecognized arguments: --no-such-flag")
    assert not re.search(r"^Traceback", one.log, re.MULTILINE)
    assert "restart" not in one.log


def test_an_engine_that_fails_deep_inside_ends_it_with_the_root_cause(launch: Launch) -> None:
    """The worker says why; what the processes above it say comes later and is only a consequence."""
    one = launch("--max-model-len", "8k", "--kv-cache-memory-bytes", str(10**6), flags=("--no-preflight",))
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
