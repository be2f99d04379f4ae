"""The facts of a prediction for its model's drift: a few numbers and a label, of its first row.

The rows of one request are alike, so they are no independent observations, and one is read. Never any content: a label
is one that the model declares, or the number of a class. Knows arrays and contracts.
"""

from __future__ import annotations

import functools
from math import isfinite
from typing import Any, Final, SupportsFloat

import numpy as np
import numpy.typing as npt

from inferd.predict.contract import Array, Contract, Tensors
from inferd.types import NUM_FEATURES, Facts, TensorSpec

Numbers = npt.NDArray[Any]

FEW: Final = 16
"""So many outputs of a row, or fewer, are averaged. More are projected, as an embedding's mean says nothing."""

MAX_VALUES: Final = 4096
"""Values of a row that are read."""

SCALES: Final = (0.5, 1.0)
"""Widths of the Gaussian kernels, in distances on the unit sphere. Each has a half of the features."""

_FLOATS: Final = frozenset({"FP16", "FP32", "FP64"})
_SIGNS: Final[npt.NDArray[np.float64]] = np.where(np.random.default_rng(0).random(MAX_VALUES) < 0.5, -1.0, 1.0)
"""The direction of the projection: the same in every version of a model and in every process."""


@functools.cache
def _frequencies() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """The frequencies [NUM_FEATURES, MAX_VALUES] and phases [NUM_FEATURES] of the features: the same in every version
    of a model and in every process."""
    random = np.random.default_rng(1)
    widths = np.repeat(SCALES, NUM_FEATURES // len(SCALES))[:, None]
    drawn = random.standard_normal((NUM_FEATURES, MAX_VALUES)) / widths
    return drawn.astype(np.float32), random.uniform(0, 2 * np.pi, NUM_FEATURES).astype(np.float32)


def features_of(row: Numbers) -> bytes:
    """Random Fourier features of the direction of a row of numbers: ``NUM_FEATURES`` float32, each between -0.25 and
    0.25. Empty where the row has no direction.

    The scalar product of two rows' features approximates the mean of two Gaussian kernels of their directions (A.
    Rahimi and B. Recht, "Random Features for Large-Scale Kernel Machines", 2007). The length of a row does not matter:
    the stream ``output`` sees that. No embedding can be computed from so few features.
    """
    values = row.astype(np.float32)
    length = float(np.linalg.norm(values))
    if not isfinite(length) or length == 0.0:
        return b""
    frequencies, phases = _frequencies()
    angles = frequencies[:, : values.size] @ (values / np.float32(length)) + phases
    return (np.cos(angles) * np.float32(np.sqrt(2.0 / NUM_FEATURES))).astype(np.float32).tobytes()


class FactsReader:
    """Reads the facts of one model's predictions. Chooses by the contract which inputs and outputs they are of."""

    def __init__(self, contract: Contract) -> None:
        self._has_rows = contract.max_batch_size > 0
        outputs = contract.outputs
        named = [spec for spec in outputs if spec.datatype in _FLOATS and spec.labels]
        classes = [spec for spec in outputs if spec.datatype not in (*_FLOATS, "BF16") and self._has_one_value(spec)]
        several = [spec for spec in outputs if spec.datatype in _FLOATS and not self._has_one_value(spec)]
        self._scores = next(iter(named or (several if classes else ())), None)
        self._class = next((spec.name for spec in classes if spec.datatype != "BYTES"), None)
        numbers = [spec for spec in outputs if spec.datatype in _FLOATS]
        self._number = numbers[0].name if numbers and self._scores is None else None

    def _has_one_value(self, spec: TensorSpec) -> bool:
        return all(size == 1 for size in spec.shape[int(self._has_rows) :])

    def read(self, inputs: Tensors, outputs: Tensors) -> Facts:
        """The facts of a request's inputs and outputs. What cannot be read is left out."""
        with np.errstate(all="ignore"):
            return self._read(inputs, outputs)

    def _read(self, inputs: Tensors, outputs: Tensors) -> Facts:
        rows, mean, is_missing = 1, None, None
        for given in inputs.values():
            array = np.asarray(given)
            if self._has_rows and array.ndim:
                rows = len(array)
            row = self._row(array)
            if row is None:
                continue
            found = _mean(row)
            if array.dtype.kind == "f":
                is_missing = bool(is_missing)
                if found is None and np.isnan(row).any():
                    is_missing, row = True, row[~np.isnan(row)]
                    found = _mean(row) if row.size else None
            mean = found if mean is None else mean
        label, score = self._classified(outputs)
        output, embedding = None, b""
        if self._number is not None:
            row = self._row(outputs.get(self._number))
            if row is not None and row.size <= FEW:
                output = _mean(row)
            elif row is not None:
                output = _finite(np.dot(row.astype(np.float64), _SIGNS[: row.size]))
                embedding = features_of(row)
        return Facts(rows, mean, is_missing, label, score, output, embedding)

    def _classified(self, outputs: Tensors) -> tuple[str, float | None]:
        row = None if self._scores is None else self._row(outputs.get(self._scores.name))
        if row is not None and self._scores is not None:
            best, labels = int(row.argmax()), self._scores.labels
            return labels[best] if best < len(labels) else str(best), _finite(row[best])
        if self._class is not None:
            row = self._row(outputs.get(self._class))
            if row is not None and isfinite(row[0]):
                return str(int(row[0])), None
        return "", None

    def _row(self, array: Array | None) -> Numbers | None:
        """The numbers of the first row; None: there are none."""
        if array is None:
            return None
        array = np.asarray(array)
        if array.dtype.kind not in "fiub" or not array.size:
            return None
        row = array[0] if self._has_rows and array.ndim else array
        return row[:MAX_VALUES] if row.ndim == 1 else row.reshape(-1)[:MAX_VALUES]


def _mean(row: Numbers) -> float | None:
    return _finite(np.add.reduce(row, dtype=np.float64) / row.size)


def _finite(value: SupportsFloat) -> float | None:
    number = float(value)
    return number if isfinite(number) else None
