"""Grafana's dashboards, made from the table of metrics: ``python -m inferd.observe.dashboards overview`` prints one.

``overview`` is of all models, ``model`` of one that is chosen. Names of metrics come from the table, so that no panel
shows a metric that is not there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from inferd.observe import metrics as m
from inferd.observe.metrics import Metric

_WINDOW: Final = "[$__rate_interval]"
_COLUMNS: Final = 24
_HEIGHT: Final = 8
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart. ``targets``: expressions, each with the legend of its series."""

    title: str
    unit: str
    targets: tuple[tuple[str, str], ...]
    help: str = ""
    most: float | None = None  # the upper end of the axis
    is_number: bool = False  # the last value alone


@dataclass(frozen=True, slots=True)
class Row:
    """Charts below one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Scope:
    """The series that a dashboard shows: which are chosen, and by which label those of a chart differ."""

    chosen: str
    by: str

    def series(self, metric: Metric, suffix: str = "", also: str = "") -> str:
        chosen = self.chosen if "model" in metric.labels else 'instance=~"$instance"'
        return f"{metric.name}{suffix}{{{chosen}{',' + also if also else ''}}}"

    def total(self, metric: Metric, by: str = "", also: str = "") -> str:
        """The sum of gauges."""
        return f"sum by ({by or self.by}) ({self.series(metric, also=also)})"

    def rate(self, metric: Metric, by: str = "", also: str = "", suffix: str = "") -> str:
        """Per second."""
        return f"sum by ({by or self.by}) (rate({self.series(metric, suffix, also)}{_WINDOW}))"

    def ratio(self, part: Metric, whole: Metric, by: str = "") -> str:
        return f"{self.rate(part, by)} / {self.rate(whole, by)}"

    def mean(self, metric: Metric, by: str = "") -> str:
        """The mean value of a distribution."""
        return f"{self.rate(metric, by, suffix='_sum')} / {self.rate(metric, by, suffix='_count')}"

    def quantile(self, metric: Metric, q: float, by: str = "") -> str:
        return f"histogram_quantile({q:g}, {self.rate(metric, f'le, {by or self.by}', suffix='_bucket')})"

    def quantiles(self, metric: Metric) -> tuple[tuple[str, str], ...]:
        return tuple((self.quantile(metric, q), f"{{{{{self.by}}}}} p{q * 100:g}") for q in m.QUANTILES)

    @property
    def legend(self) -> str:
        return f"{{{{{self.by}}}}}"

    def with_legend(self, label: str) -> str:
        return f"{self.legend} {{{{{label}}}}}"

    def both(self, label: str) -> str:
        """Grouping by the dashboard's label and another one."""
        return f"{self.by}, {label}"


OVERVIEW: Final = Scope('instance=~"$instance"', "model")
MODEL: Final = Scope('instance=~"$instance",model="$model"', "replica")
_ALL: Final = Scope('instance=~"$instance"', "instance")


def rows(scope: Scope) -> tuple[Row, ...]:
    """The rows that both dashboards have."""
    return (
        _traffic(scope),
        _objectives(scope),
        _latency(scope),
        _queue(scope),
        _batches(scope),
        _speculation(scope),
        _workers(scope),
        _devices(),
        _energy(scope),
        _drift(scope),
        _errors(scope),
    )


def _traffic(s: Scope) -> Row:
    panels = [
        Panel("Requests", "reqps", ((s.rate(m.REQUESTS), s.legend),)),
        Panel("Requests by outcome", "reqps", ((s.rate(m.REQUESTS, "outcome"), "{{outcome}}"),)),
        Panel(
            "Tokens per second",
            "short",
            (
                (s.rate(m.GENERATION_TOKENS), f"{s.legend} generated"),
                (s.rate(m.PROMPT_TOKENS), f"{s.legend} prompt"),
            ),
            "Tokens are counted when their request ends.",
        ),
    ]
    if s is OVERVIEW:
        panels.append(
            Panel("HTTP requests by status", "reqps", ((_ALL.rate(m.HTTP_REQUESTS, "status"), "{{status}}"),))
        )
    else:
        panels.append(
            Panel(
                "Tokens per request",
                "short",
                ((s.mean(m.REQUEST_PROMPT_TOKENS), "prompt"), (s.mean(m.REQUEST_GENERATION_TOKENS), "answer")),
            )
        )
    return Row("Traffic", tuple(panels))


def _objectives(s: Scope) -> Row:
    by, legend = "model, objective", "{{model}} {{objective}}"

    def missed(window: str) -> str:
        good = f"sum by ({by}) (increase({s.series(m.OBJECTIVE_GOOD)}[{window}]))"
        return f"1 - {good} / sum by ({by}) (increase({s.series(m.OBJECTIVE_REQUESTS)}[{window}]))"

    budget = f"(1 - max by ({by}) ({s.series(m.OBJECTIVE_TARGET)}))"
    return Row(
        "Objectives",
        (
            Panel(
                "Error budget used up",
                "none",
                ((f"({missed('1h')}) / {budget}", legend),),
                "How many times faster than it lasts, in the last hour. At 14.4 and at 6 there is an alert.",
            ),
            Panel(
                "Error budget left in the time shown",
                "percentunit",
                ((f"1 - ({missed('$__range')}) / {budget}", legend),),
                "Of the budget for as much time as the dashboard shows.",
                is_number=True,
            ),
        ),
    )


def _latency(s: Scope) -> Row:
    stages = ((m.QUEUE_S, "queue"), (m.PREFILL_S, "prefill"), (m.DECODE_S, "decode"))
    return Row(
        "Latency",
        (
            Panel("Time to first token", "s", s.quantiles(m.FIRST_TOKEN_S), "TTFT: from arrival to the first token."),
            Panel("Time per output token", "s", s.quantiles(m.PER_OUTPUT_TOKEN_S), "TPOT: the mean of each answer."),
            Panel("Whole request", "s", s.quantiles(m.REQUEST_S), "From arrival to the last token."),
            Panel("Between two tokens", "s", s.quantiles(m.INTER_TOKEN_S)),
            Panel(
                "Stages, 95th percentile",
                "s",
                tuple((s.quantile(metric, 0.95), f"{s.legend} {word}") for metric, word in stages),
            ),
            Panel(
                "Predictions by stage, mean",
                "s",
                ((s.mean(m.PREDICTION_STAGE_S, s.both("stage")), s.with_legend("stage")),),
            ),
        ),
    )


def _queue(s: Scope) -> Row:
    return Row(
        "Queue",
        (
            Panel("Waiting requests", "short", ((s.total(m.QUEUE_WAITING, "model"), "{{model}}"),)),
            Panel(
                "Waiting requests by class",
                "short",
                ((s.total(m.QUEUE_WAITING_BY_CLASS, "class"), "{{class}}"),),
            ),
            Panel("Requests in flight", "short", ((s.total(m.IN_FLIGHT, "model"), "{{model}}"),)),
            Panel("Refused requests", "reqps", ((s.rate(m.REFUSED, "model, reason"), "{{model}} {{reason}}"),)),
        ),
    )


def _batches(s: Scope) -> Row:
    hits = s.ratio(m.PREFIX_HITS, m.PREFIX_QUERIES)
    return Row(
        "Batches and KV cache",
        (
            Panel("Running sequences", "short", ((s.total(m.RUNNING), s.legend),)),
            Panel("Sequences per step, mean", "short", ((s.mean(m.STEP_SEQUENCES), s.legend),)),
            Panel("Tokens per step, mean", "short", ((s.mean(m.STEP_TOKENS), s.legend),)),
            Panel("Time of a step", "s", s.quantiles(m.STEP_S)),
            Panel(
                "Parts of a step",
                "percentunit",
                ((s.rate(m.STEP_PART_S, "part"), "{{part}}"),),
                "Seconds per second of all replicas.",
            ),
            Panel("Rows per batch of predictions, mean", "short", ((s.mean(m.BATCH_ROWS), s.legend),)),
            Panel(
                "KV cache in use", "percentunit", ((f"max by ({s.by}) ({s.series(m.KV_USAGE)})", s.legend),), most=1.0
            ),
            Panel("KV blocks", "short", ((s.total(m.KV_BLOCKS, "state"), "{{state}}"),)),
            Panel("Preemptions", "ops", ((s.rate(m.PREEMPTIONS), s.legend),)),
            Panel("Hits of the prefix cache", "percentunit", ((hits, s.legend),), "Of the tokens looked up.", most=1.0),
        ),
    )


def _speculation(s: Scope) -> Row:
    return Row(
        "Speculation",
        (
            Panel(
                "Accepted of guessed tokens",
                "percentunit",
                ((s.ratio(m.ACCEPTED_TOKENS, m.DRAFTED_TOKENS), s.legend),),
                most=1.0,
            ),
            Panel("Accepted tokens per guess", "short", ((s.ratio(m.ACCEPTED_TOKENS, m.DRAFTS), s.legend),)),
            Panel("Guesses", "ops", ((s.rate(m.DRAFTS), s.legend),)),
        ),
    )


def _workers(s: Scope) -> Row:
    memory = (
        f"1 - {_ALL.series(m.MEMORY_AVAILABLE)} / {_ALL.series(m.MEMORY_LIMIT)}",
        "{{instance}} machine or container",
    )
    panels = [
        Panel("Replicas by state", "short", ((s.total(m.REPLICA_STATE, "model, state"), "{{model}} {{state}}"),)),
        Panel(
            "Resident memory of workers",
            "bytes",
            ((s.total(m.REPLICA_RSS, "model, replica"), "{{model}}/{{replica}}"),),
        ),
        Panel("Memory in use", "percentunit", (memory,), most=1.0),
        Panel(
            "Faults and restarts of workers",
            "short",
            (
                (f"sum by (model, fault) (increase({s.series(m.REPLICA_FAULTS)}{_WINDOW}))", "{{model}} {{fault}}"),
                (f"sum by (model) (increase({s.series(m.REPLICA_RESTARTS)}{_WINDOW}))", "{{model}} restarts"),
            ),
        ),
        Panel(
            "Breakers that are not closed",
            "short",
            ((s.total(m.BREAKER_STATE, "model, state", 'state!="closed"'), "{{model}} {{state}}"),),
        ),
        Panel(
            "Last load by phase",
            "s",
            ((f"max by (model, phase) ({s.series(m.REPLICA_LOAD_S)})", "{{model}} {{phase}}"),),
        ),
    ]
    if s is OVERVIEW:
        chosen = 'instance=~"$instance"'
        panels += [
            Panel(
                "Gateway: processor",
                "percentunit",
                ((f"rate(process_cpu_seconds_total{{{chosen}}}{_WINDOW})", "{{instance}}"),),
            ),
            Panel(
                "Gateway: resident memory", "bytes", ((f"process_resident_memory_bytes{{{chosen}}}", "{{instance}}"),)
            ),
            Panel("Gateway: open files", "short", ((f"process_open_fds{{{chosen}}}", "{{instance}}"),)),
        ]
    return Row("Workers and memory", tuple(panels))


def _devices() -> Row:
    """Devices have no model: both dashboards show those of the chosen servers."""
    legend = "{{instance}} {{device}}"
    used = f"{_ALL.series(m.DEVICE_MEMORY_USED)} / {_ALL.series(m.DEVICE_MEMORY_TOTAL)}"
    return Row(
        "Devices",
        (
            Panel(
                "Duty cycle",
                "percentunit",
                ((_ALL.series(m.DEVICE_DUTY), legend),),
                "Of a GPU, 70 to 90 % is right: less is idle hardware, more has no reserve.",
                most=1.0,
            ),
            Panel("Device memory in use", "percentunit", ((used, legend),), most=1.0),
            Panel("Temperature", "celsius", ((_ALL.series(m.DEVICE_TEMPERATURE), legend),)),
            Panel("Power", "watt", ((_ALL.series(m.DEVICE_POWER), legend),)),
            Panel(
                "Time at a reduced speed",
                "percentunit",
                ((_ALL.rate(m.DEVICE_THROTTLED_S, "instance, device, reason"), f"{legend} {{{{reason}}}}"),),
                "A GPU at its limit of power works as it should; the other reasons are faults.",
            ),
            Panel(
                "Errors and failed readings",
                "ops",
                (
                    (_ALL.rate(m.DEVICE_ERRORS, "instance, device, error"), f"{legend} {{{{error}}}}"),
                    (_ALL.rate(m.DEVICE_FAILURES, "instance, source"), "{{instance}} {{source}} not read"),
                ),
            ),
        ),
    )


def _energy(s: Scope) -> Row:
    tokens = s.rate(m.STEP_TOKENS, "model", suffix="_sum")
    return Row(
        "Energy and cost",
        (
            Panel(
                "Joules per 1,000 tokens",
                "joule",
                ((f"1000 * {s.rate(m.MODEL_ENERGY, 'model')} / {tokens}", "{{model}}"),),
                "Tokens that were computed, of prompts and of answers.",
            ),
            Panel(
                "Device seconds per 1,000 tokens",
                "s",
                ((f"1000 * {s.rate(m.MODEL_DEVICE_S, 'model')} / {tokens}", "{{model}}"),),
            ),
            Panel(
                "Power by model",
                "watt",
                (
                    (s.rate(m.MODEL_ENERGY, "model"), "{{model}}"),
                    (_ALL.rate(m.DEVICE_IDLE_ENERGY, "device"), "{{device}} idle"),
                ),
            ),
            Panel(
                "Cost per hour",
                "none",
                ((f"3600 * {s.rate(m.MODEL_COST, 'model, currency')}", "{{model}} {{currency}}"),),
                "At the prices of the configuration (devices).",
            ),
        ),
    )


def _drift(s: Scope) -> Row:
    both = "model, stream"
    return Row(
        "Drift",
        (
            Panel(
                "Population stability index, MMD",
                "none",
                (
                    (f"max by ({both}) ({s.series(m.DRIFT_PSI)})", "{{model}} {{stream}}"),
                    (f"max by ({both}) ({s.series(m.DRIFT_MMD)})", "{{model}} {{stream}} MMD"),
                ),
                "Of the last window against the reference. Chance alone makes it more than 0: inferd drift show.",
            ),
            Panel(
                "Drifting streams",
                "none",
                ((f"sum by (model) ({s.series(m.DRIFT_DETECTED)})", "{{model}}"),),
                "Streams that differ from the reference by more than chance.",
            ),
            Panel(
                "Windows beyond chance",
                "percentunit",
                ((s.ratio(m.DRIFT_ALARMS, m.DRIFT_WINDOWS, both), "{{model}} {{stream}}"),),
                most=1.0,
            ),
        ),
    )


def _errors(s: Scope) -> Row:
    failed = f"{s.rate(m.ERRORS, 'model')} / {s.rate(m.REQUESTS, 'model')}"
    panels = [
        Panel("Failed requests", "percentunit", ((failed, "{{model}}"),), "Errors of clients are among them."),
        Panel("Errors by kind", "ops", ((s.rate(m.ERRORS, "model, kind"), "{{model}} {{kind}}"),)),
        Panel("Attempts elsewhere", "ops", ((s.rate(m.RETRIES, "kind, result"), "{{kind}} {{result}}"),)),
        Panel("Response cache", "ops", ((s.rate(m.CACHE_LOOKUPS, "result"), "{{result}}"),)),
    ]
    if s is OVERVIEW:
        lost = ((m.LINES_DROPPED, "log lines dropped"), (m.OBSERVER_FAILURES, "events not counted"))
        fine = ((m.CONFIG_OK, "configuration served"), (m.STATE_AVAILABLE, "database answers"))
        panels += [
            Panel(
                "HTTP 5xx",
                "reqps",
                ((_ALL.rate(m.HTTP_REQUESTS, "route, status", 'status=~"5.."'), "{{status}} {{route}}"),),
            ),
            Panel(
                "What the server depends on",
                "bool_yes_no",
                tuple((_ALL.series(row), f"{{{{instance}}}} {word}") for row, word in fine),
            ),
            Panel(
                "Lost observations", "ops", tuple((_ALL.rate(row), f"{{{{instance}}}} {word}") for row, word in lost)
            ),
        ]
    return Row("Errors", tuple(panels))


def dashboard(name: str) -> dict[str, Any]:
    """A dashboard in Grafana's JSON model."""
    scope, title = {"overview": (OVERVIEW, "inferd: overview"), "model": (MODEL, "inferd: one model")}[name]
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        _variable("instance", f"label_values({m.BUILD.name}, instance)", has_all=True),
    ]
    if scope is MODEL:
        variables.append(_variable("model", f'label_values({m.QUEUE_WAITING.name}{{instance=~"$instance"}}, model)'))
    return {
        "uid": f"inferd-{name}",
        "title": title,
        "tags": ["inferd"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [{"type": "dashboards", "tags": ["inferd"], "title": "inferd", "asDropdown": False, "keepTime": True}],
        "templating": {"list": variables},
        "panels": list(_placed(rows(scope))),
    }


def _variable(name: str, query: str, *, has_all: bool = False) -> dict[str, Any]:
    several = {"includeAll": True, "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        **(several if has_all else {}),
    }


def _placed(sections: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """The panels with their places: below their heading, three side by side."""
    number, y, width = 0, 0, _COLUMNS // 3
    for section in sections:
        number += 1
        place = {"x": 0, "y": y, "w": _COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": section.title, "collapsed": False, "gridPos": place, "panels": []}
        y += 1
        for at, panel in enumerate(section.panels):
            number += 1
            place = {"x": at % 3 * width, "y": y + at // 3 * _HEIGHT, "w": width, "h": _HEIGHT}
            yield {"id": number, **_panel(panel), "gridPos": place}
        y += -(-len(section.panels) // 3) * _HEIGHT


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if not panel.is_number:
        defaults |= {"min": 0, "custom": {"fillOpacity": 10, "showPoints": "never"}}
    if panel.most is not None:
        defaults["max"] = panel.most
    return {
        "type": "stat" if panel.is_number else "timeseries",
        "title": panel.title,
        **({"description": panel.help} if panel.help else {}),
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        **({} if panel.is_number else {"options": {"legend": {"displayMode": "list", "placement": "bottom"}}}),
        "targets": [
            {"refId": chr(ord("A") + at), "expr": expr, "legendFormat": legend, "datasource": _SOURCE}
            for at, (expr, legend) in enumerate(panel.targets)
        ],
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(sys.argv[1]), indent=2))
