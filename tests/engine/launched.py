"""`python -m launcher` with real vLLM, and a look at all of its processes."""

import http.client
import json
import os
from pathlib import Path
from typing import Any

import httpx

from tests.engine.tiny_model import tiny_model
from tests.harness import Child, Metrics, free_port, wait_until

Json = dict[str, Any]
START_S = 600.0  # a busy machine needs minutes; an engine that ends is noticed at once


class Launcher(Child):
    """`python -m launcher` with the tiny model, in a folder for its sockets that the test can look into."""

    def __init__(
        self,
        *extra: str,
        flags: tuple[str, ...] = (),
        model: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        super().__init__("launcher")
        self.run = Path(self.folder.name, "run")
        self.run.mkdir()
        self.port = free_port()
        small = ("--kv-cache-memory-bytes", str(2**30))
        arguments = [str(model or tiny_model()), "--port", str(self.port), *flags, "--", *small, *extra]
        self.spawn("launcher", arguments, {"XDG_RUNTIME_DIR": str(self.run)} | (environment or {}))

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ready(self) -> "Launcher":
        wait_until(lambda: not self.running or "ready: " in self.log, "a ready engine", within=START_S)
        assert self.running, self.log[-5000:]
        return self

    def ask(self, path: str, body: Json | None = None) -> tuple[int, Json]:
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
        status, answer = self.ask("/v1/completions", words(4, stream=False))
        return status == 200 and answer["usage"]["completion_tokens"] == 4

    def metrics(self) -> Metrics:
        return Metrics(httpx.get(f"{self.base_url}/metrics", timeout=60, trust_env=False).text)

    def ups(self) -> int:
        """How many engines have been ready so far."""
        return self.log.count("ready: ")

    def next_engine(self, number: int) -> None:
        """Wait until the engine of that number is ready."""
        wait_until(lambda: self.ups() >= number or not self.running, "another engine", within=START_S)
        assert self.running, self.log[-5000:]

    def engine(self, name: str = "") -> list[int]:
        """Live processes of the engine: those of the session whose leader has our folder in its command line."""
        return [pid for pid, text in processes().items() if text.startswith(name) and pid in self.sessions()]

    def sessions(self) -> set[int]:
        leaders = {pid for pid, text in processes().items() if str(self.run) in text and "guard" not in text}
        return {pid for pid in processes() if session_of(pid) in leaders}

    def leaves_nothing(self, session: list[int]) -> None:
        wait_until(lambda: not [pid for pid in session if pid in processes()], "the end of every process", within=60)
        wait_until(lambda: not list(self.run.iterdir()), "the removal of every socket", within=60)


def words(count: int, *, stream: bool) -> Json:
    """A body whose answer has exactly so many tokens."""
    return {"model": tiny_model().name, "prompt": "a", "max_tokens": count, "ignore_eos": True, "stream": stream}


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
