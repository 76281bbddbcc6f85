"""Every overlay renders, would be taken by the API server, and keeps the rules of `rules.py`."""

import subprocess
from pathlib import Path

import pytest

from launcher.command import ENTRY, Model, make_plan
from launcher.device import Device
from tests.kubernetes import schemas
from tests.kubernetes.manifests import K8S, ON_GPUS, OVERLAYS, WITH_PODS, of_kind, parse, pods, rendered, tool
from tests.kubernetes.rules import problems, settings_of


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_is_right(overlay: str) -> None:
    assert list(problems(parse(rendered(overlay)))) == []


def test_custom_resources_keep_to_their_schemas() -> None:
    if not schemas.CRDS.is_dir():
        pytest.skip(f"the CRDs are not there: {schemas.CRDS}")
    customs = [one for overlay in OVERLAYS for one in parse(rendered(overlay)) if schemas.is_custom(one)]
    assert {one["kind"] for one in customs} >= {"LeaderWorkerSet", "ScaledObject", "InferencePool", "PodMonitor"}
    assert [problem for one in customs for problem in schemas.custom_problems(one)] == []


def test_yaml_is_tidy() -> None:
    command = [tool("yamllint"), "--strict", "-c", str(K8S / "yamllint.yaml"), str(K8S)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("overlay", WITH_PODS)
def test_gateway_starts_with_the_settings_of_the_pod(overlay: str) -> None:
    gateways = [pod for pod in pods(parse(rendered(overlay))) if pod.gateway]
    assert len(gateways) == 1
    assert settings_of(gateways[0]).log_format == "json"


@pytest.mark.parametrize("overlay", ON_GPUS)
def test_engine_gets_what_the_launcher_would_give_it(overlay: str) -> None:
    plan = make_plan(Device("cuda", "GPU"), Model("org/model", "org/model"), Path("/e.sock"), [], {}, max_in_flight=256)
    flags = plan.argv[plan.argv.index(ENTRY) + 1 :]
    ours = {"--model", "--uds", "--max-num-queued-reqs"}  # the pod has the first two in its own way, and no third
    names = {flag for flag in flags if flag.startswith("--")} - ours
    for pod in pods(parse(rendered(overlay))):
        assert pod.engine
        given = pod.arguments(pod.engine)
        assert names <= {flag.partition("=")[0] for flag in given}
        assert plan.argv[plan.argv.index("--scheduling-policy") + 1] == pod.option(pod.engine, "scheduling-policy")
        environment = pod.environment(pod.engine)
        wanted = {
            name: plan.env[name] for name in ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE")
        }
        assert wanted.items() <= environment.items()


def test_ranks_of_a_group_differ_in_their_rank_alone() -> None:
    leader, worker = pods(parse(rendered("multi-node")))
    assert leader.engine
    assert worker.engine
    ours, theirs = set(leader.arguments(leader.engine)), set(worker.arguments(worker.engine))
    assert ours ^ theirs == {"--node-rank=0", "--node-rank=1", "--headless"}
    group = of_kind(parse(rendered("multi-node")), "LeaderWorkerSet")[0]["spec"]["leaderWorkerTemplate"]
    assert group["size"] == int(leader.option(leader.engine, "pipeline-parallel-size"))


def test_scale_down_waits_for_each_drain() -> None:
    (scaler,) = of_kind(parse(rendered("autoscale-keda")), "ScaledObject")
    down = scaler["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    grace_s = next(pods(parse(rendered("gpu")))).spec["terminationGracePeriodSeconds"]
    assert [(policy["type"], policy["value"]) for policy in down["policies"]] == [("Pods", 1)]
    assert down["policies"][0]["periodSeconds"] >= grace_s
    assert down["stabilizationWindowSeconds"] >= grace_s
    (target,) = of_kind(parse(rendered("gpu")), "Deployment")
    assert scaler["spec"]["scaleTargetRef"]["name"] == target["metadata"]["name"]


def test_what_is_applied_beside_the_pods_finds_them() -> None:
    (pod,) = pods(parse(rendered("gpu")))
    assert pod.gateway
    (monitor,) = of_kind(parse(rendered("monitoring")), "PodMonitor")
    ports = {port["name"]: port["containerPort"] for port in pod.gateway["ports"]}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod.labels.items()
    assert [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]] == ["ops"]
    routing = parse(rendered("gateway-api"))
    (pool,) = of_kind(routing, "InferencePool")
    assert pool["spec"]["selector"]["matchLabels"].items() <= pod.labels.items()
    assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]
    picker = pool["spec"]["endpointPickerRef"]
    (service,) = of_kind(routing, "Service")
    assert (service["metadata"]["name"], service["spec"]["ports"][0]["port"]) == (
        picker["name"],
        picker["port"]["number"],
    )
    (deployment,) = of_kind(routing, "Deployment")
    assert (
        f"--model-server-metrics-port={ports['ops']}" in deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    )
