"""A folder's numbered subfolders become entries of the configuration, by policy."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.config import Config, ModelConfig, VersionsConfig, load_config
from inferd.config.versions import base_of, draw, entry_named, names_of_entries, versions_of
from inferd.errors import ConfigError
from inferd.tenancy.principal import Principal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in ("1", "2", "10"):
        (tmp_path / "digits" / number).mkdir(parents=True)
        (tmp_path / "digits" / number / "model.onnx").write_bytes(b"onnx")
    (tmp_path / "digits" / "3").mkdir()  # nothing has been copied there yet
    (tmp_path / "digits" / "notes").mkdir()
    return tmp_path / "digits"


def load(folder: Path, **model: object) -> Config:
    return load_config(None, {}, {"models": {"digits": {"source": str(folder), **model}}})


def served(config: Config) -> dict[str, tuple[str, str]]:
    return {name: (Path(model.source).name, model.version) for name, model in config.models.items()}


def test_the_newest_version_has_the_model_s_name(folder: Path) -> None:
    assert served(load(folder)) == {"digits": ("10", "10")}


def test_the_latest_are_the_highest_numbers_not_the_last_by_alphabet(folder: Path) -> None:
    config = load(folder, versions={"policy": "latest", "count": 2})
    assert served(config) == {"digits@2": ("2", "2"), "digits": ("10", "10")}
    assert versions_of(config.models, "digits") == {"2": "digits@2", "10": "digits"}


def test_all_versions_are_served_at_once(folder: Path) -> None:
    config = load(folder, versions={"policy": "all"}, threads=1)
    assert versions_of(config.models, "digits") == {"1": "digits@1", "2": "digits@2", "10": "digits"}
    assert {model.threads for model in config.models.values()} == {1}


def test_specific_versions_are_those_named(folder: Path) -> None:
    config = load(folder, versions={"policy": "specific", "only": [2, 1]})
    assert served(config) == {"digits@1": ("1", "1"), "digits": ("2", "2")}


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"policy": "specific", "only": [7]}, "no version 7; the folder has 1, 2, 10"),
        ({"policy": "specific"}, "needs 'only'"),
        ({"policy": "latest", "count": 0}, "count"),
    ],
)
def test_a_policy_that_cannot_be_met_says_what_there_is(folder: Path, policy: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(folder, versions=policy)
    assert said in refused.value.message


def test_a_name_that_a_version_takes_is_refused(folder: Path) -> None:
    models = {"digits": {"source": str(folder), "versions": {"policy": "all"}}, "digits@1": {"source": "demo"}}
    with pytest.raises(ConfigError, match="digits@1"):
        load_config(None, {}, {"models": models})


def test_a_checkpoint_with_numbered_folders_is_one_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    assert served(load(folder)) == {"digits": ("digits", "1")}


def test_a_model_that_only_looks_like_a_version_is_none(folder: Path) -> None:
    models = {"digits": {"source": str(folder)}, "digits@5": {"source": "demo"}}
    config = load_config(None, {}, {"models": models})
    assert versions_of(config.models, "digits") == {"10": "digits"}


def test_a_key_for_a_model_is_one_for_its_versions_and_for_no_other_model() -> None:
    principal = Principal(models=("digits", "team-*"))
    assert principal.may_use("digits@2")
    assert principal.may_use("team-a@1")
    assert not principal.may_use("letters@1")
    assert not principal.may_use("digits2@1")
    assert base_of("team@host") == "team@host"


def weighted(folder: Path, **weights: float) -> Config:
    found = {number.strip("v"): weight for number, weight in weights.items()}
    return load(folder, versions={"policy": "all", "aliases": {"stable": 2}, "weights": found})


def test_aliases_and_numbers_are_names_for_versions(folder: Path) -> None:
    models = load(folder, versions={"policy": "all", "aliases": {"stable": 2, "next": 10}}).models
    assert entry_named(models, "digits@stable") == "digits@2"
    assert entry_named(models, "digits@next") == entry_named(models, "digits@10") == "digits"
    for other in ("digits@7", "digits@other", "other@stable", "digits", "digits@2"):
        assert entry_named(models, other) is None


def test_the_names_of_an_entry_are_those_that_it_is_found_by(folder: Path) -> None:
    models = load(folder, versions={"policy": "all", "aliases": {"stable": 2, "next": 10}}).models
    models |= {"other@5": ModelConfig(source="demo"), "plain": ModelConfig(source="demo")}
    names = names_of_entries(models)
    assert names["digits"] == ["digits", "digits@10", "digits@next"]
    assert {"digits@2", "digits@stable"} <= set(names["digits@2"])
    assert "digits@stable" not in names["digits@1"]
    assert names.keys() == models.keys()
    for entry, found in names.items():
        assert [entry_named(models, name) for name in found[1:]] == [entry] * (len(found) - 1)


@given(
    st.lists(st.floats(0, 100), min_size=3, max_size=3).filter(lambda weights: sum(weights) > 0.1),
    st.lists(st.text(), min_size=1, max_size=20),
)
def test_a_user_gets_the_same_version_again_and_never_one_without_a_share(
    weights: list[float], units: list[str]
) -> None:
    entries = ("digits@1", "digits@2", "digits")
    models = {
        entry: ModelConfig(
            source="x",
            version=version,
            versions=VersionsConfig(weights=dict(zip(("1", "2", "10"), weights, strict=True))),
        )
        for entry, version in zip(entries, ("1", "2", "10"), strict=True)
    }
    share = dict(zip(entries, weights, strict=True))
    for unit in units:
        found = draw(models, "digits", unit)
        drawn = found.entry
        assert found == draw(models, "digits", unit)
        assert found.was_free
        assert share[drawn] > 0
        assert draw(models, drawn, unit).entry == drawn or drawn == "digits", "a version's own name is not shared out"
        able = draw(models, "digits", unit, lambda entry: entry != "digits")
        others = share["digits@1"] + share["digits@2"]
        assert able.entry != "digits" or not others
        assert able.was_free == (not share["digits"] or not others), "no version with a share was left out"


def test_shares_are_what_the_weights_say_and_a_change_moves_only_the_users_it_must(folder: Path) -> None:
    before, after = weighted(folder, v2=90, v10=10).models, weighted(folder, v2=70, v10=30).models
    units = [str(number) for number in range(4000)]
    first = [draw(before, "digits", unit).entry for unit in units]
    second = [draw(after, "digits", unit).entry for unit in units]
    assert 3540 < first.count("digits@2") < 3660, "within four standard deviations"
    assert 2680 < second.count("digits@2") < 2920
    assert {pair for pair in zip(first, second, strict=True) if pair[0] != pair[1]} == {("digits@2", "digits")}


def test_versions_that_can_serve_keep_their_proportions_where_another_one_cannot(folder: Path) -> None:
    models = weighted(folder, v1=60, v2=20, v10=20).models
    units = [str(number) for number in range(4000)]
    drawn = [draw(models, "digits", unit, lambda entry: entry != "digits@1").entry for unit in units]
    assert set(drawn) == {"digits@2", "digits"}
    assert 1874 < drawn.count("digits@2") < 2126, "half of them, within four standard deviations"


def test_rounded_weights_are_shares(folder: Path) -> None:
    models = weighted(folder, v1=33.33, v2=33.33, v10=33.33).models
    assert {draw(models, "digits", str(number)).entry for number in range(100)} == {"digits", "digits@1", "digits@2"}


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"aliases": {"stable": 7}}, "aliases.stable: version 7 is not served; served are: 1, 2, 10."),
        ({"aliases": {"3": 2}}, "'3' is no name for a version"),
        ({"weights": {"7": 1}}, "weights: version 7 is not served; served are: 1, 2, 10."),
        ({"weights": {"2": 0, "1": 0}}, "all of them are 0"),
        ({"weights": {"2": -1}}, "at least 0"),
        ({"weights": {"2": 90, "1": 30}}, "models.digits.versions.weights: they are percent and add up to 120;"),
        ({"weights": {"2": 0.9, "1": 0.1}}, "add up to 1;"),
        ({"weights": {"10": 99.9}}, "add up to 99.9;"),
    ],
)
def test_aliases_and_weights_of_what_is_not_served_are_refused(
    folder: Path, versions: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(folder, versions={"policy": "all", **versions})
    assert said in caught.value.message


def test_weights_are_for_versions_that_run_here() -> None:
    remote = {"source": "openai:https://host.example/v1", "version": "1"}
    weights = {"versions": {"weights": {"1": 40, "2": 60}}}
    here = {"chat@1": {"source": "a", "version": "1"}, "chat": {"source": "b", "version": "2", **weights}}
    assert load_config(None, {}, {"models": here}).models["chat"].versions.weights == {"1": 40.0, "2": 60.0}
    with pytest.raises(ConfigError) as caught:
        load_config(None, {}, {"models": {**here, "chat@1": remote}})
    assert caught.value.message.endswith(
        "models.chat.versions.weights: they are for versions that run here, and one is a remote server."
    )
