"""scikit-learn estimators: skops files with its check of types, and pickles with ``allow_pickle``.

Classes have probabilities, distributions are returned in full (``std``, ``quantiles``), and an estimator's methods
decide its outputs. Everything is computed in float64, as scikit-learn does.
"""

from __future__ import annotations

import inspect
import logging
import pickle
import sys
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from inferd.config import ModelConfig
from inferd.errors import InferdError, InvalidRequest, ModelLoadError
from inferd.predict.contract import Array, Contract, Tensors, datatype_of, object_array
from inferd.predict.load import num_threads
from inferd.predict.runtimes import tabular
from inferd.predict.runtimes.libraries import Option, check_options, needs
from inferd.predict.runtimes.trial import try_rows, vetoed
from inferd.predict.stacked import Stacked
from inferd.registry.content import content_of
from inferd.registry.rows.verdict import BY_NATURE, CLAIM, Verdict, claimed
from inferd.registry.signature import ANY_ROWS
from inferd.registry.source import Progress
from inferd.types import TensorSpec

# Classifiers whose ``predict`` is only the most probable class: ``predict_proba`` alone is called.
_MOST_PROBABLE: Final = frozenset(
    {"DecisionTreeClassifier", "ExtraTreeClassifier", "ExtraTreesClassifier", "HistGradientBoostingClassifier"}
    | {"RandomForestClassifier"}
)
# What files that are cut off or were written by other versions make their readers raise.
_CORRUPT: Final = (
    OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, NotImplementedError,
    RecursionError, ImportError, zipfile.BadZipFile, zlib.error, pickle.UnpicklingError,
)  # fmt: skip
_log = logging.getLogger("inferd.predict.sklearn")


class SklearnModel:
    """A fitted estimator or pipeline. ``compute`` is a function of stacked rows."""

    def __init__(self, estimator: Any, config: ModelConfig, platform: str) -> None:
        self._estimator = estimator
        self._reads_texts = _reads_texts(estimator)
        self._columns = None if self._reads_texts else _columns(estimator)
        self._has_names = self._columns is not None and hasattr(estimator, "feature_names_in_")
        _set_threads(estimator, config.threads)
        final = estimator.steps[-1][1] if hasattr(estimator, "steps") else estimator
        parameters = inspect.signature(final.predict).parameters if hasattr(final, "predict") else {}
        self._final = final
        self._before = estimator[:-1] if final is not estimator and hasattr(final, "predict_proba") else None
        self._with_std = "return_std" in parameters and bool(config.options.get("std", True))
        self._quantiles = _quantiles(config, final) if "quantiles" in parameters else ()
        inputs = self._columns or (tabular.numbers(int(getattr(estimator, "n_features_in_", -1)), "FP64"),)
        if self._reads_texts:
            inputs = (TensorSpec(tabular.TEXT, "BYTES", (-1,)),)
        self._inputs = inputs
        outputs = self._outputs()
        rows = claimed(_rows(estimator), config.batching.max_batch_size)
        self.contract = Contract(
            inputs=inputs,
            outputs=outputs,
            max_batch_size=ANY_ROWS if rows.because is not None else 0,
            because=rows.because,
            not_batched="" if rows.because is not None else rows.sentence,
            tasks=("predict", "classify") if self._reads_texts and self._has_probabilities else ("predict",),
            platform=platform,
            casts=tuple(spec.name for spec in inputs if spec.datatype != "BYTES"),
            refuses_nan=not _allows_nan(estimator),
            dtype="float64",
            num_threads=num_threads(config),
        )

    def compute(self, inputs: Tensors) -> dict[str, Array]:
        """The outputs of stacked rows. Raises InvalidRequest for values that the estimator does not take."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # on names of features, for each request
                return self._compute(self._table(inputs))
        except (ValueError, TypeError) as error:
            said = " ".join(str(error).split())[:300]
            raise InvalidRequest(f"The model does not take these values: {said}", param="inputs") from error

    def _table(self, inputs: Tensors) -> Any:
        """The rows as the estimator was trained on them: an array, or columns of different kinds."""
        if self._reads_texts:
            return _column(inputs[tabular.TEXT]).tolist()
        if self._columns is None:
            return inputs[tabular.INPUT]
        columns = {spec.name: _column(inputs[spec.name]) for spec in self._columns}
        if self._has_names:
            return needs("pandas", "A model that was trained on a table with named columns").DataFrame(columns)
        rows = np.empty((len(next(iter(columns.values()))), len(columns)), dtype=np.object_)
        for place, column in enumerate(columns.values()):
            rows[:, place] = column
        return rows

    # -- what it can do ---------------------------------------------------------------------

    def _compute(self, rows: Any) -> dict[str, Array]:
        model = self._estimator
        if self._before is not None:  # of a pipeline with two calls: the steps before the last are computed once
            rows = self._before.transform(rows)
            model = self._final
        outputs: dict[str, Array] = {}
        if not hasattr(model, "predict"):
            return {"output": _dense(model.transform(rows))}
        if hasattr(model, "predict_proba"):
            found = model.predict_proba(rows)
            if isinstance(found, list):  # one array for each of several targets
                outputs |= {f"{tabular.PROBABILITIES}_{place}": np.asarray(part) for place, part in enumerate(found)}
                return {tabular.LABEL: _answer(model.predict(rows)), **outputs}
            if type(model).__name__ in _MOST_PROBABLE:
                return {tabular.LABEL: _answer(model.classes_[found.argmax(axis=1)]), tabular.PROBABILITIES: found}
            return {tabular.LABEL: _answer(model.predict(rows)), tabular.PROBABILITIES: found}
        if self._quantiles:
            return {tabular.QUANTILES: np.asarray(model.predict(rows, quantiles=list(self._quantiles)))}
        if self._with_std:
            mean, std = model.predict(rows, return_std=True)
            return {tabular.PREDICTION: np.asarray(mean), tabular.STD: np.asarray(std)}
        found = _answer(model.predict(rows))
        kind = getattr(model, "_estimator_type", None) or self._kind
        if kind in ("classifier", "clusterer", "outlier_detector"):
            outputs[tabular.LABEL] = found
            if hasattr(model, "decision_function"):
                outputs[tabular.SCORE] = np.asarray(model.decision_function(rows))
            return outputs
        return {tabular.PREDICTION: found}

    def _outputs(self) -> tuple[TensorSpec, ...]:
        """From an example, as shapes and kinds of outputs are written down nowhere."""
        from sklearn.utils import get_tags

        self._kind = get_tags(self._estimator).estimator_type
        found = self._example_outputs()
        labels: dict[str, tuple[str, ...]] = {}
        classes = getattr(self._estimator, "classes_", None)
        if isinstance(classes, list):
            labels = {f"{tabular.PROBABILITIES}_{at}": tabular.class_names(part) for at, part in enumerate(classes)}
        elif classes is not None:
            labels = {
                name: tabular.class_names(np.asarray(classes).tolist()) for name in (tabular.PROBABILITIES, "score")
            }
        if self._quantiles:
            labels[tabular.QUANTILES] = tabular.quantile_names(self._quantiles)
        specs = []
        for name, array in found.items():
            named = labels.get(name, ())
            is_fit = array.ndim > 1 and array.shape[-1] == len(named)
            shape = (-1, *array.shape[1:])
            specs.append(TensorSpec(name, datatype_of(array.dtype), shape, labels=named if is_fit else ()))
        self._has_probabilities = tabular.PROBABILITIES in found
        return tuple(specs)

    def _example_outputs(self) -> dict[str, Array]:
        problem: Exception | None = None
        for value in (0.0, 1.0):
            try:
                return self.compute({spec.name: self._example(spec, value) for spec in self._inputs})
            except InferdError as error:
                problem = error
        raise ModelLoadError(
            f"The estimator {type(self._estimator).__name__} does not answer an example of its inputs: {problem} "
            "Fit it again with this version of scikit-learn, or write a Python class (module:Class).",
            param="source",
        )

    def _example(self, spec: TensorSpec, value: float) -> Array:
        known = self._known.get(spec.name) if self._columns is not None else None
        if spec.datatype == "BYTES":
            return object_array([(known or "a text").encode()])
        return np.full([1 if size == -1 else size for size in spec.shape], value)

    @property
    def _known(self) -> dict[str, str]:
        """A text for each column of texts that the model has seen."""
        return _known_texts(self._estimator)


def load(name: str, path: Path | str, config: ModelConfig, progress: Progress) -> Stacked:
    """The estimator at ``path``. Raises ModelLoadError."""
    needs("sklearn", "A scikit-learn model")
    check_options(
        name,
        "a scikit-learn model",
        config,
        Option("quantiles", (int, float, list), "a number or a list of numbers, such as [0.1, 0.9]"),
        Option("std", (bool,), "true or false"),
        Option("trusted", (str, list), "a list of types"),
    )
    path = Path(path)
    progress("model", 0, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if content_of(path) == "skops":
            estimator, platform = _from_skops(name, path, config), "sklearn_skops"
        else:
            estimator, platform = _from_pickle(path, config), "sklearn_pickle"
    for one in caught:
        if type(one.message).__name__ == "InconsistentVersionWarning":
            _log.warning("%s", " ".join(str(one.message).split())[:400])
            break
    if not hasattr(estimator, "predict") and not hasattr(estimator, "transform"):
        raise ModelLoadError(
            f"{path} holds a {type(estimator).__name__}, which neither predicts nor transforms. Save a fitted "
            "estimator or pipeline.",
            param="source",
        )
    _limit_threads(num_threads(config))
    model = SklearnModel(estimator, config, platform)
    if model.contract.because == "declared":
        model.contract = vetoed(model.contract, try_rows(model.contract, model.compute, (InferdError,)))
    progress("model", 1, 1)
    return Stacked(model.contract, model.compute, config.batching)


_ROW_LIBRARIES: Final = frozenset({"sklearn", "xgboost", "lightgbm", "catboost", "quantile_forest"})
"""Libraries whose fitted estimators compute each row by itself, except those below."""

_JOINT: Final = frozenset({"NMF", "MiniBatchNMF", "PatchExtractor"})
"""Estimators of scikit-learn that solve for all rows at once, or give other rows than they take."""


_OF_ONE_TEXT: Final = frozenset({"analyzer", "preprocessor", "tokenizer"})
"""Parameters of scikit-learn's vectorizers: functions that are called with one text at a time."""


def _rows(estimator: Any) -> Verdict:
    """Whether each row is computed by itself: by the classes of all parts of the estimator, and their functions."""
    for path, part in (("", estimator), *estimator.get_params(deep=True).items()):
        kind = type(part)
        if isinstance(part, type):
            continue
        if hasattr(part, "get_params"):
            name = f"a {kind.__name__}"
            is_joint = kind.__module__.partition(".")[0] not in _ROW_LIBRARIES or kind.__name__ in _JOINT
        else:
            parameter = path.rpartition("__")[2]
            name = f"the function {parameter}"
            is_joint = callable(part) and parameter not in _OF_ONE_TEXT and not _computes_rows(part)
        if is_joint:
            doubt = f"the rows may depend on each other in {name}"
            return Verdict(None, f"{doubt}; {CLAIM} declares that they do not", is_open=True)
    return BY_NATURE


def _computes_rows(function: Any) -> bool:
    """Whether a function that was given as a parameter is known to compute each value, or each row, by itself."""
    library = str(getattr(function, "__module__", "")).partition(".")[0]
    return isinstance(function, np.ufunc) or library in _ROW_LIBRARIES


def _from_skops(name: str, path: Path, config: ModelConfig) -> Any:
    skops = _skops()
    trusted = config.options.get("trusted", [])
    allowed = trusted.split(",") if isinstance(trusted, str) else [str(one) for one in trusted]
    try:
        unknown = [one for one in skops.get_untrusted_types(file=path) if one not in allowed]
        if unknown:
            raise ModelLoadError(
                f"{path} holds types that skops does not trust: {', '.join(unknown)}. If loading them is safe, name "
                f"them: options.trusted: {','.join([*allowed, *unknown])}",
                param="options.trusted",
            )
        return skops.load(path, trusted=allowed)
    except _CORRUPT as error:
        raise ModelLoadError(
            f"{path} is not a complete skops file ({type(error).__name__}: {str(error)[:200]}); save or copy it again.",
            param="source",
        ) from None


_ADAPTER_OF_TORCH: Final = "sklearn.externals.array_api_compat.torch"


def _skops() -> Any:
    """The library. Its import walks through all of scikit-learn, where one module would import torch: five seconds and
    200 MB that no estimator needs."""
    is_there = _ADAPTER_OF_TORCH in sys.modules
    if not is_there:
        sys.modules[_ADAPTER_OF_TORCH] = None  # type: ignore[assignment]
    try:
        return needs("skops.io", "A skops file")
    finally:
        if not is_there:
            del sys.modules[_ADAPTER_OF_TORCH]


def _from_pickle(path: Path, config: ModelConfig) -> Any:
    if not config.allow_pickle:  # checked when the file was recognised, and here for other callers
        raise ModelLoadError(f"{path} is a pickle, and allow_pickle is not set.", param="allow_pickle")
    joblib = needs("joblib", "A pickle of scikit-learn")
    try:
        return joblib.load(path)
    except ModuleNotFoundError as error:
        raise ModelLoadError(
            f"{path} needs the package {error.name}, which is not installed here; pip install it.", param="source"
        ) from None
    except _CORRUPT as error:
        raise ModelLoadError(
            f"{path} cannot be unpickled here ({type(error).__name__}: {str(error)[:200]}); save it again with the "
            "installed versions of its packages.",
            param="source",
        ) from None


def _limit_threads(count: int) -> None:
    import threadpoolctl

    threadpoolctl.threadpool_limits(count)


def _set_threads(estimator: Any, threads: int | None) -> None:
    """Sets ``n_jobs`` of every part: for batches of a server's size, handing rows to threads costs more than it
    saves."""
    wanted = {name: threads or 1 for name in estimator.get_params(deep=True) if name.rpartition("__")[2] == "n_jobs"}
    if wanted:
        estimator.set_params(**wanted)


def _reads_texts(estimator: Any) -> bool:
    """Whether a row is one text: a vectorizer comes first."""
    from sklearn.utils import get_tags

    tags = get_tags(_first(estimator)).input_tags
    return bool(tags.string and not tags.two_d_array)


def _allows_nan(estimator: Any) -> bool:
    from sklearn.utils import get_tags

    tags = get_tags(estimator)
    return bool(tags.input_tags.allow_nan) or _columns(estimator) is not None


def _quantiles(config: ModelConfig, final: Any) -> tuple[float, ...]:
    """The configured quantiles, or the estimator's own."""
    found = config.options.get("quantiles", getattr(final, "default_quantiles", None)) or (0.1, 0.5, 0.9)
    chosen = [found] if isinstance(found, int | float) else list(found)
    if not all(isinstance(one, int | float) and 0 < one < 1 for one in chosen):
        raise ModelLoadError(
            f"options.quantiles is {found!r}; write numbers between 0 and 1, such as [0.1, 0.9].",
            param="options",
        )
    return tuple(map(float, chosen))


def _columns(estimator: Any) -> tuple[TensorSpec, ...] | None:
    """An input for each column, where columns have different kinds; None where the input is one array of numbers."""
    kinds = _text_columns(estimator)
    if not kinds:
        return None
    names = getattr(estimator, "feature_names_in_", None)
    if names is None:
        names = [f"column-{place}" for place in range(int(estimator.n_features_in_))]
    texts = {str(names[key]) if isinstance(key, int) else key for key in kinds}
    return tuple(TensorSpec(str(name), "BYTES" if str(name) in texts else "FP64", (-1,)) for name in names)


def _text_columns(estimator: Any) -> dict[str | int, str]:
    """Columns of texts, each with a text that was seen in training: those that encoders of the first step know."""
    step = _first(estimator)
    parts: list[tuple[Any, Sequence[Any]]] = []
    if hasattr(step, "transformers_"):
        parts = [(_first(part), columns) for _, part, columns in step.transformers_ if not isinstance(part, str)]
    elif hasattr(step, "categories_"):
        parts = [(step, list(range(int(step.n_features_in_))))]
    names = [str(name) for name in getattr(estimator, "feature_names_in_", ())]
    found: dict[str | int, str] = {}
    for part, columns in parts:
        categories = getattr(part, "categories_", None)
        if categories is None:
            continue
        places = np.arange(max(len(names), int(estimator.n_features_in_)))
        listed = places[columns].tolist() if isinstance(columns, slice) or _is_mask(columns) else list(columns)
        for column, known in zip(listed, categories, strict=True):
            text = next((value for value in np.asarray(known).tolist() if isinstance(value, str)), None)
            if text is not None:
                found[column if isinstance(column, str) else int(column)] = text
    return found


def _first(model: Any) -> Any:
    """The first step of a pipeline, which gets the rows."""
    if getattr(model, "steps", None):
        return _first(model.steps[0][1])
    return _first(model.transformer_list[0][1]) if getattr(model, "transformer_list", None) else model


def _is_mask(columns: Any) -> bool:
    return len(columns) > 0 and isinstance(columns[0], bool | np.bool_)


def _known_texts(estimator: Any) -> dict[str, str]:
    names = getattr(estimator, "feature_names_in_", None)
    found = {}
    for key, text in _text_columns(estimator).items():
        name = key if isinstance(key, str) else (str(names[key]) if names is not None else f"column-{key}")
        found[name] = text
    return found


def _column(array: Array) -> Array:
    if array.dtype != np.object_:
        return array
    try:
        return object_array([value.decode() for value in array.tolist()])
    except UnicodeDecodeError:
        raise InvalidRequest("A column of texts holds bytes that are no UTF-8.", param="inputs") from None


def _answer(found: Any) -> Array:
    array = np.asarray(found)
    return tabular.texts(array) if array.dtype.kind in "OSU" else array


def _dense(found: Any) -> Array:
    return np.asarray(found.toarray() if hasattr(found, "toarray") else found)
