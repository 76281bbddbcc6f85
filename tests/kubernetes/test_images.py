"""The Dockerfiles are tidy, and the gateway's build steps give a gateway that starts, is small and keeps its root."""

import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.harness import ROOT, Child, FakeEngine, free_port, wait_until
from tests.kubernetes.image import Image, instructions
from tests.kubernetes.manifests import parse, pods, rendered, tool
from tests.wire import CHAT

DOCKERFILES = ["Dockerfile", "Dockerfile.engine"]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfile_is_tidy(name: str) -> None:
    done = subprocess.run([tool("hadolint"), ROOT / name], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_untidy_dockerfile_is_found(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text("FROM python\nRUN cd /src && pip install tidegate\n")
    done = subprocess.run([tool("hadolint"), file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert {"DL3006", "DL3013"} <= {word for word in done.stdout.split() if word.startswith("DL")}


@pytest.mark.parametrize("name", DOCKERFILES)
def test_image_runs_as_the_pods_user(name: str) -> None:
    (user,) = [text for kind, text in instructions((ROOT / name).read_text()) if kind == "USER"]
    for overlay in ("cpu", "gpu"):
        security = next(pods(parse(rendered(overlay)))).spec["securityContext"]
        assert user == f"{security['runAsUser']}:{security['runAsGroup']}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_build_steps_give_a_gateway_that_serves(tmp_path: Path) -> None:
    image = Image(ROOT / "Dockerfile", tmp_path)
    size_mb = sum(Path(file).stat().st_size for file in image.files() if not Path(file).is_symlink()) / 1e6
    assert size_mb < 100, f"{size_mb:.0f} MB: what has come in?"
    assert not [file for file in image.files() if "/torch/" in file or "/vllm/" in file]
    before = image.files()
    with FakeEngine(tcp=True) as engine:
        port, ops = free_port(), free_port()
        settings = {"TIDEGATE_PORT": str(port), "TIDEGATE_OPS_PORT": str(ops), "TIDEGATE_ENGINE_URL": engine.url}
        child = Child("gateway")
        child.process = image.start(child.log_path, **settings)
        with child:
            wait_until(lambda: image.is_healthy(**settings) or not child.running, "health")
            assert child.running, child.log
            assert not image.is_healthy(**settings | {"TIDEGATE_OPS_PORT": str(free_port())})
            wait_until(lambda: httpx.get(f"http://127.0.0.1:{ops}/readyz", trust_env=False).is_success, "readiness")
            body = {"model": "m", "messages": [], "max_tokens": 2}
            answer = httpx.post(f"http://127.0.0.1:{port}{CHAT}", json=body, trust_env=False)
            assert answer.json()["choices"][0]["finish_reason"], child.log
            child.signal(signal.SIGTERM)
            assert child.exit_code() == 0
    assert image.files() == before, "it wrote to its root file system"
