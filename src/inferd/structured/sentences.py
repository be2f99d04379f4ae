"""Which parts of a grammar have a sentence, a text that ends. Knows nothing of notations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

Part = int
"""A part of a grammar: a text, a sequence, alternatives or a rule."""

TEXT: Final[Part] = 0
"""Any text."""


class Sentences:
    """The parts of one grammar, and the least set of those that have a sentence.

    A sequence has one if each of its parts has, and alternatives if one of them has. Each part is looked at once for
    each of its uses, so that the work is linear.
    """

    def __init__(self) -> None:
        self._num_missing = [0]  # parts without which it has no sentence, by part
        self._parts: list[list[Part]] = [[]]
        self._users: list[list[Part]] = [[]]

    def sequence(self, parts: Sequence[Part]) -> Part:
        needed = [part for part in parts if part != TEXT]
        if len(needed) < 2:
            return needed[0] if needed else TEXT
        return self._made(needed, len(needed))

    def alternatives(self, ways: Sequence[Part] = ()) -> Part:
        """A part that has a sentence if one of the ways has. More of them may be added."""
        return self._made(ways, 1)

    def add(self, alternatives: Part, way: Part) -> None:
        self._parts[alternatives].append(way)
        self._users[way].append(alternatives)

    def _made(self, parts: Sequence[Part], num_missing: int) -> Part:
        made = len(self._parts)
        self._num_missing.append(num_missing)
        self._parts.append([])
        self._users.append([])
        for part in parts:
            self.add(made, part)
        return made

    def endless(self) -> set[Part]:
        """The parts without a sentence."""
        missing = list(self._num_missing)
        found = [part for part, number in enumerate(missing) if not number]
        for part in found:
            for user in self._users[part]:
                missing[user] -= 1
                if not missing[user]:
                    found.append(user)
        return set(range(len(missing))).difference(found)

    def reason(self, part: Part) -> list[Part]:
        """Parts of an endless one, each within the one before, that have no sentence: up to one that has no parts, or
        that stands in the list already."""
        endless, path = self.endless(), [part]
        seen = {part}
        while True:
            within = next((each for each in self._parts[path[-1]] if each in endless), None)
            if within is None:
                return path
            path.append(within)
            if within in seen:
                return path
            seen.add(within)
