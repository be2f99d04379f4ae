"""The registry in MLflow's terms: what its client reads, in the shapes that a server of MLflow's own answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.admin.test_admin_api import KEYS
from tests.gateway.fakes import FakeControl, FakeDoor, FakeRouter, Running, running

from inferd import clock
from inferd.config.versioning import RegistryConfig
from inferd.errors import InvalidRequest
from inferd.gateway.mlflow.search import Condition, holds, read_filter, read_orders
from inferd.lifecycle import registry
from inferd.lifecycle.actions import RegistryActions
from inferd.lifecycle.registry import Finding, NewVersion
from inferd.state.database import Database
from inferd.state.open import open_database
from inferd.state.thread import StateThread

FIELDS = {
    *("name", "version", "creation_timestamp", "last_updated_timestamp", "current_stage", "description", "source"),
    *("run_id", "status", "run_link"),
}
"""Those of every version that mlflow server 3.17 answers."""


def registered(database: Database, name: str, number: int, *actions: Any, **tags: str) -> None:
    digest = f"tree-sha256:{number:064x}"
    new = NewVersion(name=name, source=f"/models/{number}", digest=digest, tags=tags, run_id=f"run-{number}")
    version = registry.register(database, new, actor="user:1", now=100.0 + number).version
    found = Finding(kind="digest", passed=True, summary="", report={})
    registry.verify(database, name, version, [found], actor="user:1", now=100.0 + number)
    for action in actions:
        registry.move(database, name, version, action, actor="user:1", now=200.0 + number, reason="so")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("state")
    database = open_database(None, folder)
    registered(database, "churn", 1, "validate", "approve", "promote", auc="0.91")
    registered(database, "churn", 2, auc="0.93")
    registered(database, "churn", 3, "reject")
    registered(database, "team-b/risk", 4)
    registry.set_alias(database, "churn", "champion", 1, actor="user:1", now=300.0)
    registry.set_alias(database, "churn", "challenger", 2, actor="user:1", now=300.0)
    state = StateThread(lambda: open_database(None, folder))
    state.start(database)
    control = FakeControl()
    control.versions = RegistryActions(state, RegistryConfig, clock.wall)
    with running(FakeRouter("tiny"), door=FakeDoor(KEYS), control=control) as started:
        yield started
    state.close()


def ask(server: Running, path: str, key: str = "boss", method: str = "GET", **query: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.request(method, f"{server.url}/api/2.0/mlflow/{path}", params=query, headers=headers)


def read(server: Running, path: str, key: str = "boss", **query: Any) -> Any:
    found = ask(server, path, key, **query)
    assert found.status_code == 200, found.text
    return found.json()


def test_a_model_has_its_aliases_and_the_newest_version_of_each_stage(server: Running) -> None:
    model = read(server, "registered-models/get", name="churn")["registered_model"]
    assert model["aliases"] == [{"alias": "challenger", "version": "2"}, {"alias": "champion", "version": "1"}]
    assert [(one["version"], one["current_stage"]) for one in model["latest_versions"]] == [
        ("3", "None"),
        ("1", "Production"),
    ]
    assert (model["creation_timestamp"], model["last_updated_timestamp"]) == (101_000, 203_000)
    latest = read(server, "registered-models/get-latest-versions", name="churn", stages=["production"])
    assert [one["version"] for one in latest["model_versions"]] == ["1"]


def test_a_version_has_mlflows_fields_and_its_evidence_as_tags(server: Running) -> None:
    version = read(server, "model-versions/get", name="churn", version="1")["model_version"]
    assert set(version) >= FIELDS
    assert read(server, "registered-models/alias", name="churn", alias="champion")["model_version"] == version
    tags = {tag["key"]: tag["value"] for tag in version["tags"]}
    assert (tags["auc"], tags["inferd.stage"], tags["inferd.evidence.digest"]) == ("0.91", "production", "passed")
    assert (tags["inferd.digest"], tags["inferd.approver"]) == (f"tree-sha256:{1:064x}", "user:1")
    assert (version["status"], version["source"], version["run_id"]) == ("READY", "/models/1", "run-1")
    uri = read(server, "model-versions/get-download-uri", name="churn", version="1")
    assert uri == {"artifact_uri": "/models/1"}
    rejected = read(server, "model-versions/get", name="churn", version="3")["model_version"]
    assert (rejected["status"], rejected["status_message"]) == ("FAILED_REGISTRATION", "rejected: so")


def test_searches_filter_order_and_page(server: Running) -> None:
    def versions(**query: Any) -> list[str]:
        found = read(server, "model-versions/search", **query)
        return [f"{one['name']} {one['version']}" for one in found.get("model_versions", [])]

    assert versions() == ["churn 3", "churn 1", "team-b/risk 1", "churn 2"], "the last changed first"
    assert versions(filter="name='churn'", order_by=["version_number ASC"]) == ["churn 1", "churn 2", "churn 3"]
    assert versions(filter="name = 'churn' and tags.auc = '0.93'") == ["churn 2"]
    assert versions(filter="tags.`inferd.stage` = 'production'") == ["churn 1"]
    assert versions(filter="run_id IN ('run-2', 'run-4')", order_by=["name"]) == ["churn 2", "team-b/risk 1"]
    assert versions(filter="version_number > 1 AND name ILIKE 'CH%'", order_by=["version_number"]) == [
        *("churn 2", "churn 3")
    ]
    assert read(server, "model-versions/search", filter="name='none'") == {}
    pages, token = [], ""
    while True:
        found = read(server, "model-versions/search", max_results=3, page_token=token)
        pages.append(len(found["model_versions"]))
        token = found.get("next_page_token", "")
        if not token:
            break
    assert pages == [3, 1]
    models = read(server, "registered-models/search", filter="name LIKE '%r%'", order_by=["name DESC"])
    assert [one["name"] for one in models["registered_models"]] == ["team-b/risk", "churn"]


def test_a_key_reads_what_it_may_use_and_others_nothing(server: Running) -> None:
    found = read(server, "registered-models/search", "narrow")["registered_models"]
    assert [one["name"] for one in found] == ["team-b/risk"]
    assert ask(server, "registered-models/get", "narrow", name="churn").status_code == 404
    assert ask(server, "model-versions/get", "narrow", name="churn", version="1").status_code == 404
    missing = ask(server, "registered-models/search", "")
    assert (missing.status_code, missing.json()["error_code"]) == (401, "UNAUTHENTICATED")


@pytest.mark.parametrize(
    ("path", "query", "status", "code"),
    [
        ("registered-models/get", {"name": "none"}, 404, "RESOURCE_DOES_NOT_EXIST"),
        ("registered-models/get", {}, 400, "INVALID_PARAMETER_VALUE"),
        ("registered-models/alias", {"name": "churn", "alias": "x"}, 404, "RESOURCE_DOES_NOT_EXIST"),
        ("model-versions/get", {"name": "churn", "version": "9"}, 404, "RESOURCE_DOES_NOT_EXIST"),
        ("model-versions/search", {"filter": "name = churn"}, 400, "INVALID_PARAMETER_VALUE"),
        ("model-versions/search", {"filter": "tags.a = 'b' OR tags.a = 'c'"}, 400, "INVALID_PARAMETER_VALUE"),
        ("model-versions/search", {"order_by": "status"}, 400, "INVALID_PARAMETER_VALUE"),
        ("model-versions/search", {"max_results": "0"}, 400, "INVALID_PARAMETER_VALUE"),
        ("model-versions/search", {"page_token": "xx"}, 400, "INVALID_PARAMETER_VALUE"),
        ("experiments/search", {}, 404, "ENDPOINT_NOT_FOUND"),
    ],
)
def test_what_cannot_be_read_is_refused_in_mlflows_form(
    server: Running, path: str, query: dict[str, str], status: int, code: str
) -> None:
    found = ask(server, path, **query)
    assert (found.status_code, found.json()["error_code"]) == (status, code), found.text
    assert found.json()["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *[("POST", f"registered-models/{word}") for word in ("create", "rename", "set-tag", "alias")],
        *[("POST", f"model-versions/{word}") for word in ("create", "transition-stage", "set-tag")],
        *[("DELETE", f"registered-models/{word}") for word in ("delete", "delete-tag", "alias")],
        *[("PATCH", f"{entity}/update") for entity in ("registered-models", "model-versions")],
    ],
)
def test_every_change_is_refused_with_the_remedy(server: Running, method: str, path: str) -> None:
    before = read(server, "model-versions/search")
    found = ask(server, path, method=method, name="churn")
    assert (found.status_code in (404, 405), found.json()["error_code"]) == (True, "ENDPOINT_NOT_FOUND")
    assert "inferd registry register" in found.json()["message"]
    assert read(server, "model-versions/search") == before


def test_a_method_that_is_not_there_makes_the_client_try_the_other(server: Running) -> None:
    found = ask(server, "registered-models/get-latest-versions", method="POST")
    assert (found.status_code, found.json()["error_code"]) == (405, "ENDPOINT_NOT_FOUND")


# -- the grammar of filters -----------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_characters="'", exclude_categories=("Cs", "Cc")), max_size=20)
CONDITIONS = st.one_of(
    st.builds(Condition, st.just("name"), st.sampled_from(["=", "!=", "LIKE", "ILIKE"]), st.tuples(TEXTS)),
    st.builds(Condition, st.just("tags.a b.c"), st.sampled_from(["=", "!="]), st.tuples(TEXTS)),
    st.builds(
        Condition,
        st.just("version_number"),
        st.sampled_from(["=", "!=", "<", "<=", ">", ">="]),
        st.tuples(st.integers(0, 99).map(str)),
    ),
    st.builds(Condition, st.just("run_id"), st.just("IN"), st.lists(TEXTS, min_size=1, max_size=3).map(tuple)),
)


def written(condition: Condition) -> str:
    key, operator, values = condition
    key = f"tags.`{key.removeprefix('tags.')}`" if key.startswith("tags.") else key
    if operator == "IN":
        return f"{key} IN ({', '.join(repr_of(value) for value in values)})"
    return f"{key} {operator} {values[0] if key == 'version_number' else repr_of(values[0])}"


def repr_of(value: str) -> str:
    return f"'{value}'"


@given(st.lists(CONDITIONS, max_size=4))
def test_a_filter_is_read_as_it_was_written(conditions: list[Condition]) -> None:
    assert read_filter(" AND ".join(map(written, conditions)), "version") == conditions


@given(st.text(max_size=80), st.sampled_from(["model", "version"]))
def test_no_text_breaks_the_grammar(text: str, entity: Any) -> None:
    try:
        found = read_filter(text, entity)
    except InvalidRequest:
        return
    for condition in found:
        holds(condition, {"name": "x", "version_number": "1"}, {})


def test_patterns_match_as_in_sql() -> None:
    def matches(pattern: str, value: str, operator: str = "LIKE") -> bool:
        return holds(Condition("name", operator, (pattern,)), {"name": value}, {})

    assert matches("ch%", "churn")
    assert not matches("ch%", "Churn")
    assert matches("CH%", "churn", "ILIKE")
    assert matches("c_urn", "churn")
    assert not matches("c.urn", "churn")
    assert matches("%" * 5000 + "x", "a" * 100 + "x")
    assert not holds(Condition("tags.a", "!=", ("b",)), {}, {}), "a tag that is not there fulfils nothing"


def test_orders_name_fields_and_directions() -> None:
    assert read_orders(["name DESC", "version_number"], "version") == [("name", True), ("version_number", False)]
    with pytest.raises(InvalidRequest, match="order_by"):
        read_orders(["version_number"], "model")
