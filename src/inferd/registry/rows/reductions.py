"""Rules of operators that read whole axes: sums, norms, orders."""

from __future__ import annotations

from collections.abc import Sequence

from inferd.registry.rows.value import ONE, Fixed, MixedRowsError, Size, Value, axis_of, dims_of, made, place, plain


def reduce(value: Value, axes: Sequence[int] | None, *, keeps_dims: bool) -> Value:
    """One element for all along ``axes``; None: along all of them."""
    if isinstance(value, Fixed) and value.dims is None:
        plain(value)
        return Fixed(None)
    dims = dims_of(value)
    plain(value)
    gone = set(range(len(dims))) if axes is None else {place(axis, len(dims)) for axis in axes}
    axis = axis_of(value)
    if axis in gone:
        raise MixedRowsError("reduces over the rows")
    if keeps_dims:
        return made([ONE if number in gone else size for number, size in enumerate(dims)], axis)
    kept = [number for number in range(len(dims)) if number not in gone]
    return made([dims[number] for number in kept], None if axis is None else kept.index(axis))


def along(value: Value, axes: Sequence[int], action: str) -> Value:
    """The shape stays; each element depends on all along ``axes``. ``action``: the words for it in a reason."""
    dims = dims_of(value)
    plain(value)
    if axis_of(value) in {place(axis, len(dims)) for axis in axes}:
        raise MixedRowsError(action)
    return made(dims, axis_of(value))


def norm(value: Value, axes: Sequence[int]) -> Value:
    return along(value, axes, "normalises over the rows")


def best(value: Value, axis: int, count: Size) -> Value:
    """So many elements along ``axis``, chosen by their order."""
    dims = list(dims_of(value))
    plain(value)
    at = place(axis, len(dims))
    if at == axis_of(value):
        raise MixedRowsError("orders the rows")
    dims[at] = count
    return made(dims, axis_of(value))
