"""The base of every section of the configuration."""

from __future__ import annotations

from typing import ClassVar

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: keyword only, immutable, an unknown key is an error."""

    short: ClassVar[str] = ""
    """The field that a text in place of the whole section sets; empty: the section has no short form."""
