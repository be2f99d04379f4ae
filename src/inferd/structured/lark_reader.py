"""Reads which parts of a grammar in Lark have a sentence, in llguidance's extension of the notation.

The mask engine reads the grammar itself, and tells what is not well formed. What this reader does not know has a
sentence, so that no grammar is refused because of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from inferd.structured import regex
from inferd.structured.faults import Fault
from inferd.structured.sentences import TEXT, Part, Sentences

SCHEMA: Final = "%json"
_TOKEN: Final = re.compile(
    r"""(?P<skip>(?:[ \t]+|(?:\#|//)[^\n]*+)++)
    |(?P<line>(?:\r?\n)++)
    |(?P<string>"(?:\\.|[^"\\\n])*+"i?)
    |(?P<regex>/(?:\\.|[^/\\])++/[imslux]*)
    |(?P<special><[^<>\s]++>)
    |(?P<grammar>@[\w-]++)
    |(?P<name>!?[_?]?[a-z][_a-z0-9-]*+|_?[A-Z][_A-Z0-9-]*+)
    |(?P<number>[+-]?[0-9][0-9a-fA-FxX.]*?(?=\.\.|[^0-9a-fA-FxX.]))
    |(?P<json>%(?:json|regex|llguidance)\b)
    |(?P<word>%[a-z]++)
    |(?P<sign>->|\.\.|::|[:,.(){}\[\]~|&=_+*?])
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_DEEPEST: Final = 100  # groups within each other; the mask engine takes fewer


class Span(NamedTuple):
    """A piece of the text."""

    first: int
    end: int


class Way(NamedTuple):
    """One of several alternatives."""

    part: Part
    first: int  # with the sign before it, behind the alternative before
    own: int  # without that sign
    end: int


class Reading(NamedTuple):
    """The parts of a grammar."""

    sentences: Sentences
    start: Part
    rules: dict[Part, tuple[str, int]]  # the name of each rule that is no terminal, and where its definition is
    empty: dict[Part, int]  # patterns that no text matches, and where a class without a character is in them
    choices: list[list[Way]]
    grammars: list[tuple[str, int]]  # other grammars that it refers to, and where
    options: list[tuple[Part, Span]]  # what may be left out, with the sign that says so


def read(text: str) -> Reading | None:
    """The parts of a grammar; None: it is not well formed, or has a construct that this reader does not know."""
    try:
        return _Reader(text).read()
    except (_Unknown, RecursionError):
        return None


def schema(text: str) -> int | None:
    """Where a grammar has a schema of its own; None: nowhere. In texts, patterns and comments there is none."""
    try:
        return next((token.offset for token in _tokens(text) if token.text == SCHEMA), None)
    except (_Unknown, RecursionError):
        at = text.find(SCHEMA)
        return None if at < 0 else at


def without_endless(text: str) -> str:
    """The same grammar without the alternatives and options that have no sentence, so that no answer begins one. What
    stands behind them keeps its place."""
    reading = read(text)
    endless = reading.sentences.endless() if reading is not None else set()
    if reading is None or not endless:
        return text
    cut = [(span, _NOTHING) for part, span in reading.options if part in endless]
    for ways in reading.choices:
        kept = next((number for number, way in enumerate(ways) if way.part not in endless), 0)
        if kept:
            cut.append((Span(ways[0].first, ways[kept].own), ""))
        if ways[kept].part not in endless:  # else the alternative around them has no sentence either
            cut += [(Span(way.first, way.end), "") for way in ways[kept + 1 :] if way.part in endless]
    characters = list(text)
    for (first, end), written in sorted(cut, key=lambda each: each[0].end - each[0].first):
        characters[first:end] = written.ljust(end - first)
    return "".join(characters)


_NOTHING: Final = '""'


class _Unknown(Exception):
    """The text is not read any further."""


class _Token(NamedTuple):
    kind: str
    text: str
    offset: int


_END: Final = _Token("end", "", 0)


def _tokens(text: str) -> Iterator[_Token]:
    """Raises _Unknown."""
    at, decoder = 0, json.JSONDecoder()
    while at < len(text):
        found = _TOKEN.match(text, at)
        kind = "other" if found is None else found.lastgroup
        if found is None or kind is None or kind == "other":
            raise _Unknown
        at = found.end()
        if kind == "json":
            try:
                start = at + len(text[at : at + 64]) - len(text[at : at + 64].lstrip())
                _, at = decoder.raw_decode(text, start)
            except ValueError:
                raise _Unknown from None
        if kind != "skip":
            yield _Token(kind, found[0], found.start())


class _Reader:
    """Goes through the tokens once."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text + "\n"))
        self._at = 0
        self._sentences = Sentences()
        self._rules: dict[Part, tuple[str, int]] = {}
        self._choices: list[list[Way]] = []
        self._grammars: list[tuple[str, int]] = []
        self._options: list[tuple[Part, Span]] = []
        self._empty: dict[Part, int] = {}

    def read(self) -> Reading:
        start = self._grammar(0)
        if self._peek() is not _END:
            raise _Unknown
        return Reading(self._sentences, start, self._rules, self._empty, self._choices, self._grammars, self._options)

    def _peek(self, ahead: int = 0) -> _Token:
        place = self._at + ahead
        return self._tokens[place] if place < len(self._tokens) else _END

    def _next(self) -> _Token:
        token = self._peek()
        self._at += 1
        return token

    def _takes(self, sign: str) -> bool:
        token = self._peek()
        if token.text == sign and token.kind == "sign":
            self._at += 1
            return True
        return False

    def _expect(self, sign: str) -> None:
        if not self._takes(sign):
            raise _Unknown

    def _skip_lines(self) -> None:
        while self._peek().kind == "line":
            self._at += 1

    def _grammar(self, depth: int) -> Part:
        """The rules up to the end, or to the brace that closes a grammar within another one. Its start."""
        names: dict[str, Part] = {}
        bodies: list[tuple[Part, Part]] = []
        self._skip_lines()
        while (token := self._peek()) is not _END and not (token.kind == "sign" and token.text == "}"):
            self._at += 1
            if token.kind == "name":
                name = token.text.lstrip("!?")
                is_bounded = self._head()
                body = self._alternatives(names, depth)
                rule = self._named(names, name)
                if not name.isupper():
                    self._rules[rule] = (name, token.offset)
                bodies.append((rule, TEXT if is_bounded else body))
            elif token.text == "%ignore":
                self._alternatives(names, depth)
            elif token.text == "%import":
                self._skip_line()
            elif not token.text.startswith("%llguidance"):
                raise _Unknown
            self._skip_lines()
        defined = {rule for rule, _ in bodies}
        for rule, body in bodies:
            self._sentences.add(rule, body)
        for rule in names.values():
            if rule not in defined:
                self._sentences.add(rule, TEXT)  # imported, or not defined, as the mask engine tells
        return names.get("start", TEXT)

    def _named(self, names: dict[str, Part], name: str) -> Part:
        if name not in names:
            names[name] = self._sentences.alternatives()
        return names[name]

    def _head(self) -> bool:
        """What stands between a name and its colon. Whether the rule ends after some tokens in any case."""
        is_bounded = False
        if self._takes("::"):
            self._expect("_")
        if self._takes("."):
            self._next()
        if self._takes("["):
            while not self._takes("]"):
                is_bounded |= self._next().text == "max_tokens"
                if self._peek().kind in ("line", "end"):
                    raise _Unknown
        self._expect(":")
        return is_bounded

    def _skip_line(self) -> None:
        while self._peek().kind not in ("line", "end"):
            self._at += 1

    def _alternatives(self, names: dict[str, Part], depth: int) -> Part:
        if depth > _DEEPEST:
            raise _Unknown
        ways: list[Way] = []
        first = self._peek().offset
        while not ways or self._takes_bar():
            own = self._peek().offset
            part = self._sequence(names, depth)
            ways.append(Way(part, first, own, self._end()))
            first = self._end()
        if len(ways) == 1:
            return ways[0].part
        self._choices.append(ways)
        return self._sentences.alternatives([way.part for way in ways])

    def _end(self) -> int:
        """Where the last token ends."""
        token = self._tokens[self._at - 1]
        return token.offset + len(token.text)

    def _takes_bar(self) -> bool:
        if self._takes("|"):
            return True
        if self._peek().kind == "line" and self._peek(1).kind == "sign" and self._peek(1).text == "|":
            self._at += 2
            return True
        return False

    def _sequence(self, names: dict[str, Part], depth: int) -> Part:
        """One alternative, which may be several terminals that hold together."""
        parts: list[Part] = []
        while True:
            token = self._peek()
            if token.kind in ("line", "end") or (token.kind == "sign" and token.text in "|)]}"):
                break
            if self._takes("->"):
                self._next()
            elif token.text == "%if":
                self._at += 1
                self._skip_call()
            elif not self._takes("&"):
                parts.append(self._item(names, depth))
        return self._sentences.sequence(parts)

    def _skip_call(self) -> None:
        """A name, and what stands in parentheses behind it."""
        self._next()
        if self._takes("("):
            num_open = 1
            while num_open:
                token = self._next()
                if token.kind in ("line", "end"):
                    raise _Unknown
                num_open += (token.text == "(") - (token.text == ")")

    def _item(self, names: dict[str, Part], depth: int) -> Part:
        first, is_not = self._peek().offset, self._takes("~")
        part = self._value(names, depth)
        may_be_left_out = False
        if self._takes("*") or self._takes("?"):
            may_be_left_out = True
        elif self._takes("~"):
            may_be_left_out = self._is_zero(self._next())
            if self._takes(".."):
                self._next()
        elif self._takes("{"):
            may_be_left_out = self._takes(",") or self._is_zero(self._peek())
            while not self._takes("}"):
                if self._next().kind not in ("number", "sign"):
                    raise _Unknown
        else:
            self._takes("+")
        if may_be_left_out and not is_not:
            self._options.append((part, Span(first, self._end())))
        return TEXT if is_not or may_be_left_out else part

    def _is_zero(self, token: _Token) -> bool:
        return token.kind == "number" and not token.text.strip("+-0")

    def _value(self, names: dict[str, Part], depth: int) -> Part:
        if self._takes("("):
            part = self._alternatives(names, depth + 1)
            self._expect(")")
            return part
        if self._takes("["):
            first = self._tokens[self._at - 1].offset
            part = self._alternatives(names, depth + 1)
            self._expect("]")
            self._options.append((part, Span(first, self._end())))
            return TEXT
        token = self._next()
        if token.kind == "string":
            if self._takes(".."):
                self._next()
            return TEXT
        if token.kind == "regex":
            return self._pattern(token)
        if token.kind == "name":
            return self._reference(names, token)
        if token.text == "%lark":
            self._expect("{")
            part = self._grammar(depth + 1)
            self._expect("}")
            return part
        if token.kind == "grammar":
            self._grammars.append((token.text, token.offset))
        if token.kind in ("special", "grammar", "json"):
            return TEXT
        raise _Unknown

    def _reference(self, names: dict[str, Part], token: _Token) -> Part:
        part = self._named(names, token.text.lstrip("!?"))
        if self._takes("::"):
            if self._peek().kind in ("number", "sign"):
                self._next()
            else:
                self._skip_call()
        return part

    def _pattern(self, token: _Token) -> Part:
        written, _, flags = token.text[1:].rpartition("/")
        if "x" in flags:
            return TEXT  # it may have comments
        try:
            at = regex.empty_class(written)
        except Fault:
            return TEXT
        if at is None:
            return TEXT
        part = self._sentences.alternatives()
        self._empty[part] = token.offset + 1 + at
        return part
