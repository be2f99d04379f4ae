"""Whether a generated answer is a refusal, by its first words: a heuristic, for the guard ``refused`` and for drift.

A refusal begins with a set phrase in nearly all cases, in English at least. Answers of other languages, and refusals in
other words, are not found. Both uses compare answers with answers, so what is missed in both does not matter.
"""

from __future__ import annotations

import re
from typing import Final

READ_CHARACTERS: Final = 200
"""Of an answer. A refusal says so at its beginning."""

_APOLOGY: Final = r"(?:i['\u2019]?m|i am|we['\u2019]?re|we are)\s+(?:very |really |truly |so )?sorry,?\s+(?:but\s+)?"
_UNABLE: Final = (
    r"(?:i|we)(?:\s+(?:can(?:not|['\u2019]t)|can not|won['\u2019]t|will not|must decline|decline|refuse|"
    r"am not able|are not able|am unable|are unable|am not comfortable)|['\u2019]m (?:not able|unable|not comfortable)|"
    r"['\u2019]re (?:not able|unable))"
)
_DEEDS: Final = (
    r"(?:to\s+)?(?:help|assist|do|provide|comply|fulfil|answer|create|write|give|generate|discuss|support|"
    r"engage|continue|share|offer|produce|fulfill)"
)
_REFUSAL: Final = re.compile(
    rf"\W*(?:{_APOLOGY})?(?:unfortunately,?\s+|sorry,?\s+(?:but\s+)?|as an ai(?:\s+\w+){{0,3}},?\s+)*{_UNABLE}\b"
    rf",?(?:\s+\w+){{0,2}}?\s+{_DEEDS}\b",
    re.IGNORECASE,
)


def is_refusal(text: str) -> bool:
    """Whether a text begins as refusals do."""
    return _REFUSAL.match(text[:READ_CHARACTERS]) is not None
