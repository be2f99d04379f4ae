"""A runtime made of a plain function of stacked arrays: it stacks the rows of several requests and splits the outputs.

``compute`` is given every input with the rows of all items concatenated along the first dimension, and returns outputs
with as many rows. Items whose other dimensions differ are not computed together, unless they are padded. Knows arrays;
knows neither dialects nor libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from inferd.config import BatchingConfig
from inferd.errors import InferdError, InternalError
from inferd.predict.contract import MASKS, NUMPY, Array, Contract, Tensors
from inferd.predict.runtime import Item, Result
from inferd.types import TensorSpec

Compute = Callable[[dict[str, Array]], Mapping[str, Array]]


class Stacked:
    """A ``Runtime``."""

    def __init__(
        self,
        contract: Contract,
        compute: Compute,
        batching: BatchingConfig = BatchingConfig(),
        *,
        close: Callable[[], None] | None = None,
    ) -> None:
        self._compute = compute
        self._close = close
        self._has_rows = contract.max_batch_size > 0
        self._buckets = tuple(sorted(batching.buckets))
        self._variable = {spec.name: axes for spec in contract.inputs if (axes := _variable_axes(spec))}
        self._pads = batching.pad and self._has_rows and bool(self._variable)
        self._masks: dict[str, str] = {}
        if self._pads:
            contract, self._masks = _with_masks(contract, self._variable)
        self.contract = contract
        self._is_uniform = (
            not self._variable and not contract.any_rank and not any(spec.is_optional for spec in contract.inputs)
        )
        self.padded_rows = 0  # positions of rows that the last batch computed for nothing

    def prepare(self, item: Item) -> None:
        if not self._has_rows:
            return
        if self._masks:
            self._add_masks(item)
        if not self._is_uniform:
            item.bucket = tuple((name, self._bucket_of(name, array)) for name, array in item.inputs.items())

    def _bucket_of(self, name: str, array: Array) -> tuple[int, ...]:
        """The dimensions that must be equal; -1 where padding makes them so."""
        shape = list(array.shape[1:])
        if self._pads:
            for axis in self._variable.get(name, ()):
                shape[axis - 1] = self._bucketed(shape[axis - 1]) if self._buckets else -1
        return tuple(shape)

    def _bucketed(self, length: int) -> int:
        return next((bucket for bucket in self._buckets if bucket >= length), length)

    def _add_masks(self, item: Item) -> None:
        missing = {mask: like for mask, like in self._masks.items() if mask not in item.inputs}
        if missing:
            made: dict[str, Array] = dict(item.inputs)
            dtypes = {spec.name: NUMPY[spec.datatype] for spec in self.contract.inputs}
            for mask, like in missing.items():
                made[mask] = np.ones(item.inputs[like].shape, dtypes[mask])
            item.inputs = made

    # -- computing --------------------------------------------------------------------------

    def predict(self, items: Sequence[Item]) -> Sequence[Result | InferdError]:
        """An exception of ``compute`` is raised and concerns all items."""
        self.padded_rows = 0
        if not self._has_rows:
            return [Result(outputs=self._compute(dict(item.inputs))) for item in items]
        rows = sum([item.rows for item in items])
        inputs = self._stack(items)
        outputs = self._compute(inputs)
        for name, output in outputs.items():
            if not output.ndim or output.shape[0] != rows:
                raise InternalError(
                    f"The output {name!r} has the shape {list(output.shape)} for {rows} rows; its first dimension must "
                    "be the batch."
                )
        if len(items) == 1 and not self._pads:
            return [Result(outputs=outputs)]
        results = []
        begin = 0
        for item in items:
            end = begin + item.rows
            parts = {name: output[begin:end] for name, output in outputs.items()}
            if self._pads:
                parts = self._cut(parts, item, inputs)
            results.append(Result(outputs=parts))
            begin = end
        return results

    def _stack(self, items: Sequence[Item]) -> dict[str, Array]:
        inputs: dict[str, Array] = {}
        for name in items[0].inputs:
            arrays = [item.inputs[name] for item in items]
            if self._pads and name in self._variable:
                arrays = self._padded(name, arrays)
            inputs[name] = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return inputs

    def _padded(self, name: str, arrays: list[Array]) -> list[Array]:
        """The arrays padded to the same lengths: the longest of the batch, or the bucket's."""
        axes = self._variable[name]
        lengths = {axis: max(array.shape[axis] for array in arrays) for axis in axes}
        if self._buckets:
            lengths = {axis: self._bucketed(length) for axis, length in lengths.items()}
        made = []
        wasted = 0
        for array in arrays:
            shape = tuple(lengths.get(axis, size) for axis, size in enumerate(array.shape))
            if shape != array.shape:
                padded = np.full(shape, b"", array.dtype) if array.dtype == np.object_ else np.zeros(shape, array.dtype)
                padded[tuple(slice(size) for size in array.shape)] = array
                wasted += array.shape[0] * (_positions(shape, axes) - _positions(array.shape, axes))
                array = padded
            made.append(array)
        self.padded_rows = max(self.padded_rows, wasted)  # of inputs that are padded alike, once
        return made

    def _cut(self, parts: dict[str, Array], item: Item, stacked: Tensors) -> dict[str, Array]:
        """The outputs without what padding added: dimensions that are as long as a padded input's are cut to what
        that input had."""
        lengths: dict[int, dict[int, int]] = {}  # padded -> axis -> what it was
        for name, axes in self._variable.items():
            if name in item.inputs:
                for axis in axes:
                    padded, was = stacked[name].shape[axis], item.inputs[name].shape[axis]
                    lengths.setdefault(padded, {})[axis] = was
        specs = {spec.name: spec for spec in self.contract.outputs}
        cut = {}
        for name, part in parts.items():
            spec = specs.get(name)
            slices = [slice(None)] * part.ndim
            for axis in range(1, part.ndim):
                is_free = spec is None or len(spec.shape) != part.ndim or spec.shape[axis] == -1
                known = lengths.get(part.shape[axis]) if is_free else None
                if known:
                    was = set(known.values())
                    slices[axis] = slice(known.get(axis) if len(was) > 1 else was.pop())
            cut[name] = part[tuple(slices)]
        return cut

    def close(self) -> None:
        if self._close is not None:
            self._close()


def _variable_axes(spec: TensorSpec) -> tuple[int, ...]:
    """Axes behind the first that may have any length."""
    return tuple(axis for axis, size in enumerate(spec.shape) if axis and size == -1)


def _positions(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    count = 1
    for axis in axes:
        count *= shape[axis]
    return count


def _with_masks(contract: Contract, variable: Mapping[str, tuple[int, ...]]) -> tuple[Contract, dict[str, str]]:
    """The contract with its masks optional, and for each mask an input that has its shape."""
    masks: dict[str, str] = {}
    inputs = []
    for spec in contract.inputs:
        like = next(
            (
                other.name
                for other in contract.inputs
                if other.name in variable and other.name not in MASKS and len(other.shape) == len(spec.shape)
            ),
            None,
        )
        if spec.name in MASKS and spec.datatype != "BYTES" and like is not None:
            masks[spec.name] = like
            spec = msgspec.structs.replace(spec, is_optional=True)
        inputs.append(spec)
    return msgspec.structs.replace(contract, inputs=tuple(inputs)), masks
