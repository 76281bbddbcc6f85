"""Real vLLM for tests: started with the launcher's arguments, reached past the gateway, ended with its whole group."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from launcher.command import Model, make_plan
from launcher.device import find
from launcher.niceness import give_way
from tests.harness import ROOT, Child, Metrics, UnixConnection
from tests.wire import Answer

SLOTS = 16  # sequences that the engine runs at once; more of them wait inside it
LOAD = ("vllm:num_requests_running", "vllm:num_requests_waiting")
CONTEXT = 8192  # tokens; the model's own
MODEL = "tiny"  # the name that clients use
# More than the launcher says: tool calls for a model that isn't the embedded one, and memory for others.
EXTRA = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--kv-cache-memory-bytes", str(2**30))
START_S = 600.0  # a busy machine needs minutes; an engine that ends is noticed at once
STOP_S = 20.0


class Vllm(Child):
    """vLLM on a Unix socket in a process group of its own."""

    def __init__(self, model: Path, extra: Sequence[str] = EXTRA) -> None:
        super().__init__("vllm")
        self.socket_path = Path(self.folder.name, "e.sock")
        plan = make_plan(
            find("auto"), Model(str(model), MODEL), self.socket_path, extra, os.environ, max_in_flight=SLOTS
        )
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                plan.argv,
                cwd=self.folder.name,
                env=plan.env | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        give_way(self.process.pid, plan.niceness)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """For `TIDEGATE_ENGINE_URL`."""
        return f"unix://{self.socket_path}"

    def _wait(self) -> None:
        end = time.monotonic() + START_S
        while True:
            assert self.running, f"vLLM ended with {self.exit_code()}:\n{self.log[-5000:]}"
            assert time.monotonic() < end, f"vLLM is not ready after {START_S:g} s:\n{self.log[-5000:]}"
            with suppress(OSError):
                if self.ask("GET", "/health").status_code == 200:
                    return
            time.sleep(0.1)

    def ask(self, method: str, path: str, body: bytes | None = None) -> Answer:
        """What the engine itself says, without the gateway."""
        with closing(UnixConnection(str(self.socket_path))) as line:
            line.request(method, path, body, {"content-type": "application/json"} if body is not None else {})
            got = line.getresponse()
            return Answer(got.status, {name.lower(): value for name, value in got.getheaders()}, got.read(), True)

    def token(self, text: str) -> int:
        """The id of a text that is one token."""
        body = json.dumps({"model": MODEL, "prompt": text, "add_special_tokens": False}).encode()
        (token,) = self.ask("POST", "/tokenize", body).json()["tokens"]
        return int(token)

    def metrics(self) -> Metrics:
        """Its own `/metrics`, parsed."""
        return Metrics(self.ask("GET", "/metrics").body.decode())

    def kill(self) -> None:
        """End it politely, then by force, and wait for its workers too."""
        assert self.process is not None
        self.signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        end = time.monotonic() + STOP_S
        with suppress(ProcessLookupError):
            while time.monotonic() < end:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.poll()
                time.sleep(0.05)


def load(seen: Metrics) -> tuple[int, int]:
    """Requests that the engine runs, and those that wait inside it."""
    running, waiting = (int(seen.total(name)) for name in LOAD)
    return running, waiting
