"""Patterns in the syntax of Rust's ``regex`` crate as patterns of ECMA 262, which a schema may hold."""

from __future__ import annotations

import re

from inferd.structured.classes import POSIX, posix_members
from inferd.structured.faults import Fault
from inferd.structured.regex import INNER_ANCHOR, Scan, check, inner_anchor, pieces

_LOOK = ("(?=", "(?!", "(?<=", "(?<!")
_CONTROL = re.compile(
    r"[\x00-\x07\x0b\x0e-\x1f\x7f]|\\0|\\v|\\(?:x|u00|U0{6})(?:0[0-7bBe-fE-F]|1[0-9a-fA-F]|7[fF])"
    r"|\\[xuU]\{0*(?:[0-7bBe-fE-F]|1[0-9a-fA-F]|7[fF])\}"
)
_CONTROL_CLASS = re.compile(rf"\[(?:{_CONTROL.pattern})+\]")
_CONTROL_ESCAPE = re.compile(r"\\c[A-Za-z]")
_ESCAPE = re.compile(r"\\.", re.DOTALL)


def to_ecma(pattern: str) -> str:
    """A pattern in Rust's syntax with the classes of ECMA 262, in which ``[:alpha:]`` stands for its characters.

    What is well formed in ECMA 262 alone, such as ``[^[]``, means what it means there. A class that both read in
    different ways is refused. Raises ``Fault``.
    """
    scan = Scan(pattern, in_ecma=False)
    try:
        scan.run()
    except Fault:
        if any(found[0][0] == "[" and POSIX.search(found[0], 1) for found in pieces(pattern)):
            raise
        check(pattern, in_ecma=True)
        _check_writable(pattern)
        return pattern
    if scan.operation is not None:
        at, sign = scan.operation
        problem = "a class within a class" if sign == "[" else f"the operation '{sign}' on classes"
        written = "".join(f"\\{character}" for character in sign)
        remedy = f"name the characters that remain, or write '{written}' for the character{'s' * (len(sign) > 1)}"
        raise Fault(pattern, at, f"{problem} is not supported in a format", remedy)
    parts, last = [], 0
    for start, end, name in scan.named:
        parts += [pattern[last:start], posix_members(name)]
        last = end
    check(pattern, in_ecma=True)
    _check_writable(pattern)
    return "".join([*parts, pattern[last:]])


def _check_writable(pattern: str) -> None:
    found = unwritable(pattern)
    if found is not None:
        at, construct = found
        raise Fault(pattern, at, f"{construct} is not supported", "leave it out")
    anchor = inner_anchor(pattern)
    if anchor is not None:
        raise Fault(pattern, anchor, *INNER_ANCHOR)


def unwritable(pattern: str) -> tuple[int, str] | None:
    """A construct of a pattern of ECMA 262 that no mask can enforce, and where it is; ``None``: there is none."""
    for piece in pieces(pattern):
        construct = _construct(pattern, piece)
        if construct is not None:
            return piece.start(), construct
    return None


def _construct(pattern: str, piece: re.Match[str]) -> str | None:
    """The construct that no mask can enforce in a piece of a pattern."""
    text, start = piece[0], piece.start()
    if text[0] == "[":
        # The mask engine would leave a control character out of the text. In a class it leaves the others.
        if _CONTROL_CLASS.fullmatch(text):
            return "a control character"
        return next((name for escape in _ESCAPE.finditer(text) if (name := _escaped(text, escape.start()))), None)
    if _CONTROL.match(pattern, start):
        return "a control character"
    if text[0] == "\\":
        return _escaped(pattern, start)
    return "look-around" if pattern.startswith(_LOOK, start) else None


def _escaped(pattern: str, at: int) -> str | None:
    """The same for an escape."""
    if pattern.startswith(tuple("123456789"), at + 1):
        return "a back-reference"
    if pattern.startswith(("b", "B"), at + 1):
        return "a word boundary"
    return "a control escape" if _CONTROL_ESCAPE.match(pattern, at) else None
