"""Objects of a body whose type says which of their fields have an effect: parts, items, tools, formats.

A struct of such an object names them in ``variants``; ``fields`` lists those of the other types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Variants(NamedTuple):
    """The fields that have an effect, by the value of the field ``tag``. An object of another value has all of its
    fields: it is refused, or left out whole."""

    tag: str
    used: Mapping[str, tuple[str, ...]]
    default: str = ""  # the value where the field is absent or null
