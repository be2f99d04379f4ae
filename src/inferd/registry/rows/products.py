"""Rules of products: matrices, convolutions, sums over indices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from inferd.registry.rows.elementwise import broadcast_dims
from inferd.registry.rows.value import (
    ONE,
    Fixed,
    Inner,
    MixedRowsError,
    Size,
    Symbols,
    UnknownRuleError,
    Value,
    axis_of,
    dims_of,
    made,
    plain,
)


def matmul(one: Value, other: Value, symbols: Symbols) -> Value:
    """numpy's matmul: batches of matrices."""
    plain(one, other)
    left, right = dims_of(one), dims_of(other)
    rows, columns = axis_of(one), axis_of(other)
    if not left or not right:
        raise UnknownRuleError("multiplies a scalar as a matrix")
    if rows == len(left) - 1 or columns == max(len(right) - 2, 0):
        raise MixedRowsError("sums over the rows")
    if rows is not None and rows == len(left) - 2 and columns is not None:
        raise MixedRowsError("multiplies each row with all rows")
    if columns is not None and columns == len(right) - 1 and rows is not None:
        raise MixedRowsError("multiplies each row with all rows")
    batch, axis = _batches(one, other, symbols)
    dims = [*batch]
    for shape, number, at in ((left, -2, rows), (right, -1, columns)):
        if len(shape) == 1:
            continue
        if at == len(shape) + number:
            if axis is not None:
                raise UnknownRuleError("meets rows along different dimensions")
            axis = len(dims)
        dims.append(shape[number])
    return made(dims, axis)


def _batches(one: Value, other: Value, symbols: Symbols) -> tuple[tuple[Size, ...], int | None]:
    """The dimensions before the matrices, broadcast."""
    stacks: list[Value] = []
    for value in (one, other):
        dims, axis = dims_of(value)[:-2], axis_of(value)
        stacks.append(made(dims, axis if axis is not None and axis < len(dims) else None))
    return broadcast_dims(stacks, symbols)


def gemm(
    one: Value, other: Value, bias: Value | None, symbols: Symbols, *, turns_one: bool, turns_other: bool
) -> Value:
    """Two matrices and a bias. The bias is broadcast, so its rows must be those of the product."""
    for value in (one, other):
        if len(dims_of(value)) != 2:
            raise UnknownRuleError("multiplies tensors that are no matrices")
    left = (dims_of(one), axis_of(one))
    right = (dims_of(other), axis_of(other))
    if (left[1] is not None and left[1] == (0 if turns_one else 1)) or (
        right[1] is not None and right[1] == (1 if turns_other else 0)
    ):
        raise MixedRowsError("sums over the rows")
    if left[1] is not None and right[1] is not None:
        raise MixedRowsError("multiplies each row with all rows")
    plain(one, other, bias)
    if isinstance(one, Inner) and not turns_one and isinstance(bias, Fixed | None) and right[1] is None:
        return Inner((left[0][0], right[0][0 if turns_other else 1]), 0, one.outer)
    if isinstance(one, Inner) or isinstance(other, Inner) or isinstance(bias, Inner):
        raise UnknownRuleError("takes rows that are joined with the dimensions before them")
    dims = (left[0][1 if turns_one else 0], right[0][0 if turns_other else 1])
    axis = 0 if left[1] is not None else 1 if right[1] is not None else None
    product = made(dims, axis)
    if bias is not None:
        shape, at = broadcast_dims((product, bias), symbols)
        return made(dims, at) if len(shape) == 2 else product
    return product


_LETTERS = re.compile(r"[A-Za-z.,]*->[A-Za-z]*")


def einsum(equation: str, values: Sequence[Value], symbols: Symbols) -> Value:
    """Sums over indices; no ellipsis."""
    text = equation.replace(" ", "")
    if not _LETTERS.fullmatch(text) or "." in text:
        raise UnknownRuleError("sums over indices that are left open")
    left, _, out = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(values):
        raise UnknownRuleError("sums over other inputs than it has")
    plain(*values)
    sizes: dict[str, Size] = {}
    rows: str | None = None
    for term, value in zip(terms, values, strict=True):
        dims, axis = dims_of(value), axis_of(value)
        if len(term) != len(dims):
            raise UnknownRuleError("sums over other dimensions than its inputs have")
        if axis is not None:
            if rows not in (None, term[axis]):
                raise MixedRowsError("multiplies each row with all rows")
            rows = term[axis]
        for letter, size in zip(term, dims, strict=True):
            known = sizes.setdefault(letter, size)
            if known == ONE:
                sizes[letter] = size
            elif known.rows != size.rows or (size.rows and known != size):
                raise UnknownRuleError("meets different numbers of rows")
    if rows is not None:
        for term, value in zip(terms, values, strict=True):
            axis = axis_of(value)
            if term.count(rows) > (axis is not None) or (axis is None and rows in term):
                raise UnknownRuleError("meets the rows with another dimension")
        if out.count(rows) != 1:
            raise MixedRowsError("sums over the rows")
    if not set(out) <= set(sizes):
        raise UnknownRuleError("gives a dimension that its inputs have not")
    return made([sizes[letter] for letter in out], None if rows is None else out.index(rows))


class Window(NamedTuple):
    """What moves along the space of [batch, channels, space...]. Sizes are those of each dimension of the space."""

    kernel: tuple[int, ...] = ()  # empty: not known
    strides: tuple[int, ...] = ()  # empty: 1, as for the dilations
    pads: tuple[int, ...] = ()  # all begins, then all ends; empty: 0
    dilations: tuple[int, ...] = ()
    is_same: bool = False  # padded to the input's size
    is_open: bool = False  # rounded up, or turned around: only the library knows the sizes


def convolution(value: Value, weight: Value | None, channels: Size | None, window: Window, symbols: Symbols) -> Value:
    """Over [batch, channels, space...]: also pooling, where there is no weight. ``channels`` None: those of the
    input."""
    plain(value, weight)
    dims, axis = dims_of(value), axis_of(value)
    if weight is not None and not isinstance(weight, Fixed):
        raise UnknownRuleError("takes its weights from the rows")
    if axis == 1:
        raise MixedRowsError("sums over the rows")
    if axis is not None and axis > 1:
        raise MixedRowsError("moves a window along the rows")
    if len(dims) < 3:
        raise UnknownRuleError("has no dimension to move a window along")
    space = [_moved(size, number, len(dims) - 2, window) or symbols.size() for number, size in enumerate(dims[2:])]
    return made([dims[0], channels if channels is not None else dims[1], *space], axis)


def _moved(size: Size, number: int, count: int, window: Window) -> Size | None:
    """The size of one dimension after the window; None when it is not known."""
    length, kernel, strides, dilations = size.number, window.kernel, window.strides, window.dilations
    if length is None or window.is_open or len(kernel) != count:
        return None
    stride = strides[number] if len(strides) == count else 1
    width = (kernel[number] - 1) * (dilations[number] if len(dilations) == count else 1) + 1
    if stride < 1 or (strides and len(strides) != count) or (dilations and len(dilations) != count):
        return None
    if window.is_same:
        return Size(-(-length // stride))
    if window.pads and len(window.pads) != 2 * count:
        return None
    padded = length + (window.pads[number] + window.pads[number + count] if window.pads else 0)
    return Size((padded - width) // stride + 1) if padded >= width else None


def per_channel(value: Value, others: Sequence[Value | None]) -> Value:
    """Elements scaled and moved by numbers of their channel, which is the second axis."""
    plain(value, *others)
    if not all(other is None or isinstance(other, Fixed) for other in others):
        raise UnknownRuleError("takes its numbers from the rows")
    if axis_of(value) == 1:
        raise UnknownRuleError("has the rows as channels")
    return value
