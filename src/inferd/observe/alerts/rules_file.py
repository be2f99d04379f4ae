"""The rules as the YAML that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import yaml

from inferd.config import ObjectivesConfig
from inferd.observe.alerts.burn_rates import MIN_MISSED, burn_rate_alerts, recordings, unreachable
from inferd.observe.alerts.cohorts import RECORDINGS
from inferd.observe.alerts.general import GENERAL
from inferd.observe.alerts.rule import RUNBOOKS, Alert, Recording

_HEAD: Final = "# Made by `inferd alerts`; do not edit. Load it with rule_files in prometheus.yml.\n"


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as a block, as it would be written by hand."""


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def rules_file(
    objectives: Mapping[str, ObjectivesConfig], *, runbooks: str = RUNBOOKS, min_missed: int = MIN_MISSED
) -> str:
    """The text of the file. ``runbooks``: the address of an alert's page, with ``{alert}`` for its name."""
    burning = list(burn_rate_alerts(objectives, min_missed))
    groups: list[dict[str, object]] = [{"name": "inferd", "rules": _written([*RECORDINGS, *GENERAL], runbooks)}]
    if burning:
        groups.append({"name": "inferd-objectives", "rules": _written([*recordings(), *burning], runbooks)})
    comments = "".join(f"# {sentence}\n" for sentence in unreachable(objectives))
    text = yaml.dump({"groups": groups}, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=116)
    return f"{_HEAD}{comments}{text}"


def runbook_template(base: str) -> str:
    """The address of every alert's page below a base: a text with ``{alert}``, or the address of a site of pages."""
    return base if "{alert}" in base else f"{base.rstrip('/')}/{{alert}}.html"


def _written(rules: Iterable[Recording | Alert], runbooks: str) -> list[dict[str, Any]]:
    return [
        {"record": rule.name, "expr": rule.expr} if isinstance(rule, Recording) else _alert(rule, runbooks)
        for rule in rules
    ]


def _alert(alert: Alert, runbooks: str) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        **({"for": alert.for_} if alert.for_ else {}),
        "labels": {"severity": alert.severity, **alert.labels},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook_url": runbooks.replace("{alert}", alert.name),
        },
    }
