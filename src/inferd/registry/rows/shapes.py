"""Rules of operators that move, cut, join and reshape tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from inferd.registry.rows.value import (
    ONE,
    ROWS,
    Fixed,
    Inner,
    MixedRowsError,
    Rows,
    Size,
    Symbols,
    UnknownRuleError,
    Value,
    axis_of,
    dims_of,
    made,
    place,
    plain,
    quotient,
    times,
)


def transpose(value: Value, order: Sequence[int] | None) -> Value:
    """``order`` None: all axes backwards."""
    dims = dims_of(value)
    axes = tuple(reversed(range(len(dims)))) if order is None else tuple(place(axis, len(dims)) for axis in order)
    if sorted(axes) != list(range(len(dims))):
        raise UnknownRuleError("has an order of axes that does not fit its input")
    axis = axis_of(value)
    turned = made([dims[number] for number in axes], None if axis is None else axes.index(axis))
    if isinstance(value, Fixed) and value.items is not None:
        return Fixed(dims_of(turned), _rearranged(value, [range(size) for size in _numbers(dims)], axes))
    return turned


def slice_items(value: Fixed, axis: int, part: slice) -> Value:
    """A slice of a constant whose elements are known."""
    dims = list(dims_of(value))
    kept = [range(size) for size in _numbers(dims)]
    kept[axis] = kept[axis][part]
    dims[axis] = Size(len(kept[axis]))
    return Fixed(tuple(dims), _rearranged(value, kept, range(len(dims))))


def _numbers(dims: Sequence[Size]) -> list[int]:
    numbers = [size.number for size in dims]
    if None in numbers:
        raise UnknownRuleError("has elements without a shape")
    return [number for number in numbers if number is not None]


def _rearranged(value: Fixed, kept: Sequence[range], axes: Sequence[int]) -> tuple[Size, ...]:
    """The elements at these places along each dimension, with the dimensions in this order."""
    assert value.items is not None
    steps = [1]
    for size in reversed(_numbers(dims_of(value))[1:]):
        steps.insert(0, steps[0] * size)
    chosen = itertools.product(*[kept[axis] for axis in axes])
    return tuple(value.items[sum(steps[axis] * at for axis, at in zip(axes, places, strict=True))] for places in chosen)


def reshape(value: Value, target: Sequence[Size], symbols: Symbols, *, zero_copies: bool = False) -> Value:
    """``target`` may hold one -1; with ``zero_copies`` 0 stands for the input's own size."""
    if isinstance(value, Fixed) and value.dims is None:
        return _known_shape(target)
    dims = dims_of(value)
    wanted = list(target)
    for number, size in enumerate(wanted):
        if zero_copies and size.number == 0:
            if number >= len(dims):
                raise UnknownRuleError("copies a dimension that its input has not")
            wanted[number] = dims[number]
    guesses = [number for number, size in enumerate(wanted) if size.number == -1]
    if len(guesses) > 1 or any(size.factor < 0 for size in wanted if size.number != -1):
        raise UnknownRuleError("reshapes to negative sizes")
    if guesses:
        wanted[guesses[0]] = _guessed(dims, [size for size in wanted if size.number != -1], symbols)
    if isinstance(value, Fixed):
        plain_dims = made(wanted, None)
        return Fixed(dims_of(plain_dims), value.items)
    assert isinstance(value, Rows), "a mixed tensor has no dimensions"
    return _reshaped_rows(value, wanted)


def _known_shape(target: Sequence[Size]) -> Value:
    """The value of a tensor without rows whose own shape is not known."""
    if any(size.rows or size.factor < 1 for size in target):
        return Fixed(None)
    return Fixed(tuple(target))


def _guessed(dims: Sequence[Size], others: Sequence[Size], symbols: Symbols) -> Size:
    """The size that makes the number of elements equal."""
    total, known = times(*dims), times(*others)
    exact = quotient(total, known)
    if exact is not None:
        return exact
    if known.rows == total.rows:  # so it does not depend on the number of rows
        return symbols.size()
    raise UnknownRuleError("reshapes to unknown sizes")


def _reshaped_rows(value: Rows, wanted: Sequence[Size]) -> Value:
    """What lies before the rows in memory stays before them: then each row's blocks stay whole."""
    before = times(*value.dims[: value.axis], value.outer if isinstance(value, Inner) else ONE)
    axes = [number for number, size in enumerate(wanted) if size.rows]
    if len(axes) != 1 or wanted[axes[0]].rows != 1:
        raise UnknownRuleError("reshapes the rows away")
    axis = axes[0]
    outer = quotient(before, times(*wanted[:axis]))
    if outer is None or quotient(wanted[axis], times(outer, ROWS)) is None:
        raise UnknownRuleError("joins the rows with the dimensions before them")
    return made(wanted, axis) if outer == ONE else Inner(tuple(wanted), axis, outer)


def squeeze(value: Value, axes: Sequence[int] | None) -> Value:
    dims = dims_of(value)
    axis = axis_of(value)
    if axes is None:
        if axis is not None or any(size.number is None for size in dims):
            raise UnknownRuleError("drops whichever dimensions are 1")
        gone = {number for number, size in enumerate(dims) if size == ONE}
    else:
        gone = {place(one, len(dims)) for one in axes}
    if axis in gone:
        raise UnknownRuleError("drops the dimension of the rows")
    kept = [number for number in range(len(dims)) if number not in gone]
    left = made([dims[number] for number in kept], None if axis is None else kept.index(axis))
    return Fixed(dims_of(left), value.items) if isinstance(value, Fixed) else left


def unsqueeze(value: Value, axes: Sequence[int]) -> Value:
    dims = list(dims_of(value))
    rank = len(dims) + len(axes)
    new = sorted({place(one, rank) for one in axes})
    if len(new) != len(axes):
        raise UnknownRuleError("adds an axis twice")
    axis = axis_of(value)
    for one in new:
        dims.insert(one, ONE)
        if axis is not None and one <= axis:
            axis += 1
    grown = made(dims, axis)
    return Fixed(dims_of(grown), value.items) if isinstance(value, Fixed) else grown


def expand(value: Value, target: Sequence[Size], symbols: Symbols) -> Value:
    """Repeated along dimensions of 1 until it has these sizes; a target of 1 or -1 keeps the tensor's own size."""
    dims = dims_of(value)
    plain(value)
    rank = max(len(dims), len(target))
    axis = axis_of(value)
    axis = None if axis is None else axis + rank - len(dims)
    own = (*[ONE] * (rank - len(dims)), *dims)
    wanted = (*[ONE] * (rank - len(target)), *target)
    sizes = []
    for number, (has, wants) in enumerate(zip(own, wanted, strict=True)):
        if wants in (has, ONE) or wants.number == -1:
            sizes.append(has)
        elif has == ONE:
            sizes.append(wants)
        elif number == axis or wants.rows:
            raise UnknownRuleError("expands the rows")
        else:
            sizes.append(symbols.size())
    if axis is None:  # repeated for each row, and so equal for all
        axis = next((number for number, size in enumerate(sizes) if size.rows), None)
    return made(sizes, axis)


def tile(value: Value, repeats: Sequence[Size]) -> Value:
    dims = dims_of(value)
    plain(value)
    if len(repeats) != len(dims):
        raise UnknownRuleError("repeats other dimensions than its input has")
    axis = axis_of(value)
    if axis is not None and repeats[axis] != ONE:
        raise UnknownRuleError("repeats the rows")
    for number, (size, count) in enumerate(zip(dims, repeats, strict=True)):
        if count.rows and (axis is not None or size != ONE):
            raise UnknownRuleError("repeats a dimension for each row")
        if count.rows:
            axis = number
    return made([times(size, count) for size, count in zip(dims, repeats, strict=True)], axis)


def concat(values: Sequence[Value], axis: int, symbols: Symbols) -> Value:
    shapes = [dims_of(value) for value in values]
    rank = len(shapes[0])
    if any(len(shape) != rank for shape in shapes):
        raise UnknownRuleError("joins tensors of different ranks")
    at = place(axis, rank)
    if rank == 1 and all(isinstance(value, Fixed) and value.items is not None for value in values):
        items = tuple(item for value in values if isinstance(value, Fixed) for item in value.items or ())
        if len(items) <= 64:
            return Fixed((Size(len(items)),), items)
    plain(*values)
    axes = {axis_of(value) for value in values}
    if at in axes:
        raise MixedRowsError("joins rows with other rows")
    if len(axes) > 1:
        raise UnknownRuleError("joins rows along different dimensions")
    rows = axes.pop()
    dims = []
    for number in range(rank):
        met = {shape[number] for shape in shapes}
        if number == at:
            dims.append(_sum([shape[at] for shape in shapes], symbols))
        elif len(met) > 1 and number == rows:
            raise UnknownRuleError("joins different numbers of rows")
        else:
            dims.append(min(met, key=lambda size: (size.number is None, size)))
    return made(dims, rows)


def _sum(parts: Sequence[Size], symbols: Symbols) -> Size:
    numbers = [part.number for part in parts]
    known = [number for number in numbers if number is not None]
    return Size(sum(known)) if len(known) == len(numbers) else symbols.size()


def split(value: Value, axis: int, sizes: Sequence[Size] | None, count: int, symbols: Symbols) -> list[Value]:
    """Into ``count`` parts. ``sizes`` None: equal ones."""
    dims = dims_of(value)
    plain(value)
    at = place(axis, len(dims))
    if at == axis_of(value):
        raise MixedRowsError("splits the rows into parts")
    if sizes is not None and len(sizes) == count:
        parts = list(sizes)
    else:
        each = quotient(dims[at], Size(count))
        parts = [each if each is not None else symbols.size() for _ in range(count)]
    return [made([*dims[:at], part, *dims[at + 1 :]], axis_of(value)) for part in parts]


def keeps(value: Value, changed: Sequence[int], sizes: Sequence[Size], action: str) -> Value:
    """The tensor with other sizes along the ``changed`` axes, along which elements move. ``action``: the words for it
    in a reason."""
    dims = list(dims_of(value))
    plain(value)
    for one, size in zip(changed, sizes, strict=True):
        at = place(one, len(dims))
        if at == axis_of(value):
            raise MixedRowsError(action)
        dims[at] = size
    return made(dims, axis_of(value))


def gather(data: Value, indices: Value, axis: int) -> Value:
    """Whole slices of ``data`` along ``axis``, one for each index."""
    dims, chosen = dims_of(data), dims_of(indices)
    plain(indices)
    at = place(axis, len(dims))
    if isinstance(data, Fixed) and isinstance(indices, Fixed) and data.items is not None and len(dims) == 1:
        numbers = [item.number for item in indices.items] if indices.items is not None else [None]
        count = len(data.items)
        known = [number for number in numbers if number is not None and -count <= number < count]
        if len(known) == len(numbers):
            return Fixed(chosen, tuple(data.items[number] for number in known))
    plain(data)
    sizes = (*dims[:at], *chosen, *dims[at + 1 :])
    if isinstance(data, Rows):
        if data.axis == at:
            raise MixedRowsError("picks single rows")
        if isinstance(indices, Rows):
            raise MixedRowsError("picks for each row from all rows")
        return made(sizes, data.axis if data.axis < at else data.axis + len(chosen) - 1)
    return made(sizes, None if not isinstance(indices, Rows) else at + indices.axis)


def gather_elements(data: Value, indices: Value, axis: int) -> Value:
    """Elements of ``data`` along ``axis``, at the places that ``indices`` say for each element."""
    plain(data, indices)
    dims, chosen = dims_of(data), dims_of(indices)
    if len(dims) != len(chosen):
        raise UnknownRuleError("has indices of another rank")
    at = place(axis, len(dims))
    rows = {axis_of(data), axis_of(indices)}
    if rows == {None}:
        return made(chosen, None)
    if at in rows:
        raise MixedRowsError("picks elements of other rows")
    if len(rows) > 1:
        raise UnknownRuleError("picks from a tensor whose rows lie elsewhere")
    found = rows.pop()
    if found is not None and dims[found] != chosen[found]:
        raise UnknownRuleError("picks from another number of rows")
    return made(chosen, found)


def scatter_elements(data: Value, indices: Value, updates: Value, axis: int) -> Value:
    kept = gather_elements(data, indices, axis)
    gather_elements(updates, indices, axis)
    return made(dims_of(data), axis_of(kept))


def gather_nd(data: Value, indices: Value, batch: int) -> Value:
    """``batch``: the leading dimensions that both have."""
    plain(data, indices)
    dims, chosen = dims_of(data), dims_of(indices)
    width = chosen[-1].number if chosen else None
    if width is None or not 0 < width <= len(dims) - batch:
        raise UnknownRuleError("picks by indices of unknown length")
    sizes = (*chosen[:-1], *dims[batch + width :])
    if isinstance(data, Fixed) and (batch == 0 or isinstance(indices, Fixed)):
        return made(sizes, axis_of(indices))
    if not isinstance(data, Rows):
        raise UnknownRuleError("picks for each row from all rows")
    if data.axis >= batch + width and isinstance(indices, Fixed):
        return made(sizes, data.axis - batch - width + len(chosen) - 1)
    if data.axis < batch and axis_of(indices) == data.axis and dims[data.axis] == chosen[data.axis]:
        return made(sizes, data.axis)
    raise UnknownRuleError("picks from all rows")


def depth_to_space(value: Value, block: int, *, is_inverse: bool) -> Value:
    dims = dims_of(value)
    plain(value)
    if len(dims) != 4 or axis_of(value) not in (0, None) or block < 1:
        raise MixedRowsError("moves rows into other dimensions")
    square, side = Size(block * block), Size(block)
    depth = times(dims[1], square) if is_inverse else quotient(dims[1], square)
    area = [quotient(size, side) if is_inverse else times(size, side) for size in dims[2:]]
    sizes = [depth, *area]
    if any(size is None for size in sizes):
        raise UnknownRuleError("moves blocks that do not fit its input")
    return made([dims[0], *(size for size in sizes if size is not None)], axis_of(value))
