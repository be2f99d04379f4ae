"""The checklist of a deployment: what a bare server misses, what is enough, and what only people can check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.app.test_replaced_files import inferd
from tests.predict.live import serving

from inferd import models
from inferd.cli.running.checklist import STAGES, Item, Seen, items
from inferd.config import Config
from inferd.gateway.control import ModelReport, ReplicaReport, ServerReport

ROOT = Path(__file__).resolve().parent.parent.parent


def status(**fields: Any) -> ServerReport:
    replicas = [ReplicaReport(index=i, kind="local", name="", state="ready", artifact="a") for i in range(2)]
    model = ModelReport(
        name="m", state="ready", load="startup", replicas_ready=2, replicas=replicas, waiting=0, in_flight=0
    )
    values: dict[str, Any] = {
        "status": "serving",
        "version": "1",
        "pid": 1,
        "started_at": 1.0,
        "config_path": "/nowhere/inferd.yaml",
        "last_reload": None,
        "reload_since": None,
        "memory_bytes": 1,
        "memory_budget_bytes": 10,
        "models": [model],
    }
    return ServerReport(**{**values, **fields})


def seen(config: dict[str, Any] | None = None, **fields: Any) -> Seen:
    values: dict[str, Any] = {
        "status": status(),
        "ready": True,
        "models": frozenset({"m"}),
        "metrics": "inferd_build_info 1\ninferd_state_available 1\n",
        "keys": (),
        "config": None if config is None else msgspec.convert(config, Config),
        "config_problem": "it is elsewhere",
    }
    return Seen(**{**values, **fields})


def of(found: list[Item], words: str) -> Item:
    (item,) = [item for item in found if words in item.what]
    return item


def test_every_stage_has_an_item_with_a_page_that_exists_and_a_remedy_where_it_does_not_pass() -> None:
    for given in (seen(), seen({"models": {"m": {"source": "demo"}}}), seen(metrics=None, models=None, keys=None)):
        found = items(given)
        assert list(dict.fromkeys(item.stage for item in found)) == list(STAGES)
        for item in found:
            assert (ROOT / item.page).is_file(), item
            assert bool(item.remedy) == (item.result != "pass"), item


def test_what_is_missing_is_named() -> None:
    bare = items(seen({"models": {"m": {"source": "demo"}}, "server": {"host": "0.0.0.0"}}))
    for words in ("there are keys", "use TLS", "has an objective"):
        assert of(bare, words).result == "missing", words
    good = {"source": "demo", "objectives": {"availability": 0.99}, "drift": {"enabled": True}}
    better = items(seen({"models": {"m": good}}))
    for words in ("use TLS", "has an objective", "drift is watched", "two replicas"):
        assert of(better, words).result == "pass", words


@pytest.mark.parametrize(
    ("model", "is_verified"),
    [
        ({"source": "registry:churn@1"}, True),
        ({"source": "mlflow:models:/churn@champion"}, True),
        ({"source": "/m", "verify": {"mode": "enforce", "digest": f"sha256:{'0' * 64}"}}, True),
        ({"source": "/m", "verify": {"mode": "warn", "digest": f"sha256:{'0' * 64}"}}, False),
        ({"source": "/m"}, False),
    ],
)
def test_files_are_verified_where_other_files_would_be_refused(model: dict[str, Any], is_verified: bool) -> None:
    found = items(seen({"models": {"m": model}}))
    assert (of(found, "verified before").result == "pass") == is_verified
    assert (of(found, "name a revision").result == "pass") == (model["source"] != "/m")


def test_what_cannot_be_seen_is_for_people_and_is_no_failure() -> None:
    found = items(seen(metrics=None, models=None, keys=None))
    for words in ("has an objective", "there are keys", "metrics can be read", "clients see every model", "use TLS"):
        assert of(found, words).result == "not checkable", words
    assert of(found, "a load test").result == "not checkable"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"config_path": None}, "has a configuration file"),
        ({"memory_bytes": 11}, "less than their budget"),
    ],
)
def test_the_status_alone_decides(fields: dict[str, Any], words: str) -> None:
    assert of(items(seen()), words).result == "pass"
    assert of(items(seen(status=status(**fields))), words).result == "missing"


def test_a_running_server_is_checked_by_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    entry = {"source": str(models.path("demo-digits") / "model.onnx"), "objectives": {"availability": 0.99}}
    with serving(tmp_path, {"digits": entry}):
        code, printed = inferd("checklist", "--json")
        assert code == 1, printed
        report = json.loads(printed)
        assert not report["ok"]
        results = {item["what"].partition(":")[0]: item["result"] for item in report["items"]}
        assert results["the content of every model's files is known by a digest"] == "pass"
        assert results["every model is ready"] == results["the server says that it is ready"] == "pass"
        assert results["metrics can be read"] == results["clients see every model"] == "pass"
        assert results["the database of keys and limits answers"] == "pass"
        assert results["every model has an objective"] == results["the file has no problem"] == "pass"
        assert results["every model has two replicas or more"] == "missing"
        assert results["there are keys, so that no request is without one"] == "missing"
        code, printed = inferd("checklist")
        assert code == 1
        assert (" 1. artefact\n" in printed, "10. failure modes\n" in printed) == (True, True), printed
        assert "MISSING  every model has two replicas or more: not digits" in printed
        assert "docs/keys-and-limits.md" in printed
