"""Regular expressions of schemas: what the masks read, which texts match, and complements of finite sets of texts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

import jsonschema_rs

from inferd.structured import ecma, regex
from inferd.structured.classes import CLASS
from inferd.structured.faults import Fault, place
from inferd.structured.schema import finite

_LONGEST_SHOWN = 80  # characters of a pattern in a message


def unreadable(pattern: str) -> str | None:
    """The construct of a pattern that no mask can enforce; ``None`` where there is none."""
    found = ecma.unwritable(pattern)
    return None if found is None else found[1]


def is_readable(pattern: str) -> bool:
    """Whether the validators read the pattern at all."""
    try:
        _validator(pattern)
    except jsonschema_rs.ValidationError:
        return False
    return True


def fault_of(pattern: str) -> tuple[str, str]:
    """What is wrong with a pattern that is not readable, and what is accepted instead."""
    problem = f"{shown(pattern)} is too large, or no regular expression"
    remedy = "the syntax of ECMA 262 without look-around, and smaller numbers of repetitions"
    return misread(pattern) or (problem, remedy)


def misread(pattern: str) -> tuple[str, str] | None:
    """What the pattern has that is not of ECMA 262, so that the masks and the validators might read it in different
    ways, and what is accepted instead; ``None`` where there is nothing."""
    try:
        regex.check(pattern, in_ecma=True)
    except Fault as fault:
        where = place(pattern, fault.offset)
        return f"the pattern {shown(pattern)} cannot be read {where}: {fault.problem}", fault.remedy
    return None


def shown(pattern: str) -> str:
    """A pattern in a message."""
    return repr(pattern if len(pattern) <= _LONGEST_SHOWN else f"{pattern[:_LONGEST_SHOWN]}...")


def matches(pattern: str, text: str) -> bool:
    return _validator(pattern).is_valid(text)


@lru_cache(512)
def _validator(pattern: str) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator({"pattern": pattern})


def for_masks(pattern: str) -> str:
    """The pattern as the mask engine reads it. White space is what every dialect of regular expressions calls so:
    U+0085 and U+FEFF are white space in one of two dialects, and stand for neither ``\\s`` nor ``\\S``. In a class
    ``[``, ``&&``, ``--`` and ``~~`` are characters, as in ECMA 262, and no operations on classes.

    Classes have no control character that is never written. With them the engine would take the spelling of a quotation
    mark or a backslash for one of their members."""
    return _PIECE.sub(lambda found: _piece(found[0]), pattern)


_PIECE = re.compile(rf"{CLASS}|\\[pP](?:\{{[^}}]*+\}}|.)|\\.|.", re.DOTALL)
_MEMBER = re.compile(r"\\.|--|.", re.DOTALL)
_WHITE = {r"\s": r"[ \t\n\f\r]", r"\S": r"[^\s\uFEFF]"}
_IN_CLASS = {r"\s": r" \t\n\f\r", r"\S": r"[^\s\uFEFF]"}
_IN_NEGATED_CLASS = {r"\s": r"\s\uFEFF", r"\S": r"[^ \t\n\f\r]"}
_LITERAL = {"[": r"\[", "]": r"\]", "&": r"\&", "~": r"\~", "--": r"-\-"}
_UNWRITTEN = r"\x00-\x07\x0B\x0E-\x1F"
_MAY_HAVE_CONTROLS = re.compile(r"[\\\x00-\x1f]")


def _piece(text: str) -> str:
    if text[0] == "[":
        return _class(text)
    if text.startswith(("\\p", "\\P")):
        return f"[{text}&&[^{_UNWRITTEN}]]"
    return _WHITE.get(text, text)


def _class(text: str) -> str:
    """A class of characters, with its brackets."""
    start = "[^" if text.startswith("[^") else "["
    white = _IN_NEGATED_CLASS if start == "[^" else _IN_CLASS
    members = _MEMBER.findall(text[len(start) : -1])
    if members and members[-1] == "-":
        members[-1] = r"\-"  # what is written behind it would make it a range
    written = "".join(white.get(each) or _LITERAL.get(each, each) for each in members)
    if start == "[^":
        return f"[^{written}{_UNWRITTEN}]"
    return f"[[{written}]&&[^{_UNWRITTEN}]]" if _MAY_HAVE_CONTROLS.search(text) else f"[{written}]"


def is_universal(pattern: str) -> bool:
    """Whether every text matches, told from the pattern's form: what matches the empty text without asking for an end
    matches at the start of each text."""
    return not any(end in pattern for end in ("$", r"\z", r"\Z")) and matches(pattern, "")


def of_length(least: int, most: int | None) -> str:
    """The pattern of the texts of some lengths."""
    return f"^(?s:.{{{least},{'' if most is None else most}}})$"


def of_others(texts: Iterable[str]) -> str:
    """The pattern of every text that is none of these."""
    return f"^(?:{_others(sorted(set(texts)))})$"


@lru_cache(512)
def texts_of(pattern: str) -> tuple[str, ...] | None:
    """All texts that match, where they are few; None where they are many or not known."""
    found = finite.texts(pattern)
    return None if found is None else tuple(text for text in found if matches(pattern, text))


def of_unlike(pattern: str) -> str | None:
    """The pattern of the texts that do not match; ``None`` where none is known here."""
    literal = re.fullmatch(r"\^([\w \-/:@]*)(\$?)", pattern)
    if literal is None:
        return None
    text, end = literal.groups()
    return of_others([text]) if end else f"^(?:{_without_start(text)})$"


def of_texts(texts: Iterable[str]) -> str:
    return f"^(?:{'|'.join(map(_literal, texts))})$"


def _others(rests: list[str]) -> str:
    """What may follow where the texts still possible are ``rests``."""
    by_first: dict[str, list[str]] = {}
    for rest in rests:
        if rest:
            by_first.setdefault(rest[0], []).append(rest[1:])
    ways = [] if "" in rests else [""]
    if by_first:
        ways.append(f"[^{''.join(map(_member, by_first))}](?s:.*)")
    else:
        ways.append("(?s:.+)")
    ways.extend(f"{_literal(first)}(?:{_others(following)})" for first, following in by_first.items())
    return "|".join(ways)


def _without_start(text: str) -> str:
    """The texts that do not begin with ``text``."""
    if not text:
        return "[^\\s\\S]"
    return f"|[^{_member(text[0])}](?s:.*)|{_literal(text[0])}(?:{_without_start(text[1:])})"


def _literal(text: str) -> str:
    return "".join(f"\\{c}" if c in r"\.+*?()|[]{}^$-/" else c if c.isprintable() else _code(c) for c in text)


def _member(character: str) -> str:
    if character in r"\]^-[&~":
        return f"\\{character}"
    return character if character.isprintable() else _code(character)


def _code(character: str) -> str:
    return f"\\u{ord(character):04X}" if ord(character) < 0x10000 else character
