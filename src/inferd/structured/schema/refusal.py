"""The refusal of a schema: where, which keyword, and what would be accepted instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from inferd.errors import InvalidRequest

Path = tuple[str | int, ...]


def pointer(path: Iterable[str | int]) -> str:
    """The JSON pointer (RFC 6901) of a path; that of the whole document is the empty text."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in path)


def refuse(at: str, path: Iterable[str | int], problem: str, remedy: str) -> NoReturn:
    """Raise the error of a schema that can not be enforced. ``at`` is the field of the request that holds it."""
    place = pointer(path)
    where = f"{at}: at {place}" if place else at
    raise InvalidRequest(f"{where}: {problem}; {remedy}", param=at, code="unsupported_schema")
