"""The table of the gateway-cost benchmark, and what it says of arms that could not be had."""

import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest import cost_report, gateway_cost, peers, traffic
from loadtest.client import Address, NotServed
from loadtest.cost_report import Figures
from loadtest.peers import PEERS, Missing, Place


def figures(event_us: float, call_us: float = 100.0, call_p50_ms: float = 1.0) -> Figures:
    return Figures(event_us, 2.0, call_us, call_p50_ms, 20 * call_p50_ms, 1000.0, 20.0)


ARMS = {
    "direct": [figures(0.0, 0.0, 0.5)],
    "nginx": [figures(10.0)],
    "smg": [figures(40.0)],
    "vllm-router": [figures(30.0), figures(50.0)],
    "tidegate": [figures(28.0), figures(32.0)],
}


def test_ours_is_told_by_the_better_of_the_rust_gateways_and_by_everyone() -> None:
    event, call, _, added = cost_report.ratios(ARMS)
    assert "0.75 x the better of the Rust gateways (smg)" in event
    assert "3.00 x nginx" in event
    assert "1.00 x nginx" in call
    assert "0.50 ms longer" in added
    assert "10.00 ms with 32 in flight" in added


def test_an_arm_that_could_not_be_had_is_in_the_table_with_the_reason() -> None:
    table = cost_report.table({"tidegate": ARMS["tidegate"]}, {"nginx": "not installed"})
    assert "nginx: missing, not installed" in table
    assert "30 [28, 32]" in table


def test_without_ours_there_are_no_ratios() -> None:
    assert cost_report.ratios({"nginx": ARMS["nginx"]}) == []


def test_a_missing_nginx_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(Missing, match="apt-get install"):
        PEERS["nginx"].prepare(Place(1, 2, tmp_path), print)


def test_an_installation_that_fails_is_told_by_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "CACHE", tmp_path)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(Missing, match="installation failed"):
        PEERS["smg"].prepare(Place(1, 2, tmp_path), lambda _: None)


def test_litellms_compromised_releases_are_never_taken() -> None:
    (line,) = [line for line in (peers.LOCKS / "litellm.txt").read_text().splitlines() if line.startswith("litellm[")]
    assert not any(f"=={bad} " in line for bad in ("1.82.7", "1.82.8", "1.107.0"))


def test_an_unknown_arm_is_named_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gateway_cost.main(["--arms", "apache"])
    assert "no such arm: apache (there are: nginx" in capsys.readouterr().err


def test_everything_is_written(tmp_path: Path) -> None:
    about: dict[str, Any] = {"machine": "m", "at": "2026-01-01T00:00"}
    cost_report.write(tmp_path, about, {"nginx": []}, {"smg": "why"}, {})
    assert json.loads((tmp_path / "cost.json").read_text())["missing"] == {"smg": "why"}


def test_what_is_asked_of_ours_alone_is_told_with_its_spread() -> None:
    names = "refusal_us refusal_connection_us gap_p99_quiet_ms gap_p99_refusing_ms gap_p99_elsewhere_ms".split()
    names += "vllm_tokens_s_direct vllm_tokens_s_through vllm_first_ms_direct vllm_first_ms_through".split()
    own = {name: [100.0, 120.0] for name in names}
    own |= {"stream_kib": [21.0], "early_mib": [59.0], "late_mib": [59.5], "calls": [1000]}
    said = cost_report.own_table(own)
    assert "A refusal costs 110 [100, 120] µs CPU" in said
    assert "holds 21 KiB" in said
    assert "(100.0%)" in said


async def test_an_arm_that_never_gets_done_is_told_and_ends_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "WAIT_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address(port=silent.getsockname()[1])
        with pytest.raises(NotServed, match=r"not done after 0\.01 s"):
            await traffic.streams(address, 2)
