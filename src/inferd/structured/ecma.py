"""Patterns in the syntax of Rust's ``regex`` crate as patterns of ECMA 262, which a schema may hold."""

from __future__ import annotations

from inferd.structured.classes import POSIX, posix_members
from inferd.structured.faults import Fault
from inferd.structured.regex import Scan, check, pieces


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
    return "".join([*parts, pattern[last:]])
