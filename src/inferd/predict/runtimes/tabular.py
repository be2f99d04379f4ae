"""The common part of runtimes for tables: one input of numbers, classes with probabilities, quantiles.

The names of inputs and outputs are those of KServe's and scikit-learn's examples. Knows no library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from inferd.predict.contract import Array, object_array
from inferd.types import TensorSpec

INPUT: Final = "input-0"
TEXT: Final = "text"
LABEL: Final = "label"
PROBABILITIES: Final = "probabilities"
PREDICTION: Final = "prediction"
QUANTILES: Final = "quantiles"
MARGIN: Final = "margin"
SCORE: Final = "score"
STD: Final = "std"


def numbers(count: int, datatype: str) -> TensorSpec:
    """Rows of ``count`` numbers; -1 where the model does not say how many."""
    return TensorSpec(INPUT, datatype, (-1, count))


def both_classes(positive: Array) -> Array:
    """Probabilities of the negative and the positive class from those of the positive one. Shape [n] -> [n, 2]."""
    positive = positive.reshape(-1)
    return np.stack([1 - positive, positive], axis=1)


def class_names(classes: Sequence[object]) -> tuple[str, ...]:
    return tuple(text.decode() if isinstance(text, bytes) else str(text) for text in classes)


def texts(array: Array) -> Array:
    """An array of texts as BYTES."""
    made = [text if isinstance(text, bytes) else str(text).encode() for text in array.ravel().tolist()]
    return object_array(made).reshape(array.shape)


def quantile_names(quantiles: Sequence[float]) -> tuple[str, ...]:
    return tuple(format(float(quantile), "g") for quantile in quantiles)
