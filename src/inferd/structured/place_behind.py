"""Where a token leads in an answer: to a place inside of a JSON text, or beside it, as the grammar tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from inferd.structured.names import LONGEST_BEGIN, Place
from inferd.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher


def place_behind(
    place: Place | None, token_id: int, vocabulary: Vocabulary, matcher: LLMatcher, tokens: Sequence[int] = ()
) -> Place | None:
    """The place behind a token; ``None`` where it repeats a name. ``matcher``: the state of the grammar before
    ``tokens``, which the token follows.

    Where free text may go on, no JSON text begins, although the text before it reads so.
    """
    if place is None or token_id in vocabulary.eos_ids:
        return place
    data = vocabulary.token_bytes(token_id)
    after = place.after(data)
    if place.beside is None or (after is not None and after.beside is not None):
        return after
    path = [*tokens, token_id, *vocabulary.outside_json]
    is_prose = matcher.validate_tokens(path) == len(path)
    return place._replace(beside=(place.beside + data)[-LONGEST_BEGIN:]) if is_prose else after
