"""Each alert of the page fires when it should and is quiet when it should be: by Prometheus' own judgement."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "failure-modes.md"
TEXT = re.search(r"^```yaml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
assert TEXT is not None
RULES = TEXT[1]
ALERTS = [rule["alert"] for group in yaml.safe_load(RULES)["groups"] for rule in group["rules"]]

Inputs = dict[str, str]
M, R = 'model="a"', 'model="a",replica="0"'

# Series as promtool writes them (a minute between samples): with which an alert fires, and with which not.
CASES: dict[str, tuple[Inputs, Inputs]] = {
    "InferdReplicaRestarting": (
        {f"inferd_replica_restarts_total{{{R}}}": "0+1x30"},
        {f"inferd_replica_restarts_total{{{R}}}": "0x15 1x15"},
    ),
    "InferdNotReady": (
        {f'inferd_replica_state{{{R},state="ready"}}': "0x30", f'inferd_replica_state{{{R},state="failed"}}': "1x30"},
        {f'inferd_replica_state{{{R},state="ready"}}': "0x30", f'inferd_replica_state{{{R},state="stopped"}}': "1x30"},
    ),
    "InferdErrors": (
        {f"inferd_errors_total{{{M}}}": "0+1x30", f"inferd_requests_total{{{M}}}": "0+100x30"},
        {f"inferd_errors_total{{{M}}}": "0x30", f"inferd_requests_total{{{M}}}": "0+100x30"},
    ),
    "InferdQueueFull": (
        {f'inferd_refused_total{{{M},reason="queue_full"}}': "0+1x30"},
        {f'inferd_refused_total{{{M},reason="draining"}}': "0+1x30"},
    ),
    "InferdKvPressure": (
        {f"inferd_kv_usage_ratio{{{R}}}": "0.95x30", f"inferd_preemptions_total{{{R}}}": "0+3x30"},
        {f"inferd_kv_usage_ratio{{{R}}}": "0.95x30", f"inferd_preemptions_total{{{R}}}": "3x30"},
    ),
    "InferdBreakerOpen": (
        {f'inferd_breaker_state{{{R},state="open"}}': "1x30"},
        {f'inferd_breaker_state{{{R},state="open"}}': "0x30", f'inferd_breaker_state{{{R},state="closed"}}': "1x30"},
    ),
    "InferdReplicaEjected": (
        {f'inferd_breaker_state{{{R},state="ejected"}}': "1x30"},
        {f'inferd_breaker_state{{{R},state="ejected"}}': "0x27 1x3"},
    ),
    "InferdRetriesRefused": (
        {f'inferd_retries_total{{{M},kind="retry",result="refused"}}': "0+1x30"},
        {f'inferd_retries_total{{{M},kind="retry",result="granted"}}': "0+1x30"},
    ),
    "InferdQuota": (
        {f'inferd_refused_total{{{M},reason="quota_tokens"}}': "0+120x60"},
        {f'inferd_refused_total{{{M},reason="quota_tokens"}}': "0+6x60"},
    ),
    "InferdCacheErrors": (
        {'inferd_response_cache_total{result="error"}': "0+1x30"},
        {f'inferd_response_cache_total{{{M},result="miss"}}': "0+1x30"},
    ),
    "InferdReloadRefused": (
        {"inferd_config_last_reload_successful": "0x30"},
        {"inferd_config_last_reload_successful": "1x30"},
    ),
    "InferdStateUnavailable": ({"inferd_state_available": "0x30"}, {"inferd_state_available": "1x30"}),
    "InferdLogLost": ({"inferd_log_lines_dropped_total": "0+5x30"}, {"inferd_log_lines_dropped_total": "5x30"}),
    "InferdObserverDefect": (
        {"inferd_observer_failures_total": "0+1x30"},
        {"inferd_observer_failures_total": "1x30"},
    ),
}


def test_every_alert_has_a_case() -> None:
    assert sorted(CASES) == sorted(ALERTS)


@pytest.mark.parametrize("alert", ALERTS)
@pytest.mark.parametrize("fires", [True, False], ids=["fires", "is-quiet"])
def test_an_alert_fires_when_it_should_and_only_then(alert: str, fires: bool, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    (tmp_path / "rules.yaml").write_text(RULES)
    said = judged(promtool, tmp_path, alert, CASES[alert][0 if fires else 1])
    # Nothing is expected, so promtool complains exactly where the alert fires.
    assert ("got:" in said and alert in said) == fires, said


def judged(promtool: str, folder: Path, alert: str, inputs: Inputs) -> str:
    minutes = "60m" if "x60" in "".join(inputs.values()) else "29m"
    case: dict[str, Any] = {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in inputs.items()],
        "alert_rule_test": [{"eval_time": minutes, "alertname": alert, "exp_alerts": []}],
    }
    (folder / "case.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [case]}))
    done = subprocess.run(
        [promtool, "test", "rules", "case.yaml"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert "SUCCESS" in done.stdout or "FAILED" in done.stdout + done.stderr, done.stdout + done.stderr
    return done.stdout + done.stderr
