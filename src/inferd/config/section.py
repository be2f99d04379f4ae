"""The base of every section of the configuration, and the forms that texts may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

import msgspec

ADDRESS: Final = r"^(\[[0-9A-Fa-f:.]+\]|[^:\s]*):[0-9]{1,5}$"
BASE_URL: Final = r"^https?://[^/\s]+"
DEVICE: Final = r"^(auto|cpu|cuda(:[0-9]+)?)$"
DIGEST: Final = r"^(tree-)?sha256:[0-9a-f]{64}$"
STEP_NAME: Final = r"^[\w-]*$"
VARIABLE: Final = r"^[A-Za-z_][A-Za-z0-9_]*$"
VERSION: Final = r"^[1-9][0-9]{0,17}$"

IN_WORDS: Final[Mapping[str, str]] = {
    ADDRESS: "HOST:PORT such as 0.0.0.0:8001",
    BASE_URL: "a URL such as https://host/v1",
    DEVICE: "auto, cpu, cuda or cuda:N",
    DIGEST: "a digest such as tree-sha256: and 64 hexadecimal digits",
    STEP_NAME: "a word of letters, digits, - and _",
    VARIABLE: "the name of an environment variable",
    VERSION: "a text of a whole number above 0, of at most 18 digits",
}
"""What a text of each pattern is."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: keyword only, immutable, an unknown key is an error."""

    short: ClassVar[str] = ""
    """The field that a text in place of the whole section sets; empty: the section has no short form."""
