"""The rules that ``inferd alerts`` writes: names, words, pages, and what the objectives change."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.observe.promql import labels_of_every_series, problems, read

from inferd.config import ObjectivesConfig
from inferd.gateway.routes import ROUTES
from inferd.observe.alerts.burn_rates import BURN_RATES
from inferd.observe.alerts.cohorts import COHORT
from inferd.observe.alerts.general import GENERAL, PROBES
from inferd.observe.alerts.rules_file import rules_file, runbook_template

ROOT = Path(__file__).resolve().parent.parent.parent.parent
RUNBOOKS = ROOT / "docs" / "runbooks"
ALL = ObjectivesConfig(availability=0.999, ttft_ms=500.0, tpot_ms=50.0, total_ms=20_000.0)
NAMES = {alert.name for alert in GENERAL} | {rate.alert for rate in BURN_RATES}


def rules(objectives: dict[str, ObjectivesConfig], **options: Any) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(rules_file(objectives, **options))["groups"] for rule in group["rules"]]


RULES = rules({"chat": ALL})
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = {
    rule["record"]: frozenset(COHORT if "tpot" in rule["record"] else ("model", "objective"))
    for rule in RULES
    if "record" in rule
}


def named(rule: dict[str, Any]) -> str:
    return "-".join([str(rule.get("alert", rule.get("record"))), rule.get("labels", {}).get("objective", "")])


@pytest.mark.parametrize("rule", RULES, ids=named)
def test_an_expression_names_metrics_and_labels_of_the_page(rule: dict[str, Any]) -> None:
    assert list(problems(rule["expr"], RECORDED)) == []


@pytest.mark.parametrize("rule", ALERTS, ids=named)
def test_an_alert_is_for_an_operator_and_its_words_use_labels_that_it_has(rule: dict[str, Any]) -> None:
    notes = rule["annotations"]
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert set(notes) == {"summary", "description", "runbook_url"}
    expression = read(rule["expr"])
    known = labels_of_every_series() | RECORDED
    grouped = re.match(r"sum by \(([^)]*)\)", rule["expr"])
    has = set(grouped[1].split(", ")) if grouped else known[expression.selectors[0].metric] | {"instance"}
    used = set(re.findall(r"\$labels\.(\w+)", notes["summary"] + notes["description"]))
    assert used <= has | rule["labels"].keys()


@pytest.mark.parametrize("rule", ALERTS, ids=named)
def test_the_page_of_an_alert_is_there(rule: dict[str, Any]) -> None:
    assert (ROOT / rule["annotations"]["runbook_url"]).is_file()


def test_every_alert_has_a_page_and_every_page_an_alert() -> None:
    pages = {page.stem for page in RUNBOOKS.glob("*.md")} - {"index"}
    assert pages == NAMES == {rule["alert"] for rule in ALERTS}


@pytest.mark.parametrize("page", sorted(NAMES))
def test_a_page_says_what_it_means_how_to_see_it_and_what_to_do(page: str) -> None:
    text = (RUNBOOKS / f"{page}.md").read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    assert headings == [page, "What it means", "How to see it", "First steps", "Usual causes"]
    assert re.search(r"^```console\n\$ ", text, re.MULTILINE), "steps are commands"
    severity = {alert.name: alert.severity for alert in GENERAL} | {r.alert: r.severity for r in BURN_RATES}
    assert f"Severity: {severity[page]}." in text
    for named_metric in re.findall(r"`((?:inferd|process)_\w+)", text):
        metric = re.sub(r"_(bucket|sum|count)$", "", named_metric)
        assert {named_metric, metric, f"{metric}_sum"} & labels_of_every_series().keys(), named_metric


def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    (tmp_path / "rules.yml").write_text(rules_file({"chat": ALL, 'odd "name" \\ {{ x': ALL}), encoding="utf-8")
    found = subprocess.run(
        [promtool, "check", "rules", "rules.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "SUCCESS" in found.stdout, found.stdout + found.stderr


def test_probes_are_no_http_errors() -> None:
    readiness = [route for route in ROUTES if 503 in route.also]
    assert {"/health", "/v2/health/ready", "/v2/models/{model}/ready"} <= {route.pattern for route in readiness}
    assert [route.pattern for route in readiness if not re.fullmatch(PROBES, route.pattern)] == []
    assert not re.fullmatch(PROBES, "/v1/chat/completions")


def test_without_objectives_there_are_the_general_alerts_alone() -> None:
    found = {rule["alert"] for rule in rules({"chat": ObjectivesConfig()}) if "alert" in rule}
    assert found == {alert.name for alert in GENERAL}


def test_an_objective_brings_its_alerts_and_no_others() -> None:
    found = rules({"chat": ObjectivesConfig(ttft_ms=500.0, ttft_fraction=0.99), "digits": ObjectivesConfig()})
    burning = [rule for rule in found if "objective" in rule.get("labels", {})]
    assert {(rule["labels"]["model"], rule["labels"]["objective"]) for rule in burning} == {("chat", "ttft")}
    bounds = [re.findall(r"> ([\d.]+ \* [\d.]+)$", rule["expr"], re.MULTILINE) for rule in burning]
    assert bounds == [["14.4 * 0.01"] * 2, ["6 * 0.01"] * 2, ["1 * 0.01"] * 2]


def test_an_alert_that_could_never_fire_is_left_out_and_named() -> None:
    text = rules_file({"chat": ObjectivesConfig(total_ms=100.0, total_fraction=0.9)})
    assert [rule["alert"] for rule in rules({"chat": ObjectivesConfig(total_ms=100.0, total_fraction=0.9)})[-2:]] == [
        "InferdErrorBudgetBurn",
        "InferdErrorBudgetBurnSlow",
    ]
    assert "# InferdErrorBudgetBurnFast is left out for total of chat" in text


@given(st.floats(0.001, 0.99999), st.integers(1, 100))
def test_every_bound_is_a_fraction_of_requests_and_the_floor_is_kept(target: float, floor: int) -> None:
    found = rules({"m": ObjectivesConfig(availability=target)}, min_missed=floor)
    for rule in found:
        if "objective" in rule.get("labels", {}):
            for factor, budget in re.findall(r"> ([\d.]+) \* ([\d.]+)$", rule["expr"], re.MULTILINE):
                assert 0 < float(factor) * float(budget) < 1
            assert rule["expr"].endswith(f">= {floor}")
    assert any("objective" in rule.get("labels", {}) for rule in found), "a ticket is always possible"


def test_runbooks_may_be_elsewhere() -> None:
    assert runbook_template("https://docs.example.com/books/") == "https://docs.example.com/books/{alert}.html"
    assert runbook_template("https://wiki.example.com/?page={alert}") == "https://wiki.example.com/?page={alert}"
    found = rules({}, runbooks=runbook_template("https://docs.example.com/books"))
    (absent,) = [rule for rule in found if rule.get("alert") == "InferdAbsent"]
    assert absent["annotations"]["runbook_url"] == "https://docs.example.com/books/InferdAbsent.html"
