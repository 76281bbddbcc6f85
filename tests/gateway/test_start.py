"""Bad input at the start: one clear line that says what to do, exit code 2, no traceback."""

import json
import socket
import time
from typing import Any

import pytest

from tests.harness import FakeEngine, Gateway, free_port, wait_until

pytestmark = pytest.mark.slow


def start_fails(words: list[str], *, environment: dict[str, str] | None = None, **settings: Any) -> str:
    """Start a gateway that must refuse; its words, of which one line must hold all `words`."""
    with FakeEngine(start=False) as engine, Gateway(engine, wait=None, environment=environment, **settings) as gate:
        assert gate.exit_code() == 2, gate.log
        lines = [line for line in gate.log.splitlines() if line.strip()]
        assert "Traceback" not in gate.log
        assert len(lines) == 1, gate.log
        assert all(word.lower() in lines[0].lower() for word in words), lines[0]
        return lines[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TIDEGATE_MAX_QUEU", "5"),
        ("TIDEGATE_MAX_QUEUE", "many"),
        ("TIDEGATE_DEADLINE_S", "0"),
        ("TIDEGATE_ENGINE_URL", "localhost:8001"),
        ("TIDEGATE_LANES", '[{"name": "a", "flor": 1}]'),
        ("TIDEGATE_LANES", "no json"),
        ("TIDEGATE_API_KEYS_FILE", "/nowhere/keys"),
        ("TIDEGATE_API_KEYS", "nocolon"),
    ],
)
def test_bad_setting_is_named(name: str, value: str) -> None:
    line = start_fails([name], environment={name: value})
    assert "nocolon" not in line, "a key is never shown"


@pytest.mark.parametrize("port", ["port", "ops_port"])
def test_port_taken(port: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        start_fails([str(taken)], **{port: taken})
        line = json.loads(start_fails([str(taken)], **{port: taken}, log_format="json"))
    assert (line["level"], line["logger"]) == ("error", "tidegate")


def test_engine_that_cannot_be_reached_is_told_once() -> None:
    with FakeEngine(start=False) as engine, Gateway(engine, wait="/livez") as gate:
        wait_until(lambda: "cannot be reached" in gate.log)
        time.sleep(2.5)  # two more looks
        assert gate.log.count("TIDEGATE_ENGINE_URL") == 1
        assert f"listening on 127.0.0.1 port {gate.port}" in gate.log


def test_same_port_twice() -> None:
    port = free_port()
    start_fails([str(port)], port=port, ops_port=port)


def test_several_workers_would_multiply_the_limit() -> None:
    start_fails(["WEB_CONCURRENCY"], environment={"WEB_CONCURRENCY": "4"})


def test_one_worker_by_name_is_fine() -> None:
    with FakeEngine() as engine, Gateway(engine, environment={"WEB_CONCURRENCY": "1"}) as gate:
        assert gate.running


@pytest.mark.parametrize("name", ["TIDEGATE_PORT", "TIDEGATE_OPS_PORT"])
def test_service_link_that_kubernetes_injects(name: str) -> None:
    """A Service named tidegate puts TIDEGATE_PORT=tcp://… into every pod of its namespace."""
    start_fails([name, "kubernetes"], environment={name: "tcp://10.0.0.7:8000"})


def test_service_links_beside_a_port_are_no_unknown_settings() -> None:
    """The rest of what Kubernetes injects for such a Service stops the start with a reason, or does not matter."""
    injected = {"TIDEGATE_SERVICE_HOST": "10.0.0.7", "TIDEGATE_PORT_8000_TCP": "tcp://10.0.0.7:8000"}
    start_fails(["TIDEGATE_"], environment=injected | {"TIDEGATE_PORT": "tcp://10.0.0.7:8000"})


def test_env_file_in_the_working_folder_is_read_and_checked() -> None:
    with FakeEngine(start=False) as engine, Gateway(engine, wait=None) as gate:
        gate.kill()
        (gate.log_path.parent / "cwd" / ".env").write_text("TIDEGATE_MAX_QUEU=5\n")
        gate.log_path.unlink()
        gate.spawn("app", [], {"TIDEGATE_PORT": str(free_port()), "TIDEGATE_ENGINE_URL": engine.url})
        assert gate.exit_code() == 2
        assert "TIDEGATE_MAX_QUEU" in gate.log


def test_environment_beats_the_env_file() -> None:
    with FakeEngine() as engine, Gateway(engine, wait=None) as gate:
        gate.kill()
        (gate.log_path.parent / "cwd" / ".env").write_text("TIDEGATE_MAX_IN_FLIGHT=7\nTIDEGATE_MAX_QUEUE=9\n")
        with Gateway(engine, max_in_flight=3) as other:
            assert other.stats()["limit"] == 3


def test_listens_before_the_engine_is_up() -> None:
    with FakeEngine(start=False) as engine, Gateway(engine, wait="/livez") as gate:
        assert gate.get("/readyz").status_code == 503
        assert gate.stats()["engine"]["state"] == "starting"
        assert gate.metrics().total("tidegate_engine_up") == 0
        assert gate.get("/enginez").status_code == 200, "starting is not stalled"
