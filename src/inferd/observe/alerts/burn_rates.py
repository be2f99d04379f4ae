"""Alerts that fire while the error budget of an objective is used up too fast.

Each compares two windows. The long one shows that much of the budget is gone, the short one that it still goes. The
factors and windows are those of the SRE Workbook (sre.google/workbook/alerting-on-slos): of a budget for 30 days, 14.4
times in an hour is 2 %, 6 times in six hours is 5 %, and once in three days is 10 %.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Final, NamedTuple

from inferd.config import ObjectivesConfig
from inferd.observe.alerts.rule import Alert, Recording, Severity
from inferd.observe.objectives import Objective, objectives_of

_LEVEL: Final = "model_objective:inferd_objective_bad"
_BY: Final = "sum by (model, objective)"


class BurnRate(NamedTuple):
    """``factor``: how many times faster the budget is used up than it would last."""

    alert: str
    severity: Severity
    factor: Decimal
    long: str
    short: str


BURN_RATES: Final = (
    BurnRate("InferdErrorBudgetBurnFast", "page", Decimal("14.4"), "1h", "5m"),
    BurnRate("InferdErrorBudgetBurn", "page", Decimal("6"), "6h", "30m"),
    BurnRate("InferdErrorBudgetBurnSlow", "ticket", Decimal("1"), "3d", "6h"),
)

_WORDS: Final = {
    "availability": "of the requests are answered",
    "ttft": "of the requests have their first token within {limit} s",
    "tpot": "of the answers take at most {limit} s per token",
    "total": "of the requests are complete within {limit} s",
}

MIN_MISSED: Final = 5
"""Requests that must have missed an objective in the long window, so that one failure at night calls no operator."""


def recordings() -> Iterator[Recording]:
    """The fraction of requests that missed each objective, by window, and their number."""
    windows = dict.fromkeys(window for rate in reversed(BURN_RATES) for window in (rate.short, rate.long))
    for window in windows:
        good = f"{_BY} (rate(inferd_objective_good_total[{window}]))"
        requests = f"{_BY} (rate(inferd_objective_requests_total[{window}]))"
        yield Recording(f"{_LEVEL}:ratio_rate{window}", f"1 - {good}\n  / {requests}")
    for rate in BURN_RATES:
        requests = f"{_BY} (increase(inferd_objective_requests_total[{rate.long}]))"
        good = f"{_BY} (increase(inferd_objective_good_total[{rate.long}]))"
        yield Recording(f"{_LEVEL}:increase{rate.long}", f"{requests}\n  - {good}")


def burn_rate_alerts(objectives: Mapping[str, ObjectivesConfig], min_missed: int) -> Iterator[Alert]:
    """The alerts of every objective that is set."""
    for model, config in objectives.items():
        for objective in objectives_of(config):
            for rate in BURN_RATES:
                if can_be_reached(objective, rate):
                    yield _alert(model, objective, rate, min_missed)


def unreachable(objectives: Mapping[str, ObjectivesConfig]) -> list[str]:
    """A sentence for each alert that is left out, because more than all requests would have to miss the objective."""
    return [
        f"{rate.alert} is left out for {objective.name} of {model}: with a fraction of {objective.target:g} the budget "
        f"cannot be used up {rate.factor} times too fast."
        for model, config in objectives.items()
        for objective in objectives_of(config)
        for rate in BURN_RATES
        if not can_be_reached(objective, rate)
    ]


def can_be_reached(objective: Objective, rate: BurnRate) -> bool:
    return rate.factor * _budget(objective) < 1


def _budget(objective: Objective) -> Decimal:
    """The fraction of requests that may miss the objective, without the rounding of binary fractions."""
    return 1 - Decimal(repr(objective.target))


def _alert(model: str, objective: Objective, rate: BurnRate, min_missed: int) -> Alert:
    labels = f'{{model={json.dumps(model, ensure_ascii=False)},objective="{objective.name}"}}'
    bound = f"{rate.factor} * {_budget(objective):f}"
    limit = "" if objective.limit_s is None else f"{objective.limit_s:g}"
    goal = f"{(1 - _budget(objective)) * 100:f} % {_WORDS[objective.name].format(limit=limit)}"
    return Alert(
        rate.alert,
        rate.severity,
        f"{_LEVEL}:ratio_rate{rate.long}{labels} > {bound}\n"
        f"and\n{_LEVEL}:ratio_rate{rate.short}{labels} > {bound}\n"
        f"and\n{_LEVEL}:increase{rate.long}{labels} >= {min_missed}",
        "{{ $labels.model }} misses its objective for {{ $labels.objective }} in {{ $value | humanizePercentage }} of "
        "its requests",
        f"The objective {objective.name} is that {goal}. Its error budget is used up {rate.factor} times as fast as "
        f"it lasts, or faster, in the last {rate.long} and in the last {rate.short}.",
        labels={"model": model.replace("{{", '{{"{{"}}'), "objective": objective.name},
    )
