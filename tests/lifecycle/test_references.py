"""References to versions as sources: which files they lead to, what is refused, and when they have changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd.config import Config, load_config, model_name
from inferd.errors import ModelLoadError, StateUnavailable
from inferd.lifecycle import registry, sources
from inferd.lifecycle.registry import Finding, NewVersion
from inferd.lifecycle.sources import References
from inferd.registry.source import find, is_code, is_remote, resolve
from inferd.state.database import Database
from inferd.state.open import open_database

DIGEST = "tree-sha256:{:064x}"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = open_database(None, tmp_path)
    for number in (1, 2):
        new = NewVersion(name="churn", source=f"/models/{number}.onnx", digest=DIGEST.format(number))
        registry.register(opened, new, actor="user:1", now=1.0)
    move(opened, 1, "verify", "validate", "approve", "promote")
    yield opened
    opened.close()


def move(database: Database, version: int, *actions: Any) -> None:
    for action in actions:
        if action == "verify":
            found = Finding(kind="digest", passed=True, summary="", report={})
            registry.verify(database, "churn", version, [found], actor="user:1", now=1.0)
        else:
            registry.move(database, "churn", version, action, actor="user:1", now=1.0, reason="so")


def config(folder: Path, *sources: str, **settings: Any) -> Config:
    models = {f"m{number}": {"source": source} for number, source in enumerate(sources)}
    return msgspec.convert({"state": {"data_dir": str(folder)}, "models": models, **settings}, Config)


@pytest.mark.parametrize(
    ("source", "number"),
    [("registry:churn", 1), ("registry:churn@production", 1), ("registry:churn@2", 2), ("registry:churn@latest", 2)],
)
def test_a_reference_leads_to_its_files_and_to_no_others(
    database: Database, tmp_path: Path, source: str, number: int
) -> None:
    found = References().resolved(config(tmp_path, source, "demo")).models
    assert found["m0"].source == f"/models/{number}.onnx"
    assert found["m0"].verify is not None
    assert (found["m0"].verify.mode, found["m0"].verify.digest) == ("enforce", DIGEST.format(number))
    assert (found["m1"].source, found["m1"].verify) == ("demo", None)


def test_what_must_not_be_served_is_refused_with_its_setting(database: Database, tmp_path: Path) -> None:
    def refused(*sources: str, **settings: Any) -> str:
        with pytest.raises(ModelLoadError) as error:
            References().resolved(config(tmp_path, *sources, **settings))
        return error.value.message

    assert "models.m0.source: The registry has no model 'other'" in refused("registry:other")
    assert "no version, alias or stage 'canary'" in refused("registry:churn@canary")
    assert "2 models cannot be loaded" in refused("registry:other", "registry:churn@9")
    strict = {"registry": {"require_approval": True}}
    assert "churn@2 is registered and was not approved" in refused("registry:churn@2", **strict)
    assert References().resolved(config(tmp_path, "registry:churn", **strict)).models["m0"].verify is not None
    move(database, 2, "reject")
    assert "churn@2 was rejected (so), and is never served" in refused("registry:churn@2")
    other = {"source": "registry:churn", "verify": {"digest": DIGEST.format(7)}}
    with pytest.raises(ModelLoadError, match=r"verify\.digest says"):
        References().resolved(msgspec.convert({"state": {"data_dir": str(tmp_path)}, "models": {"m0": other}}, Config))


def test_only_what_leads_elsewhere_is_a_change(database: Database, tmp_path: Path) -> None:
    references = References()
    assert not references.have_changed()
    references.resolved(config(tmp_path, "registry:churn"))
    assert not references.have_changed()
    move(database, 2, "verify", "validate")  # another version's way
    assert not references.have_changed()
    move(database, 2, "approve", "promote")
    assert references.have_changed()
    assert not references.have_changed(), "a change is told once"
    move(database, 1, "promote")
    references.resolved(config(tmp_path, "registry:churn"))
    assert not references.have_changed(), "it was read since"
    move(database, 1, "archive")
    assert references.have_changed(), "nothing is in production"
    references.resolved(config(tmp_path, "demo"))
    move(database, 1, "promote")
    assert not references.have_changed(), "there is no reference any more"


def test_a_database_that_does_not_answer_is_no_change(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    references = References()
    references.resolved(config(tmp_path, "registry:churn"))

    def gone(wanted: Config) -> Database:
        raise StateUnavailable("The database is away.")

    monkeypatch.setattr(sources, "_opened", gone)
    assert not references.have_changed()
    with pytest.raises(StateUnavailable):
        references.resolved(config(tmp_path, "registry:churn"))
    monkeypatch.undo()
    move(database, 2, "verify", "validate", "approve", "promote")
    assert references.have_changed()


def test_a_reference_is_no_class_no_path_and_no_hub_id(tmp_path: Path) -> None:
    for source in ("registry:churn", "registry:team/churn@2"):
        assert not is_code(source)
        assert is_remote(source)
        assert find(source) is None
        with pytest.raises(ModelLoadError, match="only a model of the configuration"):
            resolve(source)
    assert model_name("registry:team/churn@2") == "team/churn"
    (tmp_path / "inferd.yaml").write_text("models: {churn: {source: 'registry:churn@production'}}\n")
    assert load_config(tmp_path / "inferd.yaml", {}, {}).models["churn"].source == "registry:churn@production"
