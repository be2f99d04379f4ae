"""Each alert fires when it should and is quiet when it should be: by Prometheus' own judgement."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from tests.tiers import THOROUGH

from inferd.config import ObjectivesConfig
from inferd.observe.alerts.burn_rates import BURN_RATES
from inferd.observe.alerts.general import GENERAL
from inferd.observe.alerts.rules_file import rules_file

RULES = rules_file({"a": ObjectivesConfig(availability=0.999, ttft_ms=500.0)})

Inputs = dict[str, str]
M, R, I = 'model="a"', 'model="a",replica="0"', 'instance="i"'  # noqa: E741
HTTP = 'instance="i",method="POST"'


class Case(NamedTuple):
    """Series as promtool writes them, a minute between samples. ``fires`` at minute ``at``, ``quiet`` does not."""

    fires: Inputs
    quiet: Inputs
    at: int = 29


def objective(good: str, requests: str, name: str = "availability") -> Inputs:
    labels = f'{M},objective="{name}"'
    return {
        f"inferd_objective_requests_total{{{labels}}}": requests,
        f"inferd_objective_good_total{{{labels}}}": good,
    }


D = 'instance="i",device="gpu0",kind="gpu"'
TPOT = "inferd_request_time_per_output_token_seconds"


def cohort(replica: str, answers: float, seconds: float) -> Inputs:
    """So many answers a minute of one replica, each at so many seconds per token."""
    labels = f'{I},{M},replica="{replica}"'
    return {f"{TPOT}_sum{{{labels}}}": f"0+{answers * seconds:g}x60", f"{TPOT}_count{{{labels}}}": f"0+{answers:g}x60"}


def subset(fast: int, slow: int) -> Inputs:
    """So many answers a minute of up to 25 ms per token, and so many of 300 to 400 ms."""
    labels = f"{I},{R}"
    buckets = {"0.01": 0, "0.025": fast, "0.3": fast, "0.4": fast + slow, "+Inf": fast + slow}
    return {f'{TPOT}_bucket{{{labels},le="{le}"}}': f"0+{count}x60" for le, count in buckets.items()} | {
        f"{TPOT}_sum{{{labels}}}": f"0+{fast * 0.02 + slow * 0.4:g}x60",
        f"{TPOT}_count{{{labels}}}": f"0+{fast + slow}x60",
    }


BUSY, BAD, FLAT = "0+100x5000", "0+97x5000", "0+99.95x5000"
CASES: dict[str, list[Case]] = {
    "InferdAbsent": [Case({"other": "1x30"}, {f"inferd_build_info{{{I}}}": "1x30"})],
    "InferdNotReady": [
        Case(
            {f'inferd_replica_state{{{R},state="ready"}}': "0x30", f'inferd_replica_state{{{R},state="hung"}}': "1x30"},
            {
                f'inferd_replica_state{{{R},state="ready"}}': "0x30",
                f'inferd_replica_state{{{R},state="stopped"}}': "1x30",
            },
        ),
    ],
    "InferdErrors": [
        Case(
            {f'inferd_errors_total{{{M},kind="internal"}}': "0+2x30", f"inferd_requests_total{{{M}}}": "0+100x30"},
            {
                f'inferd_errors_total{{{M},kind="invalid_request"}}': "0+2x30",
                f"inferd_requests_total{{{M}}}": "0+100x30",
            },
        ),
        Case(  # one failure of few requests calls no operator
            {f'inferd_errors_total{{{M},kind="internal"}}': "0+2x30", f"inferd_requests_total{{{M}}}": "0+3x30"},
            {f'inferd_errors_total{{{M},kind="internal"}}': "0x20 1x9", f"inferd_requests_total{{{M}}}": "0+1x30"},
        ),
    ],
    "InferdHttpErrors": [
        Case(
            {
                f'inferd_http_requests_total{{{HTTP},route="/v1/models",status="503"}}': "0+10x30",
                f'inferd_http_requests_total{{{HTTP},route="/v1/models",status="200"}}': "0+90x30",
            },
            {
                f'inferd_http_requests_total{{{HTTP},route="/health/ready",status="503"}}': "0+10x30",
                f'inferd_http_requests_total{{{HTTP},route="/v1/models",status="429"}}': "0+90x30",
            },
        ),
    ],
    "InferdConnectionsRefused": [
        Case(
            {f"inferd_http_connections_refused_total{{{I}}}": "0+1x30"},
            {f"inferd_http_connections_refused_total{{{I}}}": "9x30"},
        ),
    ],
    "InferdQueueFull": [
        Case(
            {f'inferd_refused_total{{{M},reason="queue_full"}}': "0+1x30"},
            {f'inferd_refused_total{{{M},reason="draining"}}': "0+1x30"},
        ),
    ],
    "InferdQueueGrowing": [
        Case({f"inferd_queue_waiting{{{M}}}": "20+2x30"}, {f"inferd_queue_waiting{{{M}}}": "80-2x30"}),
        Case({f"inferd_queue_waiting{{{M}}}": "20+2x30"}, {f"inferd_queue_waiting{{{M}}}": "50x30"}),
        Case({f"inferd_queue_waiting{{{M}}}": "20+2x30"}, {f"inferd_queue_waiting{{{M}}}": "0+0.3x30"}),
    ],
    "InferdDrift": [
        Case(
            {f'inferd_drift_detected{{{M},stream="label",{I}}}': "0x28 1x9"},
            {f'inferd_drift_detected{{{M},stream="label",{I}}}': "1x10 0x30"},
        ),
    ],
    "InferdKvPressure": [
        Case(
            {f"inferd_kv_usage_ratio{{{R}}}": "0.95x30", f"inferd_preemptions_total{{{R}}}": "0+3x30"},
            {f"inferd_kv_usage_ratio{{{R}}}": "0.95x30", f"inferd_preemptions_total{{{R}}}": "3x30"},
        ),
    ],
    "InferdRetriesRefused": [
        Case(
            {f'inferd_retries_total{{{M},kind="retry",result="refused"}}': "0+1x30"},
            {f'inferd_retries_total{{{M},kind="retry",result="granted"}}': "0+1x30"},
        ),
    ],
    "InferdQuota": [
        Case(
            {f'inferd_refused_total{{{M},reason="quota_tokens"}}': "0+120x60"},
            {f'inferd_refused_total{{{M},reason="quota_tokens"}}': "0+6x60"},
            at=60,
        ),
    ],
    "InferdMemoryHigh": [
        Case(
            {f"inferd_memory_available_bytes{{{I}}}": "14x30", f"inferd_memory_limit_bytes{{{I}}}": "100x30"},
            {f"inferd_memory_available_bytes{{{I}}}": "16x30", f"inferd_memory_limit_bytes{{{I}}}": "100x30"},
        ),
    ],
    "InferdGpuMemoryHigh": [
        Case(
            {'inferd_gpu_memory_used_bytes{gpu="0"}': "96x30", 'inferd_gpu_memory_total_bytes{gpu="0"}': "100x30"},
            {'inferd_gpu_memory_used_bytes{gpu="0"}': "94x30", 'inferd_gpu_memory_total_bytes{gpu="0"}': "100x30"},
        ),
    ],
    "InferdKvSaturated": [
        Case(
            {f"inferd_kv_usage_ratio{{{R}}}": "0.99x30", f"inferd_replica_waiting{{{R}}}": "2x30"},
            {f"inferd_kv_usage_ratio{{{R}}}": "0.99x30", f"inferd_replica_waiting{{{R}}}": "0x30"},
        ),
        Case(
            {f"inferd_kv_usage_ratio{{{R}}}": "0.88 0.96x30", f"inferd_replica_waiting{{{R}}}": "2x30"},
            {f"inferd_kv_usage_ratio{{{R}}}": "0.8 0.89x30", f"inferd_replica_waiting{{{R}}}": "2x30"},
        ),
    ],
    "InferdTpotDeviation": [
        # One of three replicas is slow: the mean of all grew by a third only.
        Case(
            {**cohort("0", 10, 0.02), **cohort("1", 10, 0.02), **cohort("2", 10, 0.04)},
            {**cohort("0", 10, 0.02), **cohort("1", 10, 0.02), **cohort("2", 10, 0.025)},
        ),
        # All are slow: that is no deviation.
        Case({**cohort("0", 90, 0.02), **cohort("1", 3, 0.2)}, {**cohort("0", 10, 0.2), **cohort("1", 10, 0.2)}),
        # Three answers in ten minutes are too few to judge, and a model with one replica has no peers.
        Case({**cohort("0", 10, 0.02), **cohort("1", 3, 0.2)}, {**cohort("0", 10, 0.02), **cohort("1", 0.3, 0.2)}),
        Case({**cohort("0", 10, 0.02), **cohort("1", 3, 0.2)}, cohort("0", 10, 0.2)),
    ],
    "InferdTpotSubset": [
        # One answer of ten takes 0.4 s per token, the others 20 ms: the mean is 58 ms, as if all took that long.
        Case(subset(9, 1), subset(100, 1)),
        Case(subset(9, 1), subset(0, 10)),
    ],
    "InferdDeviceBusy": [
        Case({f"inferd_device_duty_cycle{{{D}}}": "0.95x60"}, {f"inferd_device_duty_cycle{{{D}}}": "0.85x60"}, at=60),
        Case(
            {f"inferd_device_duty_cycle{{{D}}}": "0.95x60"},
            {'inferd_device_duty_cycle{instance="i",device="cpu",kind="cpu"}': "1x60"},
            at=60,
        ),
    ],
    "InferdDeviceUnderused": [
        Case(
            {f"inferd_device_duty_cycle{{{D}}}": "0.4x90", f"inferd_in_flight{{{I},{M}}}": "3x90"},
            {f"inferd_device_duty_cycle{{{D}}}": "0.4x90", f"inferd_in_flight{{{I},{M}}}": "0x90"},
            at=90,
        ),
        Case(
            {f"inferd_device_duty_cycle{{{D}}}": "0.6x90", f"inferd_in_flight{{{I},{M}}}": "1x90"},
            {f"inferd_device_duty_cycle{{{D}}}": "0.75x90", f"inferd_in_flight{{{I},{M}}}": "3x90"},
            at=90,
        ),
    ],
    "InferdDeviceThrottled": [
        Case(
            {f'inferd_device_throttled_seconds_total{{{D},reason="thermal"}}': "0+12x30"},
            {
                f'inferd_device_throttled_seconds_total{{{D},reason="thermal"}}': "0+3x30",
                f'inferd_device_throttled_seconds_total{{{D},reason="power"}}': "0+60x30",
            },
        ),
    ],
    "InferdDeviceHot": [
        Case(
            {f"inferd_device_temperature_celsius{{{D}}}": "88x30"},
            {
                f"inferd_device_temperature_celsius{{{D}}}": "80x30",
                'inferd_device_temperature_celsius{instance="i",device="coretemp",kind="sensor"}': "92x30",
            },
        ),
    ],
    "InferdDeviceErrors": [
        Case(
            {f'inferd_device_errors_total{{{D},error="uncorrected"}}': "0x20 1x40"},
            {
                f'inferd_device_errors_total{{{D},error="uncorrected"}}': "7x60",
                f'inferd_device_errors_total{{{D},error="corrected"}}': "0+9x60",
            },
        ),
    ],
    "InferdDeviceUnreadable": [
        Case(
            {f'inferd_device_read_failures_total{{{I},source="nvml"}}': "0+2x30"},
            {f'inferd_device_read_failures_total{{{I},source="nvml"}}': "0x10 1x20"},
        ),
    ],
    "InferdReplicaRestarting": [
        Case(
            {f"inferd_replica_restarts_total{{{R}}}": "0+1x30"},
            {f"inferd_replica_restarts_total{{{R}}}": "0x15 1x15"},
        ),
    ],
    "InferdReplicaAway": [
        Case(
            {f'inferd_replica_state{{{R},state="failed"}}': "1x30"},
            {f'inferd_replica_state{{{R},state="died"}}': "0x26 1x3"},
        ),
        Case(
            {f'inferd_replica_state{{{R},state="hung"}}': "1x30"},
            {f'inferd_replica_state{{{R},state="stopped"}}': "1x30"},
        ),
    ],
    "InferdBreakerOpen": [
        Case(
            {f'inferd_breaker_state{{{R},state="open"}}': "1x30"},
            {
                f'inferd_breaker_state{{{R},state="open"}}': "0x30",
                f'inferd_breaker_state{{{R},state="closed"}}': "1x30",
            },
        ),
    ],
    "InferdReplicaEjected": [
        Case(
            {f'inferd_breaker_state{{{R},state="ejected"}}': "1x30"},
            {f'inferd_breaker_state{{{R},state="ejected"}}': "0x27 1x3"},
        ),
    ],
    "InferdStateUnavailable": [
        Case({f"inferd_state_available{{{I}}}": "0x30"}, {f"inferd_state_available{{{I}}}": "1x30"}),
    ],
    "InferdCacheErrors": [
        Case(
            {'inferd_response_cache_total{result="error"}': "0+1x30"},
            {f'inferd_response_cache_total{{{M},result="miss"}}': "0+1x30"},
        ),
    ],
    "InferdReloadRefused": [
        Case(
            {f"inferd_config_last_reload_successful{{{I}}}": "0x30"},
            {f"inferd_config_last_reload_successful{{{I}}}": "1x30"},
        ),
    ],
    "InferdGatewaysDiffer": [
        Case({f"inferd_gateways_differing{{{I}}}": "1x30"}, {f"inferd_gateways_differing{{{I}}}": "0x26 1x3"}),
    ],
    "InferdLogLost": [
        Case({f"inferd_log_lines_dropped_total{{{I}}}": "0+5x30"}, {f"inferd_log_lines_dropped_total{{{I}}}": "5x30"}),
    ],
    "InferdObserverDefect": [
        Case({f"inferd_observer_failures_total{{{I}}}": "0+1x30"}, {f"inferd_observer_failures_total{{{I}}}": "1x30"}),
    ],
    "InferdErrorBudgetBurnFast": [
        Case(objective(BAD, BUSY), objective(FLAT, BUSY), at=120),  # 3 % of all fail, against 0.05 %
        # The failures ended an hour ago: the long window is still bad, the short one is not.
        Case(objective(BAD, BUSY), objective("0+97x60 5920+100x60", BUSY), at=80),
        # A night with one request in five minutes: one that fails is 8 % of an hour, and pages no operator.
        Case(objective("0x240", "0+0.2x240"), objective("0+0.2x200 39+0.2x40", "0+0.2x240"), at=203),
        # Of an objective of 95 % the bound is 72 %.
        Case(objective("0+20x200", "0+100x200", "ttft"), objective("0+40x200", "0+100x200", "ttft"), at=120),
    ],
    "InferdErrorBudgetBurn": [
        Case(objective("0+99x5000", BUSY), objective("0+99.6x5000", BUSY), at=720),
        Case(objective("0+99x5000", BUSY), objective("0+99x360 35740+100x400", BUSY), at=400),
    ],
    "InferdErrorBudgetBurnSlow": [
        Case(objective("0+99.8x5000", BUSY), objective(FLAT, BUSY), at=4410),
        Case(objective("0+99.8x5000", BUSY), objective("0+99.8x3900 389320+100x1000", BUSY), at=4410),
    ],
}


def test_every_alert_has_a_case() -> None:
    assert set(CASES) == {alert.name for alert in GENERAL} | {rate.alert for rate in BURN_RATES}


# Every day the first case of each alert.
ALL = [
    pytest.param(alert, case, marks=() if case is cases[0] else THOROUGH)
    for alert, cases in CASES.items()
    for case in cases
]


@pytest.mark.parametrize(("alert", "case"), ALL)
@pytest.mark.parametrize("fires", [True, False], ids=["fires", "is-quiet"])
def test_an_alert_fires_when_it_should_and_only_then(alert: str, case: Case, fires: bool, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    (tmp_path / "rules.yaml").write_text(rules_for(alert))
    said = judged(promtool, tmp_path, alert, case.fires if fires else case.quiet, case.at)
    # Nothing is expected, so promtool complains exactly where the alert fires, and prints its labels and words.
    assert ("got:" in said) == fires, said
    if fires:
        (rule,) = {rule["labels"]["severity"] for rule in rules_of(alert)}
        assert f'severity="{rule}"' in said
        assert f'runbook_url="docs/runbooks/{alert}.md"' in said
        assert "<no value>" not in said
        assert "<error" not in said, "a template that fails says so in the text"


def rules_for(alert: str) -> str:
    """The file with this alert alone and all that is recorded: Prometheus computes every rule of a file each minute."""
    rules = yaml.safe_load(RULES)
    for group in rules["groups"]:
        group["rules"] = [rule for rule in group["rules"] if rule.get("alert") in (alert, None)]
    rules["groups"] = [group for group in rules["groups"] if group["rules"]]
    return yaml.safe_dump(rules)


def rules_of(alert: str) -> list[dict[str, Any]]:
    rules = [rule for group in yaml.safe_load(RULES)["groups"] for rule in group["rules"]]
    return [rule for rule in rules if rule.get("alert") == alert]


def judged(promtool: str, folder: Path, alert: str, inputs: Inputs, minutes: int) -> str:
    case: dict[str, Any] = {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in inputs.items()],
        "alert_rule_test": [{"eval_time": f"{minutes}m", "alertname": alert, "exp_alerts": []}],
    }
    (folder / "case.yaml").write_text(
        yaml.safe_dump(
            # Days are judged twice an hour: three days of minutes would take Prometheus ten seconds.
            {"rule_files": ["rules.yaml"], "evaluation_interval": "1m" if minutes < 600 else "30m", "tests": [case]}
        )
    )
    done = subprocess.run(
        [promtool, "test", "rules", "case.yaml"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert "SUCCESS" in done.stdout or "FAILED" in done.stdout + done.stderr, done.stdout + done.stderr
    return done.stdout + done.stderr
