"""XGBoost and LightGBM: their files give the libraries' own answers, with NaN as missing and every quantile kept."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pytest
import xgboost
from tests.predict.runtimes.loading import Values, answered, loaded

from inferd.errors import ModelLoadError
from inferd.registry.artifact import recognise
from inferd.registry.signature import read_signature

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(120, 5)).astype(np.float32)
ROWS[::7, 2] = np.nan
NUMBERS = np.nan_to_num(ROWS) @ np.arange(5)
CLASSES = np.digitize(NUMBERS, [-2, 2])


def xgb(path: Path, target: Values, rows: Values = ROWS, **settings: Any) -> xgboost.Booster:
    booster = xgboost.train(
        {"verbosity": 0, "max_depth": 3, "nthread": 1, **settings}, xgboost.DMatrix(rows, target), 4
    )
    booster.save_model(path)
    return booster


def lgb(path: Path, target: Values, group: list[int] | None = None, **settings: Any) -> lightgbm.Booster:
    data = lightgbm.Dataset(ROWS, target, group=group)
    booster = lightgbm.train({"verbosity": -1, "num_threads": 1, **settings}, data, 4)
    booster.save_model(path)
    return booster


@pytest.mark.parametrize("suffix", ["json", "ubj"])
def test_xgboosts_classes_have_probabilities(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"m.{suffix}"
    booster = xgb(path, CLASSES, objective="multi:softprob", num_class=3)
    runtime = loaded(path)
    label, probabilities = runtime.contract.outputs
    assert (label.datatype, probabilities.shape, probabilities.labels) == ("INT64", (-1, 3), ("0", "1", "2"))
    assert (runtime.contract.inputs[0].shape, runtime.contract.platform) == ((-1, 5), f"xgboost_{suffix}")
    found = answered(runtime, {"input-0": ROWS})
    expected = booster.predict(xgboost.DMatrix(ROWS))
    np.testing.assert_allclose(found["probabilities"], expected, rtol=1e-6)
    np.testing.assert_array_equal(found["label"], expected.argmax(1))


def test_xgboosts_best_class_alone_is_given_with_the_others(tmp_path: Path) -> None:
    booster = xgb(tmp_path / "m.json", CLASSES, objective="multi:softmax", num_class=3)
    found = answered(loaded(tmp_path / "m.json"), {"input-0": ROWS})
    np.testing.assert_array_equal(found["label"], booster.predict(xgboost.DMatrix(ROWS)))
    np.testing.assert_allclose(found["probabilities"].sum(1), 1, rtol=1e-5)


def test_xgboosts_two_classes_are_two_probabilities_and_a_margin_if_asked(tmp_path: Path) -> None:
    booster = xgb(tmp_path / "m.json", CLASSES > 0, objective="binary:logistic")
    found = answered(loaded(tmp_path / "m.json", options={"margin": True}), {"input-0": ROWS})
    matrix = xgboost.DMatrix(ROWS)
    np.testing.assert_allclose(found["probabilities"][:, 1], booster.predict(matrix), rtol=1e-6)
    np.testing.assert_allclose(found["probabilities"].sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(found["margin"], booster.predict(matrix, output_margin=True), rtol=1e-5)


def test_xgboosts_quantiles_are_all_kept(tmp_path: Path) -> None:
    booster = xgb(tmp_path / "m.ubj", NUMBERS, objective="reg:quantileerror", quantile_alpha=[0.1, 0.5, 0.9])
    runtime = loaded(tmp_path / "m.ubj")
    (output,) = runtime.contract.outputs
    assert (output.name, output.shape, output.labels) == ("quantiles", (-1, 3), ("0.1", "0.5", "0.9"))
    found = answered(runtime, {"input-0": ROWS})["quantiles"]
    np.testing.assert_allclose(found, booster.predict(xgboost.DMatrix(ROWS)), rtol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "reg:squarederror"},
        {"objective": "count:poisson"},
        {"booster": "dart", "rate_drop": 0.5},
        {"booster": "gblinear"},
    ],
)
def test_xgboosts_other_objectives_and_boosters_give_their_prediction(tmp_path: Path, settings: dict[str, Any]) -> None:
    rows = np.nan_to_num(ROWS) if settings.get("booster") == "gblinear" else ROWS
    booster = xgb(tmp_path / "m.json", np.abs(NUMBERS), rows, **settings)
    found = answered(loaded(tmp_path / "m.json"), {"input-0": rows})["prediction"]
    np.testing.assert_allclose(found, booster.predict(xgboost.DMatrix(rows)), rtol=1e-5)


def test_xgboosts_categories_are_numbers(tmp_path: Path) -> None:
    rows = np.stack([np.arange(120) % 4, np.arange(120) % 7], 1).astype(np.float32)
    target = (rows[:, 0] == 2).astype(np.float32)
    matrix = xgboost.DMatrix(
        rows, target, feature_types=["c", "q"], feature_names=["kind", "size"], enable_categorical=True
    )
    booster = xgboost.train({"verbosity": 0, "objective": "binary:logistic", "nthread": 1}, matrix, 4)
    booster.save_model(tmp_path / "m.json")
    found = answered(loaded(tmp_path / "m.json"), {"input-0": rows})["probabilities"]
    np.testing.assert_allclose(found[:, 1], booster.predict(matrix), rtol=1e-6)


def test_xgboost_uses_the_rounds_that_were_best(tmp_path: Path) -> None:
    matrix = xgboost.DMatrix(ROWS, NUMBERS)
    booster = xgboost.train({"verbosity": 0, "nthread": 1}, matrix, 6)
    booster.set_attr(best_iteration="2")
    booster.save_model(tmp_path / "m.json")
    found = answered(loaded(tmp_path / "m.json"), {"input-0": ROWS})["prediction"]
    np.testing.assert_allclose(found, booster.predict(matrix, iteration_range=(0, 3)), rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "outputs"),
    [
        ({"objective": "binary"}, {"label": ((-1,), ()), "probabilities": ((-1, 2), ("0", "1"))}),
        (
            {"objective": "multiclass", "num_class": 3},
            {"label": ((-1,), ()), "probabilities": ((-1, 3), ("0", "1", "2"))},
        ),
        ({"objective": "quantile", "alpha": 0.9}, {"quantiles": ((-1, 1), ("0.9",))}),
        ({"objective": "regression"}, {"prediction": ((-1,), ())}),
        ({"objective": "lambdarank"}, {"score": ((-1,), ())}),
    ],
)
def test_lightgbms_objective_says_what_it_gives(
    tmp_path: Path, settings: dict[str, Any], outputs: dict[str, tuple[tuple[int, ...], tuple[str, ...]]]
) -> None:
    kind = settings["objective"]
    target = NUMBERS if kind in ("quantile", "regression") else CLASSES if kind != "binary" else CLASSES > 0
    booster = lgb(tmp_path / "m.txt", target, group=[60, 60] if kind == "lambdarank" else None, **settings)
    runtime = loaded(tmp_path / "m.txt")
    assert {spec.name: (spec.shape, spec.labels) for spec in runtime.contract.outputs} == outputs
    found = answered(runtime, {"input-0": ROWS.astype(np.float64)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = np.asarray(booster.predict(ROWS))
    last = found[list(outputs)[-1]]
    np.testing.assert_allclose(last[:, 1] if kind == "binary" else last.reshape(expected.shape), expected, rtol=1e-9)


@pytest.mark.parametrize("objective", ["binary", "multiclass", "multiclassova"])
def test_lightgbms_two_classes_are_two_probabilities_however_they_were_trained(tmp_path: Path, objective: str) -> None:
    settings: dict[str, Any] = {} if objective == "binary" else {"num_class": 2}
    booster = lgb(tmp_path / "m.txt", CLASSES > 0, objective=objective, **settings)
    runtime = loaded(tmp_path / "m.txt", options={"margin": True})
    shapes = {output.name: output.shape for output in runtime.contract.outputs}
    margins = np.asarray(booster.predict(ROWS, raw_score=True))
    assert shapes == {"label": (-1,), "probabilities": (-1, 2), "margin": (-1, *margins.shape[1:])}
    found = answered(runtime, {"input-0": ROWS})
    expected = np.asarray(booster.predict(ROWS))
    np.testing.assert_allclose(found["probabilities"][:, 1], expected if expected.ndim == 1 else expected[:, 1])
    np.testing.assert_allclose(found["margin"], margins)
    np.testing.assert_array_equal(found["label"], found["probabilities"].argmax(1))


def test_a_files_header_says_how_many_features_there_are(tmp_path: Path) -> None:
    xgb(tmp_path / "m.json", NUMBERS)
    xgb(tmp_path / "m.ubj", NUMBERS)
    lgb(tmp_path / "m.txt", NUMBERS)
    for name in ("m.json", "m.ubj", "m.txt"):
        signature = read_signature(recognise(str(tmp_path / name)))
        assert signature is not None
        assert signature.inputs == loaded(tmp_path / name).contract.inputs


@pytest.mark.parametrize("name", ["m.json", "m.ubj", "m.txt"])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    lgb(path, NUMBERS) if name == "m.txt" else xgb(path, NUMBERS)
    whole = path.read_bytes()
    for size in (len(whole) // 3, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError) as caught:
            loaded(path)
        assert "/" not in caught.value.message.replace(str(path), "")
        if name == "m.json":  # of the other formats the libraries say what they met
            assert f"the file has {size} bytes and ends within the model" in caught.value.message
    assert capfd.readouterr().out == ""


def test_a_file_is_read_by_its_content_whatever_its_name(tmp_path: Path) -> None:
    xgb(tmp_path / "m.ubj", NUMBERS)
    (tmp_path / "m.ubj").rename(tmp_path / "model.bin")
    assert loaded(tmp_path / "model.bin").contract.platform == "xgboost_ubj"


def test_an_option_that_there_is_not_is_told(tmp_path: Path) -> None:
    xgb(tmp_path / "m.json", NUMBERS)
    with pytest.raises(ModelLoadError, match="no option 'margins'"):
        loaded(tmp_path / "m.json", options={"margins": True})
    with pytest.raises(ModelLoadError, match=r"options\.margin is 'maybe'; write true or false\."):
        loaded(tmp_path / "m.json", options={"margin": "maybe"})
