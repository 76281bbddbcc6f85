"""The monitoring overlay carries the rules and the dashboard as they are."""

import json

import yaml

from tests.kubernetes import schemas
from tests.kubernetes.manifests import K8S, of_kind, parse, rendered
from tests.kubernetes.prometheusrule import as_object

RULES = K8S / "monitoring" / "rules.yaml"
SMALL = """\
# Alerts.
groups:
  - name: a
    rules:
      - alert: Down
        expr: |
          up == 0
            and on () vector(1)
        for: 5m
"""


def test_rule_file_becomes_the_operators_object() -> None:
    (made,) = parse(as_object(SMALL))
    assert made["spec"] == yaml.safe_load(SMALL)
    if schemas.CRDS.is_dir():
        assert list(schemas.problems(made)) == []


def test_overlay_has_the_rules_and_the_dashboard() -> None:
    overlay = parse(rendered("monitoring"))
    (rules,) = of_kind(overlay, "PrometheusRule")
    assert rules["spec"] == yaml.safe_load(RULES.read_text()), "run python -m tests.kubernetes.prometheusrule"
    (board,) = of_kind(overlay, "ConfigMap")
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(board["data"]["dashboard.json"]) == json.loads((RULES.parent / "dashboard.json").read_text())
