"""Patterns of few texts list exactly those that the validators match."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.structured.schema import finite, patterns

TEXTS = ["".join(text) for size in range(5) for text in product("abA", repeat=size)]
pieces = st.sampled_from(["a", "b", "[ab]", "(a|b)", "(?:|ab)", "(?i:a)", "^", "$", "[^\\W\\d]{0}", "\\u0061", "()"])
repeated = st.builds("{}{}".format, pieces, st.sampled_from(["", "", "?", "??", "{2}", "{0,2}", "{0}"]))
ways = st.lists(repeated, max_size=4).map("".join)
inner = st.lists(ways, min_size=1, max_size=2).map("|".join)


@given(inner, st.sampled_from(["^{}$", "^({})$", "^(?:{}|b)$", "{}", "^{}|b$"]))
def test_the_texts_of_a_pattern_are_those_that_match(body: str, form: str) -> None:
    pattern = form.format(body)
    if not patterns.is_readable(pattern):  # the validators read no repeated anchor
        return
    listed = patterns.texts_of(pattern)
    if listed is not None:
        assert {text for text in listed if len(text) < 5} == {text for text in TEXTS if patterns.matches(pattern, text)}


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"^\.\-\x41?$", [".-", ".-A"]),
        (r"^(?<n>a[b-d])$", ["ab", "ac", "ad"]),
        (r"^(?i:sa)$", ["sa", "sA", "Sa", "SA", "\u017fa", "\u017fA"]),
        (r"^\d$", [*"0123456789"]),
        (r"^$", [""]),
        (r"^[a-]b{0,1}$", ["a", "ab", "-", "-b"]),
        (r"(^a|^b)$", ["a", "b"]),
        (r"^a$b?$", ["a"]),
    ],
)
def test_the_texts_are_listed_in_the_order_of_the_pattern(pattern: str, texts: list[str]) -> None:
    assert patterns.texts_of(pattern) == tuple(texts)


@pytest.mark.parametrize(
    "pattern",
    [
        "^a", "a$", "^a|b$", "^a*$", "^a+$", "^a{1,}$", "^[^a]$", r"^\s$", r"^[\s]$", r"^\p{Lu}$", "^.$", "^(?i:é)$",
        "^[a-z]{2}$", "^[0-9]{1,3}$", "^(?:a{0,500000})$", f"^{'(' * 60}a{')' * 60}$", "^a(?=b)b$", "^[]$", "^b^a$",
    ],
)  # fmt: skip
def test_what_has_many_texts_or_is_not_read_here_is_not_listed(pattern: str) -> None:
    assert finite.texts(pattern) is None
