"""Numbers: bounds, multiples and finite sets. All arithmetic is exact."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from inferd.structured.schema.formulas import Atom, Emptiness, Formula, Lost

LARGEST = Fraction(10**18)  # of a number that a schema leaves unbounded; longer ones are not generated
FINEST = Fraction(1, 10**10)  # step of a number whose fraction a schema leaves unbounded
_LARGEST_FACTOR = 100_000  # of a multiple, without its decimal point; a mask has as many states


def exact(value: float) -> Fraction:
    return Fraction(value) if isinstance(value, int) else Fraction(Decimal(repr(value)))


def written(value: Fraction) -> int | float:
    """The JSON number of a value; integers have no fraction."""
    return value.numerator if value.denominator == 1 else float(value)


@dataclass(frozen=True, slots=True)
class Numbers:
    low: Fraction | None = None
    is_low_open: bool = False
    high: Fraction | None = None
    is_high_open: bool = False
    step: Fraction | None = None  # every number is a multiple of it
    values: tuple[Fraction, ...] | None = None  # only these
    excluded: frozenset[Fraction] = frozenset()

    def has(self, value: Fraction) -> bool:
        if self.low is not None and (value < self.low or (self.is_low_open and value == self.low)):
            return False
        if self.high is not None and (value > self.high or (self.is_high_open and value == self.high)):
            return False
        return (self.step is None or value % self.step == 0) and value not in self.excluded

    def settled(self) -> Numbers | None:
        """The same numbers with their finite set filtered; ``None`` where there are none."""
        values = self.values
        if values is None and self.low is not None and self.low == self.high:
            values = (self.low,)
        if values is not None:
            kept = tuple(value for value in values if self.has(value))
            return Numbers(values=kept) if kept else None
        if self.low is not None and self.high is not None and self.low > self.high:
            return None
        if self.step is not None and not self._has_multiple(self.step):
            return None
        return self

    def _has_multiple(self, step: Fraction) -> bool:
        if self.low is None or self.high is None:
            return True
        first = math.ceil(self.low / step)
        last = math.floor(self.high / step)
        first += self.is_low_open and first * step == self.low
        last -= self.is_high_open and last * step == self.high
        return first <= last

    def emitted(self) -> list[dict[str, Any]] | Lost:
        """The schemas whose union is these numbers."""
        if self.values is not None:
            return _enum(self.values)
        if self.step is not None and not _is_coded(self.step):
            return Lost(f"no mask enforces multiples of {float(self.step)}", "fewer digits in multipleOf")
        low = max(self.low, -LARGEST) if self.low is not None else -LARGEST
        high = min(self.high, LARGEST) if self.high is not None else LARGEST
        if low > LARGEST or high < -LARGEST:
            return Lost("only numbers of over 18 digits are valid", "bounds between -1e18 and 1e18")
        cuts = sorted(value for value in self.excluded if low <= value <= high)
        edges = [(low, self.is_low_open and low == self.low)]
        ranges = []
        for cut in cuts:
            ranges.append((*edges.pop(), cut, True))
            edges.append((cut, True))
        ranges.append((*edges.pop(), high, self.is_high_open and high == self.high))
        schemas = [self._range(*edge) for edge in ranges]
        return [schema for schema in schemas if schema is not None]

    def _range(self, low: Fraction, is_low_open: bool, high: Fraction, is_high_open: bool) -> dict[str, Any] | None:
        step = self.step or FINEST
        piece = replace(self, low=low, is_low_open=is_low_open, high=high, is_high_open=is_high_open, step=step)
        if low > high or not piece._has_multiple(step):
            return None
        if step.denominator == 1:
            # Bounds of integers are written as integers that belong to them, so that nothing depends on open ends.
            first, last = math.ceil(low), math.floor(high)
            least = _inside(Fraction(first + (is_low_open and first == low)))
            most = _inside(-Fraction(last - (is_high_open and last == high)))
            schema: dict[str, Any] = {"type": "integer", "minimum": int(least), "maximum": -int(most)}
            return schema if step == 1 else {**schema, "multipleOf": int(step)}
        least, most = _closed(low, is_low_open, step), -_closed(-high, is_high_open, step)
        if least > most:
            return None
        return {"type": "number", "minimum": written(least), "maximum": written(most), "multipleOf": written(step)}


def _closed(low: Fraction, is_open: bool, step: Fraction) -> Fraction:
    """The least multiple of ``step`` within the bound. A bound of too many digits for a double becomes narrower."""
    for power in range(20):
        grain = step * Fraction(10**power)
        first = math.ceil(low / grain)
        bound = grain * (first + (is_open and first * grain == low))
        if exact(written(bound)) == bound:
            return bound
    raise AssertionError("a multiple of a large step has few digits")


def _inside(bound: Fraction) -> Fraction:
    """The least number from ``bound`` on that a double holds exactly."""
    near = float(bound)
    return Fraction(near) if Fraction(near) >= bound else Fraction(math.nextafter(near, math.inf))


def _enum(values: tuple[Fraction, ...]) -> list[dict[str, Any]] | Lost:
    kept = [value for value in values if Fraction(float(value)) == value or value.denominator > 1]
    kept = [value for value in kept if abs(value) <= LARGEST]
    if not kept:
        return Lost("only numbers of over 18 digits are valid", "numbers between -1e18 and 1e18, or a text")
    return [{"enum": [written(value) for value in kept]}]


def _is_coded(step: Fraction) -> bool:
    """Whether the masks compute the step exactly, which they take from a double by multiplying with ten."""
    value, digits = float(step), 0
    while value % 1 and digits < 20:
        value, digits = value * 10, digits + 1
    return 0 < value <= _LARGEST_FACTOR and Fraction(int(value), 10**digits) == step


@dataclass(frozen=True, slots=True)
class AtLeast(Atom):
    bound: Fraction
    is_open: bool = False

    def negated(self) -> Formula:
        return AtMost(self.bound, not self.is_open)

    def narrow(self, numbers: Numbers, is_empty: Emptiness) -> Numbers | None:
        if numbers.low is not None and (numbers.low, numbers.is_low_open) >= (self.bound, self.is_open):
            return numbers
        return replace(numbers, low=self.bound, is_low_open=self.is_open).settled()


@dataclass(frozen=True, slots=True)
class AtMost(Atom):
    bound: Fraction
    is_open: bool = False

    def negated(self) -> Formula:
        return AtLeast(self.bound, not self.is_open)

    def narrow(self, numbers: Numbers, is_empty: Emptiness) -> Numbers | None:
        if numbers.high is not None and (numbers.high, not numbers.is_high_open) <= (self.bound, not self.is_open):
            return numbers
        return replace(numbers, high=self.bound, is_high_open=self.is_open).settled()


@dataclass(frozen=True, slots=True)
class MultipleOf(Atom):
    step: Fraction

    def negated(self) -> Formula:
        return NotMultipleOf(self.step)

    def narrow(self, numbers: Numbers, is_empty: Emptiness) -> Numbers | None:
        if numbers.step is None:
            return replace(numbers, step=self.step).settled()
        one, other = numbers.step, self.step
        common = Fraction(math.lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator))
        return replace(numbers, step=common).settled()


@dataclass(frozen=True, slots=True)
class NotMultipleOf(Atom):
    step: Fraction

    def negated(self) -> Formula:
        return MultipleOf(self.step)

    def narrow(self, numbers: Numbers, is_empty: Emptiness) -> Numbers | Lost | None:
        if numbers.values is not None:
            return replace(numbers, values=tuple(v for v in numbers.values if v % self.step)).settled()
        if numbers.step is not None and numbers.step % self.step == 0:
            return None
        what = "integer" if self.step == 1 else f"multiple of {float(self.step)}"
        return Lost(f"no mask enforces that a number is not a{'n' * (self.step == 1)} {what}", "bounds or an enum")


@dataclass(frozen=True, slots=True)
class NumberIn(Atom):
    values: tuple[Fraction, ...]

    def negated(self) -> Formula:
        return NumberNotIn(self.values)

    def narrow(self, numbers: Numbers, is_empty: Emptiness) -> Numbers | None:
        if numbers.values is None:
            return replace(numbers, values=self.values).settled()
        return replace(numbers, values=tuple(v for v in numbers.values if v in self.values)).settled()


@dataclass(frozen=True, slots=True)
class NumberNotIn(Atom):
    values: tuple[Fraction, ...]

    def negated(self) -> Formula:
        return NumberIn(self.values)

    def narrow(self, numbers: Numbers, is_empty: Emptiness) -> Numbers | None:
        return replace(numbers, excluded=numbers.excluded | set(self.values)).settled()
