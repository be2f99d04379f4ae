"""Grammars of custom tools as one regular expression, which a schema holds as the ``pattern`` of a text.

A grammar in Lark whose rules do not refer to themselves describes a regular language, so its rules are written in the
place of their names. Pure functions of text, bounded in time and length.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from inferd.gateway.errors import printable
from inferd.structured.classes import LARGEST_CODE
from inferd.structured.ecma import to_ecma
from inferd.structured.faults import Fault
from inferd.structured.regex import is_empty

MAX_CHARS: Final = 65_536
"""Of a grammar, and of the regular expression that it becomes."""

_MAX_DEPTH: Final = 100  # of names within names and of parentheses
_MAX_REPEATS: Final = 1000
_SHOWN: Final = 80  # characters of an expression that is not read

_COMMON: Final = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+\\-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+\-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+\-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+\-]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+\-]?[0-9]+)?",
    "LETTER": "[A-Za-z]",
    "UCASE_LETTER": "[A-Z]",
    "LCASE_LETTER": "[a-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
}
"""The terminals of Lark's ``common`` that are known."""

_TOKENS: Final = re.compile(
    r"(?P<space>[ \t\f\r]+|(?://|\#)[^\n]*)"
    r"|(?P<line>\n)"
    r'|(?P<string>"(?:[^"\\\n]|\\.)*"i?)'
    r"|(?P<regex>/(?!/)(?:[^/\\\n\[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/[a-z]*)"
    r"|(?P<name>[!?]*[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<number>-?[0-9]+)"
    r"|(?P<sign>\.\.|->|[:|()\[\]?*+~.,])"
    r"|(?P<directive>%[a-z_]+)"
    r"|(?P<other>.)",
)
_REGEX_PIECE: Final = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?P?<[^\W\d][\w.\[\]]*>|\(\?[a-zA-Z-]+[:)]|.", re.DOTALL
)
_STRING_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")
_NEVER_WRITTEN: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")
_SHORT: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "b": "\b", "\\": "\\", '"': '"', "/": "/"}


class GrammarError(Exception):
    """A grammar that is not well formed, or that no mask enforces. The message says what, and the remedy."""


def pattern_of_regex(definition: str) -> str:
    """The pattern of the texts that match a regular expression (Rust's syntax) as a whole. Raises GrammarError."""
    if len(definition) > MAX_CHARS:
        raise GrammarError(
            f"the expression has {len(definition)} characters, and at most {MAX_CHARS} are read; shorten it"
        )
    return _whole(_in_ecma(definition, ""))


def pattern_of_lark(definition: str) -> str:
    """The pattern of the sentences of a grammar in Lark. Raises GrammarError."""
    if len(definition) > MAX_CHARS:
        raise GrammarError(
            f"the grammar has {len(definition)} characters, and at most {MAX_CHARS} are read; shorten it"
        )
    return _whole(_Grammar(_Reader(definition)).start())


def _check_length(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise GrammarError(f"its regular expression has over {MAX_CHARS} characters; use a simpler grammar")


def _whole(body: str) -> str:
    _check_length(len(body))
    if is_empty(body):
        raise GrammarError(
            "no text satisfies it, because it needs a character of a class without one, such as '[^\\s\\S]'; leave the "
            "class out, or let a character be in it"
        )
    return f"^(?:{body})$"


class _Token(NamedTuple):
    kind: str
    text: str


_END: Final = _Token("end", "")


class _Reader:
    """The tokens of a grammar, and the place among them."""

    __slots__ = ("at", "tokens")

    def __init__(self, definition: str) -> None:
        self.tokens: list[_Token] = []
        self.at = 0
        for found in _TOKENS.finditer(definition):
            kind = found.lastgroup or ""
            if kind == "other":
                raise GrammarError(f"the character {found[0]!r} has no meaning in Lark at this place")
            is_blank_line = kind == "line" and bool(self.tokens) and self.tokens[-1].kind == "line"
            if kind != "space" and not is_blank_line:
                self.tokens.append(_Token(kind, found[0]))

    def peek(self, ahead: int = 0) -> _Token:
        place = self.at + ahead
        return self.tokens[place] if place < len(self.tokens) else _END

    def next(self) -> _Token:
        token = self.peek()
        self.at += 1
        return token

    def takes(self, sign: str) -> bool:
        if self.peek() == ("sign", sign):
            self.at += 1
            return True
        return False

    def expect(self, sign: str) -> None:
        if not self.takes(sign):
            raise GrammarError(f"{sign!r} is expected before {self.peek().text!r}")

    def skip_lines(self) -> None:
        while self.peek().kind == "line":
            self.at += 1

    def begins_definition(self) -> bool:
        """Whether the next line begins a rule, a directive or the end, and is no continuation."""
        ahead = 0
        while self.peek(ahead).kind == "line":
            ahead += 1
        token = self.peek(ahead)
        if token.kind in ("end", "directive"):
            return True
        return token.kind == "name" and self.peek(ahead + 1) in (("sign", ":"), ("sign", "."))


class _Grammar:
    """The definitions of a grammar, and the regular expressions of those that were asked for."""

    __slots__ = ("_bodies", "_ignored", "_open", "_reader", "_written")

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self._bodies: dict[str, int] = {}  # where the definition of a name begins
        self._written: dict[str, str] = dict(_COMMON)
        self._open: list[str] = []  # names that are being written
        self._ignored = ""
        imported: set[str] = set()
        ignored: list[int] = []
        reader.skip_lines()
        while reader.peek() is not _END:
            token = reader.next()
            if token.kind == "directive":
                self._directive(token.text, imported, ignored)
            elif token.kind == "name":
                name = token.text.lstrip("!?")
                if reader.takes("."):
                    reader.next()  # the priority of a terminal, which changes no language
                reader.expect(":")
                if name in self._bodies:
                    raise GrammarError(f"{name} is defined twice; define it once")
                self._bodies[name] = reader.at
                self._skip_body()
            else:
                raise GrammarError(f"a definition cannot begin with {token.text!r}")
            reader.skip_lines()
        for name in _COMMON.keys() - imported:
            self._written.pop(name, None)
        for name in self._bodies:
            self._written.pop(name, None)
        parts, length = [], 0
        for place in ignored:
            reader.at = place
            parts.append(self._alternatives(in_rule=False, depth=0))
            length += len(parts[-1])
            _check_length(length)
        if not all(map(_is_nothing, parts)):
            self._ignored = f"(?:{'|'.join(parts)})*"

    def start(self) -> str:
        if "start" not in self._bodies:
            raise GrammarError("there is no rule 'start'; define it")
        return self._ignored + self._named("start")

    def _directive(self, name: str, imported: set[str], ignored: list[int]) -> None:
        reader = self._reader
        if name == "%ignore":
            ignored.append(reader.at)
            self._skip_body()
        elif name == "%import":
            source, names = reader.next().text, []
            if reader.takes("("):
                while not reader.takes(")"):
                    if reader.peek() is _END:
                        raise GrammarError("')' is missing behind %import")
                    if reader.peek().kind == "name":
                        names.append(reader.peek().text)
                    reader.next()
            else:
                reader.expect(".")
                names.append(reader.next().text)
            if source != "common" or not set(names) <= _COMMON.keys():
                raise GrammarError(
                    f"%import {source} ({', '.join(names)}) is not known; of 'common' there are {', '.join(_COMMON)}"
                )
            imported.update(names)
            if reader.takes("->") and names:
                self._written[reader.next().text] = _COMMON[names[0]]
        else:
            raise GrammarError(f"{name} is not supported; leave it out")

    def _skip_body(self) -> None:
        reader = self._reader
        while not (reader.peek().kind in ("line", "end") and reader.begins_definition()):
            reader.next()

    def _named(self, name: str) -> str:
        written = self._written.get(name)
        if written is not None:
            return written
        if name not in self._bodies:
            raise GrammarError(f"{name} is not defined; define it, or import it from 'common'")
        if name in self._open:
            raise GrammarError(
                f"{name} refers to itself. Only grammars without recursion are supported; repeat with '*' or '+', or "
                "leave the format out"
            )
        if len(self._open) > _MAX_DEPTH:
            raise GrammarError(f"more than {_MAX_DEPTH} names stand within each other; use a simpler grammar")
        reader, place = self._reader, self._reader.at
        self._open.append(name)
        reader.at = self._bodies[name]
        body = self._alternatives(in_rule=not name.isupper(), depth=0)
        reader.at = place
        self._open.pop()
        self._written[name] = body
        return body

    def _alternatives(self, *, in_rule: bool, depth: int) -> str:
        if depth > _MAX_DEPTH:
            raise GrammarError(f"more than {_MAX_DEPTH} parentheses stand within each other; use a simpler grammar")
        reader = self._reader
        ways: list[str] = []
        length = 0  # of the parts, so that no more of them are kept than may be written
        while True:
            parts: list[str] = []
            while (part := self._item(in_rule=in_rule, depth=depth)) is not None:
                parts.append(part)
                length += len(part)
                _check_length(length)
            ways.append("".join(parts))
            if reader.takes("->"):
                reader.next()  # an alias, which changes no language
            if reader.peek().kind == "line" and not reader.begins_definition():
                reader.skip_lines()
            if not reader.takes("|"):
                break
        if depth == 0 and reader.peek().kind not in ("line", "end"):
            raise GrammarError(f"{reader.peek().text!r} is not expected here")
        body = ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"
        _check_length(len(body))
        return body

    def _item(self, *, in_rule: bool, depth: int) -> str | None:
        """The next item with its repetition; None: there is none."""
        reader = self._reader
        if reader.peek().kind == "line" and not reader.begins_definition() and depth:
            reader.skip_lines()
        token = reader.peek()
        is_terminal = True
        if token.kind == "string":
            reader.next()
            body = self._string(token.text)
        elif token.kind == "regex":
            reader.next()
            text, _, flags = token.text[1:].rpartition("/")
            body = _in_ecma(text.replace("\\/", "/"), flags)
        elif token.kind == "name":
            reader.next()
            is_terminal = token.text.isupper() or token.text.lstrip("_").isupper()
            body = self._named(token.text)
        elif reader.takes("("):
            is_terminal = False
            body = self._alternatives(in_rule=in_rule, depth=depth + 1)
            reader.expect(")")
        elif reader.takes("["):
            body = f"(?:{self._alternatives(in_rule=in_rule, depth=depth + 1)})?"
            reader.expect("]")
            return body
        else:
            return None
        if is_terminal and in_rule and self._ignored:
            body = f"(?:{body}){self._ignored}"
        return self._repeated(body)

    def _repeated(self, body: str) -> str:
        reader = self._reader
        for sign in "*+?":
            if reader.takes(sign):
                return "" if _is_nothing(body) else f"(?:{body}){sign}"
        if not reader.takes("~"):
            return f"(?:{body})"
        least = self._count()
        most = self._count() if reader.takes("..") else least
        if least > most:
            raise GrammarError(f"~{least}..{most} repeats nothing; write the smaller number first")
        return "" if _is_nothing(body) else f"(?:{body}){{{least},{most}}}"

    def _count(self) -> int:
        token = self._reader.next()
        if token.kind != "number" or len(token.text) > 6 or not 0 <= int(token.text) <= _MAX_REPEATS:
            raise GrammarError(f"'~' needs a number of up to {_MAX_REPEATS}, not {token.text!r}")
        return int(token.text)

    def _string(self, token: str) -> str:
        reader = self._reader
        text, ignores_case = _text_of(token)
        if _NEVER_WRITTEN.search(text):
            raise GrammarError(
                f"{token[:_SHOWN]} has a control character or half of a surrogate pair, which no text has; leave it out"
            )
        if reader.takes(".."):
            last, _ = _text_of(reader.next().text)
            if len(text) != 1 or len(last) != 1 or text > last:
                raise GrammarError(f"{token}..{last!r} is no range of characters")
            return f"[{_escaped(text)}-{_escaped(last)}]"
        if not ignores_case:
            return "".join(map(_escaped, text))
        return "".join(
            f"[{_escaped(c.lower())}{_escaped(c.upper())}]" if c.lower() != c.upper() else _escaped(c) for c in text
        )


def _is_nothing(body: str) -> bool:
    """Whether the expression is made of groups without content, which cannot be repeated."""
    while _EMPTY in body and set(body) <= set(_EMPTY):
        body = body.replace(_EMPTY, "")
    return not body


_EMPTY: Final = "(?:)"


def _text_of(token: str) -> tuple[str, bool]:
    """The text of a string, and whether its case does not count."""
    ignores_case = token.endswith("i")
    inner = token.removesuffix("i")[1:-1]

    def unescaped(found: re.Match[str]) -> str:
        code = found[1] or found[2] or found[3]
        if code and int(code, 16) <= LARGEST_CODE:
            return chr(int(code, 16))
        if code or found[4] not in _SHORT:
            raise GrammarError(f"the escape {printable(found[0])} in a text is unknown; write '\\\\' for a backslash")
        return _SHORT[found[4]]

    return _STRING_ESCAPE.sub(unescaped, inner), ignores_case


def _escaped(character: str) -> str:
    if character in r"\.+*?()|[]{}^$-/":
        return f"\\{character}"
    if character.isprintable():
        return character
    short = next((f"\\{name}" for name, value in _SHORT.items() if value == character and name != "b"), None)
    return short or f"\\u{ord(character):04X}"


def _in_ecma(regex: str, flags: str) -> str:
    """A regular expression of Rust or Python in the syntax of ECMA 262. ``.`` is any character but the line feed."""
    if set(flags) - {"s", "u", "l"}:
        raise GrammarError(f"the flags {flags!r} of a regular expression are not supported; write out what they mean")
    try:
        regex = to_ecma(regex)
    except Fault as fault:
        named = regex if len(regex) <= _SHOWN else f"{regex[:_SHOWN]}..."
        raise GrammarError(f"the expression /{named}/ is not read {fault}") from None
    dot = r"[\s\S]" if "s" in flags else r"[^\n]"
    pieces: list[str] = []
    for piece in _REGEX_PIECE.findall(regex):
        if piece == ".":
            pieces.append(dot)
        elif piece.startswith(("(?P<", "(?<")):
            pieces.append("(?:")
        elif piece.startswith("(?") and piece != "(?:":
            raise GrammarError(f"{piece!r} is not supported in a regular expression; write out what it means")
        elif piece in (r"\A", r"\z", r"\Z"):
            raise GrammarError(f"{piece!r} is not needed: the whole text is matched; leave it out")
        else:
            pieces.append(piece)
    return "".join(pieces)
