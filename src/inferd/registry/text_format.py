"""Protobuf's text format, as people write it into config.pbtxt, read into a tree and folded into structs.

Follows the language's specification (protobuf.dev/reference/protobuf/textformat-spec) but for extensions and ``Any``.
Knows no message: what fields there are is the structs' to say.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeVar

import msgspec

MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 64

Enum = typing.NewType("Enum", str)
"""A field whose value is a word without quotes."""

S = TypeVar("S", bound=msgspec.Struct)

_BLANK = re.compile(r"(?:[ \t\r\n\f\v]+|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STRING = re.compile(r"\"((?:[^\"\\\n]|\\.)*)\"|'((?:[^'\\\n]|\\.)*)'")
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]+|(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?[fF]?")
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_PLAIN: Final[Mapping[bytes, bytes]] = {
    b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v", b"\\": b"\\", b"'": b"'",
    b'"': b'"', b"?": b"?",
}  # fmt: skip


class TextFormatError(ValueError):
    """What is wrong, with its line."""


class Word(str):
    """A name without quotes: true, TYPE_FP32, inf."""

    __slots__ = ()


class Field(NamedTuple):
    name: str
    value: Value | None  # None: an empty list
    line: int
    is_listed: bool = False  # in brackets


class Message(NamedTuple):
    fields: tuple[Field, ...]


Value = Message | str | int | float


def parse(text: str) -> Message:
    """A document. Raises TextFormatError."""
    if len(text) > MAX_BYTES:
        raise TextFormatError(f"it has {len(text)} characters; expected at most {MAX_BYTES}")
    parser = _Parser(text)
    fields = parser.fields(None, 0)
    return Message(fields)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._skip()

    def _skip(self) -> None:
        match = _BLANK.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _fail(self, what: str) -> TextFormatError:
        line = self._text.count("\n", 0, self._at) + 1
        found = self._text[self._at : self._at + 20].partition("\n")[0]
        return TextFormatError(
            f"line {line}: {what}, but found {found!r}" if found else f"line {line}: {what}, but it ends"
        )

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, sign: str) -> bool:
        if self._peek() != sign or not sign:
            return False
        self._at += 1
        self._skip()
        return True

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
            self._skip()
        return match

    def fields(self, end: str | None, depth: int) -> tuple[Field, ...]:
        """Up to the sign that ends the message, or the end of the text."""
        if depth > MAX_DEPTH:
            raise self._fail(f"messages may be {MAX_DEPTH} deep")
        found: list[Field] = []
        while True:
            if end is not None and self._take(end):
                return tuple(found)
            if end is None and self._at >= len(self._text):
                return tuple(found)
            line = self._text.count("\n", 0, self._at) + 1
            name = self._match(_NAME)
            if name is None:
                raise self._fail("expected the name of a field" + (f" or {end!r}" if end else ""))
            has_colon = self._take(":")
            if self._take("["):
                if not has_colon and self._peek() == "]":
                    raise self._fail(f"expected ':' after {name[0]}")
                is_over = self._take("]")
                if is_over:
                    found.append(Field(name[0], None, line, True))
                while not is_over:
                    found.append(Field(name[0], self._value(depth, is_message=not has_colon), line, True))
                    is_over = self._take("]")
                    if not is_over and (not self._take(",") or self._peek() == "]"):
                        raise self._fail("expected ',' or ']'")
            elif not has_colon and self._peek() not in ("{", "<"):
                raise self._fail(f"expected ':' after {name[0]}")
            else:
                found.append(Field(name[0], self._value(depth, is_message=not has_colon), line))
            if not self._take(","):
                self._take(";")

    def _value(self, depth: int, *, is_message: bool) -> Value:
        for begin, end in (("{", "}"), ("<", ">")):
            if self._take(begin):
                return Message(self.fields(end, depth + 1))
        if is_message:
            raise self._fail("expected a message")
        if self._peek() in ("'", '"'):
            parts = []
            while (string := self._match(_STRING)) is not None:  # strings beside each other are one
                parts.append(self._unescaped(string[1] if string[1] is not None else string[2]))
            if not parts:
                raise self._fail("expected a string that ends on its line")
            return b"".join(parts).decode(errors="surrogateescape")
        is_negative = self._take("-")
        number = self._match(_NUMBER)
        if number is not None:
            return self._number(number[0], is_negative=is_negative)
        word = self._match(_NAME)
        if word is None:
            raise self._fail("expected a value")
        if not is_negative:
            return Word(word[0])
        if word[0].lower() not in ("inf", "infinity", "nan"):
            raise self._fail("expected a number after '-'")
        return -float(word[0])

    def _number(self, text: str, *, is_negative: bool) -> int | float:
        if self._at and _NAME.match(self._text, self._at) and self._text[self._at - 1] not in " \t\r\n\f\v":
            raise self._fail("expected a blank after a number")
        value: int | float
        try:
            if text[:2] in ("0x", "0X"):
                value = int(text, 16)
            elif text.isdigit():
                value = int(text, 8) if len(text) > 1 and text.startswith("0") else int(text)
            else:
                value = float(text.rstrip("fF"))
        except ValueError:
            raise self._fail(f"{text} is no number") from None
        return -value if is_negative else value

    def _unescaped(self, text: str) -> bytes:
        def one(match: re.Match[bytes]) -> bytes:
            octal, hexadecimal, short, long, sign = match.groups()
            if octal is not None:
                return bytes([int(octal, 8) & 0xFF])
            if hexadecimal is not None:
                return bytes([int(hexadecimal, 16)])
            if short is not None or long is not None:
                try:
                    return chr(int(short or long, 16)).encode()
                except (ValueError, UnicodeEncodeError, OverflowError):
                    raise self._fail("a string escapes a character that there is not") from None
            if sign not in _PLAIN:
                raise self._fail(f"a string has the unknown escape \\{sign.decode(errors='replace')}")
            return _PLAIN[sign]

        return _ESCAPE.sub(one, text.encode(errors="surrogateescape"))


def fold(message: Message, kind: type[S], unknown: list[str], where: str = "") -> S:
    """The message as a struct, whose tuples are repeated fields and whose dicts are maps. Fields that the struct has
    not are left out and named in ``unknown``. Raises TextFormatError."""
    hints = typing.get_type_hints(kind)
    found: dict[str, object] = {}
    for name, value, line, is_listed in message.fields:
        path = f"{where}{name}"
        hint = hints.get(name)
        if hint is None:
            if path not in unknown:
                unknown.append(path)
            continue
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if is_listed and origin not in (tuple, dict):
            raise TextFormatError(f"line {line}: {path} is a list; expected one value")
        if value is None:
            continue
        if origin is tuple:
            listed = found.setdefault(name, ())
            assert isinstance(listed, tuple)
            found[name] = (*listed, _one(value, arguments[0], unknown, path, line))
        elif origin is dict:
            table = found.setdefault(name, {})
            assert isinstance(table, dict)
            if not isinstance(value, Message):
                raise TextFormatError(f"line {line}: {path} is not a map's {{ key: ... value: ... }}")
            entry = {field.name: field.value for field in value.fields if field.value is not None}
            unknown += [f"{path}.{field}" for field in entry if field not in ("key", "value")]
            key = entry.get("key", "" if arguments[0] is str else 0)
            content = entry.get("value", "" if arguments[1] is str else Message(()))
            table[_one(key, arguments[0], unknown, f"{path}.key", line)] = _one(
                content, arguments[1], unknown, path, line
            )
        else:
            if name in found:
                raise TextFormatError(f"line {line}: {path} is given twice")
            bare = next((one for one in arguments if one is not type(None)), hint) if arguments else hint
            found[name] = _one(value, bare, unknown, path, line)
    return kind(**found)


def _one(value: Value, kind: object, unknown: list[str], path: str, line: int) -> object:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if isinstance(value, Message):
            return fold(value, kind, unknown, f"{path}.")
    elif kind is bool:
        truth = {
            "true": True,
            "t": True,
            "True": True,
            "1": True,
            "false": False,
            "f": False,
            "False": False,
            "0": False,
        }
        if (isinstance(value, Word) or (isinstance(value, int) and value in (0, 1))) and str(value) in truth:
            return truth[str(value)]
    elif kind is int:
        if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
            return value
    elif kind is float:
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, Word) and value.lower() in ("inf", "infinity", "nan"):
            return float(value)
    elif (kind is str or kind is Enum) and isinstance(value, str) and isinstance(value, Word) == (kind is Enum):
        return str(value)
    wanted = {bool: "true or false", int: "an integer", float: "a number", str: "a text in quotes", Enum: "a word"}
    noun = next((word for one, word in wanted.items() if kind is one), "a message in braces")
    shown = "a message" if isinstance(value, Message) else repr(value)
    raise TextFormatError(f"line {line}: {path} is {shown}; expected {noun}")
