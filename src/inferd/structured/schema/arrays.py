"""Lists: items by position, lengths, ``contains`` and ``uniqueItems``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from inferd.structured.schema.formulas import (
    ANYTHING,
    NOTHING,
    Atom,
    Conjunction,
    Emptiness,
    Formula,
    Lost,
    all_of,
    any_of,
    both,
    opposite,
)

WINDOW = 8  # positions, from the first that counts, in which what `contains` asks for is generated
_MOST_PLACINGS = 64
LONGEST_PREFIX = 1_000


@dataclass(frozen=True, slots=True)
class Lists:
    prefix: tuple[Conjunction, ...] = ()
    tail: Conjunction = ANYTHING
    least: int = 0
    most: int | None = None
    is_unique: bool = False

    def item(self, position: int) -> Conjunction:
        return self.prefix[position] if position < len(self.prefix) else self.tail

    def settled(self, is_empty: Emptiness) -> Lists | None:
        """The same lists; ``None`` where there are none. An item that nothing can be ends the list before it."""
        most = self.most
        for position in range(len(self.prefix)):
            if is_empty(self.prefix[position]):
                most = position if most is None else min(most, position)
                break
        else:
            if is_empty(self.tail):
                most = len(self.prefix) if most is None else min(most, len(self.prefix))
        if most is not None and self.least > most:
            return None
        prefix = self.prefix if most is None else self.prefix[:most]
        return replace(self, most=most, prefix=prefix)


@dataclass(frozen=True, slots=True)
class ItemCount(Atom):
    least: int = 0
    most: int | None = None

    def negated(self) -> Formula:
        above = self.most is not None and ItemCount(self.most + 1)
        return any_of(self.least > 0 and ItemCount(0, self.least - 1), above)

    def narrow(self, lists: Lists, is_empty: Emptiness) -> Lists | None:
        most = lists.most if self.most is None else self.most if lists.most is None else min(self.most, lists.most)
        return replace(lists, least=max(lists.least, self.least), most=most).settled(is_empty)


@dataclass(frozen=True, slots=True)
class Items(Atom):
    prefix: tuple[Conjunction, ...]
    tail: Conjunction

    def negated(self) -> Formula:
        wrong = [ItemIs(position, opposite(item)) for position, item in enumerate(self.prefix) if item != ANYTHING]
        beyond = self.tail != ANYTHING and Contains(opposite(self.tail), 1, None, len(self.prefix))
        return any_of(*wrong, beyond)

    def narrow(self, lists: Lists, is_empty: Emptiness) -> Lists | None:
        size = max(len(self.prefix), len(lists.prefix))
        other = Lists(self.prefix, self.tail)
        prefix = tuple(both(lists.item(position), other.item(position)) for position in range(size))
        return replace(lists, prefix=prefix, tail=both(lists.tail, self.tail)).settled(is_empty)


@dataclass(frozen=True, slots=True)
class ItemIs(Atom):
    """There is an item at a position, and the conjunction holds of it."""

    position: int
    item: Conjunction

    def negated(self) -> Formula:
        return any_of(ItemCount(0, self.position), ItemIs(self.position, opposite(self.item)))

    def narrow(self, lists: Lists, is_empty: Emptiness) -> Lists | None:
        prefix = (*(ANYTHING,) * self.position, self.item)
        narrowed = Items(prefix, ANYTHING).narrow(lists, is_empty)
        return narrowed and ItemCount(self.position + 1).narrow(narrowed, is_empty)


@dataclass(frozen=True, slots=True)
class Contains(Atom):
    """From a position on, the conjunction holds of ``least`` to ``most`` items."""

    item: Conjunction
    least: int = 1
    most: int | None = None
    start: int = 0

    def negated(self) -> Formula:
        fewer = self.least > 0 and Contains(self.item, 0, self.least - 1, self.start)
        more = self.most is not None and Contains(self.item, self.most + 1, None, self.start)
        return any_of(fewer, more)

    def ways(self, lists: Lists) -> Formula:
        """The same condition in positions. Matches beyond the window are lost, and those alone."""
        if self.item == ANYTHING:
            most = None if self.most is None else self.most + self.start
            return ItemCount(self.least + self.start if self.least else 0, most)
        if self.most == 0 or self.item == NOTHING:
            return Items((ANYTHING,) * self.start, opposite(self.item)) if self.least == 0 else False
        if self.least == 0 and self.most is None:
            return True
        end = self.start + WINDOW if lists.most is None else min(lists.most, self.start + WINDOW)
        places = range(self.start, end)
        sizes = [self.least] if self.most is None else range(self.least, min(self.most, len(places)) + 1)
        placings = [chosen for size in sizes for chosen in combinations(places, size)][:_MOST_PLACINGS]
        is_whole = lists.most == end and len(placings) < _MOST_PLACINGS
        lost = Lost(
            f"no mask enforces 'contains' beyond {WINDOW} items or {_MOST_PLACINGS} placings",
            "a small maxItems, or minContains of 1",
        )
        return any_of(*(self._placed(chosen) for chosen in placings), not is_whole and lost)

    def _placed(self, chosen: Sequence[int]) -> Formula:
        placed = all_of(*(ItemIs(position, self.item) for position in chosen))
        if self.most is None:
            return placed
        last = max(chosen, default=-1) + 1
        free = tuple(
            ANYTHING if position < self.start or position in chosen else opposite(self.item)
            for position in range(max(last, self.start))
        )
        return all_of(placed, Items(free, opposite(self.item)))


@dataclass(frozen=True, slots=True)
class Unique(Atom):
    def negated(self) -> Formula:
        return Lost("no mask enforces that a list repeats an item", "no uniqueItems below 'not'")

    def narrow(self, lists: Lists, is_empty: Emptiness) -> Lists | None:
        return replace(lists, is_unique=True)
