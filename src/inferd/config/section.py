"""The base of every section of the configuration."""

from __future__ import annotations

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: keyword only, immutable, an unknown key is an error."""
