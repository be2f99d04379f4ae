"""The interface of an operation: options that are checked when the model is loaded, and a function of named arrays.

Operations know rows and axes, never requests, batches or other steps. A row is one image, text or example: the first
axis. Images of different sizes are one array of dtype object with an array for each image; an operation that makes
their sizes equal returns an ordinary array again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

import msgspec
import numpy as np

from inferd.config.pipeline_graph import Spec
from inferd.errors import InvalidRequest, ModelLoadError
from inferd.predict.contract import Array, Tensors

Function = Callable[[Tensors], Tensors]
FLOATS: Final = ("FP32", "FP64")


class Operation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One operation with its options, which are the struct's fields."""

    takes: ClassVar[tuple[str, ...]] = ("input",)  # empty: any inputs, by the names in the step
    may_take: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ("output",)
    chooses: ClassVar[bool] = False  # needs only one of its inputs, so each of them may be left out
    by_rows: ClassVar[bool] = False  # computes each row by itself, and so cheaply that the call is what it costs

    def expects(self, name: str) -> Spec | None:
        """The spec of an input, if the operation alone decides it; None: it is that of the given tensor or of the next
        step."""
        return None

    def expects_for(self, output: Spec) -> Spec | None:
        """The spec of the first input that results in the first output ``output``; None: not known."""
        return None

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        """The specs of the outputs for these inputs. Raises ValueError for inputs that the operation cannot use."""
        raise NotImplementedError

    def is_by_rows(self, ndim: int) -> bool:
        """Whether rows of several requests, with so many dimensions, may be computed in one call."""
        return self.by_rows

    def load(self) -> Function:
        """The function, with what it needs from files. Raises ModelLoadError."""
        return self.run

    def run(self, inputs: Tensors) -> Tensors:
        """Pure. Raises InvalidRequest for values it cannot work with."""
        raise NotImplementedError


def is_behind_rows(axis: int, ndim: int) -> bool:
    """Whether an axis, which may be counted from the end, is another one than the rows'."""
    return -ndim < axis < ndim and axis != 0


def numbers(name: str, spec: Spec) -> Spec:
    """The spec, when it is one of numbers. Raises ValueError."""
    if spec.datatype in ("BYTES", "BF16"):
        raise ValueError(f"its input {name!r} must be numbers, not {spec.datatype}")
    return spec


def as_floats(spec: Spec) -> Spec:
    """The datatype that ``floats`` returns for it."""
    return Spec(spec.datatype if spec.datatype in FLOATS else "FP32", spec.shape, spec.labels)


def floats(array: Array) -> np.ndarray[tuple[int, ...], np.dtype[np.floating]]:
    """The same values as float64 if they are float64, otherwise as float32; copied only if they are neither."""
    if array.dtype == np.float64:
        return array  # type: ignore[return-value]
    return dense(array).astype(np.float32, copy=False)


def dense(array: Array) -> Array:
    """The array, when it is one block. Raises InvalidRequest for images of different sizes."""
    if array.dtype == np.object_ and array.size and isinstance(array.flat[0], np.ndarray):
        raise InvalidRequest(
            "The images of this request have different sizes; send them one by one, or have the model's configuration "
            "resize them.",
            param="inputs",
        )
    return array


def stack(rows: Sequence[Array]) -> Array:
    """One array of all rows, or an array of arrays where their shapes differ. A single row is not copied."""
    if len(rows) == 1:
        return rows[0][np.newaxis]
    if all(row.shape == rows[0].shape for row in rows):
        return np.stack(rows)
    ragged = np.empty(len(rows), dtype=np.object_)
    for place, row in enumerate(rows):
        ragged[place] = row
    return ragged


def axis_of(spec: Spec, axis: int) -> int:
    """A place counted from 0 of an axis that may be counted from the end. Raises ValueError."""
    if spec.shape is None:
        raise ValueError(
            "the number of its input's dimensions must be known; declare the pipeline's input with a shape"
        )
    place = axis + len(spec.shape) if axis < 0 else axis
    if not 0 <= place < len(spec.shape):
        raise ValueError(f"axis {axis} is none of the {len(spec.shape)} dimensions of its input")
    return place


def read_lines(file: str) -> tuple[str, ...]:
    """A file's lines, one name each. Raises ModelLoadError."""
    path = Path(file).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ModelLoadError(f"The file of labels {path} cannot be read: {error}.", param="options.file") from None
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise ModelLoadError(f"The file of labels {path} is empty; write one name on each line.", param="options.file")
    return tuple(line.strip() for line in lines)
