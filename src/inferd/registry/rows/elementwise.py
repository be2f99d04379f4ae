"""Rules of operators that compute each element from the elements at its place, with numpy's broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inferd.registry.rows.value import (
    ONE,
    Fixed,
    Inner,
    Rows,
    Size,
    Symbols,
    UnknownRuleError,
    Value,
    axis_of,
    dims_of,
    made,
    plain,
    quotient,
    times,
)


def broadcast(values: Sequence[Value], symbols: Symbols) -> Value:
    """The value of an operator over elements, independent of what it computes. Raises UnknownRuleError."""
    plain(*values)
    if any(not isinstance(value, Rows) and dims_of_or_none(value) is None for value in values):
        if any(isinstance(value, Rows) for value in values):
            raise UnknownRuleError("takes a tensor of unknown shape")
        return Fixed(None)
    dims, axis = broadcast_dims(values, symbols)
    inner = [value for value in values if isinstance(value, Inner)]
    if inner:  # constants may be broadcast to it, and nothing else that has rows
        if any(isinstance(value, Rows) and value != inner[0] for value in values) or dims != inner[0].dims:
            raise UnknownRuleError("meets rows along different dimensions")
        return inner[0]
    return made(dims, axis)


def dims_of_or_none(value: Value) -> tuple[Size, ...] | None:
    return value.dims if isinstance(value, Fixed | Rows) else None


def broadcast_dims(values: Sequence[Value], symbols: Symbols) -> tuple[tuple[Size, ...], int | None]:
    """The dimensions of tensors that are broadcast together, and the axis of the rows."""
    shapes = [dims_of(value) for value in values]
    rank = max(map(len, shapes), default=0)
    axes = {axis + rank - len(dims_of(value)) for value in values if (axis := axis_of(value)) is not None}
    if len(axes) > 1:
        raise UnknownRuleError("meets rows along different dimensions")
    axis = axes.pop() if axes else None
    dims = []
    for number in range(rank):
        met = [shape[place] for shape in shapes if (place := number - rank + len(shape)) >= 0]
        dims.append(_together(met, symbols, has_rows=number == axis))
    return tuple(dims), axis


def _together(met: Sequence[Size], symbols: Symbols, *, has_rows: bool) -> Size:
    """The size of one dimension of tensors that are broadcast together."""
    different = [size for number, size in enumerate(met) if size != ONE and size not in met[:number]]
    if len(different) <= 1:
        return different[0] if different else ONE
    if has_rows:  # one of them would be repeated or refused, depending on the number of rows
        raise UnknownRuleError("meets the rows with another dimension")
    fixed = [size for size in different if size.number is not None]
    return fixed[0] if len(fixed) == 1 and fixed[0].factor > 1 else symbols.size()


# -- integers ----------------------------------------------------------------------------------

Operation = Callable[[Symbols, Size, Size], Size]


def add(symbols: Symbols, one: Size, other: Size) -> Size:
    if one.factor == 0 or other.factor == 0:
        return other if one.factor == 0 else one
    if (one.symbols, one.rows) == (other.symbols, other.rows):
        total = one.factor + other.factor
        return Size(total, one.symbols, one.rows) if total else Size(0)
    return opaque(symbols, "add", one, other)


def sub(symbols: Symbols, one: Size, other: Size) -> Size:
    return add(symbols, one, times(Size(-1), other))


def mul(symbols: Symbols, one: Size, other: Size) -> Size:
    return times(one, other)


def div(symbols: Symbols, one: Size, other: Size) -> Size:
    exact = quotient(one, other)
    return exact if exact is not None else opaque(symbols, "div", one, other)


def mod(symbols: Symbols, one: Size, other: Size) -> Size:
    if one.number is not None and other.number is not None and one.number >= 0 and other.number > 0:
        return Size(one.number % other.number)
    return opaque(symbols, "mod", one, other)


def least(symbols: Symbols, one: Size, other: Size) -> Size:
    if one == other:
        return one
    if one.number is not None and other.number is not None:
        return min(one, other)
    return opaque(symbols, "min", one, other)


def most(symbols: Symbols, one: Size, other: Size) -> Size:
    if one == other:
        return one
    if one.number is not None and other.number is not None:
        return max(one, other)
    return opaque(symbols, "max", one, other)


def equal(symbols: Symbols, one: Size, other: Size) -> Size:
    if one == other:
        return Size(1)
    if one.number is not None and other.number is not None:
        return Size(0)
    for size, number in ((one, other.number), (other, one.number)):
        if number is not None and number < 0 and symbols.is_size(size):
            return Size(0)  # exporters ask whether a size is -1
    return opaque(symbols, "equal", one, other)


def opaque(symbols: Symbols, *key: object) -> Size:
    """A number that is not known, but does not depend on the number of rows."""
    if any(isinstance(part, Size) and part.rows for part in key):
        raise UnknownRuleError("computes with the number of rows")
    return symbols.number(key)


def on_items(values: Sequence[Value], operation: Operation, symbols: Symbols) -> Value:
    """Two tensors of few integers, element by element; otherwise the value of ``broadcast``."""
    one, other = values
    if not (isinstance(one, Fixed) and isinstance(other, Fixed)) or one.items is None or other.items is None:
        return broadcast(values, symbols)
    if len(dims_of(one)) > 1 or len(dims_of(other)) > 1:
        return broadcast(values, symbols)
    first, second, dims = aligned(one, other)
    return Fixed(dims, tuple(operation(symbols, a, b) for a, b in zip(first, second, strict=True)))


def aligned(one: Fixed, other: Fixed) -> tuple[tuple[Size, ...], tuple[Size, ...], tuple[Size, ...]]:
    """The elements of two vectors or scalars, equally many, and their dimensions."""
    assert one.items is not None
    assert other.items is not None
    count = max(len(one.items), len(other.items))
    dims = max((dims_of(one), dims_of(other)), key=len)
    if {len(one.items), len(other.items)} - {1, count}:
        raise UnknownRuleError("computes with sizes that do not fit each other")
    grown = [items * count if len(items) == 1 and count > 1 else items for items in (one.items, other.items)]
    return grown[0], grown[1], (Size(count),) if dims else ()


def choose(condition: Value, one: Value, other: Value, symbols: Symbols) -> Value:
    """ONNX's Where, also of shapes."""
    parts = (condition, one, other)
    known = [value for value in parts if isinstance(value, Fixed) and value.items is not None]
    if len(known) < 3 or any(len(dims_of(value)) > 1 for value in known):
        return broadcast(parts, symbols)
    first, second, dims = aligned(known[1], known[2])
    flags, first_again, dims = aligned(known[0], Fixed(dims, first))
    second = second * len(flags) if len(second) == 1 else second
    items = []
    for flag, a, b in zip(flags, first_again, second, strict=True):
        if a == b or flag.number is not None:
            items.append(b if flag.number == 0 else a)
        else:
            items.append(opaque(symbols, "where", flag, a, b))
    return Fixed(dims, tuple(items))
