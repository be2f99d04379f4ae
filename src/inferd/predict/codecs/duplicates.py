"""Names that come twice where each may come once: the keys of a JSON object, a request's tensors, a table's columns.

Knows no tensor: the gateway's process looks for them as well.
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
