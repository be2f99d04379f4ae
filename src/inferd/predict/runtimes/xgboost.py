"""XGBoost's native files (.json, .ubj), which hold trees and numbers and no code.

What the outputs are follows from the objective: classes have probabilities, quantiles stay all there, everything else is
a prediction. NaN is a missing value.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from inferd.config import ModelConfig
from inferd.errors import ModelLoadError
from inferd.predict.contract import Array, Contract, Tensors
from inferd.predict.load import num_threads
from inferd.predict.runtimes import tabular
from inferd.predict.runtimes.libraries import needs
from inferd.predict.stacked import Stacked
from inferd.registry.content import content_of
from inferd.registry.signature import ANY_ROWS
from inferd.registry.source import Progress
from inferd.types import TensorSpec


class XgboostModel:
    """A booster. ``compute`` is a function of stacked rows."""

    def __init__(self, xgboost: Any, booster: Any, platform: str, *, num_threads: int, with_margin: bool) -> None:
        self._xgboost = xgboost
        self._booster = booster
        learner = json.loads(booster.save_config())["learner"]
        self._objective = str(learner["objective"]["name"])
        self._is_linear = learner["gradient_booster"]["name"] == "gblinear"
        self._num_classes = int(learner["learner_model_param"].get("num_class", "0") or 0)
        self._quantiles = _quantiles(learner)
        self._with_margin = with_margin
        if self._objective == "multi:softmax":  # trained to say the best class alone; the trees know the others
            booster.set_param({"objective": "multi:softprob"})
            self._objective = "multi:softprob"
        best = booster.attr("best_iteration")
        self._rounds = (0, int(best) + 1) if best is not None and best.isdecimal() else (0, 0)
        self.contract = Contract(
            inputs=(tabular.numbers(booster.num_features(), "FP32"),),
            outputs=self._outputs(),
            max_batch_size=ANY_ROWS,
            because="by_nature",
            platform=platform,
            casts=(tabular.INPUT,),
            num_threads=num_threads,
        )

    def _outputs(self) -> tuple[TensorSpec, ...]:
        example = np.zeros((1, self._booster.num_features()), np.float32)
        margins: tuple[TensorSpec, ...] = ()
        if self._with_margin:
            margins = (TensorSpec(tabular.MARGIN, "FP32", (-1, *self._predict(example, margin=True).shape[1:])),)
        if self._objective.startswith("multi:") or self._objective == "binary:logistic":
            labels = tuple(map(str, range(max(self._num_classes, 2))))
            return (
                TensorSpec(tabular.LABEL, "INT64", (-1,)),
                TensorSpec(tabular.PROBABILITIES, "FP32", (-1, len(labels)), labels=labels),
                *margins,
            )
        if self._quantiles:
            labels = tabular.quantile_names(self._quantiles)
            return (TensorSpec(tabular.QUANTILES, "FP32", (-1, len(labels)), labels=labels), *margins)
        if self._objective.startswith("rank:"):
            return (TensorSpec(tabular.SCORE, "FP32", (-1,)), *margins)
        return (TensorSpec(tabular.PREDICTION, "FP32", (-1, *self._predict(example).shape[1:])), *margins)

    def compute(self, inputs: Tensors) -> dict[str, Array]:
        """The outputs of stacked rows."""
        rows = np.ascontiguousarray(inputs[tabular.INPUT])
        found = self._predict(rows)
        outputs: dict[str, Array] = {}
        if self._objective.startswith("multi:"):
            outputs = {tabular.LABEL: found.argmax(axis=1), tabular.PROBABILITIES: found}
        elif self._objective == "binary:logistic":
            outputs = {
                tabular.LABEL: np.greater(found, 0.5).astype(np.int64),
                tabular.PROBABILITIES: tabular.both_classes(found),
            }
        elif self._quantiles:
            outputs = {tabular.QUANTILES: found.reshape(len(rows), len(self._quantiles))}
        elif self._objective.startswith("rank:"):
            outputs = {tabular.SCORE: found}
        else:
            outputs = {tabular.PREDICTION: found}
        if self._with_margin:
            outputs[tabular.MARGIN] = self._predict(rows, margin=True)
        return outputs

    def _predict(self, rows: Array, *, margin: bool = False) -> Array:
        if self._is_linear:  # in-place prediction is for trees
            names = self._booster.feature_names
            matrix = self._xgboost.DMatrix(rows, missing=np.nan, feature_names=names)
            return np.asarray(self._booster.predict(matrix, output_margin=margin), dtype=np.float32)
        found = self._booster.inplace_predict(
            rows,
            iteration_range=self._rounds,
            predict_type="margin" if margin else "value",
            missing=np.nan,
            validate_features=False,
        )
        return np.asarray(found, dtype=np.float32)


def load(name: str, path: Path | str, config: ModelConfig, progress: Progress) -> Stacked:
    """The booster at ``path``. Raises ModelLoadError."""
    xgboost = needs("xgboost", "An XGBoost model")
    unknown = set(config.options) - {"margin"}
    if unknown:
        raise ModelLoadError(
            f"models.{name}.options: an XGBoost model has no option {sorted(unknown)[0]!r}; there is margin alone.",
            param="options",
        )
    path = Path(path)
    progress("model", 0, 1)
    try:
        with xgboost.config_context(verbosity=0):
            booster = xgboost.Booster(model_file=_readable(path))
            booster.set_param({"nthread": num_threads(config), "device": _device(config)})
        model = XgboostModel(
            xgboost,
            booster,
            f"xgboost_{_format(path)}",
            num_threads=num_threads(config),
            with_margin=bool(config.options.get("margin", False)),
        )
    except (xgboost.core.XGBoostError, ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
        # What it says of a file that is cut off may quote bytes that are no text.
        said = error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
        reason = next((line for line in said.splitlines() if line.strip()), type(error).__name__)
        raise ModelLoadError(
            f"XGBoost {xgboost.__version__} cannot load {path}: {_cut_off(reason, path) or _shortened(reason)}. Copy it again, or "
            "save the model again with booster.save_model.",
            param="source",
        ) from None
    progress("model", 1, 1)
    return Stacked(model.contract, model.compute, config.batching)


def _readable(path: Path) -> str | bytearray:
    """XGBoost chooses its parser by the file's name; where that says something else, it gets the bytes."""
    return str(path) if path.suffix == f".{_format(path)}" else bytearray(path.read_bytes())


def _format(path: Path) -> str:
    return "ubj" if content_of(path) == "xgboost_ubj" else "json"


def _device(config: ModelConfig) -> str:
    return config.device if config.device.startswith("cuda") else "cpu"


def _quantiles(learner: dict[str, Any]) -> tuple[float, ...]:
    found = learner["objective"].get("quantile_loss_param", {}).get("quantile_alpha", "")
    values = json.loads(found) if isinstance(found, str) and found else found
    return tuple(float(value) for value in values) if isinstance(values, list) else ()


def _shortened(text: str) -> str:
    """Without the time, and the library's own file and line."""
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", text)[:300].rstrip(".")


def _cut_off(reason: str, path: Path) -> str:
    """That the file was cut off, where the library's reader stopped at its end; else empty."""
    found = re.search(r"(?:character position|\.Pos\(\)): (\d+)", reason)
    size = path.stat().st_size
    is_at_the_end = found is not None and int(found[1]) >= size - 1
    is_beyond = re.search(rf"\bsize_ \(\d+ vs\. {size}\)", reason) is not None
    return f"the file has {size} bytes and ends within the model" if is_at_the_end or is_beyond else ""
