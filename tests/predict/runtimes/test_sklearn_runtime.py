"""scikit-learn: what an estimator can do follows from its methods, and its distributions stay whole."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import skops.io
from sklearn.cluster import KMeans
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.decomposition import PCA, MiniBatchNMF
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
)
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import BayesianRidge, LinearRegression, LogisticRegression
from sklearn.model_selection import FixedThresholdClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, MinMaxScaler, OneHotEncoder, StandardScaler
from sklearn.svm import LinearSVC
from tests.predict.runtimes.loading import answered, loaded, texts

from inferd.config import BatchingConfig
from inferd.errors import InvalidRequest, ModelLoadError

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(60, 4))
CLASSES = np.array(["cat", "dog", "eel"])[np.arange(60) % 3]
NUMBERS = ROWS @ np.arange(4)


def dumped(model: Any, path: Path) -> Path:
    skops.io.dump(model, path)
    return path


def test_a_classifier_gives_its_classes_and_their_probabilities(tmp_path: Path) -> None:
    model = make_pipeline(StandardScaler(), LogisticRegression()).fit(ROWS, CLASSES)
    runtime = loaded(dumped(model, tmp_path / "m.skops"))
    (given,) = runtime.contract.inputs
    assert (given.name, given.datatype, given.shape) == ("input-0", "FP64", (-1, 4))
    label, probabilities = runtime.contract.outputs
    assert (label.name, label.datatype, label.shape) == ("label", "BYTES", (-1,))
    assert (probabilities.name, probabilities.shape, probabilities.labels) == (
        "probabilities",
        (-1, 3),
        ("cat", "dog", "eel"),
    )
    found = answered(runtime, {"input-0": ROWS})
    np.testing.assert_array_equal(found["probabilities"], model.predict_proba(ROWS))
    assert found["label"].tolist() == [name.encode() for name in model.predict(ROWS)]
    assert runtime.contract.platform == "sklearn_skops"


@pytest.mark.parametrize(
    "model",
    [
        RandomForestClassifier(4, random_state=0),
        HistGradientBoostingClassifier(max_iter=3),
        make_pipeline(StandardScaler(), FixedThresholdClassifier(LogisticRegression(), threshold=0.9)),
    ],
)
def test_the_label_is_what_the_classifier_predicts(tmp_path: Path, model: Any) -> None:
    """Which is not always the most probable class."""
    path = tmp_path / "m.pkl"
    joblib.dump(model.fit(ROWS, NUMBERS > 0), path)
    found = answered(loaded(path, allow_pickle=True), {"input-0": ROWS})
    np.testing.assert_array_equal(found["label"], model.predict(ROWS))
    np.testing.assert_array_equal(found["probabilities"], model.predict_proba(ROWS))


def test_a_regressor_gives_its_prediction_and_a_bayesian_one_its_deviation(tmp_path: Path) -> None:
    model = BayesianRidge().fit(ROWS, NUMBERS)
    runtime = loaded(dumped(model, tmp_path / "m.skops"))
    found = answered(runtime, {"input-0": ROWS})
    mean, std = model.predict(ROWS, return_std=True)
    np.testing.assert_array_equal(found["prediction"], mean)
    np.testing.assert_array_equal(found["std"], std)
    alone = loaded(tmp_path / "m.skops", options={"std": False})
    assert [spec.name for spec in alone.contract.outputs] == ["prediction"]
    two = dumped(LinearRegression().fit(ROWS, np.stack([NUMBERS, -NUMBERS], 1)), tmp_path / "two.skops")
    assert loaded(two).contract.outputs[0].shape == (-1, 2)


class Quantiles(LinearRegression):  # type: ignore[misc]
    """As quantile forests are: ``predict`` takes the quantiles that are wanted."""

    default_quantiles = (0.1, 0.5, 0.9)

    def predict(self, rows: Any, quantiles: Any = None) -> Any:
        return super().predict(rows)[:, None] + np.asarray(quantiles)[None, :]


def test_all_quantiles_of_a_distribution_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.joblib"
    joblib.dump(Quantiles().fit(ROWS, NUMBERS), path)
    runtime = loaded(path, allow_pickle=True)
    assert [(spec.name, spec.shape, spec.labels) for spec in runtime.contract.outputs] == [
        ("quantiles", (-1, 3), ("0.1", "0.5", "0.9"))
    ]
    chosen = loaded(path, allow_pickle=True, options={"quantiles": [0.25, 0.75]})
    assert chosen.contract.outputs[0].labels == ("0.25", "0.75")
    assert answered(chosen, {"input-0": ROWS})["quantiles"].shape == (60, 2)
    for wrong in ("x", ["x"], [0.5, 2]):
        with pytest.raises(ModelLoadError, match=r"options\.quantiles is .*; write "):
            loaded(path, allow_pickle=True, options={"quantiles": wrong})


@pytest.mark.parametrize(
    ("model", "outputs"),
    [
        (LinearSVC(), {"label": (-1,), "score": (-1, 3)}),
        (KMeans(3), {"label": (-1,)}),
        (PCA(2), {"output": (-1, 2)}),
    ],
)
def test_estimators_of_other_kinds_give_what_they_have(
    tmp_path: Path, model: Any, outputs: dict[str, tuple[int, ...]]
) -> None:
    runtime = loaded(dumped(model.fit(ROWS, CLASSES), tmp_path / "m.skops"))
    assert {spec.name: spec.shape for spec in runtime.contract.outputs} == outputs


def test_columns_of_texts_and_numbers_are_inputs_of_their_own(tmp_path: Path) -> None:
    rows = np.empty((60, 3), dtype=np.object_)
    rows[:, 0], rows[:, 1], rows[:, 2] = ROWS[:, 0], np.array(["a", "b"])[np.arange(60) % 2], ROWS[:, 1]
    columns = ColumnTransformer([("numbers", StandardScaler(), [0, 2]), ("texts", OneHotEncoder(), [1])])
    model = make_pipeline(columns, LogisticRegression()).fit(rows, CLASSES)
    runtime = loaded(dumped(model, tmp_path / "m.skops"))
    assert [(spec.name, spec.datatype) for spec in runtime.contract.inputs] == [
        ("column-0", "FP64"),
        ("column-1", "BYTES"),
        ("column-2", "FP64"),
    ]
    asked = {"column-0": ROWS[:5, 0], "column-1": texts(*rows[:5, 1]), "column-2": ROWS[:5, 1]}
    np.testing.assert_allclose(answered(runtime, asked)["probabilities"], model.predict_proba(rows[:5]))
    with pytest.raises(InvalidRequest, match="does not take these values"):
        answered(runtime, {**asked, "column-1": texts("a", "b", "a", "b", "never seen")})


def test_a_text_classifier_reads_texts_and_can_be_asked_to_classify(tmp_path: Path) -> None:
    said = ["a good day", "a bad day"] * 10
    model = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(said, ["good", "bad"] * 10)
    runtime = loaded(dumped(model, tmp_path / "m.skops"))
    assert [(spec.name, spec.datatype, spec.shape) for spec in runtime.contract.inputs] == [("text", "BYTES", (-1,))]
    assert runtime.contract.tasks == ("predict", "classify")
    assert answered(runtime, {"text": texts("how good", "how bad")})["label"].tolist() == [b"good", b"bad"]


def less_the_mean(rows: Any) -> Any:
    return rows - rows.mean(0)


def as_it_is(rows: Any) -> Any:
    return rows


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize(
    "steps",
    [
        [FunctionTransformer(less_the_mean), LinearRegression()],
        [MinMaxScaler(clip=True), MiniBatchNMF(2, random_state=0), LinearRegression()],
        [ColumnTransformer([("c", FunctionTransformer(less_the_mean), [0, 1])]), LinearRegression()],
        [
            TransformedTargetRegressor(
                LinearRegression(), func=as_it_is, inverse_func=less_the_mean, check_inverse=False
            )
        ],
    ],
)
def test_rows_are_computed_together_where_all_parts_compute_each_by_itself(tmp_path: Path, steps: list[Any]) -> None:
    model = make_pipeline(*steps).fit(np.abs(ROWS), NUMBERS)
    joblib.dump(model, tmp_path / "m.joblib")
    settings: dict[str, Any] = {"allow_pickle": True, "batching": BatchingConfig()}
    doubtful = loaded(tmp_path / "m.joblib", **settings)
    assert doubtful.contract.max_batch_size == 0
    assert "batching.max_batch_size" in doubtful.contract.not_batched
    rows = np.abs(ROWS[:3])
    np.testing.assert_allclose(answered(doubtful, {"input-0": rows})["prediction"], model.predict(rows))
    joblib.dump(
        make_pipeline(FunctionTransformer(np.log1p), LinearRegression()).fit(np.abs(ROWS), NUMBERS),
        tmp_path / "u.joblib",
    )
    assert loaded(tmp_path / "u.joblib", **settings).contract.because == "by_nature"


def test_values_that_an_estimator_refuses_are_the_clients_error(tmp_path: Path) -> None:
    linear = loaded(dumped(LinearRegression().fit(ROWS, NUMBERS), tmp_path / "linear.skops"))
    assert linear.contract.refuses_nan
    with pytest.raises(InvalidRequest, match="infinity"):
        answered(linear, {"input-0": np.full((1, 4), np.inf)})
    path = tmp_path / "trees.pkl"
    joblib.dump(HistGradientBoostingRegressor(max_iter=2).fit(ROWS, NUMBERS), path)
    trees = loaded(path, allow_pickle=True)
    assert not trees.contract.refuses_nan
    assert np.isfinite(answered(trees, {"input-0": np.full((1, 4), np.nan)})["prediction"]).all()


def test_types_that_skops_does_not_trust_are_named_and_may_be_trusted(tmp_path: Path) -> None:
    path = dumped(RandomForestClassifier(3, n_jobs=-1).fit(ROWS, CLASSES), tmp_path / "m.skops")
    with pytest.raises(ModelLoadError, match=r"options.trusted: sklearn.tree._tree.Tree$"):
        loaded(path)
    trusted = loaded(path, options={"trusted": ["sklearn.tree._tree.Tree"]})
    assert answered(trusted, {"input-0": ROWS})["probabilities"].shape == (60, 3)


@pytest.mark.parametrize(("threads", "jobs"), [(None, 1), (1, 1), (2, 2)])
def test_the_threads_of_the_settings_are_those_of_every_part(threads: int | None, jobs: int, tmp_path: Path) -> None:
    forest = RandomForestClassifier(3, n_jobs=-1)
    path = dumped(make_pipeline(StandardScaler(), forest).fit(ROWS, CLASSES), tmp_path / "m.skops")
    asked: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RandomForestClassifier, "predict_proba", lambda self, rows: _noted(self, rows, asked))
        answered(loaded(path, threads=threads, options={"trusted": ["sklearn.tree._tree.Tree"]}), {"input-0": ROWS})
    assert set(asked) == {jobs}


_predict_proba = RandomForestClassifier.predict_proba


def _noted(model: Any, rows: Any, asked: list[int]) -> Any:
    asked.append(model.n_jobs)
    return _predict_proba(model, rows)


def test_a_pickle_is_opened_by_the_operators_word_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.pkl"
    model = LogisticRegression().fit(ROWS, CLASSES)
    path.write_bytes(pickle.dumps(model))
    with pytest.raises(ModelLoadError, match="allow_pickle"):
        loaded(path)
    found = answered(loaded(path, allow_pickle=True), {"input-0": ROWS})
    np.testing.assert_array_equal(found["probabilities"], model.predict_proba(ROWS))


def test_what_is_no_estimator_or_not_whole_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.pkl"
    path.write_bytes(pickle.dumps({"weights": [1]}))
    with pytest.raises(ModelLoadError, match="holds a dict, which neither predicts nor transforms"):
        loaded(path, allow_pickle=True)
    path.write_bytes(pickle.dumps(LogisticRegression().fit(ROWS, CLASSES))[:-20])
    with pytest.raises(ModelLoadError, match="cannot be unpickled"):
        loaded(path, allow_pickle=True)
    with pytest.raises(ModelLoadError, match="no option 'trust'"):
        loaded(path, allow_pickle=True, options={"trust": []})


def test_a_skops_file_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    whole = dumped(LogisticRegression().fit(ROWS, CLASSES), tmp_path / "whole.skops")
    with zipfile.ZipFile(whole) as archive:
        schema = archive.read("schema.json")
    bad = tmp_path / "bad.skops"
    for text in (schema, schema[:-30], b"{}", b"[]"):
        with zipfile.ZipFile(bad, "w") as archive:
            archive.writestr("schema.json", text)
        with pytest.raises(ModelLoadError, match="not a complete skops file"):
            loaded(bad)
    bad.write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(ModelLoadError):
        loaded(bad)
