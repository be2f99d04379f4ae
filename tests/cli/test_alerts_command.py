"""``inferd alerts`` writes the rules of a configuration, and says what it could not."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from inferd.cli.main import main

WITH = "models:\n  chat: {source: demo, objectives: {availability: 0.99}}\n"


def written(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def burning(text: str) -> list[str]:
    rules = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    return [rule["alert"] for rule in rules if rule.get("alert", "").startswith("InferdErrorBudget")]


def test_the_rules_of_a_file_go_to_standard_output_or_to_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path / "inferd.yaml", WITH)
    assert main(["alerts", config]) == 0
    text = capsys.readouterr().out
    assert burning(text) == ["InferdErrorBudgetBurnFast", "InferdErrorBudgetBurn", "InferdErrorBudgetBurnSlow"]
    assert main(["alerts", config, "-o", str(tmp_path / "rules.yml")]) == 0
    assert capsys.readouterr().out == ""
    assert (tmp_path / "rules.yml").read_text(encoding="utf-8") == text


def test_the_environment_sets_objectives_as_it_does_for_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INFERD_MODELS__CHAT__OBJECTIVES__TTFT_MS", "250")
    assert main(["alerts", written(tmp_path / "inferd.yaml", WITH)]) == 0
    assert "first token within 0.25 s" in capsys.readouterr().out


def test_general_alerts_need_no_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alerts"]) == 0
    found = capsys.readouterr()
    assert "InferdErrors" in found.out
    assert found.err == ""
    assert main(["alerts", written(tmp_path / "inferd.yaml", "models: {chat: {source: demo}}\n")]) == 0
    without = capsys.readouterr()
    assert without.out == found.out
    assert "sets no objectives (models.NAME.objectives)" in without.err


def test_the_floor_and_the_pages_are_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = written(tmp_path / "inferd.yaml", WITH)
    assert main(["alerts", config, "--min-missed", "20", "--runbooks", "https://wiki.example.com/{alert}"]) == 0
    text = capsys.readouterr().out
    assert ">= 20" in text
    assert "runbook_url: https://wiki.example.com/InferdErrors\n" in text


@pytest.mark.parametrize(
    ("objectives", "said"),
    [
        ("{availability: 1.5}", "models.chat.objectives.availability"),
        ("{availability: 1}", "models.chat.objectives.availability"),
        ("{ttft_ms: 0}", "models.chat.objectives.ttft_ms"),
        ("{total_fraction: 0}", "models.chat.objectives.total_fraction"),
        ("{latency_ms: 5}", "latency_ms"),
    ],
)
def test_an_objective_that_is_none_is_named(
    objectives: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path / "inferd.yaml", f"models: {{chat: {{source: demo, objectives: {objectives}}}}}\n")
    assert main(["alerts", config]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["none.yaml"], 1, "none.yaml does not exist"),
        (["-o", "no/such/folder/rules.yml"], 1, "no/such/folder/rules.yml cannot be written"),
        (["--runbooks", "https://x/{name}"], 2, "a placeholder other than {alert}"),
        (["--min-missed", "0"], 2, "--min-missed"),
    ],
)
def test_a_mistake_is_named(words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alerts", *words]) == code
    assert said in capsys.readouterr().err
