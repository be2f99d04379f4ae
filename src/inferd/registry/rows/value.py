"""The abstract values of a proof that rows are independent, and the arithmetic of sizes.

The number of rows of a batch is a symbol. All other sizes are equal for the requests of one batch, which the batcher
guarantees. A value states how a tensor depends on the rows. The rules of operators map values to values, and raise an
error for what they cannot express.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

MAX_RANK: Final = 64
_MAX_FACTOR: Final = 1 << 62
_MAX_SYMBOLS: Final = 16


class MixedRowsError(Exception):
    """The operator carries data from one row to another. The text says how, as the end of a sentence about it."""


class UnknownRuleError(Exception):
    """Nothing is known about what the operator does with rows. The text says why, as the end of a sentence about it."""


class UnreadError(UnknownRuleError):
    """The operator has a definition of its own, which is not read and could carry data from one row to another."""


class Size(NamedTuple):
    """A product: of an integer, of sizes that are not known but equal for all requests of a batch, and of the number of
    rows. Also an element of a tensor of integers, which may be negative."""

    factor: int = 1
    symbols: tuple[int, ...] = ()  # sorted, with repetitions
    rows: int = 0  # the exponent of the number of rows

    @property
    def number(self) -> int | None:
        """The value, when it is known."""
        return self.factor if not self.symbols and not self.rows else None


ROWS: Final = Size(rows=1)
ONE: Final = Size(1)


class Fixed(msgspec.Struct, frozen=True):
    """A tensor that does not depend on the values in any row.

    ``dims`` do not contain the number of rows; None: not known. ``items`` are the elements when they are few integers.
    Only elements may contain the number of rows.
    """

    dims: tuple[Size, ...] | None
    items: tuple[Size, ...] | None = None

    @property
    def counts_rows(self) -> bool:
        return self.items is not None and any(item.rows for item in self.items)


class Rows(msgspec.Struct, frozen=True):
    """A tensor with the rows along one axis: what lies at one row depends on that row of the inputs alone.

    The size of that axis is the number of rows times any other size; the rows are its outermost part.
    """

    dims: tuple[Size, ...]
    axis: int


class Places(Rows, frozen=True):
    """A tensor with the number of its row at each place. It depends on the place of a row in the batch, so it may be
    used only to index rows."""


class Inner(Rows, frozen=True):
    """A tensor whose rows are not the outermost part of their axis: an index is (outer x rows + row) x the rest + a
    place. Valid inputs only of operators that leave the axis unchanged or split it again."""

    outer: Size


class Mixed(msgspec.Struct, frozen=True):
    """A tensor in which one row may depend on another. ``is_certain``: the operator is known to carry data along the
    rows. False: it is not known to keep rows apart.

    ``refutes_name``: the exporter's name of the dimension no longer counts as a reason. Either the operator's own
    definition is not read, or it carries data along the rows if earlier operators do not move the rows. ``supposed``:
    the value if the operators without a rule do not move the rows.
    """

    reason: str
    is_certain: bool
    refutes_name: bool = False
    supposed: Fixed | Rows | None = None


Value = Fixed | Rows | Mixed


def worst(values: Iterable[Value | None]) -> Mixed | None:
    """The mixed tensor of which the most is known; None: no tensor is mixed."""
    mixed = [value for value in values if isinstance(value, Mixed)]
    return max(mixed, key=lambda value: (value.is_certain, value.refutes_name), default=None)


def supposed(values: Iterable[Value | None], symbols: Symbols) -> Rows | None:
    """The value of an operator without a rule, if it does not move the rows; None: the rows' axis is not known."""
    given = {(len(value.dims), value.axis) for value in values if type(value) is Rows}
    if len(given) != 1:
        return None
    rank, axis = given.pop()
    return Rows(tuple(ROWS if number == axis else symbols.size() for number in range(rank)), axis)


class Symbols:
    """Names for sizes and numbers that are not known."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._count = 0
        self._sizes: set[int] = set()

    def size(self) -> Size:
        """A symbol for a new size, which is not negative."""
        made = self._next()
        self._sizes.add(made)
        return Size(symbols=(made,))

    def number(self, key: Hashable) -> Size:
        """A symbol for the result of an operation; the same for the same key."""
        if key not in self._known:
            self._known[key] = self._next()
        return Size(symbols=(self._known[key],))

    def is_size(self, item: Size) -> bool:
        """Whether the item cannot be negative."""
        return item.factor >= 0 and all(symbol in self._sizes for symbol in item.symbols)

    def _next(self) -> int:
        self._count += 1
        return self._count


def times(*sizes: Size) -> Size:
    """The product. Raises UnknownRuleError for one that is too long."""
    factor, rows = 1, 0
    symbols: list[int] = []
    for size in sizes:
        factor *= size.factor
        rows += size.rows
        symbols += size.symbols
        if abs(factor) > _MAX_FACTOR or len(symbols) > _MAX_SYMBOLS:
            raise UnknownRuleError("computes with sizes that are too large")
    if factor == 0:
        return Size(0)
    return Size(factor, tuple(sorted(symbols)), rows)


def quotient(size: Size, by: Size) -> Size | None:
    """The exact quotient of a product."""
    if by.factor == 0 or size.factor % by.factor or by.rows > size.rows:
        return None
    left = list(size.symbols)
    for symbol in by.symbols:
        if symbol not in left:
            return None
        left.remove(symbol)
    return Size(size.factor // by.factor, tuple(left), size.rows - by.rows)


def sizes(numbers: Iterable[int]) -> tuple[Size, ...]:
    return tuple(Size(number) for number in numbers)


def place(axis: int, rank: int) -> int:
    """An axis that may be counted from the end. Raises UnknownRuleError for one that is not there."""
    if not -rank <= axis < rank:
        raise UnknownRuleError(f"names the axis {axis} of a tensor of {rank} dimensions")
    return axis % rank if rank else 0


def made(dims: Sequence[Size], axis: int | None) -> Value:
    """A tensor with rows along ``axis``, or without. Raises UnknownRuleError where the dimensions say otherwise."""
    if len(dims) > MAX_RANK:
        raise UnknownRuleError("has too many dimensions")
    for number, size in enumerate(dims):
        if size.rows != (number == axis):
            raise UnknownRuleError("has the number of rows in another dimension")
    return Fixed(tuple(dims)) if axis is None else Rows(tuple(dims), axis)


def dims_of(value: Value) -> tuple[Size, ...]:
    """Raises UnknownRuleError when they are not known."""
    if isinstance(value, Mixed) or value.dims is None:
        raise UnknownRuleError("takes a tensor of unknown shape")
    return value.dims


def axis_of(value: Value) -> int | None:
    """The axis of the rows, if there is one."""
    return value.axis if isinstance(value, Rows) else None


def numbers_of(value: Value | None) -> tuple[int, ...] | None:
    """The elements of a constant, where all are known."""
    if not isinstance(value, Fixed) or value.items is None:
        return None
    found = [item.number for item in value.items]
    return None if None in found else tuple(number for number in found if number is not None)


def plain(*values: Value | None) -> None:
    """Raises UnknownRuleError for a tensor whose elements are computed from the number of rows."""
    for value in values:
        if isinstance(value, Fixed) and value.counts_rows:
            raise UnknownRuleError("computes with the number of rows")


def operators(text: str) -> frozenset[str]:
    """The words of a text: operators that share a rule."""
    return frozenset(text.split())
