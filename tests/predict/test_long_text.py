"""A part of a long text stands for all of it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.predict.long_text import SPARSEST, WORD, deciding_part


def words_of(text: str) -> list[str]:
    """As WordPiece does: a token for each letter of a word, one for all of a word that is too long."""
    return [token for word in text.split() for token in (word if len(word) <= 100 else ["?"])]


@given(
    st.lists(st.sampled_from(["a", "bcd", " " * 500, "e" * 90, "f" * 300]), max_size=400),
    st.integers(1, 200),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_its_first_or_last_tokens_are_those_of_the_text(pieces: list[str], limit: int, from_end: bool) -> None:
    text = " ".join(pieces)
    part = deciding_part(text, limit, lambda part: len(words_of(part)), from_end=from_end)
    assert part.is_whole == (part.text == text)
    assert len(part.text) <= SPARSEST * max(limit, WORD)
    kept, whole = words_of(part.text), words_of(text)
    if part.is_whole or part.has_plenty:
        assert (kept[-limit:] if from_end else kept[:limit]) == (whole[-limit:] if from_end else whole[:limit])
    if part.has_plenty:
        assert len(whole) > limit


def test_a_short_text_is_not_even_counted() -> None:
    def count(text: str) -> int:
        raise AssertionError

    assert deciding_part("a" * 2048, 1, count).is_whole
