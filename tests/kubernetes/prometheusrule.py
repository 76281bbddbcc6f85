"""Write k8s/monitoring/prometheusrule.yaml: the rules of rules.yaml as the object that the Prometheus operator takes.

Usage: python -m tests.kubernetes.prometheusrule

kustomize can't put one file into a field of another, and Prometheus's own tools read rules.yaml alone.
"""

import textwrap

from tests.kubernetes.manifests import K8S

FOLDER = K8S / "monitoring"
HEAD = """\
# Made from rules.yaml by tests/kubernetes/prometheusrule.py.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: tidegate
  labels:
    app.kubernetes.io/name: tidegate
spec:
"""


def as_object(rules: str) -> str:
    """The object that holds a rule file."""
    body = "".join(line for line in rules.splitlines(keepends=True) if not line.startswith("#"))
    return HEAD + textwrap.indent(body, "  ")


def main() -> None:
    """Write the file."""
    (FOLDER / "prometheusrule.yaml").write_text(as_object((FOLDER / "rules.yaml").read_text()))


if __name__ == "__main__":
    main()
