"""LightGBM's text files, which hold trees and numbers and no code.

What the outputs are follows from the objective, as for XGBoost. NaN is a missing value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from inferd.config import ModelConfig
from inferd.errors import ModelLoadError
from inferd.predict.contract import Array, Contract, Tensors
from inferd.predict.load import num_threads
from inferd.predict.runtimes import tabular
from inferd.predict.runtimes.libraries import needs
from inferd.predict.stacked import Stacked
from inferd.registry.signature import ANY_ROWS
from inferd.registry.source import Progress
from inferd.types import TensorSpec

_HEAD_BYTES: Final = 16 << 20  # names and ranges of the features come before the trees
_ALPHA: Final = re.compile(rb"\[alpha: ([0-9.eE+-]+)\]")


class LightgbmModel:
    """A booster. ``compute`` is a function of stacked rows."""

    def __init__(self, booster: Any, header: Mapping[str, str], threads: int, *, with_margin: bool) -> None:
        self._booster = booster
        self._threads = threads
        self._with_margin = with_margin
        word = header.get("objective", "").partition(" ")[0]
        self._classes = booster.num_model_per_iteration() if word in ("multiclass", "multiclassova") else 0
        if word == "binary":
            self._classes = 2
        has_quantile = word == "quantile" and "alpha" in header
        self._quantiles = tabular.quantile_names([float(header["alpha"])]) if has_quantile else ()
        self._is_rank = word in ("lambdarank", "rank_xendcg")
        self.contract = Contract(
            inputs=(tabular.numbers(booster.num_feature(), "FP64"),),
            outputs=self._outputs(),
            max_batch_size=ANY_ROWS,
            because="by_nature",
            platform="lightgbm_text",
            casts=(tabular.INPUT,),
            num_threads=threads,
            dtype="float64",
        )

    def _outputs(self) -> tuple[TensorSpec, ...]:
        margins: tuple[TensorSpec, ...] = ()
        if self._with_margin:
            margins = (TensorSpec(tabular.MARGIN, "FP64", (-1, self._classes) if self._classes > 2 else (-1,)),)
        if self._classes:
            labels = tuple(map(str, range(self._classes)))
            probabilities = TensorSpec(tabular.PROBABILITIES, "FP64", (-1, len(labels)), labels=labels)
            return (TensorSpec(tabular.LABEL, "INT64", (-1,)), probabilities, *margins)
        if self._quantiles:
            return (TensorSpec(tabular.QUANTILES, "FP64", (-1, 1), labels=self._quantiles), *margins)
        name = tabular.SCORE if self._is_rank else tabular.PREDICTION
        width = self._booster.num_model_per_iteration()
        return (TensorSpec(name, "FP64", (-1, width) if width > 1 else (-1,)), *margins)

    def compute(self, inputs: Tensors) -> dict[str, Array]:
        """The outputs of stacked rows."""
        rows = inputs[tabular.INPUT]
        found = self._predict(rows, raw=False)
        if self._classes == 2:
            found = tabular.both_classes(found)
        outputs: dict[str, Array] = {}
        if self._classes:
            outputs = {tabular.LABEL: found.argmax(axis=1), tabular.PROBABILITIES: found}
        elif self._quantiles:
            outputs = {tabular.QUANTILES: found.reshape(len(rows), 1)}
        else:
            outputs = {tabular.SCORE if self._is_rank else tabular.PREDICTION: found}
        if self._with_margin:
            outputs[tabular.MARGIN] = self._predict(rows, raw=True)
        return outputs

    def _predict(self, rows: Array, *, raw: bool) -> Array:
        return np.asarray(self._booster.predict(rows, raw_score=raw, num_threads=self._threads), dtype=np.float64)


def load(name: str, path: Path | str, config: ModelConfig, progress: Progress) -> Stacked:
    """The booster at ``path``. Raises ModelLoadError."""
    lightgbm = needs("lightgbm", "A LightGBM model")
    unknown = set(config.options) - {"margin"}
    if unknown:
        raise ModelLoadError(
            f"models.{name}.options: a LightGBM model has no option {sorted(unknown)[0]!r}; there is margin alone.",
            param="options",
        )
    path = Path(path)
    progress("model", 0, 1)
    header = header_of(path)
    try:
        booster = lightgbm.Booster(model_file=str(path))
    except (lightgbm.basic.LightGBMError, ValueError, KeyError, OSError) as error:
        raise ModelLoadError(
            f"LightGBM {lightgbm.__version__} cannot load {path}: {str(error)[:300].rstrip('.')}. Save the model again with "
            "booster.save_model.",
            param="source",
        ) from None
    model = LightgbmModel(
        booster,
        header,
        num_threads(config),
        with_margin=bool(config.options.get("margin", False)),
    )
    progress("model", 1, 1)
    return Stacked(model.contract, model.compute, config.batching)


def header_of(path: Path) -> dict[str, str]:
    """What a LightGBM file says before its trees, and the quantile it was trained for. Raises ModelLoadError for one that is cut off."""
    found: dict[str, str] = {}
    with path.open("rb") as file:
        text = file.read(_HEAD_BYTES)
        file.seek(max(path.stat().st_size - 65536, 0))
        tail = file.read()
    for line in text.split(b"\nTree=0", 1)[0].decode("utf-8", "replace").splitlines():
        key, equals, value = line.partition("=")
        if equals:
            found[key] = value
    # The library dies of a file that is cut off; a whole one says where its trees and its parameters end.
    ends = (b"end of trees" in text or b"end of trees" in tail) and b"end of parameters" in tail
    if "tree_sizes" not in found or not ends:
        raise ModelLoadError(f"{path} is not a complete LightGBM model; copy or save it again.", param="source")
    alpha = _ALPHA.search(tail)
    return found if alpha is None else {**found, "alpha": alpha[1].decode()}
