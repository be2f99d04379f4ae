"""``MlflowClient`` reads inferd's registry of versions; its own search is the oracle of the filters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.gateway.fakes import Running
from tests.gateway.mlflow.test_mlflow_registry import server

mlflow: Any = pytest.importorskip("mlflow", reason="mlflow is not installed; make test-clients installs it")

__all__ = ["server"]

FILTERS = [
    "",
    "name='churn'",
    "name != 'churn'",
    "name LIKE 'ch%'",
    "name ilike '%RISK'",
    "name IN ('churn', 'other')",
    "run_id = 'run-2'",
    "run_id IN ('run-2', 'run-4')",
    "source_path = '/models/1'",
    "version_number >= 2",
    "version_number = 1 AND name LIKE '%r%'",
    "tags.auc = '0.91'",
    "tags.auc != '0.91'",
    "tags.`inferd.stage` = 'production'",
    'tags."inferd.stage" LIKE "ver%"',
    "tags.auc ILIKE '0.9_' and name = 'churn'",
]


@pytest.fixture
def client(server: Running, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "boss")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    return mlflow.MlflowClient(tracking_uri=server.url, registry_uri=server.url)


def test_the_client_reads_models_versions_and_aliases(client: Any) -> None:
    model = client.get_registered_model("churn")
    assert (model.name, model.aliases) == ("churn", {"champion": "1", "challenger": "2"})
    assert [one.name for one in client.search_registered_models()] == ["churn", "team-b/risk"]
    assert [one.name for one in client.search_registered_models("name ILIKE 'CH%'")] == ["churn"]
    champion = client.get_model_version_by_alias("churn", "champion")
    assert (champion.version, champion.current_stage, champion.status) == ("1", "Production", "READY")
    assert champion.tags["inferd.stage"] == "production"
    assert client.get_model_version("churn", "2").tags["auc"] == "0.93"
    assert {one.version for one in client.get_latest_versions("churn")} == {"1", "3"}
    assert [one.version for one in client.get_latest_versions("churn", stages=["Production"])] == ["1"]
    assert client.get_model_version_download_uri("churn", "2") == "/models/2"
    with pytest.raises(mlflow.exceptions.RestException, match="RESOURCE_DOES_NOT_EXIST"):
        client.get_registered_model("none")


@pytest.mark.parametrize("text", FILTERS)
def test_a_filter_finds_what_mlflows_own_search_finds(client: Any, text: str) -> None:
    from mlflow.utils.search_utils import SearchModelVersionUtils

    everything = list(client.search_model_versions(order_by=["name ASC", "version_number ASC"]))
    assert len(everything) == 4
    for one in everything:
        one._version = int(one.version)  # as its stores have it, and its search needs it
    wanted = SearchModelVersionUtils.filter(everything, text) if text else everything
    found = client.search_model_versions(text, order_by=["name ASC", "version_number ASC"])
    assert [(one.name, int(one.version)) for one in found] == [(one.name, one.version) for one in wanted]


def test_pages_are_followed_and_orders_kept(client: Any) -> None:
    seen: list[Any] = []
    token = None
    while True:
        page = client.search_model_versions(max_results=1, order_by=["creation_timestamp DESC"], page_token=token)
        seen += page
        token = page.token
        if not token:
            break
    assert [one.creation_timestamp for one in seen] == [104_000, 103_000, 102_000, 101_000]


def test_changes_are_refused_with_mlflows_error(client: Any) -> None:
    changes: tuple[Callable[[], Any], ...] = (
        lambda: client.create_registered_model("new"),
        lambda: client.rename_registered_model("churn", "other"),
        lambda: client.update_registered_model("churn", "words"),
        lambda: client.delete_registered_model("churn"),
        lambda: client.set_registered_model_alias("churn", "champion", "2"),
        lambda: client.delete_registered_model_alias("churn", "champion"),
        lambda: client.set_model_version_tag("churn", "1", "a", "b"),
        lambda: client.update_model_version("churn", "1", "words"),
        lambda: client.transition_model_version_stage("churn", "1", "Archived"),
        lambda: client.delete_model_version("churn", "1"),
    )
    for change in changes:
        with pytest.raises(mlflow.exceptions.RestException, match="changes nothing: versions come") as error:
            change()
        assert error.value.error_code == "ENDPOINT_NOT_FOUND"
    assert client.get_model_version_by_alias("churn", "champion").version == "1"


def test_a_wrong_token_is_refused(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "nobody")
    with pytest.raises(mlflow.exceptions.MlflowException, match="UNAUTHENTICATED"):
        client.get_registered_model("churn")
