"""Every query of the dashboard and the alerts, put to a Prometheus that scrapes a loaded gateway on a real engine."""

import asyncio
import contextlib
import http.client
import json
import math
import re
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx

from tests.engine.clients import ENDLESS, raw, words
from tests.engine.conftest import Start
from tests.harness import COMPLETIONS, ROOT, Child, Gateway, free_port, wait_until
from tests.tools import tool

FILES = ROOT / "k8s" / "monitoring"
WITHIN_S = 120.0
LONG = "word " * 600  # a prompt for the long lane


class Prometheus(Child):
    """Scrapes one gateway every second and evaluates our alerts."""

    def __init__(self, gate: Gateway) -> None:
        super().__init__("prometheus")
        self.port = free_port()
        config = Path(self.folder.name, "prometheus.yml")
        scrape = {"job_name": "tidegate", "static_configs": [{"targets": [f"127.0.0.1:{gate.port}"]}]}
        every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        rules = [str(FILES / "rules.yaml")]
        config.write_text(
            json.dumps({"global": every, "rule_files": rules, "scrape_configs": [scrape]})
        )  # JSON is YAML
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    tool("prometheus"),
                    f"--config.file={config}",
                    f"--storage.tsdb.path={self.folder.name}/data",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                cwd=self.folder.name,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(lambda: not self.running or self._ready(), "Prometheus")
        assert self.running, self.log

    def _ready(self) -> bool:
        try:
            return bool(self.ask("/api/v1/query", query="vector(1)"))
        except (OSError, ValueError):
            return False

    def ask(self, path: str, **query: str) -> Any:
        """The data of an answer of its API."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(line):
            line.request("GET", f"{path}?{urlencode(query)}")
            answer = json.loads(line.getresponse().read())
        assert answer["status"] == "success", answer
        return answer["data"]

    def tells(self, expression: str) -> bool:
        """Whether an expression has a value now, of any series."""
        values = [float(sample["value"][1]) for sample in self.ask("/api/v1/query", query=expression)["result"]]
        return any(not math.isnan(value) for value in values)

    def alerts(self) -> list[dict[str, Any]]:
        """Its rules as it has read them."""
        return [rule for group in self.ask("/api/v1/rules")["groups"] for rule in group["rules"]]


def of_dashboard() -> list[str]:
    """Its expressions, for a viewer who has chosen nothing."""
    panels = json.loads((FILES / "dashboard.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    return [re.sub(r"\$(job|instance)", ".*", one).replace("$__rate_interval", "1m") for one in expressions]


def of_alert(expression: str) -> str:
    """What it compares: comparisons give 0 or 1 instead of nothing, and absence is asked for as presence."""
    compared = re.sub(r"\s(==|<|>)\s", r" \1 bool ", expression)
    return re.sub(r"\babsent\(", "(", compared)


async def load(client: httpx.AsyncClient) -> None:
    """A second or two of everything that the queries speak of."""
    sent = [client.post(COMPLETIONS, json=words(20, stream=True)) for _ in range(8)]
    sent += [client.post(COMPLETIONS, json=words(20, prompt=LONG, stream=True)) for _ in range(8)]
    sent.append(client.post(COMPLETIONS, json=words(5), headers={"x-stainless-retry-count": "1"}))
    answers = await asyncio.gather(*sent)
    assert {answer.status_code for answer in answers} == {200, 503}
    late = await client.post(COMPLETIONS, json=words(ENDLESS), headers={"x-request-timeout-ms": "300"})
    assert late.status_code == 504
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.3):
            await client.post(COMPLETIONS, json=words(ENDLESS))


async def test_no_query_of_the_dashboard_or_the_alerts_is_empty(gateway: Start) -> None:
    gate = gateway(fresh=True, max_in_flight=4, max_queue=6, api_keys="someone:a-key")
    with Prometheus(gate) as prometheus:
        alerts = prometheus.alerts()
        queries = {alert["query"]: of_alert(alert["query"]) for alert in alerts} | {one: one for one in of_dashboard()}
        assert len(queries) > 40
        end = time.monotonic() + WITHIN_S
        async with raw(gate) as client:
            while empty := [shown for shown, query in queries.items() if not prometheus.tells(query)]:
                assert time.monotonic() < end, "nothing to see:\n" + "\n".join(empty)
                await load(client)
        wait_until(lambda: {alert["health"] for alert in prometheus.alerts()} == {"ok"}, "an evaluation of every alert")
        assert not prometheus.tells("vector(1) == 2"), "the test takes nothing for something"
        [up] = prometheus.ask("/api/v1/query", query="up")["result"]
        assert up["value"][1] == "1"
