"""The checks can fail: each of these broken manifests is found, by the rule that is there for it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kubernetes import schemas
from tests.kubernetes.manifests import K8S, parse, render, rendered, tool
from tests.kubernetes.rules import problems

BROKEN = [
    # overlay, in the rendered text, becomes, what is said
    ("gpu", "terminationGracePeriodSeconds: 660", "terminationGracePeriodSeconds: 600", "times:"),
    ("gpu", 'TIDEGATE_DRAIN_S: "600"', 'TIDEGATE_DRAIN_S: "900"', "times:"),
    ("gpu", 'TIDEGATE_DRAIN_S: "600"', 'TIDEGATE_DRAIN_S: "60"', "times: a request may outlast"),
    ("gpu", "--shutdown-timeout=30", "--shutdown-timeout=300", "times:"),
    ("gpu", "          preStop:\n            sleep:\n              seconds: 15", "          {}", "times:"),
    ("cpu", "terminationGracePeriodSeconds: 150", "terminationGracePeriodSeconds: 30", "times:"),
    ("gpu", "TIDEGATE_MAX_QUEUE", "TIDEGATE_MAXQUEUE", "settings: TIDEGATE_MAXQUEUE"),
    ("gpu", "TIDEGATE_LOG_FORMAT: json", "TIDEGATE_LOG_FORMAT: yaml", "settings:"),
    ("gpu", "TIDEGATE_HOST: 0.0.0.0", "TIDEGATE_HOST: 127.0.0.1", "settings: nobody"),
    ("gpu", "containerPort: 9000", "containerPort: 9001", "settings: ports"),
    ("gpu", "--port=8001", "--port=8002", "settings: the gateway looks"),
    ("gpu", "key: TIDEGATE_MAX_IN_FLIGHT", "key: TIDEGATE_MAX_QUEUE", "limit:"),
    ("gpu", "--max-num-seqs=$(MAX_NUM_SEQS)", "--max-num-seqs=512", "limit:"),
    ("gpu", "        restartPolicy: Always\n", "", "sidecar:"),
    ("gpu", "--host=127.0.0.1", "--host=0.0.0.0", "sidecar: the engine can be reached"),
    ("gpu", "path: /enginez", "path: /readyz", "sidecar: the engine's liveness"),
    ("gpu", "          failureThreshold: 12", "          failureThreshold: 3", "sidecar: a gateway that is away"),
    ("gpu", "          failureThreshold: 12", "          failureThreshold: twelve", "schema 1.30"),
    ("multi-node", "path: /livez", "path: /readyz", "probes: livenessProbe"),
    ("cpu", "path: /readyz", "path: /health", "probes: readinessProbe"),
    ("gpu", "maxUnavailable: 0", "maxUnavailable: 1", "rollout:"),
    ("gpu", "progressDeadlineSeconds: 3600", "progressDeadlineSeconds: 300", "rollout: loading"),
    ("gpu", "spec:\n  minReadySeconds", "spec:\n  replicas: 2\n  minReadySeconds", "rollout: applying"),
    ("gpu", "kind: PodDisruptionBudget\nmetadata", "kind: PodDisruptionBudgets\nmetadata", "schema"),
    ("gpu", "enableServiceLinks: false", "enableServiceLinks: true", "hardened: service links"),
    ("multi-node", "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false", "hardened:"),
    (
        "multi-node",
        "              drop:\n              - ALL",
        "              add:\n              - SYS_PTRACE",
        "hardened:",
    ),
    ("cpu", "runAsUser: 65532", "runAsUser: 0", "hardened: runs as root"),
    ("cpu", "type: RuntimeDefault", "type: Unconfined", "hardened: no seccomp"),
    ("gpu", "emptyDir:\n          sizeLimit: 20Gi", "hostPath:\n          path: /", "hardened: volume"),
    ("gpu", "mountPath: /tmp", "mountPath: /temp", "storage:"),
    ("gpu-tensor-parallel", "mountPath: /dev/shm", "mountPath: /shm", "storage:"),
    ("gpu-tensor-parallel", "--tensor-parallel-size=4", "--tensor-parallel-size=8", "gpus:"),
    ("gpu", 'nvidia.com/gpu: "1"', 'nvidia.com/gpus: "1"', "gpus:"),
    ("gpu", "port: ops\n      protocol", "port: http\n      protocol", None),  # harmless: nobody reaches more
    ("gpu", "port: http\n      protocol", "port: 8001\n      protocol", "network:"),
    ("gpu", '"true"\n    ports:\n    - port: http', '"true"\n    ports:\n    - port: ops', "network:"),
    ("gpu", "    app.kubernetes.io/name: tidegate\n  name: tidegate-models", "    a: b\n  name: models", "references:"),
    ("multi-node", "name: tidegate-engine-", "name: tidegate-engines-", None),  # renamed everywhere: still right
    ("gpu", "claimName: tidegate-models", "claimName: models", "references:"),
    ("gpu", "targetPort: http", "targetPort: ops", "references: Service"),
    ("gpu", "image: vllm/vllm-openai:v0.33.0", "image: vllm/vllm-openai", "references:"),
    ("gpu", "  namespace: tidegate\n", "", "references:"),
    ("gpu", "kubernetes.io/hostname", "kubernetes.io/host", "spread:"),
    ("cpu", "minReadySeconds: 10", "minReadySecond: 10", "schema 1.37"),
    ("cpu", "sizeLimit: 1Gi", "sizeLimits: 1Gi", "schema 1.37"),
    ("multi-node", "            seconds: 15", "            second: 15", "schema 1.30"),
]


@pytest.mark.parametrize(("overlay", "before", "after", "said"), BROKEN)
def test_broken_manifest_is_found(overlay: str, before: str, after: str, said: str | None) -> None:
    text = rendered(overlay)
    assert before in text, "this mutation mutates nothing"
    found = list(problems(parse(text.replace(before, after))))
    if said is None:
        assert found == []
    else:
        assert [problem for problem in found if said in problem], found


@pytest.mark.parametrize(
    ("overlay", "before", "after"),
    [
        ("autoscale-keda", "maxReplicaCount: 8", "maxReplicas: 8"),
        ("autoscale-keda", "pollingInterval: 15", "pollingInterval: often"),
        ("monitoring", "port: ops", "port: 9000"),
        ("monitoring", "podMetricsEndpoints", "endpoints"),
        ("gateway-api", "number: 9002", "number: 90020"),
        ("multi-node", "size: 2", "size: two"),
        ("multi-node", "workerTemplate:", "workersTemplate:"),
    ],
)
def test_broken_custom_resource_is_found(overlay: str, before: str, after: str) -> None:
    if not schemas.CRDS.is_dir():
        pytest.skip(f"the CRDs are not there: {schemas.CRDS}")
    text = rendered(overlay)
    assert before in text, "this mutation mutates nothing"
    customs = [one for one in parse(text.replace(before, after)) if schemas.is_custom(one)]
    assert [problem for one in customs for problem in schemas.custom_problems(one)]


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("base/kustomization.yaml", "  - service.yaml\n", "  - services.yaml\n"),
        ("base/deployment.yaml", "      containers:\n", "     containers:\n"),
        ("overlays/gpu/gpu.yaml", "name: tidegate\n", "name: tidegates\n"),
    ],
)
def test_overlay_that_does_not_render_is_found(tmp_path: Path, file: str, before: str, after: str) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    broken = tmp_path / "k8s" / file
    assert before in broken.read_text()
    broken.write_text(broken.read_text().replace(before, after, 1))
    with pytest.raises(AssertionError):
        render(tmp_path / "k8s" / "overlays" / "gpu")


def test_untidy_yaml_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: 1\na: 2\nb:   3\n")
    command = [tool("yamllint"), "--strict", "-c", str(K8S / "yamllint.yaml"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "duplication of key" in done.stdout
