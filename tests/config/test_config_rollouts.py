"""The rollout of a model in the configuration: what it says, and what is refused with its place and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferd.config import Config, RolloutConfig, load_config
from inferd.config.versions import rollout_warnings
from inferd.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in ("1", "2", "3"):
        (tmp_path / "churn" / number).mkdir(parents=True)
        (tmp_path / "churn" / number / "model.onnx").write_bytes(b"onnx")
    return tmp_path / "churn"


def load(folder: Path, rollout: object, **model: object) -> Config:
    versions = {"policy": "all"}
    return load_config(
        None, {}, {"models": {"churn": {"source": str(folder), "versions": versions, "rollout": rollout, **model}}}
    )


def test_a_rollout_is_the_model_s_and_no_version_has_one_of_its_own(folder: Path) -> None:
    config = load(folder, {"stable": 2, "new": 3})
    found = config.models["churn"].rollout
    assert isinstance(found, RolloutConfig)
    assert [step.weight for step in found.steps] == [1, 5, 25, 100]
    assert found.guards.errors is not None
    assert (found.guards.slow, found.guards.invalid, found.guards.reported) == (None, None, None)
    assert {name: model.rollout is None for name, model in config.models.items()} == {
        "churn@1": True,
        "churn": False,
        "churn@3": True,
    }


def test_the_stable_version_keeps_the_name_so_that_the_new_one_replaces_nothing(folder: Path) -> None:
    before = load_config(None, {}, {"models": {"churn": {"source": str(folder / "1")}}}).models
    after = load(folder, {"stable": 1, "new": 3}, versions={}).models
    assert {name: model.version for name, model in after.items()} == {"churn": "1", "churn@3": "3"}
    assert before["churn"].source == after["churn"].source


def test_one_replica_of_each_version_is_worth_a_warning(folder: Path) -> None:
    (sentence,) = rollout_warnings(load(folder, {"stable": 2, "new": 3}).models)
    assert sentence.startswith("models.churn.replicas: each of the two versions of its rollout has one replica")
    assert rollout_warnings(load(folder, {"stable": 2, "new": 3}, replicas=2).models) == []
    assert rollout_warnings(load(folder, None).models) == []


def test_a_guard_is_turned_off_by_null(folder: Path) -> None:
    found = load(folder, {"stable": 2, "new": 3, "guards": {"errors": None, "slow": {"over_ms": 300}}})
    rollout = found.models["churn"].rollout
    assert rollout is not None
    assert rollout.guards.errors is None
    assert rollout.guards.slow is not None


def test_the_versions_may_be_entries_of_their_own() -> None:
    models = {
        "chat": {"source": "b", "version": "2", "rollout": {"stable": 1, "new": 2}},
        "chat@1": {"source": "a", "version": "1"},
    }
    assert load_config(None, {}, {"models": models}).models["chat"].rollout is not None


@pytest.mark.parametrize(
    ("rollout", "model", "said"),
    [
        ({"new": 3}, {}, "models.churn.rollout.stable: missing; give number of the version that serves now."),
        ({"stable": 2, "new": 2}, {}, "rollout.new: 2 is rollout.stable as well; name the version that is to serve."),
        (
            {"stable": 2, "new": 7},
            {},
            "models.churn.rollout.new: there is no version 7; the folder has 1, 2, 3. Name one of these, or put",
        ),
        ({"stable": 9, "new": 3}, {}, "models.churn.rollout.stable: there is no version 9"),
        ({"stable": 2, "new": 3, "steps": []}, {}, "rollout.steps: there are none; write at least one"),
        (
            {"stable": 2, "new": 3, "steps": [{"weight": 25}, {"weight": 5}]},
            {},
            "rollout.steps[1].weight: 5 is not above 25, the step before",
        ),
        (
            {"stable": 2, "new": 3, "steps": [{"weight": 101}]},
            {},
            "rollout.steps[0].weight: 101 is not a number from 0 to 100",
        ),
        ({"stable": 2, "new": 3, "steps": [{"wait": 1}]}, {}, "rollout.steps[0].wait: no such field"),
        ({"stable": 2, "new": 3, "alpha": 0}, {}, "rollout.alpha: 0 is not a number, above 0 and at most 0.5"),
        (
            {"stable": 2, "new": 3, "guards": {"errors": {"max_ratio": None, "max_fraction": None}}},
            {},
            "rollout.guards.errors: max_ratio and max_fraction are both unset",
        ),
        ({"stable": 2, "new": 3, "guards": {"slow": {}}}, {}, "or objectives.ttft_ms"),
        (
            {"stable": 2, "new": 3, "steps": [{"shadow": 100}, {"shadow": 100}, {"weight": 100}]},
            {},
            "rollout.steps[1].weight: 0 is not above 0, the step before",
        ),
        (
            {"stable": 2, "new": 3, "steps": [{"for_s": 9}, {"weight": 100}]},
            {},
            "rollout.steps[0]: it has neither weight nor shadow; write one",
        ),
        (
            {"stable": 2, "new": 3, "steps": [{"weight": 100, "shadow": 10}]},
            {},
            "rollout.steps[0].shadow: the new version serves every unit in this step",
        ),
        (
            {"stable": 2, "new": 3, "guards": {"differs": {}}},
            {},
            "rollout.guards.differs: no step copies requests, so nothing is compared",
        ),
        ({"stable": 2, "new": 3, "guards": {"differs": {"max_ratio": 2}}}, {}, "rollout.guards.differs.max_ratio: no"),
        (
            {"stable": 2, "new": 3},
            {"versions": {"policy": "all", "weights": {"2": 50, "3": 50}}},
            "models.churn.rollout: versions.weights divides the requests as well; leave the weights out",
        ),
        (
            {"stable": 2, "new": 3},
            {"sequence": {"states": {"out": "in"}}},
            "models.churn.rollout: a growing share would move sequences away from their states",
        ),
        ({"stable": 2, "new": 3, "unit": "planet"}, {}, "rollout.unit: 'planet' is not one of auto, request"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    folder: Path, rollout: dict[str, object], model: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(folder, rollout, **model)
    assert said in caught.value.message


def test_two_rollouts_of_one_model_are_refused() -> None:
    rollout = {"stable": 1, "new": 2}
    models = {
        "chat": {"source": "b", "version": "2", "rollout": rollout},
        "chat@1": {"source": "a", "version": "1", "rollout": rollout},
    }
    with pytest.raises(ConfigError, match=r"models.chat@1.rollout: this is a version of chat; write the one rollout"):
        load_config(None, {}, {"models": models})


def test_a_rollout_to_a_remote_server_is_refused() -> None:
    models = {
        "chat": {"source": "openai:https://host.example/v1", "version": "2", "rollout": {"stable": 1, "new": 2}},
        "chat@1": {"source": "a", "version": "1"},
    }
    with pytest.raises(ConfigError, match=r"models.chat.rollout: it is for versions that run here, and chat is a remo"):
        load_config(None, {}, {"models": models})
