"""The launcher as its own process, with the real gateway and an engine that does as told in vLLM's place."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from app.settings import Settings
from launcher.__main__ import LAST_LINES, _private_folder, _url
from launcher.supervisor import EngineFailed
from tests.harness import ROOT, Child, free_port, wait_until
from tests.unit.launcher_engine import is_alive
from tests.unit.test_launcher_guard import alive_in
from tests.unit.test_launcher_init import UNSHARE, can_unshare

ENGINE = Path(__file__).with_name("launcher_engine.py")
FOREVER: dict[str, Any] = {}
pytestmark = pytest.mark.slow


class Launcher(Child):
    """`python -m launcher` with a package named vllm that is `launcher_engine.py`."""

    def __init__(
        self, *arguments: str, lives: list[dict[str, Any]], version: str = "0.32.0+cpu", **settings: str
    ) -> None:
        super().__init__("launcher")
        here = Path(self.folder.name)
        self.site, self.run, self.cache = here / "site", here / "run", here / "cache"
        self.notes_file = here / "notes"
        self.model = here / "model"
        for folder in (self.site / "vllm/entrypoints/openai", self.run, self.cache, self.model):
            folder.mkdir(parents=True)
        (self.model / "config.json").write_text("{}")
        for package in ("vllm", "vllm/entrypoints", "vllm/entrypoints/openai"):
            (self.site / package / "__init__.py").touch()
        shutil.copy(ENGINE, self.site / "vllm/entrypoints/openai/api_server.py")
        metadata = self.site / f"vllm-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        self.port = free_port()
        self.arguments = [str(self.model) if part == "MODEL" else part for part in arguments]
        self.environment = {
            "PYTHONPATH": f"{self.site}{os.pathsep}{ROOT}",
            "XDG_RUNTIME_DIR": str(self.run),
            "XDG_CACHE_HOME": str(self.cache),
            "CUDA_VISIBLE_DEVICES": "",
            "FAKE_ENGINE": json.dumps(lives),
            "FAKE_NOTES": str(self.notes_file),
            "TIDEGATE_PORT": str(self.port),
        } | {f"TIDEGATE_{name.upper()}": value for name, value in settings.items()}

    def start(self) -> "Launcher":
        self.spawn("launcher", self.arguments, self.environment)
        return self

    @property
    def notes(self) -> list[dict[str, Any]]:
        lines = self.notes_file.read_text().splitlines() if self.notes_file.exists() else []
        return [json.loads(line) for line in lines]

    def ask(self, path: str, body: bytes | None = None) -> tuple[int, dict[str, Any]]:
        import http.client

        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            headers = {"content-type": "application/json"}
            line.request("GET" if body is None else "POST", path, body, headers)
            answer = line.getresponse()
            return answer.status, json.loads(answer.read() or b"{}")
        except OSError:
            return 0, {}
        finally:
            line.close()

    def ready(self) -> None:
        wait_until(lambda: not self.running or "ready: fake-model" in self.log, "a ready engine")
        assert self.running, self.log

    def leaves_nothing(self) -> None:
        pids = [pid for note in self.notes for pid in note["pids"]]
        wait_until(lambda: not [pid for pid in pids if is_alive(pid)], "the end of the engine")
        wait_until(lambda: not list(self.run.iterdir()), "the removal of the private folder")

    def close(self) -> None:
        try:
            self.kill()
            self.leaves_nothing()
        finally:
            super().close()


Launch = Callable[..., Launcher]


@pytest.fixture
def launch() -> Iterator[Launch]:
    made: list[Launcher] = []

    def start(*arguments: str, lives: list[dict[str, Any]] | None = None, **options: Any) -> Launcher:
        made.append(Launcher(*arguments, lives=lives or [FOREVER], **options))
        return made[-1].start()

    yield start
    for one in made:
        one.close()


def one_line(launcher: Launcher) -> str:
    (line,) = launcher.log.splitlines()
    return line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_and_a_signal_ends_all_of_it(launch: Launch, number: int) -> None:
    one = launch("MODEL", lives=[{"child": True, "say": ["loading"]}])
    one.ready()
    assert one.ask("/v1/models")[0] == 200
    (private,) = one.run.iterdir()
    assert private.stat().st_mode & 0o777 == 0o700
    for text in (
        "engine   | loading",
        "dtype ",
        "sequences  16 at a time",
        "KV cache   as much as vLLM finds",
        "curl http://127.0.0.1:",
        "from openai import OpenAI",
    ):
        assert text in one.log
    one.signal(number)
    assert one.exit_code() == 0
    one.leaves_nothing()
    assert "Traceback" not in one.log


def test_it_answers_503_while_the_engine_loads(launch: Launch) -> None:
    one = launch("MODEL", lives=[{"hang": True}])
    wait_until(lambda: one.notes, "start of the engine")
    status, body = one.ask("/v1/chat/completions", b"{}")
    assert (status, body["error"]["code"]) == (503, "engine_unavailable")
    assert one.ask("/livez")[0] == 200
    assert one.ask("/readyz")[0] == 503
    one.signal(signal.SIGTERM)
    assert one.exit_code() == 0


def test_a_killed_launcher_leaves_no_engine(launch: Launch) -> None:
    """First the launcher is killed, then what it left."""
    one = launch("MODEL", lives=[{"deaf": True, "child": True}])
    one.ready()
    one.kill()
    one.leaves_nothing()


def test_a_dead_engine_is_restarted_and_counted(launch: Launch) -> None:
    one = launch("MODEL", lives=[{"child": True}, FOREVER])
    one.ready()
    os.kill(one.notes[0]["pids"][0], signal.SIGKILL)
    wait_until(lambda: one.ask("/readyz")[0] == 503, "readiness to drop")
    wait_until(lambda: len(one.notes) == 2 and one.ask("/readyz")[0] == 200, "the engine to be back")
    assert one.notes[1]["leftovers"] == []
    assert one.ask("/stats")[1]["engine"]["restarts"] == 1
    assert "killed by SIGKILL: out of memory?" in one.log


def test_an_engine_that_cannot_start_ends_it_with_the_reason(launch: Launch) -> None:
    """Not with a time-out, and not with a traceback of ours."""
    one = launch(
        "MODEL", lives=[{"exit": 2, "say": ["usage: api_server.py", "api_server.py: error: unrecognized: --x"]}]
    )
    assert one.exit_code() == 1
    shown = ["engine   | usage: api_server.py", "engine   | api_server.py: error: unrecognized: --x"]
    reason = "tidegate: the engine could not start (exit code 2): error: unrecognized: --x"
    assert one.log.splitlines()[-3:] == [*shown, reason]
    assert one.log.count(f"{shown[0]}\n") == 2, "as it came, and again next to the reason"
    assert "Traceback" not in one.log
    assert len(one.notes) == 1


@pytest.mark.parametrize("before", [{}, {"after": 0.1}], ids=["before it is ready", "after"])
@pytest.mark.parametrize("how", [{"exit": 0}, {"exit": 1}, {"signal": signal.SIGSEGV}], ids=["0", "1", "SIGSEGV"])
def test_an_engines_end_is_never_taken_for_success(launch: Launch, how: dict[str, Any], before: dict[str, Any]) -> None:
    one = launch("MODEL", lives=[before | how], max_restarts="0")
    assert one.exit_code() == 1
    assert "killed by SIGSEGV" in one.log if "signal" in how else f"exit code {how['exit']}" in one.log


@pytest.mark.skipif(not can_unshare(), reason="makes a process namespace, which takes root and the tool `unshare`")
def test_as_process_1_of_a_container_it_restarts_drains_and_leaves_no_zombie() -> None:
    one = Launcher(lives=[{"child": True, "after": 0.2, "exit": 1}, FOREVER])
    command = [*UNSHARE, sys.executable, "-m", "launcher", str(one.model)]
    try:
        with one.log_path.open("wb") as log:
            outer = subprocess.Popen(command, cwd=one.cache, env=os.environ | one.environment, stdout=log, stderr=log)
        wait_until(lambda: one.log.count("ready: ") == 2, "a restart")
        (init,) = children_of(outer.pid)
        states = [state_of(pid) for pid in (init, *children_of(init))]
        assert len(states) >= 2
        assert "Z" not in states
        os.kill(init, signal.SIGTERM)
        assert outer.wait(20) == 0
        assert not list(one.run.iterdir())
    finally:
        outer.kill()
        outer.wait()
        one.folder.cleanup()


@pytest.mark.skipif(not can_unshare(), reason="makes a process namespace, which takes root and the tool `unshare`")
def test_process_1_heeds_a_signal_that_comes_while_it_still_imports() -> None:
    """The kernel drops a signal that process 1 doesn't handle, and nobody sends it again."""
    one = Launcher(lives=[FOREVER])
    mark = one.site / "mark"
    (one.site / "uvloop.py").write_text(f"import time; open({str(mark)!r}, 'w'); time.sleep(600)")
    with subprocess.Popen([*UNSHARE, sys.executable, "-m", "launcher"], env=os.environ | one.environment) as outer:
        try:
            wait_until(mark.exists, "the imports")
            (init,) = children_of(outer.pid)
            os.kill(init, signal.SIGTERM)
            assert outer.wait(20) == 128 + signal.SIGTERM
        finally:
            outer.kill()
            one.folder.cleanup()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
def test_a_crash_loop_ends_it(launch: Launch) -> None:
    """With what the last engine said last; its live output is far above, before the gateway's own end."""
    said = [f"line {number}" for number in range(LAST_LINES)] + ["RuntimeError: boom"]
    one = launch("MODEL", lives=[{"after": 0.1, "exit": 1, "say": said}], max_restarts="1")
    assert one.exit_code() == 1
    last, reason = one.log.splitlines()[-LAST_LINES - 1 : -1], one.log.splitlines()[-1]
    assert last == [f"engine   | {line}" for line in said[1:]]
    assert one.log.count("engine   | line 9\n") == 3, "one for each engine, and one at the end"
    assert one.log.count("engine   | line 0\n") == 2
    assert reason == "tidegate: the engine has ended (exit code 1): RuntimeError: boom"
    assert len(one.notes) == 2


@pytest.mark.parametrize(
    ("arguments", "settings", "code", "says"),
    [
        (["./nowhere"], {}, 2, "there is no folder ./nowhere"),
        (["MODEL", "--port", "none"], {}, 2, "argument --port: invalid int value"),
        (["MODEL", "--port", "99999"], {}, 2, "TIDEGATE_PORT"),
        (["MODEL", "--dtype", "half"], {}, 2, "arguments for vLLM go after --"),
        (["MODEL", "--device", "cuda"], {}, 2, "no GPU"),
        (["MODEL", "--", "--port", "1"], {}, 2, "--port cannot be passed on to vLLM"),
        (["--", "MODEL"], {}, 2, "MODEL goes before the --"),
        (["MODEL", "--", "--max-num-seqs", "x"], {}, 2, "must be a whole number"),
        (["MODEL", "--", "--dtype", "float8"], {}, 2, "--dtype float8: vLLM knows auto, bfloat16, "),
        (["MODEL"], {"max_inflight": "3"}, 2, "did you mean TIDEGATE_MAX_IN_FLIGHT?"),
        (["MODEL"], {"max_queue": "many"}, 2, "TIDEGATE_MAX_QUEUE"),
        (["MODEL"], {"port": "tcp://10.0.0.1:80"}, 2, "enableServiceLinks"),
        (["MODEL"], {"version": "0.33.0"}, 1, "run `make setup DEVICE=cpu`"),
    ],
)
def test_bad_input_ends_in_one_clear_line(
    launch: Launch, arguments: list[str], settings: dict[str, str], code: int, says: str
) -> None:
    one = launch(*arguments, **settings)
    assert one.exit_code() == code
    assert one_line(one).startswith("tidegate: ")
    assert says in one_line(one)
    assert not one.notes


def test_a_taken_port_is_found_before_the_model_loads(launch: Launch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        one = launch("MODEL", "--port", str(taken.getsockname()[1]))
        assert one.exit_code() == 2
    assert "cannot listen on 127.0.0.1 port" in one_line(one)
    assert "choose another with TIDEGATE_PORT (of the launcher: --port)" in one_line(one)
    assert not one.notes


def test_an_address_of_another_machine_is_told_from_a_taken_port(launch: Launch) -> None:
    one = launch("MODEL", "--host", "192.0.2.1", "--port", "0")
    assert one.exit_code() == 2
    assert "give an address of this machine with TIDEGATE_HOST (of the launcher: --host)" in one_line(one)
    assert not one.notes


def test_a_model_that_cannot_fit_is_refused_before_anything_is_loaded() -> None:
    one = Launcher("MODEL", lives=[FOREVER])
    try:
        large = {"hidden_size": 99_999, "intermediate_size": 99_999, "num_hidden_layers": 999, "num_attention_heads": 9}
        (one.model / "config.json").write_text(json.dumps(large))
        assert one.start().exit_code() == 1
        assert "GiB of free memory: take a smaller or a quantised model" in one_line(one)
        one.arguments.append("--no-preflight")
        one.log_path.unlink()
        one.start().ready()
    finally:
        one.close()


def test_a_folder_for_sockets_is_found_or_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as in a container whose root is read-only."""
    usable = tmp_path / "usable"
    usable.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("TMPDIR", str(usable))
    monkeypatch.setattr("launcher.__main__.LONGEST_BASE", len(str(usable)))
    folder = _private_folder()
    assert folder.parent == usable
    assert folder.stat().st_mode & 0o77 == 0

    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(EngineFailed, match="point XDG_RUNTIME_DIR to one that can be written"):
        _private_folder()


def test_several_workers_are_refused(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Launcher("MODEL", lives=[FOREVER])
    try:
        one.environment["WEB_CONCURRENCY"] = "4"
        assert one.start().exit_code() == 2
        assert "WEB_CONCURRENCY=4" in one_line(one)
    finally:
        one.close()


def test_settings_and_arguments_reach_the_engine_and_keys_stay_secret(launch: Launch) -> None:
    one = launch(
        "MODEL",
        "--",
        "--seed",
        "7",
        lives=[{"say": ["the key is engine-secret"]}],
        max_in_flight="3",
        engine_api_key="engine-secret",
        api_keys="me:client-secret",
        engine_url="http://127.0.0.1:1",
    )
    one.ready()
    (note,) = one.notes
    assert note["argv"][-2:] == ["--seed", "7"]
    assert note["argv"][note["argv"].index("--max-num-seqs") + 1] == "3"
    assert note["environment"]["VLLM_API_KEY"] == "engine-secret"
    assert not [name for name in note["environment"] if name.startswith("TIDEGATE_")]
    assert one.ask("/stats")[0] == 401
    assert "Authorization: Bearer YOUR_KEY" in one.log
    assert "warning: TIDEGATE_ENGINE_URL" in one.log
    assert "engine-secret" not in one.log
    assert "client-secret" not in one.log


def test_with_a_certificate_the_address_that_is_shown_is_https() -> None:
    secure = Settings.model_construct(host="::", tls_cert_file=Path("cert.pem"))
    assert _url(secure, 8443) == "https://[::1]:8443"
    assert _url(Settings.model_construct(), 8000) == "http://127.0.0.1:8000"


def test_contradictory_limits_are_named(launch: Launch) -> None:
    one = launch("MODEL", "--", "--max-num-seqs", "4", max_in_flight="8")
    one.ready()
    assert "warning: --max-num-seqs 4 and TIDEGATE_MAX_IN_FLIGHT=8 contradict each other" in one.log
    assert one.ask("/stats")[1]["limit"] == 4


def test_all_lines_are_json_where_that_is_asked_for(launch: Launch) -> None:
    one = launch("MODEL", lives=[{"say": ["100% loaded"]}], log_format="json")
    wait_until(lambda: "ready: fake-model" in one.log, "a ready engine")
    messages = {line["logger"]: line["message"] for line in map(json.loads, one.log.splitlines())}
    assert messages["tidegate.engine"] == "100% loaded"


def test_all_lines_are_json_to_the_end(launch: Launch) -> None:
    one = launch("MODEL", lives=[{"exit": 1, "say": ["RuntimeError: boom"]}], log_format="json")
    assert one.exit_code() == 1
    *_, line, reason = map(json.loads, one.log.splitlines())
    assert (line["logger"], line["message"]) == ("tidegate.engine", "RuntimeError: boom")
    assert (reason["logger"], reason["level"]) == ("tidegate.launcher", "error")
    assert reason["message"] == "the engine could not start (exit code 1): RuntimeError: boom"


def test_a_refusal_to_start_is_json_too(launch: Launch) -> None:
    one = launch("MODEL", "--", "--port", "1", log_format="json")
    assert one.exit_code() == 2
    assert "--port cannot be passed on to vLLM" in json.loads(one_line(one))["message"]


def with_pip(one: Launcher, script: str) -> Launcher:
    """Replace pip, which fetches the embedded model."""
    (one.site / "pip").mkdir()
    (one.site / "pip/__init__.py").touch()
    (one.site / "pip/__main__.py").write_text(script)
    return one.start()


def test_it_can_be_ended_while_the_embedded_model_is_fetched() -> None:
    one = Launcher(lives=[FOREVER])
    try:
        mark = one.site / "pid"
        with_pip(one, f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
        wait_until(lambda: mark.exists() and mark.read_text(), "the download")
        assert one.ask("/v1/chat/completions", b"{}")[0] == 503
        one.signal(signal.SIGTERM)
        assert one.exit_code() == 0
        assert not is_alive(int(mark.read_text()))
        assert not list((one.cache / "tidegate").glob("*.part-*"))
    finally:
        one.close()


def test_a_killed_launcher_leaves_no_download() -> None:
    one = Launcher(lives=[FOREVER])
    try:
        mark = one.site / "pid"
        with_pip(one, f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
        wait_until(lambda: mark.exists() and mark.read_text(), "the download")
        one.kill()
        wait_until(lambda: not is_alive(int(mark.read_text())), "the end of the download")
    finally:
        one.close()


def test_an_embedded_model_that_cannot_be_had_ends_it_with_the_reason() -> None:
    one = Launcher(lives=[FOREVER])
    try:
        with_pip(one, "raise SystemExit('ERROR: no network')")
        assert one.exit_code() == 1
        assert "failed: ERROR: no network" in one.log
        assert "Traceback" not in one.log
        assert not one.notes
    finally:
        one.close()


def test_a_cache_that_cannot_be_looked_into_ends_it_with_the_reason() -> None:
    one = Launcher(lives=[FOREVER])
    try:
        one.environment["XDG_CACHE_HOME"] = "/" + "a" * 300
        assert one.start().exit_code() == 1
        assert "the model cannot be stored in /aaa" in one.log
        assert "Traceback" not in one.log
    finally:
        one.close()


def test_help_says_how_to_pass_arguments_on() -> None:
    command = [sys.executable, "-m", "launcher", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for text in ("-- VLLM ARGUMENTS", "--device {auto,cuda,cpu}", "Exit codes: 0 drained"):
        assert text in done.stdout


@pytest.mark.slow
def test_an_engine_that_ignores_the_signal_is_killed_in_the_end(launch: Launch) -> None:
    one = launch("MODEL", lives=[{"deaf": True}])
    one.ready()
    group = one.notes[0]["pids"][0]
    one.signal(signal.SIGINT)
    time.sleep(0.2)
    one.signal(signal.SIGINT)
    assert one.exit_code() == 0
    assert not alive_in(group)
