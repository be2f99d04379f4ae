"""The dashboards show metrics that are there: by the table, and by a real Prometheus that scrapes a busy server."""

from __future__ import annotations

import asyncio
import io
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.http_server import answering
from tests.observe.devices.test_device_series import GPU, write
from tests.observe.prometheus_server import asked, prometheus
from tests.observe.promql import problems
from tests.observe.test_observer import ended, step

from inferd.config import AliasDialect, Config, DevicesConfig, ModelConfig, ObjectivesConfig
from inferd.events import (
    BreakerChanged,
    CacheLooked,
    DriftRead,
    Event,
    HttpServed,
    QueueChanged,
    ReplicaChanged,
    RequestRefused,
    Retried,
    StepDone,
)
from inferd.observe import Observer
from inferd.observe.alerts.rules_file import rules_file
from inferd.observe.dashboards import dashboard
from inferd.observe.devices import Devices
from inferd.types import StepParts, StepStats, Timings, Usage

NAMES = ("overview", "model")
ROWS = [
    "Traffic",
    "Objectives",
    "Latency",
    "Queue",
    "Batches and KV cache",
    "Speculation",
    "Workers and memory",
    "Devices",
    "Energy and cost",
    "Drift",
    "Errors",
]
OBJECTIVES = ObjectivesConfig(availability=0.99, ttft_ms=300.0, tpot_ms=300.0, total_ms=1000.0)
DRIFTS: list[tuple[str, Literal["psi", "mmd"]]] = [("output_tokens", "psi"), ("embedding", "mmd")]
VARIABLES = {"$__rate_interval": "30s", "$__range": "5m", "$instance": ".*", "$model": "tiny"}


def panels(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = dashboard(name)["panels"]
    return found


def expressions(name: str) -> list[tuple[str, str]]:
    """Each panel's title with each of its expressions."""
    return [(panel["title"], target["expr"]) for panel in panels(name) for target in panel.get("targets", ())]


def filled(expression: str) -> str:
    """The expression as Grafana sends it."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    return expression


@pytest.mark.parametrize(("title", "expr"), [pair for name in NAMES for pair in expressions(name)])
def test_an_expression_names_metrics_and_labels_of_the_page(title: str, expr: str) -> None:
    assert list(problems(expr)) == [], title
    assert "$" not in filled(expr), "Grafana knows no other variable here"


@pytest.mark.parametrize("name", NAMES)
def test_a_dashboard_has_its_rows_and_no_panel_covers_another(name: str) -> None:
    found = panels(name)
    assert [panel["title"] for panel in found if panel["type"] == "row"] == ROWS
    assert len({panel["id"] for panel in found}) == len(found)
    assert all(one["type"] != "row" or other["type"] != "row" for one, other in pairwise(found)), "no row is empty"
    taken: set[tuple[int, int]] = set()
    for panel in found:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells


@pytest.mark.parametrize("name", NAMES)
def test_the_legend_of_a_series_uses_labels_that_are_left(name: str) -> None:
    for panel in panels(name):
        for target in panel.get("targets", ()):
            grouped = re.search(r"by \(([^)]*)\)", target["expr"])
            if grouped is not None:
                wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                assert wanted <= set(re.split(r",\s*", grouped[1])), panel["title"]


@pytest.mark.parametrize("name", NAMES)
def test_the_choices_of_a_dashboard_come_from_metrics_that_are_there(name: str) -> None:
    asked = [v["query"]["query"] for v in dashboard(name)["templating"]["list"] if v["type"] == "query"]
    for query in asked:
        series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert list(problems(f"sum by ({label}) ({series})")) == []
    assert len(asked) == (1 if name == "overview" else 2)


# -- a real Prometheus ----------------------------------------------------------------------------------


def a_busy_moment(number: int) -> list[Event]:
    """Events of everything that a server does, with numbers that grow."""
    timings = Timings(dispatched=0.1, tokenized=0.15, scheduled=0.2, first_token=0.4, finished=1.4)
    stats = StepStats(
        step_tokens=20,
        step_sequences=4,
        step_s=0.01,
        parts=StepParts(forward=0.01),
        num_running=4,
        num_waiting=1,
        blocks_total=100,
        blocks_used=40,
        blocks_cached=20,
        num_preempted=1,
        prefix_query_tokens=20,
        prefix_hit_tokens=10,
        num_drafts=2,
        drafted_tokens=8,
        accepted_tokens=5,
    )
    batch = StepStats(batch_rows=3, step_s=0.01)
    refused = ended(outcome="failed", error_kind="internal")
    return [
        ReplicaChanged(
            model="tiny", replica=0, state="ready", load_s={"weights": 1.0}, rss_bytes=1 << 30, kv_blocks=100
        ),
        step(),
        StepDone(model="tiny", replica=0, stats=stats),
        StepDone(model="tiny", replica=0, stats=batch),
        QueueChanged(model="tiny", waiting=3, in_flight=4, waiting_by_class=(0, 1, 1, 1)),
        ended(request_id=f"r{number}", timings=timings, usage=Usage(prompt_tokens=10, completion_tokens=5)),
        refused,
        RequestRefused(model="tiny", reason="queue_full"),
        BreakerChanged(model="tiny", replica=0, state="open" if number % 2 else "closed"),
        Retried(model="tiny", kind="retry", granted=True),
        CacheLooked(model="tiny", result="hit"),
        *(
            DriftRead(
                model="tiny",
                stream=stream,
                size=1000,
                is_smallest=True,
                measure=measure,
                distance=0.2,
                is_alarm=True,
                is_drifting=True,
                is_news=number == 1,
                sentence="",
            )
            for stream, measure in DRIFTS
        ),
        *(
            HttpServed(
                request_id="h",
                method="POST",
                route="/v1/completions",
                status=status,
                duration_s=0.1,
                model="tiny",
                replica=0,
                outcome="done",
                timings=timings,
            )
            for status in (200, 503)
        ),
    ]


@contextmanager
def a_page(folder: Path, aliases: Sequence[AliasDialect] = ()) -> Iterator[int]:
    """The port of a server that answers every scrape with a busier page."""
    file = write(folder / "devices.json", devices=[GPU])
    config = Config(
        devices=DevicesConfig(simulated=str(file), interval_s=0.05, price_per_kwh=0.3),
        models={"tiny": ModelConfig(source="tiny", device="cpu")},
    )
    devices = Devices(config.devices)
    devices.configure(config)
    devices.start()
    observer = Observer(
        devices=devices,
        models={"tiny": 1},
        objectives={"tiny": OBJECTIVES},
        aliases=aliases,
        stream=io.StringIO(),
        access_log=False,
    )

    class Page(BaseHTTPRequestHandler):
        scrapes = 0

        def do_GET(self) -> None:
            Page.scrapes += 1
            for event in a_busy_moment(Page.scrapes):
                observer.emit(event)
            page = asyncio.run(observer.page(self.headers.get("accept", "")))
            self.send_response(200)
            self.send_header("content-type", page.media)
            self.end_headers()
            self.wfile.write(page.body)

    try:
        with answering(Page) as port:
            yield port
    finally:
        devices.stop()
        observer.close()


def test_every_panel_of_every_dashboard_shows_something(tmp_path: Path) -> None:
    with a_page(tmp_path) as page, prometheus(tmp_path, page) as port:
        until_scraped(port)
        dead = []
        for name in NAMES:
            for title, expr in expressions(name):
                values = [float(one["value"][1]) for one in asked(port, "query", query=filled(expr))["result"]]
                if not [value for value in values if value == value]:
                    dead.append(f"{name}: {title}: {filled(expr)} -> {values}")
        assert dead == []


def test_prometheus_evaluates_every_rule_and_fires_what_the_page_deserves(tmp_path: Path) -> None:
    """Half of the requests fail: the budget burns, and the alert names the model, the objective and its page."""
    with a_page(tmp_path) as page, prometheus(tmp_path, page, rules_file({"tiny": OBJECTIVES})) as port:
        until_scraped(port)
        wanted = {"alertname": "InferdErrorBudgetBurnFast", "model": "tiny", "objective": "availability"}
        deadline = time.monotonic() + 60
        while True:
            alerts = asked(port, "alerts")["alerts"]
            found = [alert for alert in alerts if wanted.items() <= alert["labels"].items()]
            if [alert["state"] for alert in found] == ["firing"]:
                break
            assert time.monotonic() < deadline, alerts
            time.sleep(0.2)
        assert found[0]["labels"]["severity"] == "page"
        assert found[0]["annotations"]["runbook_url"] == "docs/runbooks/InferdErrorBudgetBurnFast.md"
        rules = [rule for group in asked(port, "rules")["groups"] for rule in group["rules"]]
        assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
        assert len(rules) > 30


def until_scraped(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            (seen,) = asked(port, "query", query="count_over_time(inferd_build_info[5m])")["result"]
        except (OSError, ValueError):
            seen = {"value": [0, "0"]}
        if int(seen["value"][1]) >= 5:
            return
        assert time.monotonic() < deadline, "Prometheus has no five scrapes"
        time.sleep(0.1)
