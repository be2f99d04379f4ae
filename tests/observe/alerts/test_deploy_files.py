"""The files in deploy/ are ones that Prometheus and Alertmanager take, and fit the alerts."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import yaml
from tests.observe.prometheus_server import free_port

DEPLOY = Path(__file__).resolve().parent.parent.parent.parent / "deploy"
ALERTMANAGER = DEPLOY / "alertmanager" / "alertmanager.yml"


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def test_prometheus_takes_its_configuration_with_the_rules() -> None:
    command = [tool("promtool"), "check", "config", str(DEPLOY / "prometheus" / "prometheus.yml")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "1 rule files found" in found.stdout


def test_alertmanager_takes_its_configuration() -> None:
    command = [tool("amtool"), "check-config", str(ALERTMANAGER)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(("severity", "receiver"), [("page", "pages"), ("ticket", "tickets")])
def test_an_alert_of_each_severity_goes_to_its_receiver(severity: str, receiver: str) -> None:
    labels = [f"severity={severity}", "alertname=InferdErrors", "model=a"]
    command = [tool("amtool"), "config", "routes", "test", f"--config.file={ALERTMANAGER}", *labels]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stdout.strip() == receiver, found.stdout + found.stderr


def test_the_alerts_have_the_severities_that_are_routed() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "inferd.rules.yml").read_text(encoding="utf-8"))
    severities = {rule["labels"]["severity"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule}
    assert severities == {"page", "ticket"}


Names = dict[str, str]


def suppressed(tmp_path: Path, *alerts: Names) -> list[bool]:
    """Which of these alerts a real Alertmanager mutes."""
    port = free_port()
    base = f"http://127.0.0.1:{port}/api/v2/alerts"
    command = [tool("prometheus-alertmanager"), f"--config.file={ALERTMANAGER}", f"--storage.path={tmp_path}"]
    options = [f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address=", "--log.level=error"]
    log = tmp_path / "log"
    with log.open("w") as stderr, subprocess.Popen([*command, *options], stderr=stderr, stdout=stderr) as process:
        try:
            deadline = time.monotonic() + 30
            while True:
                try:
                    httpx.post(base, json=[{"labels": labels} for labels in alerts]).raise_for_status()
                    break
                except httpx.HTTPError:
                    if process.poll() is not None and "default.tmpl: no such file" in log.read_text():
                        pytest.skip("Alertmanager is unpacked and not installed: its templates are not in their place")
                    assert time.monotonic() < deadline, "Alertmanager does not answer"
                    time.sleep(0.1)
            while True:
                found = {frozenset(one["labels"].items()): one["status"]["state"] for one in httpx.get(base).json()}
                states = [found.get(frozenset(labels.items())) for labels in alerts]
                if not {None, "unprocessed"} & set(states):
                    return [state == "suppressed" for state in states]
                assert time.monotonic() < deadline, states
                time.sleep(0.1)
        finally:
            process.terminate()
            process.wait(timeout=30)


def alert(name: str, severity: str, **labels: str) -> Names:
    return {"alertname": name, "severity": severity, **labels}


def test_a_page_mutes_the_tickets_of_its_model_alone(tmp_path: Path) -> None:
    assert suppressed(
        tmp_path,
        alert("InferdNotReady", "page", model="a"),
        alert("InferdReplicaAway", "ticket", model="a"),
        alert("InferdReplicaAway", "ticket", model="b"),
        alert("InferdLogLost", "ticket", instance="i"),
    ) == [False, True, False, False]


def test_a_page_about_the_whole_server_mutes_no_ticket(tmp_path: Path) -> None:
    assert suppressed(
        tmp_path, alert("InferdStateUnavailable", "page", instance="i"), alert("InferdLogLost", "ticket", instance="i")
    ) == [False, False]


def test_the_fastest_burn_rate_of_an_objective_pages_alone(tmp_path: Path) -> None:
    fast = alert("InferdErrorBudgetBurnFast", "page", model="a", objective="ttft")
    assert suppressed(
        tmp_path,
        fast,
        {**fast, "alertname": "InferdErrorBudgetBurn"},
        {**fast, "alertname": "InferdErrorBudgetBurn", "objective": "total"},
    ) == [False, True, False]
