"""Grammars in GBNF, llama.cpp's notation, as grammars in Lark.

A rule that refers to no rule but such ones is a terminal, which the mask engine reads as one word, as far as it goes.
So a grammar without recursion is one terminal, and every way to read a text is followed. In a grammar with recursion,
words that would take what belongs to the next one are read as smaller ones, so that no sentence is lost. Pure functions
of text, bounded in depth.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final, NamedTuple, NoReturn

from inferd.structured import endless, lark, regex
from inferd.structured.classes import LARGEST_CODE
from inferd.structured.faults import Fault
from inferd.structured.lexemes import (
    Division,
    Expression,
    InOrder,
    OneOf,
    Ranges,
    Reference,
    Repeated,
    Text,
    Ways,
    division,
    references,
)
from inferd.structured.sentences import TEXT, Sentences
from inferd.structured.sentences import Part as Sentence

DEEPEST: Final = 100  # parentheses within each other
MOST_REPEATS: Final = 100_000
MOST_WAYS: Final = 10_000  # of one rule or group
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_SHORT: Final = {"n": "\n", "r": "\r", "t": "\t"}
_ITSELF: Final = '"\\[]-^'
_REPETITIONS: Final[Mapping[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_ANY: Final = OneOf("(?s:.)", ((0, LARGEST_CODE),))
_DEEPEST_IN_LARK: Final = 20  # groups within each other; the mask engine takes a few more
_BLANK: Final = " \t"
_LINE_ENDS: Final = "\r\n"


_EMPTY: Final = Text("")


class _Body(NamedTuple):
    """What a rule, a sequence or an item is."""

    expression: Expression
    sentence: Sentence


class _Rule(NamedTuple):
    body: Expression
    offset: int


def to_lark(text: str) -> str:
    """The same grammar in Lark, with the rule ``start`` for ``root``. Raises ``Fault``."""
    parser = _Parser(text)
    rules = parser.rules()
    for rule in rules.values():
        for name, offset in references(rule.body):
            if name not in rules:
                remedy = f"define it, as in '{name} ::= \"text\"', or write a text in double quotation marks"
                raise Fault(text, offset, f"the rule {name!r} is not defined", remedy)
    if "root" not in rules:
        raise Fault(text, 0, "there is no rule 'root'", "define it: its sentences are the answers")
    parser.check_ends(rules)
    return _written({name: rule.body for name, rule in rules.items()})


def _written(rules: dict[str, Expression]) -> str:
    """The rules in Lark."""
    terminals = _terminals(rules)
    divided = division(rules, terminals) if "root" not in terminals else Division()
    words = {name: f"T{number}" for number, name in enumerate(rules) if name in terminals}
    names = {name: f"r{number}" for number, name in enumerate(rules)}
    whole = {name: word for name, word in words.items() if name not in divided.rules}
    lines = [f"{word}: {_lark(rules[name], words, frozenset())}" for name, word in words.items()]
    if "root" in terminals:
        return "\n".join([*lines, f"start: {words['root']}"])
    names = {**names, "root": "start", **whole}
    lines += [
        f"{names[name]}: {_lark(rule, names, divided.texts)}" for name, rule in rules.items() if name not in whole
    ]
    return "\n".join([*lines, lark.UNFORCED])


def _terminals(rules: dict[str, Expression]) -> frozenset[str]:
    """A rule is a terminal as it would have a sentence if all of its references stood in one sequence."""
    known = Sentences()
    parts = {name: known.alternatives() for name in rules}
    for name, part in parts.items():
        known.add(part, known.sequence([parts[each.name] for each in references(rules[name])]))
    others = known.endless()
    return frozenset(name for name, part in parts.items() if part not in others)


def _lark(expression: Expression, names: Mapping[str, str], divided: frozenset[str]) -> str:
    """An expression in Lark, where rules have these names. ``divided``: the texts that are no words as a whole."""
    match expression:
        case Text(text):
            if text in divided:
                return f"({' '.join(map(_quoted, text))})"
            return _quoted(text)
        case OneOf(written):
            return f"/{written}/"
        case Reference(name):
            return names[name]
        case InOrder(parts):
            pieces = [(part, _lark(part, names, divided)) for part in parts]
            return " ".join(f"({each})" if isinstance(part, Ways) else each for part, each in pieces)
        case Ways(ways):
            return " | ".join(_lark(way, names, divided) for way in ways)
        case Repeated(part, sign):
            inner = _lark(part, names, divided)
            return f"({inner}){sign}" if isinstance(part, Ways | InOrder) else f"{inner}{sign}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class _Parser:
    __slots__ = ("_at", "_empty", "_names", "_rules", "_sentences", "_text")

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._rules: dict[str, _Rule] = {}
        self._sentences = Sentences()
        self._names: dict[str, Sentence] = {}  # of rules
        self._empty: dict[Sentence, int] = {}  # classes without a character, and where they are

    def rules(self) -> dict[str, _Rule]:
        rules = self._rules
        self._skip(lines=True)
        while self._at < len(self._text):
            offset, name = self._at, self._name()
            if not name:
                self._fail("a rule begins with its name", "write 'name ::= what it is' on a line of its own")
            self._skip(lines=False)
            if not self._text.startswith("::=", self._at):
                self._fail(f"'::=' is expected behind {name!r}", "write 'name ::= what it is' on a line of its own")
            self._at += 3
            if name in rules:
                self._fail(f"the rule {name!r} is defined twice", "define it once, with '|' between its ways", offset)
            self._skip(lines=True)
            body = self._alternatives(0)
            rules[name] = _Rule(body.expression, offset)
            self._sentences.add(self._named(name), body.sentence)
            if self._peek() not in ("", *_LINE_ENDS):
                self._fail_item()
            self._skip(lines=True)
        return rules

    def check_ends(self, rules: dict[str, _Rule]) -> None:
        """Raise ``Fault`` where no text that ends is a sentence of the rules."""
        places = {self._names[name]: (name, rule.offset) for name, rule in rules.items() if name in self._names}
        endless.check(self._text, self._sentences, self._names["root"], places, self._empty)

    def _named(self, name: str) -> Sentence:
        if name not in self._names:
            self._names[name] = self._sentences.alternatives()
        return self._names[name]

    def _fail(self, problem: str, remedy: str, offset: int | None = None) -> NoReturn:
        raise Fault(self._text, self._at if offset is None else offset, problem, remedy)

    def _fail_item(self) -> NoReturn:
        if self._peek() == ")":
            self._fail("')' closes no group", "leave it out, or open a group before it")
        if self._peek() in ("<", "!"):
            self._fail("tokens by name or number are not supported", "write their text in double quotation marks")
        if self._peek() in ("*", "+", "?", "{"):
            self._fail(f"'{self._peek()}' has nothing to repeat before it", "write what is repeated before it")
        remedy = "a text in \"...\", characters in [...], the name of a rule, a group in (...), or '|'"
        self._fail("this has no meaning here", remedy)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, *, lines: bool) -> None:
        while (character := self._peek()) and (character in _BLANK or character == "#" or character in _LINE_ENDS):
            if character == "#":
                while self._peek() not in ("", *_LINE_ENDS):
                    self._at += 1
            elif character in _LINE_ENDS and not lines:
                return
            else:
                self._at += 1

    def _name(self) -> str:
        start = self._at
        while self._peek().isalnum() or self._peek() in ("-", "_"):
            self._at += 1
        return self._text[start : self._at]

    def _alternatives(self, depth: int) -> _Body:
        first = self._sequence(depth)
        ways, sentences = [first.expression], [first.sentence]
        while self._peek() == "|":
            if len(sentences) >= MOST_WAYS:
                self._fail(f"there are over {MOST_WAYS} alternatives", "name parts of them as rules")
            self._at += 1
            self._skip(lines=True)
            way = self._sequence(depth)
            ways.append(way.expression)
            sentences.append(way.sentence)
        return first if len(ways) == 1 else _Body(Ways(tuple(ways)), self._sentences.alternatives(sentences))

    def _sequence(self, depth: int) -> _Body:
        parts: list[Expression] = []
        sentences: list[Sentence] = []
        while (item := self._item(depth)) is not None:
            expression, sentence = item
            self._skip(lines=depth > 0)
            while (repetition := self._repetition()) is not None:
                sign, least, most = repetition
                if isinstance(expression, Repeated):
                    expression = self._apart(expression)
                is_empty = most == 0 or expression == _EMPTY
                expression = _EMPTY if is_empty else Repeated(expression, sign, least, most)
                sentence = TEXT if least == 0 else sentence
                self._skip(lines=depth > 0)
            parts.append(expression)
            sentences.append(sentence)
        expression = InOrder(tuple(parts)) if len(parts) != 1 else parts[0]
        return _Body(expression if parts else _EMPTY, self._sentences.sequence(sentences))

    def _item(self, depth: int) -> _Body | None:
        """The next item; None: there is none."""
        offset, character = self._at, self._peek()
        if character == '"':
            return _Body(Text(self._literal()), TEXT)
        if character == "[":
            return self._class()
        if character == ".":
            self._at += 1
            return _Body(_ANY, TEXT)
        if character == "(":
            if depth >= DEEPEST:
                self._fail(f"more than {DEEPEST} parentheses stand within each other", "name parts of it as rules")
            self._at += 1
            self._skip(lines=True)
            body = self._alternatives(depth + 1)
            if self._peek() != ")":
                if self._peek():
                    self._fail_item()
                self._fail("the group is not closed", "add ')' behind it", offset)
            self._at += 1
            if depth % _DEEPEST_IN_LARK == _DEEPEST_IN_LARK - 1:
                return _Body(self._apart(body.expression), body.sentence)
            return body
        name = self._name()
        return _Body(Reference(name, offset), self._named(name)) if name else None

    def _apart(self, expression: Expression) -> Reference:
        """The same as a rule of its own, with a name that no other has."""
        name = f"({len(self._rules)})"
        self._rules[name] = _Rule(expression, self._at)
        return Reference(name, self._at)

    def _repetition(self) -> tuple[str, int, int | None] | None:
        """The repetition behind an item: its sign, and how often the item stands there at least and at most. None: there
        is no repetition, or no limit."""
        offset, sign = self._at, self._peek()
        if sign and sign in _REPETITIONS:
            self._at += 1
            return sign, *_REPETITIONS[sign]
        if sign != "{":
            return None
        end = self._text.find("}", offset)
        least, comma, most = self._text[offset + 1 : max(end, offset + 1)].partition(",")
        least, most = least.strip(), most.strip()
        if end < 0 or not least.isdecimal() or not (most.isdecimal() or not most):
            self._fail("'{' begins no number of repetitions", "write '{2}', '{2,}' or '{2,5}'")
        if max(len(least), len(most)) > 9 or max(int(least), int(most or "0")) > MOST_REPEATS:
            self._fail("the number of repetitions is too large", f"write at most {MOST_REPEATS}")
        if most and int(least) > int(most):
            self._fail("the repetition is empty", "write the smaller number first")
        self._at = end + 1
        if not comma:
            return f"{{{int(least)}}}", int(least), int(least)
        return f"{{{int(least)},{int(most) if most else ''}}}", int(least), int(most) if most else None

    def _literal(self) -> str:
        offset = self._at
        self._at += 1
        characters: list[str] = []
        while (character := self._peek()) != '"':
            if not character:
                self._fail("the text is not closed", "add '\"' behind it; '\\n' is a line feed", offset)
            characters.append(self._character())
        self._at += 1
        return "".join(characters)

    def _class(self) -> _Body:
        offset = self._at
        self._at += 1
        is_negated = self._peek() == "^"
        self._at += is_negated
        members: list[str] = []
        ranges: list[tuple[int, int]] = []
        while (character := self._peek()) != "]":
            if not character:
                self._fail("the characters are not closed", "add ']' behind them; '\\]' is the character", offset)
            begun, first = self._at, self._character()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._character()
                if first > last:
                    self._fail(f"the range {first!r}-{last!r} is empty", "write the smaller one first", begun)
                members.append(f"{_coded(first)}-{_coded(last)}")
                ranges.append((ord(first), ord(last)))
            else:
                members.append(_coded(first))
                ranges.append((ord(first), ord(first)))
        self._at += 1
        if not members:
            self._fail("there is no character between '[' and ']'", "name at least one, or write '.' for any", offset)
        written, sentence = f"[{'^' if is_negated else ''}{''.join(members)}]", TEXT
        if is_negated and regex.empty_class(written) is not None:
            sentence = self._sentences.alternatives()
            self._empty[sentence] = offset
        return _Body(OneOf(written, _others(ranges) if is_negated else tuple(ranges)), sentence)

    def _character(self) -> str:
        """The character at the place, which may be an escape."""
        start, character = self._at, self._peek()
        self._at += 1
        if character != "\\":
            return character
        letter = self._peek()
        self._at += 1
        if letter in _HEX_DIGITS:
            count = _HEX_DIGITS[letter]
            digits = self._text[self._at : self._at + count]
            try:
                named = chr(int(digits, 16)) if len(digits) == count and digits.isalnum() else ""
            except (ValueError, OverflowError):
                named = ""
            if not named or 0xD800 <= ord(named) <= 0xDFFF:
                self._fail(f"'\\{letter}' needs {count} hexadecimal digits of a character", "write them", start)
            self._at += count
            return named
        if letter in _SHORT:
            return _SHORT[letter]
        if not letter or letter not in _ITSELF:
            remedy = 'one of \\n \\r \\t \\" \\\\ \\[ \\] \\x41 \\u00e9 \\U0001f600'
            self._fail("this escape is unknown", remedy, start)
        return letter


def _others(ranges: list[tuple[int, int]]) -> Ranges:
    """All characters that are in none of the ranges."""
    found, start = [], 0
    for first, last in [*sorted(ranges), (LARGEST_CODE + 1, LARGEST_CODE + 1)]:
        if first > start:
            found.append((start, first - 1))
        start = max(start, last + 1)
    return tuple(found)


def _coded(character: str) -> str:
    """A member of a class in the syntax of the mask engine."""
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):X}}}"
