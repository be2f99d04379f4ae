"""Models of an MLflow server as sources: when an alias counts as moved, and what is held while the server is away."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest
from onnx import numpy_helper as number_helper
from tests.app.test_registry_served import adding
from tests.registry.mlflow_stand_in import StandIn, logged, standing_in

from inferd import clock
from inferd.config import Config
from inferd.errors import ModelLoadError
from inferd.lifecycle.sources import References
from inferd.registry.source import find, is_code, is_remote, resolve

ALIAS = "mlflow:models:/adding@champion"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with standing_in() as found:
        for number in (1, 2):
            file = adding(tmp_path / f"made-{number}" / "model.onnx", float(number)).read_bytes()
            found.add("adding", number, logged("onnx", {"model.onnx": file}, data="model.onnx"))
        found.add("code", 1, logged("spam", {"x": b""}))
        found.aliases["adding", "champion"] = "1"
        yield found


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the clock is ahead."""
    ahead, real = [0.0], clock.now
    monkeypatch.setattr(clock, "now", lambda: real() + ahead[0])
    return ahead


def config(server: StandIn, *sources: str, **models: Any) -> Config:
    found = {f"m{number}": {"source": source} for number, source in enumerate(sources)}
    return msgspec.convert({"mlflow": {"url": server.url, "poll_s": 60}, "models": {**found, **models}}, Config)


def number_of(config: Config, name: str = "m0") -> int:
    """The version that is loaded: what its model adds."""
    (number,) = onnx.load(config.models[name].source).graph.initializer
    return int(number_helper.to_array(number).item())


def test_an_alias_is_asked_for_when_it_is_time_and_when_a_webhook_came(server: StandIn, later: list[float]) -> None:
    references = References()
    assert not references.have_changed()
    assert number_of(references.resolved(config(server, ALIAS, "demo"))) == 1
    asked = len(server.asked)
    server.aliases["adding", "champion"] = "2"
    assert not references.have_changed()
    assert len(server.asked) == asked, "it is not time yet"
    references.look_soon()
    assert references.have_changed()
    assert number_of(references.resolved(config(server, ALIAS))) == 2
    server.aliases["adding", "champion"] = "1"
    later[0] += 61
    assert references.have_changed(), "polling repairs what no webhook said"
    assert number_of(references.resolved(config(server, ALIAS))) == 1
    later[0] += 61
    assert not references.have_changed()
    references.resolved(config(server, "demo"))
    server.aliases["adding", "champion"] = "2"
    later[0] += 61
    assert not references.have_changed(), "no model follows it"


def test_a_version_by_its_number_is_not_asked_for_again(server: StandIn, later: list[float]) -> None:
    references = References()
    assert number_of(references.resolved(config(server, "mlflow:models:/adding/2"))) == 2
    asked = len(server.asked)
    later[0] += 1000
    references.look_soon()
    assert not references.have_changed()
    assert len(server.asked) == asked


def test_what_is_served_is_held_while_the_server_is_away(
    server: StandIn, later: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    references = References()
    before = references.resolved(config(server, ALIAS))
    server.status = 503
    server.aliases["adding", "champion"] = "2"
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            later[0] += 61
            assert not references.have_changed()
        assert len(caplog.records) == 1, "it is said once"
        assert references.resolved(config(server, ALIAS, "demo")).models["m0"] == before.models["m0"]
    assert "stays as it is served" in caplog.text
    with pytest.raises(ModelLoadError, match=r"models\.new\.source: .*did not answer"):
        references.resolved(config(server, ALIAS, new={"source": "mlflow:models:/adding/2"}))
    server.status = 0
    later[0] += 61
    assert references.have_changed()
    assert number_of(references.resolved(config(server, ALIAS))) == 2


def test_a_start_while_the_server_is_away_serves_the_copy_that_was_verified_last(
    server: StandIn, later: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    before = References().resolved(config(server, ALIAS))
    server.status = 503
    server.aliases["adding", "champion"] = "2"
    restarted = References()
    with caplog.at_level(logging.WARNING):
        assert restarted.resolved(config(server, ALIAS)) == before
    assert "is adding version 1, the copy that was verified last" in caplog.text
    assert not restarted.have_changed()
    server.status = 0
    later[0] += 61
    assert restarted.have_changed(), "the alias is followed when the server answers again"
    assert number_of(restarted.resolved(config(server, ALIAS))) == 2
    server.status = 503
    assert number_of(References().resolved(config(server, ALIAS))) == 2
    settings = {"source": ALIAS, "verify": {"digest": "tree-sha256:" + "0" * 64}}
    with pytest.raises(ModelLoadError, match="did not answer"):
        References().resolved(config(server, m0=settings))
    shutil.rmtree(Path(before.models["m0"].source).parent.parent)
    with pytest.raises(ModelLoadError, match="did not answer"):
        References().resolved(config(server, ALIAS))


def test_a_download_that_was_interrupted_is_tried_again_and_a_refused_version_is_not(
    server: StandIn, later: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferd.registry.mlflow.fetching.ATTEMPTS", 1)
    references = References()
    before = references.resolved(config(server, ALIAS))
    server.aliases["adding", "champion"] = "2"
    server.cuts = [1] * 100
    references.look_soon()
    assert references.have_changed()
    assert references.resolved(config(server, ALIAS)) == before, "the version of before goes on"
    server.cuts.clear()
    later[0] += 61
    assert references.have_changed(), "what did not come is asked for again"
    assert number_of(references.resolved(config(server, ALIAS))) == 2
    server.versions["adding", "3"] = server.versions["code", "1"]
    server.aliases["adding", "champion"] = "3"
    later[0] += 61
    assert references.have_changed()
    with pytest.raises(ModelLoadError, match=r"models\.m0\.source: adding version 3 cannot be served"):
        references.resolved(config(server, ALIAS))
    later[0] += 61
    assert not references.have_changed(), "it is the same refused version"
    del server.aliases["adding", "champion"]
    later[0] += 61
    assert references.have_changed()
    with pytest.raises(ModelLoadError, match="alias champion not found"):
        references.resolved(config(server, ALIAS))
    later[0] += 61
    assert not references.have_changed()


def test_all_refused_models_are_listed(server: StandIn) -> None:
    with pytest.raises(ModelLoadError) as error:
        References().resolved(config(server, "mlflow:models:/code/1", "mlflow:models:/churn", ALIAS))
    assert "2 models cannot be loaded" in error.value.message
    assert "models.m0.source: code version 1 cannot be served" in error.value.message
    assert "models.m1.source: 'mlflow:models:/churn' names no model" in error.value.message


def test_a_model_of_mlflow_is_no_class_no_path_and_no_hub_id() -> None:
    assert is_remote(ALIAS)
    assert not is_code("mlflow:models")
    assert find(ALIAS) is None
    with pytest.raises(ModelLoadError, match="only a model of the configuration may"):
        resolve(ALIAS)
