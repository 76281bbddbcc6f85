"""checkov's opinion of the manifests; `k8s/checkov.yaml` says what of it doesn't hold here, and why."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.kubernetes.manifests import K8S, OVERLAYS, Manifest, parse, rendered
from tests.kubernetes.schemas import as_pods

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CONFIG = K8S / "checkov.yaml"


def check(folder: Path) -> dict[str, set[str]]:
    """The checks that failed, with the objects that did, for all files of a folder."""
    command = Path(sys.prefix, "checkov", "bin", "checkov")
    assert command.exists(), "checkov is missing: scripts/setup.sh checkov installs it"
    argv = [str(command), "--config-file", str(CONFIG), "--output", "json", "--directory", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=150, cwd=folder)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["summary"]["passed"] > 50, "it has looked at nothing"
    assert not report["summary"]["parsing_errors"], report["results"]["parsing_errors"]
    failed: dict[str, set[str]] = {}
    for result in report["results"]["failed_checks"]:
        failed.setdefault(result["check_id"], set()).add(result["resource"])
    return failed


def write(folder: Path, name: str, documents: list[Manifest]) -> None:
    """All objects, with pods in place of what checkov doesn't know."""
    known = [one for document in documents for one in list(as_pods(document)) or [document]]
    (folder / f"{name}.yaml").write_text(yaml.safe_dump_all(known))


def test_manifests_keep_to_the_policy(tmp_path: Path) -> None:
    for overlay in OVERLAYS:
        write(tmp_path, overlay, parse(rendered(overlay)))
    assert check(tmp_path) == {}


def test_manifest_that_breaks_the_policy_is_found(tmp_path: Path) -> None:
    text = rendered("gpu")
    for before, after in (
        ("allowPrivilegeEscalation: false", "privileged: true"),
        ("runAsUser: 65532", "runAsUser: 0"),
        ("        readOnlyRootFilesystem: true\n", ""),
        ("      enableServiceLinks: false\n", "      hostNetwork: true\n"),
        ("image: tidegate:0.1.0", "image: tidegate:latest"),
        ("kind: NetworkPolicy", "kind: NoPolicy"),
    ):
        assert before in text, "this mutation mutates nothing"
        text = text.replace(before, after)
    write(tmp_path, "gpu", parse(text))
    found = check(tmp_path).keys()
    # in this order: privileged, escalation, root, read-only root, the node's network, tag, no policy for the pods
    assert found >= {"CKV_K8S_16", "CKV_K8S_20", "CKV_K8S_40", "CKV_K8S_22", "CKV_K8S_19", "CKV_K8S_14", "CKV2_K8S_6"}


def test_every_waiver_has_its_reason() -> None:
    waived = [line for line in CONFIG.read_text().splitlines() if line.startswith("  - CKV")]
    assert len(waived) == len(yaml.safe_load(CONFIG.read_text())["skip-check"])
    assert all(len(line.partition("  # ")[2]) > 20 for line in waived)
