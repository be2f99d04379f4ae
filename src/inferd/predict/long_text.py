"""The part of a long text that a model reads, when it reads a limited number of tokens.

Tokenizing megabytes delays all other requests, and a model that reads 512 tokens needs a few thousand characters. Knows
no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

SPARSE: Final = 16  # characters for each token of the limit, beyond which a part of a text is looked at first
SPARSEST: Final = 256  # characters for each token of the limit, beyond which no longer part of a text is tried
WORD: Final = 128  # more tokens than a word has; of longer ones WordPiece makes a single one


class Part(NamedTuple):
    text: str
    is_whole: bool
    has_plenty: bool  # whether a part has more than twice as many tokens as are needed; False for a whole text


def deciding_part(text: str, limit: int, count: Callable[[str], int], *, from_end: bool = False) -> Part:
    """The beginning or end of ``text`` whose first or last ``limit`` tokens are those of all of it.

    The tokens of a word that is cut may differ: at most ``WORD`` of them, so more than twice the limit is needed.
    """
    plenty = max(limit, WORD)
    size = SPARSE * plenty
    while len(text) > size:
        part = text[-size:] if from_end else text[:size]
        has_plenty = count(part) > 2 * plenty
        if has_plenty or size >= SPARSEST * plenty:
            return Part(part, False, has_plenty)
        size *= 2
    return Part(text, True, False)
