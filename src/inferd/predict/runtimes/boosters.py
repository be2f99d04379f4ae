"""The common part of XGBoost's and LightGBM's models: their outputs, by the objective they were trained for.

Classes have probabilities, all quantiles are returned, and everything else is a prediction. Knows neither library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from inferd.config import ModelConfig
from inferd.predict.contract import Array, Contract, Tensors
from inferd.predict.load import num_threads
from inferd.predict.runtimes import tabular
from inferd.predict.stacked import Stacked
from inferd.registry.signature import ANY_ROWS
from inferd.types import TensorSpec

Predict = Callable[[Array, bool], Array]
"""Values of rows: predictions, or (true) margins, which are the sums of the trees."""


class Objective(NamedTuple):
    """What a model was trained for."""

    is_classes: bool = False
    quantiles: tuple[float, ...] = ()
    is_rank: bool = False


def boosted(
    predict: Predict,
    objective: Objective,
    config: ModelConfig,
    *,
    num_features: int,
    datatype: Literal["FP32", "FP64"],
    platform: str,
) -> Stacked:
    """The model's runtime. One row of zeros shows the shapes of its outputs."""
    with_margin = bool(config.options.get("margin", False))

    def compute(inputs: Tensors) -> dict[str, Array]:
        rows = inputs[tabular.INPUT]
        found = predict(rows, False)
        outputs: dict[str, Array] = {}
        if objective.is_classes:
            found = tabular.both_classes(found) if found.ndim == 1 else found
            outputs = {tabular.LABEL: found.argmax(axis=1), tabular.PROBABILITIES: found}
        elif objective.quantiles:
            outputs = {tabular.QUANTILES: found.reshape(len(rows), len(objective.quantiles))}
        else:
            outputs = {tabular.SCORE if objective.is_rank else tabular.PREDICTION: found}
        if with_margin:
            outputs[tabular.MARGIN] = predict(rows, True)
        return outputs

    def spec(name: str, shape: tuple[int, ...]) -> TensorSpec:
        labels: tuple[str, ...] = ()
        if name == tabular.PROBABILITIES:
            labels = tuple(map(str, range(shape[0])))
        elif name == tabular.QUANTILES:
            labels = tabular.quantile_names(objective.quantiles)
        return TensorSpec(name, "INT64" if name == tabular.LABEL else datatype, (-1, *shape), labels=labels)

    example = np.zeros((1, num_features), np.float32 if datatype == "FP32" else np.float64)
    contract = Contract(
        inputs=(tabular.numbers(num_features, datatype),),
        outputs=tuple(spec(name, found.shape[1:]) for name, found in compute({tabular.INPUT: example}).items()),
        max_batch_size=ANY_ROWS,
        because="by_nature",
        platform=platform,
        casts=(tabular.INPUT,),
        num_threads=num_threads(config),
        dtype=str(example.dtype),
    )
    return Stacked(contract, compute, config.batching)
