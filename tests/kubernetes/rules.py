"""What must hold in every overlay, beyond what the API server checks. Each rule yields what is wrong, in words."""

from collections.abc import Iterator

from pydantic import ValidationError

from app.connection import LINGER_S
from app.settings import PREFIX, Settings
from launcher.supervisor import GRACE_S
from tests.kubernetes import schemas
from tests.kubernetes.manifests import Manifest, Pod, of_kind, pods, selects

RESTART_S = 120  # for a gateway to come back before its engine is taken for stalled
LOAD_S = {"Deployment": 600}  # a load slower than this needs a longer progressDeadlineSeconds
HARDENED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
}
HARMLESS = {"emptyDir", "persistentVolumeClaim", "secret", "configMap"}
MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
PICKER = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "tidegate-picker"}}}
RANKS = {"matchLabels": {"leaderworkerset.sigs.k8s.io/name": "tidegate"}}


def problems(documents: list[Manifest]) -> Iterator[str]:
    """What is wrong in an overlay: in its form, and if that is right, in its sense. Custom resources are left out where
    their CRDs aren't there."""
    everything = [one for document in documents for one in (document, *schemas.as_pods(document))]
    checkable = [one for one in everything if not schemas.is_custom(one) or schemas.CRDS.is_dir()]
    if malformed := [problem for one in checkable for problem in schemas.problems(one)]:
        yield from malformed
        return
    yield from _references(documents)
    yield from _network(documents)
    for pod in pods(documents):
        try:
            settings_of(pod)
        except ValidationError as error:
            yield f"{pod.owner}: settings: {error}"
            continue
        for rule in (_settings, _hardened, _sidecar, _probes, _times, _one_limit, _spread, _storage, _gpus):
            yield from (f"{pod.owner}: {problem}" for problem in rule(pod))
    for deployment in of_kind(documents, "Deployment"):
        if list(pods([deployment])):
            yield from _rollout(deployment, documents)


def _settings(pod: Pod) -> Iterator[str]:
    if not pod.gateway:
        return
    given = {name: value for name, value in pod.environment(pod.gateway).items() if name.startswith(PREFIX)}
    for name in given:
        if name.removeprefix(PREFIX).lower() not in Settings.model_fields:
            yield f"settings: {name} is none of the gateway's"
    settings = settings_of(pod)
    named = {port["name"]: port["containerPort"] for port in pod.gateway["ports"]}
    if named != {"http": settings.port, "ops": settings.ops_port}:
        yield f"settings: ports {named}, but the gateway listens on {settings.port} and {settings.ops_port}"
    if settings.host != "0.0.0.0":
        yield "settings: nobody outside the pod can reach it"
    engine = pod.engine
    if engine and settings.engine_url != f"http://{pod.option(engine, 'host')}:{pod.option(engine, 'port')}":
        yield f"settings: the gateway looks for its engine at {settings.engine_url}"


def settings_of(pod: Pod) -> Settings:
    """The gateway's settings in this pod; the defaults where there is none.

    Raises:
        ValidationError: a value is bad.
    """
    given = pod.environment(pod.gateway).items() if pod.gateway else ()
    named = {name.removeprefix(PREFIX).lower(): value for name, value in given if name.startswith(PREFIX)}
    return Settings.model_validate(named)


def _one_limit(pod: Pod) -> Iterator[str]:
    """Slots of the gateway and sequences of the engine come from one key of one ConfigMap."""
    if not pod.engine:
        return
    sources = [one["valueFrom"]["configMapKeyRef"] for one in pod.engine["env"] if one["name"] == "MAX_NUM_SEQS"]
    if [source["key"] for source in sources] != [f"{PREFIX}MAX_IN_FLIGHT"]:
        yield "limit: --max-num-seqs has a source of its own"
    if pod.gateway and pod.option(pod.engine, "max-num-seqs") != str(settings_of(pod).max_in_flight):
        yield "limit: --max-num-seqs isn't TIDEGATE_MAX_IN_FLIGHT"


def _sidecar(pod: Pod) -> Iterator[str]:
    """The engine beside a gateway starts first, ends last, and lets the gateway answer while it loads."""
    if not (pod.engine and pod.gateway):
        return
    if pod.engine not in pod.spec.get("initContainers", []) or pod.engine.get("restartPolicy") != "Always":
        yield "sidecar: the engine must be an init container with restartPolicy Always"
    if "startupProbe" in pod.engine:
        yield "sidecar: a startup probe of the engine holds the gateway back"
    if pod.option(pod.engine, "host") != "127.0.0.1" or pod.engine.get("ports"):
        yield "sidecar: the engine can be reached from outside the pod"
    probe = pod.engine.get("livenessProbe", {})
    asked = probe.get("httpGet", {})
    if (asked.get("path"), asked.get("port")) != ("/enginez", settings_of(pod).ops_port):
        yield f"sidecar: the engine's liveness is /enginez on the gateway's ops port, not {asked}"
    patience_s = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
    if patience_s < RESTART_S:
        yield f"sidecar: a gateway that is away for {patience_s} s costs the engine its life"


def _probes(pod: Pod) -> Iterator[str]:
    if not pod.gateway:
        return
    for kind, path in (("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        asked = pod.gateway.get(kind, {}).get("httpGet", {})
        if asked != {"path": path, "port": "ops"}:
            yield f"probes: {kind} asks {asked}"
    liveness = pod.gateway.get("livenessProbe", {})
    if liveness.get("periodSeconds", 10) * liveness.get("failureThreshold", 3) < 30:
        yield "probes: a busy moment costs the gateway its life"


def _times(pod: Pod) -> Iterator[str]:
    """What follows on the deletion of a pod, one after the other, fits into its grace period."""
    if not pod.gateway:
        return
    grace_s = pod.spec.get("terminationGracePeriodSeconds", 30)
    sleep_s = pod.gateway.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    if sleep_s < 5:
        yield "times: the gateway stops before the proxies have heard of it"
    settings = settings_of(pod)
    drain_s = settings.drain_limit_s + 2 * LINGER_S  # to write errors, and for slow readers
    if settings.drain_limit_s < settings.deadline_s:
        yield "times: a request may outlast the drain"
    engine_s = float(pod.option(pod.engine, "shutdown-timeout") or 0) if pod.engine else GRACE_S
    if grace_s < sleep_s + drain_s + engine_s:
        yield f"times: {sleep_s} s of preStop, {drain_s:g} s of drain and {engine_s:g} s for the engine in {grace_s} s"


def _rollout(deployment: Manifest, documents: list[Manifest]) -> Iterator[str]:
    spec = deployment["spec"]
    if "replicas" in spec:
        yield "rollout: applying this undoes what an autoscaler has set"
    rolling = spec.get("strategy", {}).get("rollingUpdate", {})
    if rolling.get("maxUnavailable") != 0 or rolling.get("maxSurge", 0) < 1:
        yield f"rollout: an update takes a pod away before there is another: {rolling}"
    if spec.get("progressDeadlineSeconds", 600) <= LOAD_S["Deployment"]:
        yield "rollout: loading the model counts as a failed update"
    labels = spec["template"]["metadata"]["labels"]
    budgets = [one["spec"] for one in of_kind(documents, "PodDisruptionBudget")]
    if [one.get("maxUnavailable") for one in budgets if selects(one["selector"], labels)] != [1]:
        yield "rollout: no disruption budget of one pod"


def _hardened(pod: Pod) -> Iterator[str]:
    spec = pod.spec
    if spec.get("enableServiceLinks") is not False:
        yield "hardened: service links; with them Kubernetes sets TIDEGATE_PORT"
    if spec.get("automountServiceAccountToken") is not False:
        yield "hardened: a service-account token"
    security = spec.get("securityContext", {})
    if security.get("runAsNonRoot") is not True or security.get("runAsUser", 0) < 10_000:
        yield "hardened: runs as root, or as a user that the node may have"
    if security.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "hardened: no seccomp profile"
    for name, container in pod.containers.items():
        if container.get("securityContext") != HARDENED:
            yield f"hardened: {name}: {container.get('securityContext')}"
        if "memory" not in container.get("resources", {}).get("limits", {}):
            yield f"hardened: {name} may take all memory"
    for volume in spec["volumes"]:
        if not volume.keys() - {"name"} <= HARMLESS:
            yield f"hardened: volume {volume}"
        if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
            yield f"hardened: volume {volume['name']} may fill the node's disk"


def _storage(pod: Pod) -> Iterator[str]:
    """With a read-only root, everything that is written to has a volume."""
    volumes = {one["name"]: one for one in pod.spec["volumes"]}
    for name, container in pod.containers.items():
        mounts = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
        needed = ["/tmp"] if name == "gateway" and pod.engine else ["/tmp", "/dev/shm"]
        if name == "engine":
            environment = pod.environment(container)
            needed += [environment["HOME"], environment["HF_HOME"]]
            if "persistentVolumeClaim" not in mounts.get(environment["HF_HOME"], {}):
                yield "storage: the model is downloaded at every start"
            token = environment["HF_TOKEN_PATH"].rpartition("/")[0]
            if not mounts.get(token, {}).get("secret", {}).get("optional"):
                yield "storage: no optional Secret for Hugging Face's token"
        yield from (f"storage: {name} can't write to {path}" for path in needed if path not in mounts)
        if "/dev/shm" in needed and mounts.get("/dev/shm", {}).get("emptyDir", {}).get("medium") != "Memory":
            yield f"storage: {name} has the 64 MiB of /dev/shm that containers have by default"


def _gpus(pod: Pod) -> Iterator[str]:
    if not pod.engine:
        return
    held = int(pod.engine["resources"]["limits"].get("nvidia.com/gpu", 0))
    ranks = int(pod.option(pod.engine, "tensor-parallel-size") or 1)
    if held != ranks:
        yield f"gpus: {held} for {ranks} ranks"
    if not pod.spec.get("nodeSelector") or {"nvidia.com/gpu"} != {one["key"] for one in pod.spec["tolerations"]}:
        yield "gpus: not kept to nodes with GPUs, or kept off them"


def _spread(pod: Pod) -> Iterator[str]:
    over = {one["topologyKey"] for one in pod.spec.get("topologySpreadConstraints", [])}
    if over != {"topology.kubernetes.io/zone", "kubernetes.io/hostname"}:
        yield f"spread: over {sorted(over)}"


def _network(documents: list[Manifest]) -> Iterator[str]:
    """Clients reach the main port, monitoring (and the endpoint picker) the ops port, and nobody anything else."""
    for pod in pods(documents):
        policies = [one["spec"] for one in of_kind(documents, "NetworkPolicy")]
        chosen = [one for one in policies if selects(one["podSelector"], pod.labels)]
        if not chosen:
            yield f"network: anybody reaches {pod.owner}"
        for rule in (rule for policy in chosen for rule in policy["ingress"]):
            sources, ports = rule.get("from", []), [port["port"] for port in rule.get("ports", [])]
            allowed = {
                "http": bool(sources),
                "ops": bool(sources) and all(source in (MONITORING, PICKER) for source in sources),
            }
            inside = sources == [{"podSelector": RANKS}]
            if not inside and (not ports or not all(allowed.get(port, False) for port in ports)):
                yield f"network: {sources or 'anybody'} reaches {ports or 'every port'} of {pod.owner}"


def _references(documents: list[Manifest]) -> Iterator[str]:
    """Whatever is named is there: ConfigMaps with their hashes, claims, accounts, ports, targets."""
    there = {(one["kind"], one["metadata"]["name"]) for one in documents}
    for document in documents:
        if document["kind"] != "Namespace" and document["metadata"].get("namespace") != "tidegate":
            yield f"references: {document['kind']} {document['metadata']['name']} is in no namespace of ours"
    for pod in pods(documents):
        wanted = {("ServiceAccount", pod.spec["serviceAccountName"])}
        wanted |= {
            ("PersistentVolumeClaim", one["persistentVolumeClaim"]["claimName"])
            for one in pod.spec["volumes"]
            if "persistentVolumeClaim" in one
        }
        for container in pod.containers.values():
            references = [one["configMapRef"] for one in container.get("envFrom", [])]
            references += [
                one["valueFrom"]["configMapKeyRef"]
                for one in container.get("env", [])
                if "configMapKeyRef" in one.get("valueFrom", {})
            ]
            wanted |= {("ConfigMap", one["name"]) for one in references}
            if ":" not in container["image"]:
                yield f"references: {container['image']} has no tag"
        yield from (f"references: {pod.owner} names {kind} {name}" for kind, name in sorted(wanted - there))
        for service in of_kind(documents, "Service"):
            names = {port["name"] for port in (pod.gateway or {}).get("ports", [])}
            if service["spec"]["selector"].items() <= pod.labels.items():
                yield from (
                    f"references: Service to {port['targetPort']}"
                    for port in service["spec"]["ports"]
                    if port["targetPort"] not in names - {"ops"}
                )
