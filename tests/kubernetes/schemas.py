"""Whether the API server would take a manifest: the schemas of two Kubernetes versions and of the custom resources."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.harness import ROOT
from tests.kubernetes.manifests import LOADER, Manifest, labels_of

VERSIONS = ("1.30", "1.37")  # the oldest that has all that is used here, and the newest
CRDS = ROOT.parent / "shared" / "crds"
BUILT_IN = {"", "apps", "policy", "networking.k8s.io", "rbac.authorization.k8s.io"}


def is_custom(document: Manifest) -> bool:
    """Whether the kind comes from a CRD."""
    return document["apiVersion"].rpartition("/")[0] not in BUILT_IN


def problems(document: Manifest) -> Iterator[str]:
    """What the API server would object to."""
    yield from custom_problems(document) if is_custom(document) else _built_in_problems(json.dumps(document))


@functools.cache  # kubernetes-validate reads its schemas anew for each object, and most come again and again here
def _built_in_problems(text: str) -> list[str]:
    return list(_validate(json.loads(text)))


def _validate(document: Manifest) -> Iterator[str]:
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"schema {version}: {document['kind']}: {'.'.join(map(str, error.path))}: {error.message}"
        except kubernetes_validate.SchemaNotFoundError as error:
            yield f"schema {version}: {error.message}"


def custom_problems(document: Manifest) -> Iterator[str]:
    """The same for a custom resource; a CRD that isn't there says so with a KeyError."""
    schema = crds()[document["apiVersion"], document["kind"]]
    for error in jsonschema.Draft202012Validator(schema).iter_errors(document):
        yield f"schema: {document['kind']}: {'.'.join(map(str, error.path))}: {error.message}"


@functools.cache
def crds() -> dict[tuple[str, str], Manifest]:
    """The schema of each custom resource, by version and kind."""
    found = {}
    for file in sorted(CRDS.glob("*.yaml")):
        crd = _load(file)["spec"]
        for version in crd["versions"]:
            schema = _strict(version["schema"]["openAPIV3Schema"])
            found[f"{crd['group']}/{version['name']}", crd["names"]["kind"]] = schema
    return found


def _load(file: Path) -> Manifest:
    found: Manifest = yaml.load(file.read_text(), LOADER)
    return found


def _strict(schema: Any) -> Any:
    """Unknown fields, which the API server would drop without a word, become errors."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    known = {name: _strict(part) for name, part in schema.items()}
    is_closed = isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema
    if is_closed and schema.get("type") == "object" and not schema.get("x-kubernetes-preserve-unknown-fields"):
        known["additionalProperties"] = False
    return known


def as_pods(document: Manifest) -> Iterator[Manifest]:
    """The templates of a LeaderWorkerSet as pods, which other tools know; its CRD leaves most of a pod unchecked."""
    if document["kind"] == "LeaderWorkerSet":
        group = document["spec"]["leaderWorkerTemplate"]
        for role in ("leader", "worker"):
            template = group[f"{role}Template"]
            metadata = template["metadata"] | {
                "name": f"tidegate-{role}",
                "namespace": document["metadata"]["namespace"],
                "labels": labels_of(document, template),
            }
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
