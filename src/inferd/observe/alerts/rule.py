"""One rule of Prometheus: an alert, or an expression whose value is recorded under a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

RUNBOOKS: Final = "docs/runbooks/{alert}.md"
"""The page of an alert in this repository."""

Severity = Literal["page", "ticket"]
"""``page``: clients are affected now, and an operator is called. ``ticket``: it can wait for the next working day."""


@dataclass(frozen=True, slots=True)
class Recording:
    """``expr`` is evaluated regularly, and its value is kept as the series ``name``."""

    name: str
    expr: str


@dataclass(frozen=True, slots=True)
class Alert:
    """``for_``: how long ``expr`` must hold. ``summary`` and ``description`` are templates of Prometheus.

    ``labels`` tell rules of one name apart.
    """

    name: str
    severity: Severity
    expr: str
    summary: str
    description: str
    for_: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
