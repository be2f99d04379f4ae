"""Duplicate names: keys of a JSON object, tensors of a request, columns of a table.

Knows no tensor, because the gateway's process checks for duplicates too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class DuplicateKey(ValueError):
    """The key is the message."""


def first_repeated(names: Iterable[str]) -> str | None:
    """The first name that has come before; None: each is another."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of such pairs, for ``json.loads``. Raises DuplicateKey."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise DuplicateKey(first_repeated(key for key, _ in pairs))
    return found
