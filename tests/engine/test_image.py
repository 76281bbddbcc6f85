"""The one-container image: its build steps give a launcher that has all it needs; other tests let such a one answer."""

import signal
from pathlib import Path

import httpx
import pytest

from tests.engine.real import START_S
from tests.harness import ROOT, Child, free_port, wait_until
from tests.kubernetes.image import Image
from tests.kubernetes.manifests import parse, pods, rendered


@pytest.mark.timeout(3 * START_S)
def test_build_steps_give_a_container_that_starts_with_its_model_inside(tmp_path: Path) -> None:
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
        child.signal(signal.SIGTERM)
        assert child.exit_code() == 0, child.log
    assert "fetching" not in child.log
    assert image.files() == before, "it wrote to its root file system, which is read-only in a pod"
