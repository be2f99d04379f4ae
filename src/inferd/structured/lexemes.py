"""The parts of a grammar in GBNF, and which of its words the mask engine's lexer would read too far.

The engine reads a text as words: texts, characters of classes, and rules that are terminals. At each place it follows
all words that may come next, and goes on for as long as one of them does. Where a word ends and the next one may begin
with a character with which another word goes on, the sentence would be lost. Those other words have to be read as
smaller ones. Words of one character each lose nothing.

The analysis knows no counts and no places: it may name a word that loses nothing, and misses none. Pure functions,
whose work is bounded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

MOST_PLACES: Final = 20_000  # characters of all words, with their rules written out
MOST_WORK: Final = 300_000  # places that are looked at
DEEPEST: Final = 200  # expressions within each other, with the rules of words written out

Ranges = tuple[tuple[int, int], ...]
"""Codes of characters, from the first to the last of each range."""


class Text(NamedTuple):
    text: str


class OneOf(NamedTuple):
    """A character of a class, as the mask engine reads it."""

    written: str
    ranges: Ranges


class Reference(NamedTuple):
    name: str
    offset: int


class InOrder(NamedTuple):
    parts: tuple[Expression, ...]


class Ways(NamedTuple):
    ways: tuple[Expression, ...]


class Repeated(NamedTuple):
    part: Expression
    sign: str  # as it is written
    least: int
    most: int | None


Expression = Text | OneOf | Reference | InOrder | Ways | Repeated
Word = Text | OneOf | str
"""What the lexer reads as one: a text, a character, or the terminal of this name."""


def references(expression: Expression) -> Iterator[Reference]:
    match expression:
        case Reference():
            yield expression
        case InOrder(parts) | Ways(parts):
            for part in parts:
                yield from references(part)
        case Repeated(part):
            yield from references(part)


class Division(NamedTuple):
    """What is read as smaller words: rules that could be terminals, and texts, character by character."""

    rules: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()


def division(rules: Mapping[str, Expression], terminals: frozenset[str]) -> Division:
    """What must be read as smaller words so that no sentence is lost. ``terminals``: the rules that can be words."""
    found = Division()
    while True:
        try:
            longer = _Analysis(rules, terminals - found.rules, found.texts).read_too_far()
        except _TooLargeError:
            texts = {part.text for rule in rules.values() for part in _leaves(rule) if isinstance(part, Text)}
            return Division(terminals, frozenset(texts))
        if not longer:
            return found
        names = {word for word in longer if isinstance(word, str)}
        texts = {word.text for word in longer if isinstance(word, Text)}
        found = Division(found.rules | names, found.texts | texts)


class _TooLargeError(Exception):
    pass


def _leaves(expression: Expression) -> Iterator[Text | OneOf | Reference]:
    match expression:
        case InOrder(parts) | Ways(parts):
            for part in parts:
                yield from _leaves(part)
        case Repeated(part):
            yield from _leaves(part)
        case _:
            yield expression


class _Alphabet:
    """The characters of a grammar in groups of those that no part of it tells apart. A set of characters is a number
    with a bit for each group."""

    def __init__(self, leaves: Iterable[Text | OneOf | Reference]) -> None:
        starts = {0}
        for leaf in leaves:
            for first, last in _ranges_of(leaf):
                starts |= {first, last + 1}
        self._starts = sorted(starts)

    def set_of(self, ranges: Ranges) -> int:
        found = 0
        for first, last in ranges:
            begin, end = bisect_left(self._starts, first), bisect_right(self._starts, last)
            found |= (1 << end) - (1 << begin)
        return found


def _ranges_of(leaf: Text | OneOf | Reference) -> Ranges:
    match leaf:
        case OneOf(_, ranges):
            return ranges
        case Text(text):
            return tuple((ord(character), ord(character)) for character in text)
    return ()


@dataclass(slots=True)
class _Shape:
    """The characters of an expression one by one: where it begins and ends, as sets of places."""

    may_be_empty: bool
    first: int
    last: int


class _Analysis:
    """Of one way to read a grammar as words."""

    def __init__(self, rules: Mapping[str, Expression], terminals: frozenset[str], texts: frozenset[str]) -> None:
        self._rules = {name: rule for name, rule in rules.items() if name not in terminals}
        self._definitions = rules
        self._terminals = terminals
        self._texts = texts
        self._work = 0
        self._alphabet = _Alphabet(leaf for rule in rules.values() for leaf in _leaves(rule))
        # By place: its characters, the places that may come next, as a set, and its word.
        self._characters: list[int] = []
        self._next: list[int] = []
        self._owner: list[Word] = []
        self._known_after: dict[int, int] = {}
        self._words: dict[Word, _Shape] = {}
        for rule in self._rules.values():
            for word in self._words_of(rule):
                if word not in self._words:
                    expression = self._definitions[word] if isinstance(word, str) else word
                    self._words[word] = self._shape(expression, word)

    def _words_of(self, expression: Expression) -> Iterator[Word]:
        """The words of an expression, but for references to rules that are none."""
        for leaf in _leaves(expression):
            if isinstance(leaf, Reference):
                if leaf.name in self._terminals:
                    yield leaf.name
            elif isinstance(leaf, Text):
                yield from self._parts(leaf)
            else:
                yield leaf

    def _parts(self, text: Text) -> Iterator[Text]:
        if text.text in self._texts:
            yield from map(Text, text.text)
        elif text.text:
            yield text

    # Places

    def _shape(self, expression: Expression, word: Word, depth: int = 0) -> _Shape:
        if depth > DEEPEST:
            raise _TooLargeError
        match expression:
            case Text(text):
                return self._in_order([self._place(((ord(each), ord(each)),), word) for each in text])
            case OneOf(_, ranges):
                return self._place(ranges, word)
            case Reference(name):
                return self._shape(self._definitions[name], word, depth + 1)
            case InOrder(parts):
                return self._in_order([self._shape(part, word, depth + 1) for part in parts])
            case Ways(ways):
                found = _Shape(may_be_empty=False, first=0, last=0)
                for way in ways:
                    shape = self._shape(way, word, depth + 1)
                    found.may_be_empty |= shape.may_be_empty
                    found.first |= shape.first
                    found.last |= shape.last
                return found
            case Repeated(part, _, least, most):
                if most == 0:
                    return _Shape(may_be_empty=True, first=0, last=0)
                shape = self._shape(part, word, depth + 1)
                if most != 1:
                    self._join(shape.last, shape.first)
                return _Shape(shape.may_be_empty or least == 0, shape.first, shape.last)

    def _place(self, ranges: Ranges, word: Word) -> _Shape:
        place = len(self._characters)
        if place >= MOST_PLACES:
            raise _TooLargeError
        self._characters.append(self._alphabet.set_of(ranges))
        self._next.append(0)
        self._owner.append(word)
        return _Shape(may_be_empty=False, first=1 << place, last=1 << place)

    def _in_order(self, shapes: list[_Shape]) -> _Shape:
        found = _Shape(may_be_empty=True, first=0, last=0)
        for shape in shapes:
            self._join(found.last, shape.first)
            found.first |= shape.first if found.may_be_empty else 0
            found.last = shape.last | (found.last if shape.may_be_empty else 0)
            found.may_be_empty &= shape.may_be_empty
        return found

    def _join(self, ends: int, begins: int) -> None:
        for place in _members(ends):
            self._next[place] |= begins

    # What may follow a word

    def _begins(self) -> tuple[dict[str, int], dict[str, bool]]:
        """The first characters of each rule that is no word, and whether it may be empty."""
        first, empty = dict.fromkeys(self._rules, 0), dict.fromkeys(self._rules, False)
        users: dict[str, list[str]] = {}
        for name, rule in self._rules.items():
            for reference in references(rule):
                users.setdefault(reference.name, []).append(name)
        waiting = dict.fromkeys(self._rules)
        while waiting:
            name, _ = waiting.popitem()
            self._count(1)
            begin = self._begin(self._rules[name], first, empty)
            if begin != (first[name], empty[name]):
                first[name], empty[name] = begin
                waiting.update(dict.fromkeys(users.get(name, ())))
        return first, empty

    def _begin(self, expression: Expression, first: dict[str, int], empty: dict[str, bool]) -> tuple[int, bool]:
        match expression:
            case Reference(name) if name in self._rules:
                return first[name], empty[name]
            case Reference(name):
                return self._characters_at(self._words[name].first), self._words[name].may_be_empty
            case Text(text):
                return self._alphabet.set_of(_ranges_of(Text(text[:1]))), not text
            case OneOf(_, ranges):
                return self._alphabet.set_of(ranges), False
            case Ways(ways):
                begins = [self._begin(way, first, empty) for way in ways]
                return _union(begin for begin, _ in begins), any(is_empty for _, is_empty in begins)
            case InOrder(parts):
                found = 0
                for part in parts:
                    begin, is_empty = self._begin(part, first, empty)
                    found |= begin
                    if not is_empty:
                        return found, False
                return found, True
            case Repeated(part, _, least, most):
                begin, is_empty = self._begin(part, first, empty)
                return (begin, is_empty or least == 0) if most != 0 else (0, True)

    def _characters_at(self, places: int) -> int:
        return _union(self._characters[place] for place in _members(places))

    def _following(self) -> dict[Word, int]:
        """The characters that may stand behind each word."""
        first, empty = self._begins()
        behind_rules = dict.fromkeys(self._rules, 0)
        behind: dict[Word, int] = dict.fromkeys(self._words, 0)

        def go(expression: Expression, follow: int) -> None:
            """``follow``: the characters that may stand behind the expression."""
            match expression:
                case Reference(name) if name in self._rules:
                    if follow & ~behind_rules[name]:
                        behind_rules[name] |= follow
                        waiting[name] = None
                case Reference(name):
                    behind[name] |= follow
                case Text():
                    for word in reversed([*self._parts(expression)]):
                        behind[word] |= follow
                        follow = self._characters_at(self._words[word].first)
                case OneOf():
                    behind[expression] |= follow
                case Ways(ways):
                    for way in ways:
                        go(way, follow)
                case InOrder(parts):
                    for part in reversed(parts):
                        go(part, follow)
                        begin, is_empty = self._begin(part, first, empty)
                        follow = begin | (follow if is_empty else 0)
                case Repeated(part, _, _, most):
                    if most != 0:
                        again = 0 if most == 1 else self._begin(part, first, empty)[0]
                        go(part, follow | again)

        waiting = dict.fromkeys(self._rules)
        while waiting:
            name, _ = waiting.popitem()
            self._count(1)
            go(self._rules[name], behind_rules[name])
        return behind

    def _count(self, work: int) -> None:
        self._work += work
        if self._work > MOST_WORK:
            raise _TooLargeError

    # Which words go on where another one ends

    def _after(self, places: int) -> int:
        """The places that may come behind one of these."""
        known = self._known_after.get(places)
        if known is None:
            members = [*_members(places)]
            self._count(len(members))
            known = self._known_after[places] = _union(self._next[each] for each in members)
        self._count(1)
        return known

    def read_too_far(self) -> set[Word]:
        """The words of several characters that go on where another word, or a shorter one of the same, has ended."""
        following = self._following()
        by_group: dict[int, int] = {}  # the places of each group of characters
        for place, characters in enumerate(self._characters):
            for group in _members(characters):
                by_group[group] = by_group.get(group, 0) | 1 << place
        overlap: dict[int, int] = {}  # the places that share a character with a set of characters

        def sharing(characters: int) -> int:
            if characters not in overlap:
                overlap[characters] = _union(by_group.get(group, 0) for group in _members(characters))
            return overlap[characters]

        begins = _union(shape.first for shape in self._words.values())
        found: set[Word] = set()
        for word, shape in self._words.items():
            alive: dict[int, int] = {}  # by place of this word: the places of words that have read the same
            waiting = [(place, begins & sharing(self._characters[place])) for place in _members(shape.first)]
            while waiting:
                place, same = waiting.pop()
                known = alive.get(place, 0)
                new = same & ~known
                if not new:
                    continue
                alive[place] = known | new
                after = self._after(new)
                if shape.last >> place & 1:
                    beyond = after & sharing(following[word])
                    found.update(self._owner[each] for each in _members(beyond))
                for following_place in _members(self._next[place]):
                    waiting.append((following_place, after & sharing(self._characters[following_place])))
        return found


def _members(places: int) -> Iterator[int]:
    while places:
        lowest = places & -places
        yield lowest.bit_length() - 1
        places ^= lowest


def _union(sets: Iterable[int]) -> int:
    found = 0
    for each in sets:
        found |= each
    return found
