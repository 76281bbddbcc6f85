"""The manifests as kubectl renders them, and where things stand in them."""

import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.harness import ROOT

K8S = ROOT / "k8s"
OVERLAYS = sorted(file.parent.name for file in (K8S / "overlays").glob("*/kustomization.yaml"))
WITH_PODS = ["cpu", "gpu", "gpu-tensor-parallel", "multi-node"]
ON_GPUS = WITH_PODS[1:]
RENDER_S = 60.0
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where it is there

Manifest = dict[str, Any]


def tool(name: str) -> str:
    """A command that stands beside this Python, or else on the path."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found, f"{name} is missing: it comes with requirements/dev.txt (make setup installs it for make test)"
    return found


def render(folder: Path) -> str:
    """What `kubectl kustomize` makes of a folder.

    Raises:
        AssertionError: it refuses, with its words.
    """
    done = subprocess.run([tool("kubectl"), "kustomize", str(folder)], capture_output=True, text=True, timeout=RENDER_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def rendered(overlay: str) -> str:
    """The text of an overlay."""
    return render(K8S / "overlays" / overlay)


def parse(text: str) -> list[Manifest]:
    """The objects of a rendered text."""
    return [document for document in yaml.load_all(text, LOADER) if document]


def of_kind(documents: Iterable[Manifest], kind: str) -> list[Manifest]:
    """All objects of a kind."""
    return [document for document in documents if document["kind"] == kind]


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod template: of a Deployment, or of one role in a LeaderWorkerSet."""

    owner: str
    labels: dict[str, str]
    spec: Manifest
    documents: list[Manifest]

    @property
    def containers(self) -> dict[str, Manifest]:
        """All containers by name, sidecars first, as they start."""
        return {one["name"]: one for one in [*self.spec.get("initContainers", []), *self.spec["containers"]]}

    @property
    def gateway(self) -> Manifest | None:
        """The container that clients talk to."""
        return self.containers.get("gateway")

    @property
    def engine(self) -> Manifest | None:
        """The container that is vLLM alone."""
        return self.containers.get("engine")

    def environment(self, container: Manifest) -> dict[str, str]:
        """Its variables, with ConfigMaps looked up; what is from Secrets and fields is left out."""
        maps = {one["metadata"]["name"]: one["data"] for one in of_kind(self.documents, "ConfigMap")}
        found: dict[str, str] = {}
        for source in container.get("envFrom", []):
            found |= maps[source["configMapRef"]["name"]]
        for variable in container.get("env", []):
            reference = variable.get("valueFrom", {}).get("configMapKeyRef")
            if reference:
                found[variable["name"]] = maps[reference["name"]][reference["key"]]
            elif "value" in variable:
                found[variable["name"]] = variable["value"]
        return found

    def arguments(self, container: Manifest) -> list[str]:
        """Its arguments, with variables put in; LeaderWorkerSet's as in the first worker."""
        known = self.environment(container) | {
            "LWS_GROUP_SIZE": "2",
            "LWS_WORKER_INDEX": "1",
            "LWS_LEADER_ADDRESS": "tidegate-0.tidegate.tidegate",
        }
        return [re.sub(r"\$\((\w+)\)", lambda name: known[name[1]], text) for text in container.get("args", [])]

    def option(self, container: Manifest, name: str) -> str:
        """The value of one argument `--name=value`; empty without it."""
        given = [text.partition("=")[2] for text in self.arguments(container) if text.startswith(f"--{name}=")]
        return given[-1] if given else ""


def pods(documents: list[Manifest]) -> Iterator[Pod]:
    """Every pod template that is ours: with a gateway or an engine in it."""
    for document in documents:
        if document["kind"] == "Deployment":
            templates = {"Deployment": document["spec"]["template"]}
        elif document["kind"] == "LeaderWorkerSet":
            group = document["spec"]["leaderWorkerTemplate"]
            templates = {"leader": group["leaderTemplate"], "worker": group["workerTemplate"]}
        else:
            continue
        for owner, template in templates.items():
            pod = Pod(owner, labels_of(document, template), template["spec"], documents)
            if pod.gateway or pod.engine:
                yield pod


def labels_of(owner: Manifest, template: Manifest) -> dict[str, str]:
    """The labels of the pods: those of the template, and what the LeaderWorkerSet controller adds."""
    added = {"leaderworkerset.sigs.k8s.io/name": owner["metadata"]["name"]}
    labels: dict[str, str] = template["metadata"]["labels"]
    return labels | added if owner["kind"] == "LeaderWorkerSet" else labels


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """Whether a label selector (`matchLabels` alone is used here) takes these labels."""
    assert selector.keys() <= {"matchLabels"}, selector
    return bool(selector.get("matchLabels", {}).items() <= labels.items())
