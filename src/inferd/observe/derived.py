"""The text of derived aliases: sums of series, added up anew for every page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from inferd.observe.aliases import Derived, Labels, Part, shown_labels
from inferd.observe.series import Distribution, Store, Value, head, line_begin, number, open_head

VersionOf = Callable[[str], tuple[str, str]]
"""The name and the version in KServe v2 of a model's entry."""


class _Members(NamedTuple):
    """Series that are added up, each with the place of its sum."""

    sign: int
    values: list[tuple[int, Value]]
    counts: list[tuple[int, Distribution]]  # of which the number of values is added
    totals: list[tuple[int, Distribution]]  # of which the sum of values is added


class DerivedLines:
    """The lines of one alias. Which series belong to which line is found again only when series came or went."""

    def __init__(self, store: Store, alias: Derived, version_of: VersionOf) -> None:
        self.alias = alias
        self._store = store
        self._version_of = version_of
        self._arranged_at = -1  # the number of series that had come or gone
        self._members: list[_Members] = []
        self._others: list[_Members] = []  # that are added up where the sum of the members is 0
        self._places: list[int] = []  # of each sum, its line
        self._begins: list[str] = []  # of each line

    def lines(self) -> list[str]:
        """The line of each series of the alias."""
        alias = self.alias
        changes = sum([self._store.num_arrangements(part.of) for part in (*alias.parts, *alias.otherwise)])
        if changes != self._arranged_at:
            self._arranged_at = changes
            self._arrange()
        sums = self._sums(self._members)
        if alias.otherwise:
            sums = [one if one > 0 else other for one, other in zip(sums, self._sums(self._others), strict=True)]
        values = [0.0] * len(self._begins)
        for place, one in zip(self._places, sums, strict=True):
            values[place] += one * alias.scale
        return [f"{begin}{number(value)}\n" for begin, value in zip(self._begins, values, strict=True)]

    def _arrange(self) -> None:
        alias = self.alias
        groups: dict[Labels, int] = {}  # the values of the labels that are kept, with the place of their sum
        self._members = [self._members_of(part, groups) for part in alias.parts]
        self._others = [self._members_of(part, groups) for part in alias.otherwise]
        shown: dict[Labels, int] = {}
        self._places = [shown.setdefault(shown_labels(alias, group, self._version_of), len(shown)) for group in groups]
        self._begins = [line_begin(alias.name, alias.labels, labels) for labels in shown]

    def _members_of(self, part: Part, groups: dict[Labels, int]) -> _Members:
        kept = [part.of.labels.index(label) for label in self.alias.by]
        where = [(part.of.labels.index(label), value) for label, value in part.where]

        def place_of(labels: Labels) -> int | None:
            if all(labels[at] == wanted for at, wanted in where):
                return groups.setdefault(tuple([labels[at] for at in kept]), len(groups))
            return None

        members = _Members(part.sign, [], [], [])
        if not part.sample:
            for labels, one in self._store.values_of(part.of):
                if (place := place_of(labels)) is not None:
                    members.values.append((place, one))
        else:
            chosen = members.counts if part.sample == "_count" else members.totals
            for labels, distribution in self._store.distributions_of(part.of):
                if (place := place_of(labels)) is not None:
                    chosen.append((place, distribution))
        return members

    def _sums(self, parts: list[_Members]) -> list[float]:
        sums = [0.0] * len(self._places)
        for sign, values, counts, totals in parts:
            for place, value in values:
                sums[place] += sign * value.value
            for place, one in counts:
                sums[place] += sign * one.count
            for place, one in totals:
                sums[place] += sign * one.total
        return sums


def derived_texts(aliases: Sequence[DerivedLines], is_open: bool) -> Iterator[bytes]:
    """The lines of each name, with its description. Aliases of one name stand side by side."""
    for name, alike in groupby(aliases, key=lambda lines: lines.alias.name):
        rows = list(alike)
        first = rows[0].alias
        made = head(name, first.kind, first.help) if not is_open else open_head(name, first.kind, first.help)
        yield made + "".join([line for row in rows for line in row.lines()]).encode()
