"""Alerts without Prometheus: each fires after its time, names its runbook, and ends with its condition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.observe.live.test_live import Watched, changed, ended

from inferd.events import (
    BreakerChanged,
    ConfigReloaded,
    Event,
    GatewaysCompared,
    QueueChanged,
    RequestRefused,
    StateChanged,
    StepDone,
)
from inferd.observe.alerts.general import GENERAL
from inferd.observe.live import machine
from inferd.observe.live.alerts import CONDITIONS
from inferd.types import StepStats

ROOT = Path(__file__).resolve().parents[3]
BY_NAME = {alert.name: alert for alert in GENERAL}
SERVING = changed("ready")


@pytest.fixture
def watched() -> Any:
    made = Watched({"chat": 2, "digits": 1})
    made.tick(1.0, SERVING)
    yield made
    made.observer.close()


def pass_(watched: Watched, seconds: int, *events: Event) -> set[tuple[str, str]]:
    """Ticks of a second with the same events; the alerts that fire at the end, with their models."""
    for _ in range(seconds):
        watched.tick(1.0, *events)
    return {(alert.name, alert.model) for alert in watched.live.alarms.firing}


def test_every_alert_is_a_general_one_with_a_runbook() -> None:
    assert set(CONDITIONS) <= set(BY_NAME)
    for name in CONDITIONS:
        assert (ROOT / "docs" / "runbooks" / f"{name}.md").exists()


def test_a_quiet_server_fires_nothing(watched: Watched) -> None:
    assert pass_(watched, 700, ended()) == set()


def refused(reason: Any) -> RequestRefused:
    return RequestRefused(model="chat", reason=reason)


def grows(number: int) -> Event:
    return QueueChanged(model="chat", waiting=20 + number // 5, in_flight=1)


STEP = StepStats(step_tokens=1, step_sequences=1, blocks_total=100, blocks_used=95, num_preempted=1)

CASES: list[tuple[str, str, int, list[Event], list[Event]]] = [
    ("InferdNotReady", "chat", 60, [changed("loading")], [SERVING]),
    ("InferdErrors", "chat", 310, [ended(outcome="failed", error_kind="internal")], [ended()]),
    ("InferdQueueFull", "chat", 0, [refused("queue_full")], []),
    ("InferdKvPressure", "chat", 300, [StepDone(model="chat", replica=0, stats=STEP)], []),
    ("InferdQuota", "chat", 900, [refused("quota_tokens")] * 30, []),
    ("InferdReplicaAway", "chat", 300, [changed("failed")], [SERVING]),
    ("InferdBreakerOpen", "chat", 60, [BreakerChanged(model="chat", replica=0, state="open")],
     [BreakerChanged(model="chat", replica=0, state="closed")]),
    ("InferdReplicaEjected", "chat", 300, [BreakerChanged(model="chat", replica=1, state="ejected")],
     [BreakerChanged(model="chat", replica=1, state="closed")]),
    ("InferdStateUnavailable", "", 60, [StateChanged(available=False)], [StateChanged(available=True)]),
    ("InferdReloadRefused", "", 60, [ConfigReloaded(accepted=False, is_whole=False)],
     [ConfigReloaded(accepted=True, is_whole=True)]),
    ("InferdGatewaysDiffer", "", 300, [GatewaysCompared(digest="a", num_gateways=2, num_differing=1)],
     [GatewaysCompared(digest="a", num_gateways=2, num_differing=0)]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "model", "for_s", "events", "over"), CASES, ids=[case[0] for case in CASES])
def test_an_alert_fires_after_its_time_and_ends(
    watched: Watched, name: str, model: str, for_s: int, events: list[Event], over: list[Event]
) -> None:
    if for_s > 20:
        assert (name, model) not in pass_(watched, for_s - 20, *events)
    began = watched.clock.wall - max(0, for_s - 20)
    assert (name, model) in pass_(watched, 60, *events)
    (alert,) = [alert for alert in watched.live.alarms.firing if alert.name == name]
    assert alert.severity == BY_NAME[name].severity
    assert alert.runbook == f"docs/runbooks/{name}.md"
    assert "{{" not in alert.summary
    assert "$" not in alert.summary
    assert model in alert.summary
    assert alert.since == pytest.approx(began, abs=310 if name == "InferdErrors" else 40)
    quiet_s = {"InferdQuota": 900, "InferdReplicaAway": 20}.get(name, 330)
    assert (name, model) not in pass_(watched, quiet_s, *over)


def test_a_queue_that_grows_for_ten_minutes_fires_and_one_that_is_long_does_not(watched: Watched) -> None:
    assert pass_(watched, 1000, QueueChanged(model="chat", waiting=50, in_flight=1)) == set()
    for number in range(1000):
        watched.tick(1.0, grows(number))
    assert ("InferdQueueGrowing", "chat") in pass_(watched, 1, grows(1000))


def test_workers_that_die_again_and_again_fire(watched: Watched) -> None:
    for restarts in range(1, 4):
        pass_(watched, 20, changed("died", restarts=restarts), changed("ready", restarts=restarts))
    assert ("InferdReplicaRestarting", "chat") in pass_(watched, 5)
    assert pass_(watched, 905) == set()


def test_memory_above_85_percent_for_ten_minutes_fires(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "limit_bytes", lambda: 1000)
    monkeypatch.setattr(machine, "available_bytes", lambda: 100)
    assert pass_(watched, 590) == set()
    assert ("InferdMemoryHigh", "") in pass_(watched, 20)
    assert "90 %" in watched.live.alarms.firing[0].summary
    monkeypatch.setattr(machine, "available_bytes", lambda: 500)
    assert pass_(watched, 10) == set()
