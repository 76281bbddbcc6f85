"""What a newcomer gets from `python -m launcher`: a real model, asked with the SDK, and a clean end."""

import signal
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.engine.conftest import Note
from tests.engine.real import START_S
from tests.harness import Child, free_port, refused, wait_until
from tests.wire import CHAT

STOP_S = 60.0


class Launched(Child):
    """The launcher with gateway and engine."""

    def __init__(self) -> None:
        super().__init__("launcher")
        self.port = free_port()
        self.spawn("launcher", ["--port", str(self.port)], {})
        self.early: httpx.Response | None = None  # what a call got while the engine was loading

    @property
    def base_url(self) -> str:
        """For SDKs."""
        return f"http://127.0.0.1:{self.port}/v1"

    def wait(self) -> None:
        """Until it is ready."""
        with httpx.Client(base_url=self.base_url.removesuffix("/v1"), trust_env=False, timeout=START_S) as client:

            def answers() -> bool:
                assert self.running, f"the launcher ended with {self.exit_code()}:\n{self.log}"
                try:
                    if self.early is None:
                        self.early = client.post(CHAT, json={})
                    return client.get("/readyz").status_code == 200
                except httpx.ConnectError:
                    return False

            wait_until(answers, "readiness", within=START_S)


@pytest.fixture(scope="module")
def launched() -> Iterator[Launched]:
    with Launched() as launcher:
        launcher.wait()
        yield launcher
        launcher.signal(signal.SIGTERM)
        assert launcher.exit_code(STOP_S) == 0, launcher.log
        own = [line for line in launcher.log.splitlines() if not line.startswith("engine   |")]
        assert not [line for line in own if "Traceback" in line], launcher.log


def test_the_model_knows_the_capital_of_france(launched: Launched, note: Note) -> None:
    with openai.OpenAI(base_url=launched.base_url, api_key="unused") as client:
        (model,) = client.models.list().data
        answer = client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=32,
        )
    note("answer", repr(answer.choices[0].message.content))
    assert "Paris" in (answer.choices[0].message.content or "")


def test_a_call_while_the_engine_loads_is_told_so(launched: Launched) -> None:
    assert launched.early is not None
    refused(launched.early, "engine_unavailable")
