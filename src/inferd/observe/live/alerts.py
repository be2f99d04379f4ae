"""The alerts that this server can decide alone, from its own recent numbers.

They are a part of the general alerts (``observe/alerts/general.py``), with the same names, severities, times and
runbooks. Objectives, and conditions that need several servers, are rules for Prometheus alone.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from inferd.errors import CLIENT_ERRORS
from inferd.observe import metrics as m
from inferd.observe.alerts.general import GENERAL
from inferd.observe.alerts.rule import RUNBOOKS, Alert, Severity
from inferd.observe.live.rings import Rings
from inferd.observe.series import Store

CHECK_S: Final = 5
"""Seconds between two checks."""

_REACH_S: Final = 15 * 60  # the longest window

Counts = dict[tuple[str, str], float]  # by name and model
Found = Mapping[str, float]  # the value by model; empty: of the server


class Firing(msgspec.Struct, frozen=True):
    """An alert that fires."""

    name: str
    severity: Severity
    model: str  # empty: of the server
    since: float  # when its condition began to hold, in seconds since the epoch
    summary: str
    runbook: str


class Seen(NamedTuple):
    """What the conditions are decided from. ``gained``: how much a counter of a model gained in the last seconds."""

    store: Store
    rings: Rings
    models: tuple[str, ...]
    gained: Callable[[str, str, float], float]

    def states(self, metric: m.Metric) -> Iterator[tuple[str, str]]:
        """The model and the state of every replica."""
        for (model, _, state), value in self.store.values_of(metric):
            if value.value and model in self.models:
                yield model, state


def _not_ready(seen: Seen) -> Found:
    states: dict[str, set[str]] = {}
    for model, state in seen.states(m.REPLICA_STATE):
        states.setdefault(model, set()).add(state)
    return {model: 0.0 for model, found in states.items() if "ready" not in found and found != {"stopped"}}


def _errors(seen: Seen) -> Found:
    found = {}
    for model in seen.models:
        errors, requests = seen.gained("errors", model, 300), seen.gained("requests", model, 300)
        if errors >= 5 and requests and errors / requests > 0.01:
            found[model] = errors / requests
    return found


def _queue_full(seen: Seen) -> Found:
    return {model: count for model in seen.models if (count := seen.gained("queue_full", model, 300)) > 0}


def _queue_growing(seen: Seen) -> Found:
    found = {}
    for model in seen.models:
        waiting = seen.rings.last(f"queue|{model}", 600, place=1)
        if len(waiting) >= 60 and min(waiting) > 10 and _slope(waiting) > 0.2 * sum(waiting) / len(waiting):
            found[model] = min(waiting)
    return found


def _kv_pressure(seen: Seen) -> Found:
    found = {}
    for model in seen.models:
        used = seen.rings.last(f"kv_use|{model}", CHECK_S)
        if used and used[-1] > 0.85 and seen.gained("preemptions", model, 300) > 0:
            found[model] = used[-1]
    return found


def _quota(seen: Seen) -> Found:
    return {model: rate for model in seen.models if (rate := seen.gained("quota", model, 900) / 900) > 1}


def _memory_high(seen: Seen) -> Found:
    used, limit = (seen.rings.last(f"{name}|", CHECK_S) for name in ("memory_used", "memory_limit"))
    return {"": used[-1] / limit[-1]} if used and limit and used[-1] / limit[-1] > 0.85 else {}


def _restarting(seen: Seen) -> Found:
    return {model: count for model in seen.models if (count := seen.gained("restarts", model, 900)) > 2}


def _in_state(metric: m.Metric, *wanted: str) -> Callable[[Seen], Found]:
    return lambda seen: {model: 1.0 for model, state in seen.states(metric) if state in wanted}


def _is_zero(metric: m.Metric) -> Callable[[Seen], Found]:
    return lambda seen: {} if all(value.value for _, value in seen.store.values_of(metric)) else {"": 0.0}


def _is_above_zero(metric: m.Metric) -> Callable[[Seen], Found]:
    def found(seen: Seen) -> Found:
        most = max((value.value for _, value in seen.store.values_of(metric)), default=0.0)
        return {"": most} if most > 0 else {}

    return found


CONDITIONS: Final[Mapping[str, Callable[[Seen], Found]]] = {
    "InferdNotReady": _not_ready,
    "InferdErrors": _errors,
    "InferdQueueFull": _queue_full,
    "InferdQueueGrowing": _queue_growing,
    "InferdKvPressure": _kv_pressure,
    "InferdQuota": _quota,
    "InferdMemoryHigh": _memory_high,
    "InferdReplicaRestarting": _restarting,
    "InferdReplicaAway": _in_state(m.REPLICA_STATE, "hung", "died", "failed"),
    "InferdBreakerOpen": _in_state(m.BREAKER_STATE, "open"),
    "InferdReplicaEjected": _in_state(m.BREAKER_STATE, "ejected"),
    "InferdStateUnavailable": _is_zero(m.STATE_AVAILABLE),
    "InferdReloadRefused": _is_zero(m.CONFIG_OK),
    "InferdGatewaysDiffer": _is_above_zero(m.GATEWAYS_DIFFERING),
}
"""When an alert's condition holds, by its name."""

_ALERTS: Final = [alert for alert in GENERAL if alert.name in CONDITIONS]


class Alarms:
    """Which alerts fire, and the counters of the last quarter of an hour that they need."""

    def __init__(self, store: Store, rings: Rings) -> None:
        self.firing: list[Firing] = []
        self._store = store
        self._rings = rings
        self._past: deque[tuple[float, Counts]] = deque(maxlen=_REACH_S // CHECK_S + 1)
        self._since: dict[tuple[str, str], tuple[float, float]] = {}  # on the monotonic clock, and since the epoch

    def check(self, models: tuple[str, ...], now: float, wall: float) -> None:
        """Decide which alerts fire. ``now``: on the monotonic clock."""
        counts = self._counts()
        self._past.append((now, counts))

        def gained(name: str, model: str, seconds: float) -> float:
            key = (name, model)
            before = next(before for at, before in self._past if at >= now - seconds)
            return max(0.0, counts.get(key, 0.0) - before.get(key, 0.0))

        seen = Seen(self._store, self._rings, models, gained)
        since, firing = {}, []
        for alert in _ALERTS:
            for model, value in CONDITIONS[alert.name](seen).items():
                key = (alert.name, model)
                began = since[key] = self._since.get(key, (now, wall))
                if now - began[0] >= _seconds(alert.for_):
                    firing.append(_fire(alert, model, value, began[1]))
        self._since, self.firing = since, firing

    def _counts(self) -> Counts:
        found: Counts = {}

        def add(name: str, model: str, value: float) -> None:
            found[name, model] = found.get((name, model), 0.0) + value

        values = self._store.values_of
        for labels, value in values(m.ERRORS):
            if labels[1] not in CLIENT_ERRORS:
                add("errors", labels[0], value.value)
        for labels, value in values(m.REFUSED):
            if labels[1] in ("queue_full", "tenant_queue_full"):
                add("queue_full", labels[0], value.value)
            elif labels[1].startswith("quota_"):
                add("quota", labels[0], value.value)
        for name, metric in (
            ("requests", m.REQUESTS),
            ("preemptions", m.PREEMPTIONS),
            ("restarts", m.REPLICA_RESTARTS),
        ):
            for labels, value in values(metric):
                add(name, labels[0], value.value)
        return found


def _slope(values: list[float]) -> float:
    """What the values gain from the first to the last by the straight line through them (least squares)."""
    count = len(values)
    middle, mean = (count - 1) / 2, sum(values) / count
    rises = sum((at - middle) * (value - mean) for at, value in enumerate(values))
    return count * rises / sum((at - middle) ** 2 for at in range(count))


def _seconds(duration: str) -> float:
    """A duration of Prometheus with one unit; empty: 0."""
    return float(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]] if duration else 0.0


def _fire(alert: Alert, model: str, value: float, since: float) -> Firing:
    words = {"$labels.model": model, "$labels.instance": "this server", "$labels.state": ""}

    def shown(match: re.Match[str]) -> str:
        expression = match[1].strip()
        if expression.startswith("$value"):
            return f"{100 * value:.3g} %" if "humanizePercentage" in expression else f"{value:.3g}"
        return words.get(expression, "")

    summary = re.sub(r"\{\{(.*?)\}\}", shown, alert.summary)
    return Firing(
        alert.name, alert.severity, model, since, summary[:1].upper() + summary[1:] if not model else summary,
        RUNBOOKS.replace("{alert}", alert.name),
    )  # fmt: skip
