"""How much of a long text decides what becomes of it, where a model reads a limited number of tokens.

Knows no tokenizer. While megabytes become tokens, everybody else waits; a model that reads 512 of them needs a
few thousand characters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

SPARSE: Final = 16  # characters for each token of the limit, beyond which a part of a text is looked at first
SPARSEST: Final = 256  # and beyond which no text is read at all
WORD: Final = 128  # more tokens than a word has; of longer ones WordPiece makes a single one


class Part(NamedTuple):
    text: str
    is_whole: bool
    has_plenty: bool  # of tokens: more than any limit that it was made for; told of parts alone


def deciding_part(text: str, limit: int, count: Callable[[str], int], *, from_end: bool = False) -> Part:
    """The beginning or end of ``text`` whose first or last ``limit`` tokens are those of all of it.

    Where it is cut off within a word, the tokens of that word may be others: at most ``WORD`` of them, which is why
    more than twice the limit are wanted.
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
