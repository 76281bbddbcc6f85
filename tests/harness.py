"""Real processes under test: the fake engine, the gateway in front of it, and a client on the bare socket.

    with FakeEngine() as engine, Gateway(engine, max_in_flight=1) as gate:
        async with gate.client() as client:
            answer = await client.post(CHAT, json=chat("hi", fake={"first_ms": 50}))

Settings are those of the gateway in lower case, without their prefix. Waits here are bounds for a broken program, far
above what a healthy one needs; nothing passes or fails by how fast it was.
"""

import asyncio
import contextlib
import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import httpx

from tests.wire import CHAT, PATIENCE_S, Answer, Json, Wire

ROOT = Path(__file__).resolve().parent.parent
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
KEEPALIVE = b": keep-alive\n\n"
ONE_LANE = [{"name": "all"}]  # for tests that count slots: no floors, no lending
HELD = ("tidegate_in_flight", "tidegate_queue_depth", "tidegate_house_requests", "tidegate_held_bytes")
MARKS = 200  # ports that a process keeps for itself, the last ones that it was given

_marks: deque[socket.socket] = deque()


def chat(text: str = "hello", *, fake: Json | None = None, **more: Any) -> Json:
    """A body for the chat route, with the fake engine's script in it."""
    return {
        "model": "fake-model",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4,
        "fake": fake or {},
    } | more


def body_for(route: str, *, fake: Json | None = None, **more: Any) -> Json:
    """A small valid body for any JSON route."""
    given: Json = {"model": "fake-model", "fake": fake or {}}
    match route:
        case "/v1/chat/completions" | "/v1/messages" | "/v1/messages/count_tokens":
            given |= {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        case "/v1/completions" | "/tokenize":
            given |= {"prompt": "hello", "max_tokens": 4}
        case "/v1/responses":
            given |= {"input": "hello", "max_output_tokens": 4}
        case "/detokenize":
            given |= {"tokens": [1, 2]}
        case "/v1/score" | "/score":
            given |= {"text_1": "a", "text_2": "b"}
        case "/v1/rerank" | "/rerank" | "/v2/rerank":
            given |= {"query": "q", "documents": ["d"]}
        case _:
            given |= {"input": "hello"}
    return given | more


def free_port() -> int:
    """A loopback port that nothing uses, and that no other process of these tests gets for a long while.

    Two that start servers at the same time must not be given the same one: the slower would talk to the other's server.
    """
    while True:
        port = 10_000 + secrets.randbelow(20_000)  # below those that the system gives to clients
        mark = socket.socket(socket.AF_UNIX)
        try:
            mark.bind(f"\0tidegate-test-port-{port}")
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", port))
        except OSError:
            mark.close()
            continue
        _marks.append(mark)
        if len(_marks) > MARKS:
            _marks.popleft().close()
        return port


async def until(holds: Callable[[], object], what: str = "it", *, within: float = PATIENCE_S) -> None:
    """Wait until `holds()` is true.

    Raises:
        AssertionError: it never was.
    """
    end = time.monotonic() + within
    while not (seen := holds()):
        assert time.monotonic() < end, f"{what} did not happen within {within:g} s (last seen: {seen!r})"
        await asyncio.sleep(0.01)


def wait_until(holds: Callable[[], object], what: str = "it", *, within: float = PATIENCE_S) -> None:
    """The same, where no event loop runs."""
    end = time.monotonic() + within
    while not (seen := holds()):
        assert time.monotonic() < end, f"{what} did not happen within {within:g} s (last seen: {seen!r})"
        time.sleep(0.01)


class UnixConnection(http.client.HTTPConnection):
    """An HTTP connection over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=PATIENCE_S)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class Child:
    """A child process whose output goes to a file; it never outlives its `with` block."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = tempfile.TemporaryDirectory(prefix="tgt-")  # short: a Unix socket's path has a limit
        self.process: subprocess.Popen[bytes] | None = None

    def spawn(self, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start `python -m module` in an empty folder of its own, so that nobody's `.env` is read."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TIDEGATE_", "WEB_CONC"))}
        workplace = Path(self.folder.name, "cwd")
        workplace.mkdir(exist_ok=True)
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=workplace,
                env={**kept, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log_path(self) -> Path:
        return Path(self.folder.name, f"{self.name}.log")

    @property
    def log(self) -> str:
        """All output so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it still runs."""
        if self.running:
            os.kill(self.pid, number)

    def exit_code(self, within: float = PATIENCE_S) -> int:
        """Wait for the end."""
        assert self.process is not None
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {within:g} s; its output:\n{self.log}") from None

    def kill(self) -> None:
        """End the process at once."""
        if self.process is not None:
            if self.running:
                self.process.kill()
            self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """End it and remove its folder."""
        try:
            self.kill()
        finally:
            self.folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FakeEngine(Child):
    """The scriptable engine; see `tests.fake_engine`. With `tcp` it can send RST, on a Unix socket it can't."""

    def __init__(self, *, tcp: bool = False, start: bool = True, **options: Any) -> None:
        super().__init__("engine")
        self.port = free_port() if tcp else None
        self.socket_path = str(Path(self.folder.name, "e.sock"))
        self.control_path = str(Path(self.folder.name, "c.sock"))
        self.options = options
        self._control: UnixConnection | None = None
        if start:
            self.start()

    @property
    def url(self) -> str:
        """For `TIDEGATE_ENGINE_URL`."""
        return f"unix://{self.socket_path}" if self.port is None else f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start (again, on the same address) and wait until it listens."""
        where = ["--uds", self.socket_path] if self.port is None else ["--port", str(self.port)]
        extra = [part for name, value in self.options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        self._hang_up()
        self.spawn("tests.fake_engine", [*where, "--control-uds", self.control_path, *extra], {})
        wait_until(lambda: self._listens() or not self.running, "start of the fake engine")
        assert self.running, self.log

    def _listens(self) -> bool:
        try:
            self.counts()
        except OSError:
            return False
        return True  # the control socket is the last to open

    def control(self, method: str, path: str, given: Json | None = None) -> Any:
        """Call `/fake/…` on the control socket."""
        if self._control is None:
            self._control = UnixConnection(self.control_path)
        try:
            self._control.request(method, path, json.dumps(given) if given is not None else None)
            answer = self._control.getresponse()
            text = answer.read()
        except OSError:
            self._hang_up()
            raise
        assert answer.status == 200, text
        return json.loads(text)

    def _hang_up(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def close(self) -> None:
        self._hang_up()
        super().close()

    def entries(self, tag: str | None = None) -> list[Json]:
        """The log of requests, those tagged `tag` or all."""
        return cast(list[Json], self.control("GET", "/fake/log" + (f"?tag={tag}" if tag is not None else "")))

    def entry(self, tag: str) -> Json:
        """The only request tagged `tag`."""
        (only,) = self.entries(tag)
        return only

    def counts(self) -> Json:
        """Counts of requests by what became of them."""
        return cast(Json, self.control("GET", "/fake/counts"))

    def set(self, **changes: Any) -> None:
        """Change the server itself (`health_ms`, `hang` …)."""
        self.control("POST", "/fake/set", changes)

    def defaults(self, **script: Any) -> None:
        """The script of requests that carry none."""
        self.control("POST", "/fake/defaults", script)

    def cut(self, how: str = "close", which: str = "all") -> None:
        """End open connections."""
        self.control("POST", "/fake/cut", {"how": how, "which": which})

    def reset(self) -> None:
        """Cut open work and forget everything."""
        self.control("POST", "/fake/reset", {})


class Gateway(Child):
    """The gateway as its own process in front of an engine."""

    def __init__(
        self,
        engine: FakeEngine | None,
        *,
        wait: str | None = "/readyz",
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__("gateway")
        self.engine = engine
        self.port = int(settings.pop("port", 0) or free_port())
        self.settings = settings
        variables = {"TIDEGATE_PORT": str(self.port), "TIDEGATE_HOST": "127.0.0.1"}
        if engine is not None:
            variables["TIDEGATE_ENGINE_URL"] = engine.url
        for name, value in settings.items():
            text = value if isinstance(value, str) else json.dumps(value)
            variables[f"TIDEGATE_{name.upper()}"] = text
        self.ops_port = int(settings.get("ops_port") or self.port)
        self.headers = {"authorization": f"Bearer {self._key()}"} if self._key() else {}
        self.spawn("app", [], variables | dict(environment or {}))
        try:
            if wait:
                wait_until(lambda: not self.running or self._answers(wait), f"200 from {wait}")
                assert self.running, f"the gateway ended with {self.exit_code()}; its output:\n{self.log}"
        except BaseException:
            self.close()
            raise

    def _key(self) -> str:
        return str(self.settings.get("api_keys", "")).partition(",")[0].partition(":")[2]

    def _answers(self, path: str) -> bool:
        try:
            return self.get(path).status_code == 200
        except OSError:
            return False

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, *, ops: bool = True) -> "Answer":
        """GET on a fresh connection; probes and `/metrics` go to the ops port where there is one."""
        here = ops and path in ("/livez", "/readyz", "/health", "/enginez", "/metrics")
        line = http.client.HTTPConnection("127.0.0.1", self.ops_port if here else self.port, timeout=PATIENCE_S)
        with contextlib.closing(line):
            line.request("GET", path, headers=self.headers)
            got = line.getresponse()
            return Answer(got.status, {name.lower(): value for name, value in got.getheaders()}, got.read(), True)

    def stats(self) -> Json:
        """`/stats`."""
        return self.get("/stats").json()

    def metrics(self) -> "Metrics":
        """`/metrics`, parsed."""
        return Metrics(self.get("/metrics").body.decode())

    def client(self, **options: Any) -> httpx.AsyncClient:
        """An HTTP client for this gateway, with its first key."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        # Without `verify=False` every client would load the system's certificates, which takes longer than most tests.
        given: Json = {"timeout": PATIENCE_S, "limits": limits, "headers": self.headers, "verify": False} | options
        return httpx.AsyncClient(base_url=self.base_url, trust_env=False, **given)

    async def wire(self, **options: Any) -> "Wire":
        """A client on the bare socket."""
        return await Wire.open(self.port, headers=self.headers, **options)

    def leftovers(self) -> Json:
        """Whatever the gauges still show; empty when nothing is in the house."""
        stats = self.stats()
        seen = {name: stats[name] for name in ("in_flight", "queue_depth")}
        seen |= self.metrics().held()
        seen |= {f"{name}: {key}": held for name, lane in stats["lanes"].items() for key, held in gauges(lane).items()}
        return {name: value for name, value in seen.items() if value}

    def quiet(self) -> None:
        """Wait until every gauge is back at 0."""
        wait_until(lambda: not self.leftovers(), "every gauge back to 0")


def gauges(lane: Json) -> Json:
    """Of a lane's entry in `/stats`, what must be 0 at rest."""
    return {key: lane[key] for key in ("in_flight", "queue_depth", "queued", "waiting") if key in lane}


class Metrics:
    """A parsed text exposition."""

    LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)$")
    LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                match = self.LINE.match(line)
                assert match, f"not a sample: {line!r}"
                name, labels, value = match.groups()
                self.samples[name, frozenset(self.LABEL.findall(labels or ""))] = float(value)

    @property
    def names(self) -> set[str]:
        """Names of all samples."""
        return {name for name, _ in self.samples}

    def of(self, name: str) -> dict[str, float]:
        """All samples of that name, by their labels."""
        return {f"{name}{sorted(labels)}": value for (key, labels), value in self.samples.items() if key == name}

    def held(self) -> dict[str, float]:
        """What the gauges show that must be 0 when nobody is there."""
        return {sample: value for gauge in HELD for sample, value in self.of(gauge).items() if value}

    def total(self, name: str, **labels: str) -> float:
        """Sum over the samples that have these labels."""
        wanted = set(labels.items())
        return sum(value for (key, has), value in self.samples.items() if key == name and wanted <= has)


# Every refusal of the gateway: reason -> status, type, code. The reason is also the answer's `x-tidegate-reason`.
REFUSALS = {
    "queue_full": (503, "service_unavailable_error", "server_is_overloaded"),
    "queue_timeout": (503, "service_unavailable_error", "server_is_overloaded"),
    "deadline_infeasible": (503, "service_unavailable_error", "server_is_overloaded"),
    "engine_unavailable": (503, "service_unavailable_error", "engine_unavailable"),
    "draining": (503, "service_unavailable_error", "server_draining"),
    "deadline": (504, "timeout_error", "deadline_exceeded"),
    "engine_error": (502, "server_error", "engine_error"),
    "request_too_large": (413, "invalid_request_error", "request_too_large"),
    "invalid_request": (400, "invalid_request_error", "invalid_request"),
    "invalid_api_key": (401, "invalid_request_error", "invalid_api_key"),
    "not_found": (404, "invalid_request_error", "not_found"),
    "method_not_allowed": (405, "invalid_request_error", "method_not_allowed"),
}


def refused(answer: Answer | httpx.Response, reason: str, *, status: int | None = None, anthropic: bool = False) -> str:
    """Check that `answer` is the whole, exact refusal for `reason`; returns its message."""
    expected, kind, code = REFUSALS[reason]
    said = answer.json()
    assert (answer.status_code, answer.headers.get("x-tidegate-reason")) == (status or expected, reason), said
    assert said.keys() == ({"type", "error"} if anthropic else {"error"})
    assert said.get("type", "error") == "error"
    error = said["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == (kind, code)
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-request-id"]
    if expected == 503:
        seconds, ms = int(answer.headers["retry-after"]), int(answer.headers["retry-after-ms"])
        assert 1 <= seconds <= 30
        assert seconds * 1000 <= ms <= seconds * 1500
        assert seconds == 1 or reason != "draining"
    else:
        assert "retry-after" not in answer.headers
    final = answer.headers.get("x-should-retry") == "false"
    assert final == (expected in (502, 504)) or reason == "engine_error"
    message = str(error["message"])
    assert message
    assert not re.search(r"/tmp|\.sock|Traceback|site-packages", message), "an error text gives away internals"
    return message


@contextlib.asynccontextmanager
async def occupied(gate: Gateway, slots: int = 1) -> AsyncIterator[list[Wire]]:
    """Hold slots by streams that stall after their first token; they leave with the block."""
    assert gate.engine
    engine, script = gate.engine, {"tag": "occupier", "fault": "stall", "at": 1}
    async with contextlib.AsyncExitStack() as stack:
        wires = []
        for _ in range(slots):
            wires.append(await stack.enter_async_context(await gate.wire()))
            await wires[-1].request(CHAT, chat(stream=True, fake=script))
        await until(lambda: sum(entry["events"] == 1 for entry in engine.entries("occupier")) == slots, "occupation")
        yield wires


async def queued(gate: Gateway, count: int) -> None:
    """Wait until that many requests wait in the gate."""
    await until(lambda: gate.stats()["queue_depth"] == count, f"a queue of {count}")


async def eventually(call: Callable[[], Awaitable[httpx.Response]], status: int) -> httpx.Response:
    """Repeat a call until it is answered with that status."""
    end = time.monotonic() + PATIENCE_S
    while (answer := await call()).status_code != status:
        assert time.monotonic() < end, f"never {status}, but {answer.status_code}: {answer.text}"
        await asyncio.sleep(0.01)
    return answer


async def gather_quietly(*calls: Awaitable[Any]) -> list[Any]:
    """All results, exceptions among them."""
    return await asyncio.gather(*calls, return_exceptions=True)


TERM = signal.SIGTERM
