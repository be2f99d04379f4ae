"""Regular expressions of requests: what is wrong with one, in the words of its author.

The mask engine reads the syntax of Rust's ``regex`` crate. Its own messages show the pattern as the engine got it, so
the constructs that it does not have are looked for here first, in the pattern as it was sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NoReturn

from inferd.structured.classes import CLASS, LARGEST_CODE, POSIX, POSIX_CLASSES, Members
from inferd.structured.faults import Fault

DEEPEST: Final = 200  # groups within each other
LARGEST: Final = 500_000  # characters and classes of a pattern whose repetitions are written out
_FLAGS: Final = "imsUuxR"

_LOOK: Final = (
    ("(?<=", "a look-behind"),
    ("(?<!", "a negative look-behind"),
    ("(?=", "a look-ahead"),
    ("(?!", "a negative look-ahead"),
)
_OTHER_GROUPS: Final = (
    ("(?>", "an atomic group", "write '(?:', because the whole text is matched in every way"),
    ("(?|", "a branch reset", "write '(?:'"),
    ("(?#", "a comment", "leave it out"),
    ("(?(", "a conditional", "write out both cases as alternatives, such as '(?:a|b)'"),
    ("(?P=", "a back-reference", "write the text that is repeated, or list the cases"),
    ("(?P>", "a recursion", "send a grammar, whose rules may refer to themselves"),
    ("(?&", "a recursion", "send a grammar, whose rules may refer to themselves"),
)
_REPEAT_TEXT: Final = "write the text that is repeated, or list the cases"
_WHOLE: Final = "leave it out: the whole text is matched"
_ESCAPES: Final = {
    "b": ("a word boundary", "write the characters that stand before and behind the word"),
    "B": ("a word boundary", "write the characters that stand before and behind the place"),
    "<": ("a word boundary", "write the characters that stand before the word"),
    ">": ("a word boundary", "write the characters that stand behind the word"),
    "k": ("a back-reference", _REPEAT_TEXT),
    "g": ("a back-reference", _REPEAT_TEXT),
    "Z": ("an anchor", _WHOLE),
    "G": ("an anchor", _WHOLE),
    "K": ("a reset of the match", _WHOLE),
    "c": ("a control escape", "write the character as '\\x' with two digits"),
    "e": ("an escape", "write '\\x1B'"),
    "N": ("a class", "write '[^\\n]'"),
    "R": ("a class of line ends", "write '\\r?\\n'"),
    "h": ("a class of white space", "write '[ \\t]'"),
    "H": ("a class of white space", "write '[^ \\t]'"),
    "X": ("a grapheme", "write '.', or the characters"),
    "Q": ("a quotation", "put a backslash before each character with a meaning"),
    "E": ("a quotation", "put a backslash before each character with a meaning"),
}
_KNOWN_LETTERS: Final = frozenset("dDwWsSpPxuUntrfvaAz")
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_BRACED: Final = re.compile(r"\{([0-9A-Fa-f]+)\}")
_COUNT: Final = re.compile(r"\{\s*([0-9]+)\s*(,\s*([0-9]*)\s*)?\}")
_COUNT_OF_ECMA: Final = re.compile(r"\{([0-9]+)(,([0-9]*))?\}")
_NAME: Final = re.compile(r"\(\?P?<([^\W\d][\w.\[\]]*)>")
_FLAG_GROUP: Final = re.compile(rf"\(\?([{_FLAGS}]*(?:-[{_FLAGS}]+)?)([:)])")
_PROPERTY: Final = re.compile(r"\\[pP](?:\{\^?[^{}]+\}|[A-Za-z])")
_MOST_COUNT: Final = 1_000_000


def check(pattern: str, *, in_ecma: bool = False) -> None:
    """Raise ``Fault`` where the pattern has a construct that no mask enforces, or is not well formed.

    ``in_ecma``: the pattern is one of a schema, in the syntax of ECMA 262. There ``[`` is a character of a class, no
    class stands within another one, ``\\a``, ``++``, ``{ 2 }`` and the flag ``x`` stand for nothing, and a group may have
    the name of another.
    """
    Scan(pattern, in_ecma=in_ecma).run()


def empty_class(pattern: str, *, in_ecma: bool = False) -> int | None:
    """Where a class stands that no character is in, so that no text matches the pattern; None: none is known here, or
    the pattern does without it. Raises ``Fault`` as ``check`` does."""
    scan = Scan(pattern, in_ecma=in_ecma)
    scan.run()
    return scan.empty_class


def is_empty(pattern: str) -> bool:
    """Whether certainly no text matches a pattern in the syntax of ECMA 262."""
    try:
        return empty_class(pattern, in_ecma=True) is not None
    except Fault:
        return False


def without_notes(pattern: str) -> str:
    """The same pattern without white space and comments that its flag ``x`` makes ones. Raises ``Fault`` as ``check``
    does, and where no text matches the pattern, as far as that is known here."""
    scan = Scan(pattern, in_ecma=False)
    scan.run()
    if scan.empty_class is not None:
        raise Fault(pattern, scan.empty_class, *NO_CHARACTER)
    ends = [0, *(end for note in scan.notes for end in note), len(pattern)]
    return "".join(pattern[first:end] for first, end in zip(ends[::2], ends[1::2], strict=True))


NO_CHARACTER: Final = (
    "no character is in this class, so that no text matches",
    "write a class with a character, such as '[^a]'",
)


@lru_cache(256)
def _is_property(escape: str) -> bool:
    """Whether an escape names a property of Unicode, as the validators of schemas read it."""
    import jsonschema_rs  # the gateway reads few patterns with properties

    try:
        jsonschema_rs.Draft202012Validator({"pattern": escape})
    except jsonschema_rs.ValidationError:
        return False
    return True


def fault_of(pattern: str, problem: str) -> Fault:
    """The mask engine's message about a pattern that ``check`` has let through, in words of the pattern."""
    at = inner_anchor(pattern) if "lookarounds" in problem else None
    if at is None:
        found = _CARET.search(problem)
        at = 0 if found is None or "\n" in pattern else min(len(found[1]) + pattern.startswith("^"), len(pattern))
    return Fault(pattern, at, *words_of(problem))


def words_of(problem: str) -> tuple[str, str]:
    """What is wrong with a pattern, and what is accepted, from the mask engine's message about it."""
    for part, told, remedy in _WORDS:
        if part in problem:
            return told, remedy
    return "no mask enforces this pattern", "send a simpler one"


_CARET: Final = re.compile(r"^    ( *)\^+$", re.MULTILINE)
INNER_ANCHOR: Final = ("'^' or '$' asks for an end within the text", "leave it out: the whole text is matched")
_NO_PROPERTY: Final = (
    "\\p names no property of Unicode",
    "write one such as '\\p{Letter}', '\\p{Lu}' or '\\p{Greek}'",
)
_WORDS: Final = (
    ("Unicode property", *_NO_PROPERTY),
    ("lookarounds", *INNER_ANCHOR),
    ("invalid UTF-8", "this matches bytes that are no text", "leave '(?-u)' out"),
    ("size limit", "the pattern is too large", "write smaller numbers of repetitions"),
)


def pieces(pattern: str) -> Iterator[re.Match[str]]:
    """The escapes, classes, beginnings of groups and other characters of a pattern, one behind the other.

    Each character is read once, whatever the pattern: a class that is not closed is one piece up to the end.
    """
    return _PIECE.finditer(pattern)


def inner_anchor(pattern: str) -> int | None:
    """Where ``^`` or ``$`` asks for an end within the text; None: nowhere that is known here."""
    levels = [_Place()]  # of the pattern and of each open group
    for found in pieces(pattern):
        piece, level = found[0], levels[-1]
        if piece[0] == "(":
            levels.append(_Place(may_begin=level.is_begin))
        elif piece == ")" and len(levels) > 1:
            group, level = levels.pop(), levels[-1]
            if level.end is not None:
                return level.end
            level.is_begin = False
            level.end = group.first_end if group.end is None else group.end
        elif piece == "|":
            level.is_begin = level.may_begin
            level.first_end = level.end if level.first_end is None else level.first_end
            level.end = None
        elif piece in _BEGINS:
            if not level.is_begin:
                return found.start()
        elif piece in _ENDS:
            level.end = found.start() if level.end is None else level.end
        elif level.end is not None:
            return level.end
        else:
            level.is_begin = False
    return None


class _Place:
    """A place in a group that is open, or in the whole pattern."""

    __slots__ = ("end", "first_end", "is_begin", "may_begin")

    def __init__(self, *, may_begin: bool = True) -> None:
        self.may_begin = may_begin  # the group may stand before all characters
        self.is_begin = may_begin  # the place may do so
        self.end: int | None = None  # the first anchor of an end before the place in its alternative
        self.first_end: int | None = None  # the same of the earlier alternatives


_BEGINS: Final = ("^", "\\A")
_ENDS: Final = ("$", "\\z")
_PIECE: Final = re.compile(rf"\\.|{CLASS}|\(\?(?:P?<[^\W\d][\w.\[\]]*+>|[a-zA-Z-]*+:)|.", re.DOTALL)


class _Level:
    """A group that is open, or the whole pattern."""

    __slots__ = ("before", "empty", "first_empty", "has_content", "has_text", "is_verbose", "size")

    def __init__(self, *, is_verbose: bool = False, has_content: bool = True) -> None:
        self.has_content = has_content  # more than groups that are not captured and have nothing in them
        self.is_verbose = is_verbose  # white space and what follows '#' in a line have no meaning
        self.size = 0  # written out
        self.empty: int | None = None  # a part of the alternative that no text matches
        self.before: int | None = None  # the same without its last part
        self.first_empty: int | None = None  # of the earlier alternatives
        self.has_text = False  # an earlier alternative has no such part

    def end_way(self) -> None:
        self.has_text = self.has_text or self.empty is None
        self.first_empty = self.empty if self.first_empty is None else self.first_empty
        self.empty = self.before = None

    def end(self) -> int | None:
        """Where a part stands that no text matches, so that none matches the whole; None: the whole does without."""
        self.end_way()
        return None if self.has_text else self.first_empty


class Scan:
    """One walk over a pattern."""

    def __init__(self, pattern: str, *, in_ecma: bool) -> None:
        self._pattern = pattern
        self._in_ecma = in_ecma
        self._at = 0
        self._open: list[int] = []  # where the groups begin that are not closed
        self._names: set[str] = set()
        self._can_repeat = False  # whether an expression stands before the place
        self._levels = [_Level()]  # of the pattern and of each open group
        self._blank: int | None = None  # where the expression before the place begins, if it is a group without content
        self._last = 0  # the size of the expression before the place
        self.empty_class: int | None = None  # so that no text matches the pattern
        self.notes: list[tuple[int, int]] = []  # white space and comments
        self.named: list[tuple[int, int, str]] = []  # classes with names of POSIX within others
        self.operation: tuple[int, str] | None = None  # the first one on classes, or the first class within another one

    def run(self) -> None:
        pattern = self._pattern
        while self._at < len(pattern):
            character = pattern[self._at]
            if character == "\\":
                self._escape()
            elif character == "[":
                self._class()
            elif character == "(":
                self._group()
            elif character == ")":
                if not self._open:
                    self._fail("')' closes no group", "write '\\)' for the character, or open a group before it")
                begun = self._open.pop()
                group = self._levels.pop()
                self._step(
                    1,
                    can_repeat=True,
                    size=max(group.size, 1),
                    empty=group.end(),
                    blank=None if group.has_content else begun,
                )
            elif character in "*+?":
                self._repeat(character)
            elif character == "{":
                self._count()
            elif character == "|" or (character == "^" and self._at == 0):
                if character == "|":
                    self._levels[-1].end_way()
                    self._levels[-1].has_content = True
                self._step(1, can_repeat=False)
            elif self._levels[-1].is_verbose and character in _NOTES:
                self._skip_note()
            else:
                self._step(1, can_repeat=True)
        if self._open:
            self._fail("the group is not closed", "add ')' behind it", self._open[-1])
        self.empty_class = self._levels[0].end()

    def _fail(self, problem: str, remedy: str, at: int | None = None) -> NoReturn:
        raise Fault(self._pattern, self._at if at is None else at, problem, remedy)

    def _step(
        self, by: int, *, can_repeat: bool, size: int = 1, empty: int | None = None, blank: int | None = None
    ) -> None:
        """``empty``: where a class without a character keeps the expression from matching any text. ``blank``: where the
        expression begins that is a group without content."""
        self._at += by
        self._can_repeat = can_repeat
        self._blank = blank
        if can_repeat:
            level = self._levels[-1]
            level.has_content |= blank is None
            self._last = size
            level.size += size
            level.before = level.empty
            level.empty = empty if level.empty is None else level.empty

    def _skip_note(self) -> None:
        """Step over white space, or a comment up to the end of its line."""
        start = self._at
        end = self._pattern.find("\n", start) if self._pattern[start] == "#" else start
        self._at = len(self._pattern) if end < 0 else end + 1
        self.notes.append((start, self._at))

    def _escape(self, *, in_class: bool = False) -> str | None:
        """Step over an escape. The character that it stands for; None: a class."""
        start, following = self._at, self._pattern[self._at + 1 : self._at + 2]
        if not following:
            self._fail("the backslash has nothing behind it", "write '\\\\' for a backslash")
        if following.isdecimal():
            problem = f"a back-reference (\\{following}) is not supported"
            if following == "0":
                self._fail("an octal escape (\\0) is not supported", "write '\\x00'")
            self._fail(problem, _REPEAT_TEXT)
        if following in _ESCAPES and following.isalpha():
            name, remedy = _ESCAPES[following]
            self._fail(f"{name} (\\{following}) is not supported", remedy)
        if following in "<>" and not in_class:
            name, remedy = _ESCAPES[following]
            self._fail(f"{name} (\\{following}) is not supported", remedy)
        if following in "pP" and _PROPERTY.match(self._pattern, start) is None:
            self._fail(f"\\{following} names no property", "write one such as '\\p{Letter}' or '\\pL'")
        if following in _HEX_DIGITS:
            return self._hexadecimal(following)
        if following == "a" and self._in_ecma and not in_class:
            self._fail("\\a is a control character, which no mask enforces", "leave it out")
        if following.isalpha() and (not following.isascii() or following not in _KNOWN_LETTERS):
            self._fail(f"the escape \\{following} is unknown", "leave the backslash out for the character")
        if not following.isascii():
            self._fail(f"the escape \\{following} is unknown", "leave the backslash out for the character")
        if in_class and following in "Az":
            self._fail(f"\\{following} is no character", "leave it out of the class")
        found = _PROPERTY.match(self._pattern, start)
        if found is not None and self._in_ecma and not _is_property(found[0]):
            self._fail(*_NO_PROPERTY)
        self._step(len(found[0]) if found is not None else 2, can_repeat=True)
        if following in "dDwWsSpP":
            return None
        return {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}.get(following, following)

    def _hexadecimal(self, letter: str) -> str:
        start = self._at
        braced = _BRACED.match(self._pattern, start + 2)
        digits = self._pattern[start + 2 : start + 2 + _HEX_DIGITS[letter]] if braced is None else braced[1]
        if braced is None and (len(digits) < _HEX_DIGITS[letter] or not all(c in _HEX for c in digits)):
            self._fail(
                f"\\{letter} needs {_HEX_DIGITS[letter]} hexadecimal digits",
                f"write them, or any number of them in braces, such as '\\{letter}{{1F600}}'",
            )
        code = int(digits, 16) if len(digits) <= 8 else LARGEST_CODE + 1
        if code > LARGEST_CODE or 0xD800 <= code <= 0xDFFF:
            self._fail(f"\\{letter} names no Unicode character", "write a number up to 10FFFF, without D800 to DFFF")
        self._step(2 + len(digits) + (0 if braced is None else 2), can_repeat=True)
        return chr(code)

    def _class(self) -> None:
        """Step over a class of characters, with the classes inside of it."""
        pattern, opened, begin = self._pattern, [self._at], self._at
        is_negated = pattern.startswith("[^", self._at)
        self._begin_class()
        first = pattern[self._at - 1]
        members = Members("" if first in "[^" else first)  # the first one may be any character
        last: str | None = ""  # before the place, where a range may begin; empty: nothing, None: a class
        while opened:
            if self._at >= len(pattern):
                problem, remedy = "the class of characters is not closed", "add ']' behind it; '\\[' is the character"
                self._fail(problem, remedy, opened[-1])
            start, character = self._at, pattern[self._at]
            if character == "]":
                opened.pop()
                is_empty = not opened and is_negated and self.operation is None and members.are_all
                self._step(1, can_repeat=True, empty=begin if is_empty else None)
                last = ""
            elif character == "[" and not self._in_ecma:
                named = POSIX.match(pattern, start)
                if named is not None:
                    if named[1] not in POSIX_CLASSES:
                        self._fail("the class has an unknown name", f"one of {', '.join(POSIX_CLASSES)}")
                    self._at += len(named[0])
                    self.named.append((start, self._at, named[0][2:-2]))
                else:
                    self.operation = self.operation or (start, "[")
                    opened.append(start)
                    self._begin_class()
                last = ""
            elif character == "-" and last != "" and self._is_range(last):
                members.ranges.append((ord(last or character), ord(self._range(last))))
                last = ""
            elif pattern.startswith(_OPERATIONS, start):
                self.operation = self.operation or (start, pattern[start : start + 2])
                if self._in_ecma:
                    last = self._member()
                    members.add(last, character)
                else:
                    self._at += 2
                    last = ""
            elif self._levels[-1].is_verbose and character in _NOTES:
                self._skip_note()
            else:
                last = self._member()
                members.add(last, pattern[start : self._at])

    def _is_range(self, first: str | None) -> bool:
        """Whether the ``-`` at the place makes a range, or should: it is a character before another one of a class."""
        following = self._pattern[self._at + 1 : self._at + 2]
        return following not in ("]", "") and (following != "-" or (self._in_ecma and first is not None))

    def _begin_class(self) -> None:
        self._at += 1
        if self._pattern[self._at : self._at + 1] == "^":
            self._at += 1
        if self._pattern[self._at : self._at + 1] in ("-", "]"):  # the first one is a character
            self._at += 1

    def _member(self) -> str | None:
        if self._pattern[self._at] == "\\":
            if self._pattern[self._at + 1 : self._at + 2] == "b":
                self._fail("\\b is no character here", "write '\\x08' for a backspace")
            return self._escape(in_class=True)
        self._at += 1
        return self._pattern[self._at - 1]

    def _range(self, first: str | None) -> str:
        """Step over the rest of a range. Its last character."""
        start = self._at
        if first is None:
            self._fail("a class stands at an end of a range", "write '\\-' for the character")
        self._at += 1
        if self._pattern[self._at] == "[" and not self._in_ecma:
            self._fail("the range has no end", "write '\\-' for the character", start)
        last = self._member()
        if last is None:
            self._fail("a range of characters ends with a class", "write '\\-' for the character", start)
        elif first > last:
            self._fail(f"the range {first!r}-{last!r} is empty", "write the smaller character first", start - 1)
        return last

    def _group(self) -> None:
        pattern, start = self._pattern, self._at
        for begin, name in _LOOK:
            if pattern.startswith(begin, start):
                remedy = "say what the whole text is, without looking around; the text is written from left to right"
                self._fail(f"{name} '{begin}' is not supported", remedy)
        for begin, name, remedy in _OTHER_GROUPS:
            if pattern.startswith(begin, start):
                self._fail(f"{name} '{begin}' is not supported", remedy)
        length, is_verbose, named = 1, self._levels[-1].is_verbose, None
        if pattern.startswith("(?", start):
            named, flags = _NAME.match(pattern, start), _FLAG_GROUP.match(pattern, start)
            if named is not None:
                if named[1] in self._names and not self._in_ecma:
                    self._fail(f"the group {named[1]!r} is there twice", "leave the names of groups out")
                self._names.add(named[1])
                length = len(named[0])
            elif flags is not None and (flags[1] or flags[2] == ":"):
                length = len(flags[0])
                on, _, off = flags[1].partition("-")
                if self._in_ecma and "x" in on:
                    self._fail("the flag x is not supported", "leave it out, with white space and comments")
                is_verbose = (is_verbose or "x" in on) and "x" not in off
                if flags[2] == ")":
                    self._levels[-1].is_verbose = is_verbose
                    self._step(length, can_repeat=False)
                    return
            elif pattern.startswith(("(?P<", "(?<"), start):
                self._fail("the name of the group is not well formed", "write '(?:', because names have no effect here")
            else:
                self._fail("the group has an unknown form", "write '(?:' or '('; '\\(' is the character")
        if len(self._open) >= DEEPEST:
            self._fail(f"more than {DEEPEST} groups stand within each other", "send a simpler pattern")
        self._open.append(start)
        self._levels.append(_Level(is_verbose=is_verbose, has_content=length == 1 or named is not None))
        self._step(length, can_repeat=False)

    def _repeat(self, sign: str) -> None:
        if not self._can_repeat:
            self._fail(f"'{sign}' has nothing to repeat before it", f"write '\\{sign}' for the character")
        self._check_content()
        self._at += 1
        if sign != "+":
            self._do_without()
        if self._pattern[self._at : self._at + 1] == "?":  # a lazy one, which matches the same whole texts
            self._at += 1
        self._end_repetition()

    def _check_content(self) -> None:
        """Raise ``Fault`` where the expression before the place has nothing to repeat: the validators do not read it."""
        if self._in_ecma and self._blank is not None:
            group = self._pattern[self._blank : self._at]
            problem = f"the group {group!r} is repeated, and has nothing in it"
            self._fail(problem, "leave it out, with its repetition", self._blank)

    def _do_without(self) -> None:
        """The expression before the place may occur no time."""
        level = self._levels[-1]
        level.empty = level.before

    def _end_repetition(self) -> None:
        if self._in_ecma and self._pattern.startswith(("*", "+", "?", "{"), self._at):
            self._fail("a repetition stands behind another one", "put the first one between '(?:' and ')'")

    def _count(self) -> None:
        if not self._can_repeat:
            self._fail("'{' has nothing to repeat before it", "write '\\{' for the character")
        self._check_content()
        found = (_COUNT_OF_ECMA if self._in_ecma else _COUNT).match(self._pattern, self._at)
        if found is None:
            remedy = "write '{2}', '{2,}' or '{2,5}'; '\\{' is the character"
            self._fail("'{' begins no number of repetitions", remedy)
            return
        least, most = int(found[1][:9]), int((found[3] or "0")[:9])
        if len(found[1]) > 7 or len(found[3] or "") > 7 or max(least, most) > _MOST_COUNT:
            self._fail("the number of repetitions is too large", f"write at most {_MOST_COUNT}")
        if found[3] and least > most:
            self._fail(f"the repetition {found[0]} is empty", "write the smaller number first")
        factor = max(least, most, 1)
        if not least:
            self._do_without()
        level = self._levels[-1]
        level.size += self._last * (factor - 1)
        self._last *= factor
        if level.size > LARGEST:
            problem = f"with its repetitions written out, the pattern has over {LARGEST} parts"
            self._fail(problem, "write smaller numbers, or '*' and '+'")
        self._at = found.end()
        if self._pattern[self._at : self._at + 1] == "?":
            self._at += 1
        self._end_repetition()


_NOTES: Final = frozenset("#\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000").union(
    map(chr, range(0x2000, 0x200B))
)
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_OPERATIONS: Final = ("&&", "--", "~~")
