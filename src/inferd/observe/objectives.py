"""Objectives of models, and how many requests count for each and meet it.

A request counts for an objective where the objective says something about it. One that was cancelled in time is no
evidence about durations. One that was cancelled, or met its deadline, after the duration of the objective missed it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from inferd.config import ObjectivesConfig
from inferd.errors import CLIENT_ERRORS, DeadlineExceeded
from inferd.events import RequestEnded, RequestRefused
from inferd.observe import metrics as m
from inferd.observe.series import Store, Todo, Value

CLIENT_REFUSALS: Final = ("quota_requests", "quota_tokens", "quota_in_flight", "tenant_queue_full")
"""Refusals by a limit that is set for a tenant or key."""


@dataclass(frozen=True, slots=True)
class Objective:
    """``target``: the fraction of requests that are to meet it. ``limit_s``: the duration; None: it has none."""

    name: str
    target: float
    limit_s: float | None = None


def objectives_of(config: ObjectivesConfig) -> Iterator[Objective]:
    """The objectives that are set."""
    if config.availability is not None:
        yield Objective("availability", config.availability)
    for name, limit_ms, fraction in (
        ("ttft", config.ttft_ms, config.ttft_fraction),
        ("tpot", config.tpot_ms, config.tpot_fraction),
        ("total", config.total_ms, config.total_fraction),
    ):
        if limit_ms is not None:
            yield Objective(name, fraction, limit_ms / 1000)


@dataclass(frozen=True, slots=True)
class _Counters:
    objective: Objective
    requests: Value
    good: Value


class ObjectiveSeries:
    """The counters of every model's objectives. A model without objectives has none."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._counters: dict[str, tuple[_Counters, ...]] = {}

    def configure(self, objectives: Mapping[str, ObjectivesConfig]) -> None:
        """Count these objectives. Counters of a removed objective stay; its target is removed."""
        for metric in (m.OBJECTIVE_TARGET, m.OBJECTIVE_LIMIT_S):
            self._store.clear(metric)
        self._counters = {
            model: tuple(self._open(model, objective) for objective in objectives_of(config))
            for model, config in objectives.items()
        }

    def _open(self, model: str, objective: Objective) -> _Counters:
        labels, value = (model, objective.name), self._store.value
        value(m.OBJECTIVE_TARGET, *labels).set(objective.target)
        if objective.limit_s is not None:
            value(m.OBJECTIVE_LIMIT_S, *labels).set(objective.limit_s)
        return _Counters(objective, value(m.OBJECTIVE_REQUESTS, *labels), value(m.OBJECTIVE_GOOD, *labels))

    def ended(self, model: str, events: Sequence[RequestEnded]) -> Todo:
        """What a model's ended requests add to its counters."""
        todo: Todo = []
        for counters in self._counters.get(model, ()):
            met = [is_met for event in events if (is_met := meets(counters.objective, event)) is not None]
            todo += [(counters.requests.add, len(met)), (counters.good.add, sum(met))]
        return todo

    def refused(self, event: RequestRefused) -> None:
        """Count a refusal. A request that was queued is counted when it ends."""
        if event.was_queued or event.reason in CLIENT_REFUSALS:
            return
        for counters in self._counters.get(event.model, ()):
            if counters.objective.limit_s is None:
                counters.requests.add()


def meets(objective: Objective, event: RequestEnded) -> bool | None:
    """Whether a request met an objective; None: it does not count for it."""
    if objective.limit_s is None:
        is_clients = event.outcome == "cancelled" or event.error_kind in CLIENT_ERRORS
        return None if is_clients else event.outcome == "done"
    took_s = _duration_s(objective.name, event)
    if took_s is not None:
        return took_s <= objective.limit_s
    if objective.name == "tpot" or not (event.outcome == "cancelled" or event.error_kind == DeadlineExceeded.kind):
        return None
    finished = event.timings.finished
    return False if finished is not None and finished > objective.limit_s else None


def _duration_s(name: str, event: RequestEnded) -> float | None:
    """The duration that an objective is about; None: the request did not get so far."""
    timings = event.timings
    if name == "ttft":
        return timings.first_token
    if event.outcome != "done" or timings.finished is None:
        return None
    if name == "total":
        return timings.finished
    num_tokens = event.usage.completion_tokens
    if event.n != 1 or num_tokens < 2 or timings.first_token is None:
        return None
    return (timings.finished - timings.first_token) / (num_tokens - 1)
