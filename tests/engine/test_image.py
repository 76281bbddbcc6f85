"""The one-container image: its build steps give a launcher that serves the embedded model."""

import signal
from pathlib import Path

import httpx
import pytest

from tests.engine.real import START_S
from tests.harness import ROOT, Child, free_port, wait_until
from tests.kubernetes.image import Image
from tests.kubernetes.manifests import parse, pods, rendered
from tests.wire import CHAT


@pytest.mark.timeout(3 * START_S)
def test_build_steps_give_a_container_that_answers(tmp_path: Path) -> None:
    image = Image(ROOT / "Dockerfile.engine", tmp_path)
    assert [step.partition(" ")[0] for step in image.left_out] == ["apt-get"]
    before = image.files()
    (pod,) = pods(parse(rendered("cpu")))
    assert pod.gateway
    port, ops = free_port(), free_port()
    settings = pod.environment(pod.gateway) | {"TIDEGATE_PORT": str(port), "TIDEGATE_OPS_PORT": str(ops)}
    ready = f"http://127.0.0.1:{ops}{pod.gateway['readinessProbe']['httpGet']['path']}"
    with Child("launcher") as child:
        child.process = image.start(child.log_path, **settings)
        wait_until(lambda: image.is_healthy(**settings) or not child.running, "health")
        assert child.running, child.log
        assert httpx.get(ready, trust_env=False).status_code == 503, "the model is still loading"
        wait_until(
            lambda: not child.running or httpx.get(ready, trust_env=False).is_success, "readiness", within=START_S
        )
        question = [{"role": "user", "content": "What is the capital of France?"}]
        body = {"model": "SmolLM2-135M-Instruct", "messages": question, "temperature": 0}
        answer = httpx.post(f"http://127.0.0.1:{port}{CHAT}", json=body, trust_env=False, timeout=60)
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
        child.signal(signal.SIGTERM)
        assert child.exit_code() == 0, child.log
    assert image.files() == before, "it wrote to its root file system, which is read-only in a pod"
