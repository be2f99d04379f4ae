"""The trial of a model at load: the shapes of its outputs, its time, and whether its rows visibly depend on each other.

Three different rows are computed alone and together, in every order. A difference ends batching; its absence is no
reason for batching (``registry/rows``). Knows contracts and a function of stacked arrays; knows no library.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from inferd import clock
from inferd.predict.agreement import agree, distance, reals
from inferd.predict.contract import MASKS, NUMPY, Array, Contract, Tensors, object_array
from inferd.registry.rows.verdict import CLAIM
from inferd.types import TensorSpec

_SIZES: Final = (8, 1, 64, 224)  # tried for dimensions of any size, until the model accepts one
_BATCH_S: Final = 0.1
_FEWEST_ROWS: Final = 4
_MOST_ROWS: Final = 256
_MAX_ELEMENTS: Final = 1 << 26  # of an example; larger inputs are not tried

_VALUES: Final = (0, 1, None)  # that every element has; None: those of ``example``
_ROWS: Final = (1, 2, 5)

_CHOICES: Final = (13, 2, 1)  # different integers and texts in an example, until the model accepts them
_TRIED_ROWS: Final = 3
_BOTH_WAYS: Final = ((0, 1, 2), (2, 1, 0))
_PATIENCE_S: Final = 1.0
"""How long the other orders may take."""

_WIDE: Final = 8.0  # the span of the second example's numbers, around 0

UNTRIED: Final = (
    "its file calls the first dimension a batch, but no example of its inputs could be computed to try that; "
    f"{CLAIM} declares that the rows do not depend on each other"
)

_log = logging.getLogger("inferd.predict")

Compute = Callable[[Tensors], Mapping[str, Array]]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a trial."""

    is_batchable: bool  # whether there are rows, and they were not seen to depend on each other
    reason: str = ""  # the reason why the rows are no batch
    shapes: Mapping[str, tuple[int, ...]]  # of the outputs; -1 when they may differ
    typical_rows: int = 0  # rows of a batch of acceptable duration; 0: there are no rows


def try_rows(contract: Contract, compute: Compute, failures: tuple[type[Exception], ...]) -> Trial | None:
    """The trial's outcome; None when the model accepted no example. ``failures``: exceptions that the model may raise.

    A model without a batch dimension is computed once, for the shapes of its outputs and to warm it up.
    """
    has_rows = contract.max_batch_size > 0
    is_chosen = any(spec.datatype not in _REAL for spec in contract.inputs)
    for size in _SIZES if is_open(contract, has_rows=has_rows) else _SIZES[:1]:
        for choices in _CHOICES if is_chosen else _CHOICES[:1]:
            rows = [
                {spec.name: _example(spec, size, row, choices, has_rows=has_rows) for spec in _asked(contract)}
                for row in range(_TRIED_ROWS if has_rows else 1)
            ]
            if sum(array.size for array in rows[0].values()) > _MAX_ELEMENTS:
                return None
            try:
                alone = [dict(compute(row)) for row in rows]
            except failures:
                continue
            if not has_rows:
                return Trial(is_batchable=False, shapes=_shapes(contract, alone[0], alone[0], has_rows=False))
            return _compared(contract, compute, failures, rows, alone)
    return None


def try_sequences(contract: Contract, compute: Compute, axes: Mapping[str, int]) -> str | None:
    """A sentence on how answers or states of sequences change when they are computed together. Empty: they do not
    change. None: the model accepted no example.

    ``axes``: the dimension of inputs and outputs along which sequences are stacked. Other inputs are the same for all.
    """
    specs = [_alone(spec, axes) for spec in _asked(contract)]
    is_chosen = any(spec.datatype not in _REAL for spec in specs)
    for size in _SIZES if any(-1 in spec.shape for spec in specs) else _SIZES[:1]:
        for choices in _CHOICES if is_chosen else _CHOICES[:1]:
            samples = [
                {spec.name: _example(spec, size, row * (spec.name in axes), choices, has_rows=False) for spec in specs}
                for row in range(_TRIED_ROWS)
            ]
            if sum(array.size for array in samples[0].values()) > _MAX_ELEMENTS:
                return None
            try:
                single = [dict(compute(sample)) for sample in samples]
                noise = {
                    name: distance(contract, name, array, compute(samples[0])[name])
                    for name, array in single[0].items()
                }
            except (
                Exception
            ) as error:  # as at a request's boundary: the model's library raises what it likes at an example
                _log.info("an example of the model's sequences could not be computed: %s", str(error)[:200])
                continue
            return _of_sequences(contract, compute, axes, samples, single, noise)
    return None


def _alone(spec: TensorSpec, axes: Mapping[str, int]) -> TensorSpec:
    """The input of a sequence of one row."""
    shape = tuple(1 if axes.get(spec.name) == number else size for number, size in enumerate(spec.shape))
    return msgspec.structs.replace(spec, shape=shape)


def _of_sequences(
    contract: Contract,
    compute: Compute,
    axes: Mapping[str, int],
    samples: Sequence[Tensors],
    single: Sequence[Mapping[str, Array]],
    noise: Mapping[str, float],
) -> str:
    began = clock.now()
    for number, order in enumerate((*_BOTH_WAYS, *itertools.permutations(range(len(samples))))):
        if number >= len(_BOTH_WAYS) and clock.now() - began > _PATIENCE_S:
            break
        batch = {
            name: np.concatenate([samples[row][name] for row in order], axes[name]) if name in axes else array
            for name, array in samples[0].items()
        }
        try:
            found = compute(batch)
        except Exception as error:  # likewise
            return f"{len(order)} sequences together fail: {str(error)[:200]}"
        for name, axis in axes.items():
            if name not in found:
                continue
            expected = np.concatenate([single[row][name] for row in order], axis)
            if not agree(contract, name, expected, found[name], noise[name]):
                return f"the output {name!r} of a sequence changes with the sequences beside it"
    return ""


def vetoed(contract: Contract, trial: Trial | None) -> Contract:
    """The contract, without rows where the trial saw that they depend on each other, or where their only reason is the
    exporter's name and no trial could be made (None)."""
    if trial is None:
        if contract.because != "named":
            return contract
        _log.warning("the rows are not computed together: %s", UNTRIED)
        return msgspec.structs.replace(contract, max_batch_size=0, because=None, not_batched=UNTRIED)
    if trial.is_batchable:
        return msgspec.structs.replace(contract, typical_rows=trial.typical_rows)
    if contract.max_batch_size:
        _log.warning("the rows are not computed together: %s", trial.reason)
    not_batched = contract.not_batched or trial.reason
    return msgspec.structs.replace(contract, max_batch_size=0, because=None, not_batched=not_batched)


def common_refusal(contract: Contract, compute: Compute, failures: tuple[type[Exception], ...]) -> str | None:
    """The one error message of the model for every example, for all values, numbers of rows and sizes: every request
    would get it too. None when the model computes an example, or its messages differ.

    A message that is equal for all sizes is not about the sizes, because it would name the wrong size.
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
    rows: Sequence[Tensors],
    alone: Sequence[Mapping[str, Array]],
) -> Trial:
    shapes = {name: np.shape(array) for name, array in alone[0].items()}
    for name, shape in shapes.items():
        if not shape or shape[0] != 1:
            return Trial(is_batchable=False, reason=f"one row gives the output {name!r} of {shape}", shapes=shapes)
    together: Mapping[str, Array] = {}
    per_row_s = 0.0
    began = clock.now()
    for sample, orders in _samples(contract, rows):
        try:
            single = alone if sample is rows else [dict(compute(row)) for row in sample]
        except failures:
            break  # the model does not accept these numbers
        noise: Mapping[str, float] = {}
        for number, order in enumerate(orders):
            if number >= len(_BOTH_WAYS) and clock.now() - began > _PATIENCE_S:
                break
            batch = {name: np.concatenate([sample[row][name] for row in order]) for name in sample[0]}
            try:
                found = dict(compute(batch))
                if not number:  # a second run has no cost of initialisation
                    again_at = clock.now()
                    again = compute(batch)
                    per_row_s = (clock.now() - again_at) / len(order)
                    noise = {name: distance(contract, name, array, again[name]) for name, array in found.items()}
            except failures as error:
                reason = f"{len(order)} rows together fail: {str(error)[:200]}"
                return Trial(is_batchable=False, reason=reason, shapes=shapes)
            reason = _difference(contract, [single[row] for row in order], found, noise)
            if reason:
                return Trial(is_batchable=False, reason=reason, shapes=shapes)
            together = found
    return Trial(
        is_batchable=True,
        shapes=_shapes(contract, alone[0], together, has_rows=True),
        typical_rows=_rows_within(per_row_s),
    )


def _difference(
    contract: Contract,
    single: Sequence[Mapping[str, Array]],
    found: Mapping[str, Array],
    noise: Mapping[str, float],
) -> str:
    """How the outputs of rows together differ from those of each alone; empty when they do not."""
    for name, array in found.items():
        shape, expected = np.shape(array), [one[name] for one in single]
        if shape[:1] != (len(single),):
            return f"{len(single)} rows give the output {name!r} of {shape}"
        if any(np.shape(one)[1:] != shape[1:] for one in expected):
            return f"the shape of the output {name!r} changes with the rows beside a row"
        if not agree(contract, name, np.concatenate(expected), array, noise[name]):
            return f"the output {name!r} of a row changes with the rows beside it"
    return ""


def _samples(
    contract: Contract, rows: Sequence[Tensors]
) -> Iterator[tuple[Sequence[Tensors], Sequence[tuple[int, ...]]]]:
    """Rows, and the orders to compute them in. Proved rows are tried forwards and backwards; all others in every order,
    and again with numbers of both signs."""
    if contract.because == "proved":
        yield rows, _BOTH_WAYS
        return
    orders = list(itertools.permutations(range(len(rows))))
    yield rows, orders
    real = {spec.name for spec in contract.inputs if spec.datatype in _REAL}
    if real:
        yield (
            [{name: _widened(array) if name in real else array for name, array in row.items()} for row in rows],
            orders,
        )


def _widened(array: Array) -> Array:
    if array.dtype == np.uint16:  # bfloat16
        return _bfloat16((reals(array) - 0.5) * _WIDE)
    return np.multiply(np.subtract(array, 0.5), _WIDE).astype(array.dtype)


def _rows_within(per_row_s: float) -> int:
    """The largest power of two of rows that take no longer than a batch should: beyond it a processor gains nothing."""
    rows = _MOST_ROWS
    while rows > _FEWEST_ROWS and rows * per_row_s > _BATCH_S:
        rows //= 2
    return rows


def _shapes(
    contract: Contract, alone: Mapping[str, Array], both: Mapping[str, Array], *, has_rows: bool
) -> dict[str, tuple[int, ...]]:
    """The shapes of the outputs in two runs: a size that differs may be any size."""
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


def _asked(contract: Contract) -> list[TensorSpec]:
    return [spec for spec in contract.inputs if not spec.is_optional]


def _examples(contract: Contract, size: int, *, has_rows: bool) -> dict[str, Array]:
    return {spec.name: example(spec, size, has_rows=has_rows) for spec in _asked(contract)}


def example(spec: TensorSpec, size: int = 1, *, has_rows: bool) -> Array:
    """A small input that most models take: one row, dimensions of any size as long as ``size``. Integers are 0."""
    return _example(spec, size, 0, 1, has_rows=has_rows)


_REAL: Final = frozenset({"FP16", "FP32", "FP64", "BF16"})


def _example(spec: TensorSpec, size: int, row: int, choices: int, *, has_rows: bool) -> Array:
    """An example of several rows that differ: real numbers from 0 to 1, and so many different integers or texts."""
    shape = [size if dim == -1 else dim for dim in spec.shape]
    if has_rows:
        shape[0] = 1
    count = math.prod(shape)
    places = np.arange(count)
    if spec.datatype in _REAL:
        real = ((places * 0.618 + row * 0.389) % 1.0).reshape(shape)
        return _bfloat16(real) if spec.datatype == "BF16" else real.astype(NUMPY[spec.datatype])
    chosen = (places * 7 + row * 4 + 1) % choices
    if spec.name in MASKS:
        chosen = (places % max(shape[-1] if shape else 1, 1) < max((shape[-1] if shape else 1) - row, 1)).astype(int)
    if spec.datatype == "BYTES":
        return object_array([b"a" * (1 + int(number)) for number in chosen]).reshape(shape)
    return chosen.astype(NUMPY[spec.datatype]).reshape(shape)


def _bfloat16(real: np.typing.ArrayLike) -> Array:
    bits: Array = np.asarray(real, np.float32).view(np.uint32) >> 16
    return bits.astype(np.uint16)
