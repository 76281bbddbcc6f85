"""The dashboard and the alerts as files; `tests/engine/test_monitoring.py` puts their queries to a real engine."""

import json
import re
import subprocess
from collections import Counter
from typing import Any

from tests.harness import ROOT
from tests.tools import tool

FILES = ROOT / "k8s" / "monitoring"


def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((FILES / "dashboard.json").read_text())
    return board


def test_each_alert_fires_on_its_trouble_and_none_without() -> None:
    tested = subprocess.run(
        [tool("promtool"), "test", "rules", FILES / "rules_test.yaml"], capture_output=True, text=True
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_there_is_an_example_of_every_alert_and_it_says_what_to_do() -> None:
    rules, examples = (FILES.joinpath(name).read_text() for name in ("rules.yaml", "rules_test.yaml"))
    alerts = re.findall(r"- alert: (\w+)", rules)
    assert alerts
    assert [name for name in alerts if f'alertname="{name}"' not in examples] == []
    assert len(alerts) == rules.count("summary: ") == rules.count("description: ") == rules.count("severity: ")


def test_no_two_panels_of_the_dashboard_share_a_place_or_a_number() -> None:
    panels = dashboard()["panels"]
    assert not [number for number, times in Counter(panel["id"] for panel in panels).items() if times > 1]
    taken = Counter(
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    )
    assert max(taken.values()) == 1
    assert max(x for x, _ in taken) == 23


def test_each_panel_explains_itself_and_asks_only_what_the_viewer_has_chosen() -> None:
    for panel in dashboard()["panels"]:
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert panel["datasource"]["uid"] == "${datasource}"
            for target in panel["targets"]:
                for selector in re.findall(r"(?:tidegate_|vllm:)\w+(\S*)", target["expr"]):
                    assert selector.startswith('{job=~"$job",'), target["expr"]


def test_every_series_of_ours_is_in_the_table() -> None:
    known = set(re.findall(r"`(tidegate_\w+)`", (ROOT / "docs" / "metrics.md").read_text()))
    text = "".join(FILES.joinpath(name).read_text() for name in ("dashboard.json", "rules.yaml"))
    used = {re.sub(r"_(bucket|count|sum)$", "", name) for name in re.findall(r"\btidegate_\w+", text)}
    assert used
    assert used <= known
