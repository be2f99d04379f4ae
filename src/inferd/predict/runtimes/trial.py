"""Trying a model before it is believed: does its first dimension hold rows that do not know of each other?

Computes an example row alone and with another one beside it. Knows contracts and a function of stacked arrays; knows no
library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import numpy as np

from inferd import clock
from inferd.predict.contract import NUMPY, Array, Contract, Tensors
from inferd.types import TensorSpec

_SIZES: Final = (8, 1, 64, 224)  # tried for dimensions of any size, until the model takes one
_BATCH_S: Final = 0.1
_FEWEST_ROWS: Final = 4
_MOST_ROWS: Final = 256
_MAX_ELEMENTS: Final = 1 << 26  # of an example; larger inputs are not tried

_VALUES: Final = (0, 1, None)  # that every element has; None: those of ``example``
_ROWS: Final = (1, 2, 5)

Compute = Callable[[Tensors], Mapping[str, Array]]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What came out."""

    is_batchable: bool
    reason: str = ""  # why not
    shapes: Mapping[str, tuple[int, ...]]  # of the outputs; -1 where they may differ
    typical_rows: int = 0  # a batch that takes no longer than a person notices; 0: there are no rows


def try_rows(contract: Contract, compute: Compute, failures: tuple[type[Exception], ...]) -> Trial | None:
    """The trial's outcome; None where the model took none of the examples. ``failures``: what the model may raise.

    A model without a batch dimension is computed once, for the shapes of its outputs and to warm it up.
    """
    has_rows = contract.max_batch_size > 0
    for size in _SIZES if is_open(contract, has_rows=has_rows) else _SIZES[:1]:
        first = _examples(contract, size, has_rows=has_rows)
        if sum(array.size for array in first.values()) > _MAX_ELEMENTS:
            return None
        try:
            alone = dict(compute(first))
        except failures:
            continue
        if not has_rows:
            return Trial(is_batchable=False, shapes=_shapes(contract, alone, alone, has_rows=False))
        return _compared(contract, compute, failures, first, alone)
    return None


def common_refusal(contract: Contract, compute: Compute, failures: tuple[type[Exception], ...]) -> str | None:
    """What the model says to every example, word by word the same, whatever their values, their number of rows and their
    sizes: then it will say so to every request. None where it computes one, or says different things.

    A message that does not change with the sizes is not about them: a size that was guessed wrong is part of one.
    """
    if any(spec.datatype == "BYTES" for spec in contract.inputs):
        return None  # texts can be wrong in ways that no list of examples covers
    has_rows = contract.max_batch_size > 0
    has_open_sizes = is_open(contract, has_rows=has_rows)
    said = set()
    for size in _SIZES[:3] if has_open_sizes else _SIZES[:1]:
        for value in _VALUES:
            first = _examples(contract, size, has_rows=has_rows)
            if sum(array.size for array in first.values()) > _MAX_ELEMENTS:
                return None
            if value is not None:
                first = {name: np.full_like(array, value) for name, array in first.items()}
            for rows in _ROWS if has_rows else (1,):
                try:
                    compute(
                        {name: np.repeat(array, rows, axis=0) for name, array in first.items()} if rows > 1 else first
                    )
                except failures as error:
                    said.add(str(error))
                else:
                    return None
                if len(said) > 1:
                    return None
    return said.pop() if said else None


def _compared(
    contract: Contract,
    compute: Compute,
    failures: tuple[type[Exception], ...],
    first: dict[str, Array],
    alone: dict[str, Array],
) -> Trial:
    shapes = {name: np.shape(array) for name, array in alone.items()}
    for name, shape in shapes.items():
        if not shape or shape[0] != 1:
            return Trial(is_batchable=False, reason=f"one row gives the output {name} of {shape}", shapes=shapes)
    try:
        both = dict(compute({name: np.concatenate([array, _other(array)]) for name, array in first.items()}))
    except failures as error:
        return Trial(is_batchable=False, reason=f"two rows fail: {str(error)[:200]}", shapes=shapes)
    for name, array in both.items():
        if np.shape(array)[:1] != (2,):
            reason = f"two rows give the output {name} of {np.shape(array)}"
            return Trial(is_batchable=False, reason=reason, shapes=shapes)
    began = clock.now()
    compute({name: np.concatenate([array, array]) for name, array in first.items()})
    per_row_s = (clock.now() - began) / 2
    different = [name for name in alone if not _close(alone[name], both[name][:1])]
    if different and all(_close(value, alone[name]) for name, value in compute(first).items()):
        reason = f"the output {different[0]} of a row changes with the row beside it"
        return Trial(is_batchable=False, reason=reason, shapes=shapes)
    return Trial(
        is_batchable=True, shapes=_shapes(contract, alone, both, has_rows=True), typical_rows=_rows_within(per_row_s)
    )


def _rows_within(per_row_s: float) -> int:
    """The largest power of two of rows that take no longer than a batch should: beyond it a processor gains nothing."""
    rows = _MOST_ROWS
    while rows > _FEWEST_ROWS and rows * per_row_s > _BATCH_S:
        rows //= 2
    return rows


def _shapes(
    contract: Contract, alone: Mapping[str, Array], both: Mapping[str, Array], *, has_rows: bool
) -> dict[str, tuple[int, ...]]:
    """The outputs' shapes, as far as two runs tell: where inputs may have any size, so may outputs."""
    has_open_sizes = is_open(contract, has_rows=has_rows)
    found = {}
    for name, array in alone.items():
        one, two = np.shape(array), np.shape(both[name])
        if len(one) != len(two) or has_open_sizes:
            found[name] = (-1,) * len(one)
        else:
            found[name] = tuple(a if a == b else -1 for a, b in zip(one, two, strict=True))
    return found


def is_open(contract: Contract, *, has_rows: bool) -> bool:
    """Whether inputs have dimensions of any size beside the batch's."""
    return any(-1 in spec.shape[1 if has_rows else 0 :] for spec in contract.inputs)


def _examples(contract: Contract, size: int, *, has_rows: bool) -> dict[str, Array]:
    return {spec.name: example(spec, size, has_rows=has_rows) for spec in contract.inputs if not spec.is_optional}


def example(spec: TensorSpec, size: int = 1, *, has_rows: bool) -> Array:
    """A small input that most models take: one row, dimensions of any size as long as ``size``."""
    shape = [size if dim == -1 else dim for dim in spec.shape]
    if has_rows:
        shape[0] = 1
    count = math.prod(shape)
    if spec.datatype == "BYTES":
        made = np.empty(count, dtype=np.object_)
        made[:] = [b"a"] * count
        return made.reshape(shape)
    dtype = NUMPY[spec.datatype]
    if dtype.kind == "f":
        return ((np.arange(count, dtype=np.float64) * 0.618) % 1.0).astype(dtype).reshape(shape)
    return np.zeros(shape, dtype=dtype)


def _other(array: Array) -> Array:
    """Another row beside an example."""
    return np.subtract(1, array, dtype=array.dtype) if array.dtype.kind == "f" else array


def _close(one: Array, other: Array) -> bool:
    if one.dtype.kind != "f":
        return np.array_equal(one, other)
    scale = float(np.nanmax(np.abs(one), initial=1.0)) if one.size else 1.0
    return bool(np.allclose(one, other, rtol=1e-2, atol=1e-3 * scale, equal_nan=True))
