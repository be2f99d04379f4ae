"""What is replaced before a text is written, and that no pattern of an operator takes unbounded time."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.config.pattern_cost import problem_of
from inferd.observe.payloads.redaction import PIECE, Redactor

ALL = ("api_key", "email", "card", "phone")
redact = Redactor(ALL, {"employee": r"\bEMP-\d{6}\b"})


def with_checksum(digits: str) -> str:
    """The digits with Luhn's check digit."""
    total = sum(2 * int(d) - 9 * (int(d) > 4) if index % 2 == 0 else int(d) for index, d in enumerate(digits[::-1]))
    return digits + str(-total % 10)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("write to anna.b+x@mail.example.com now", "write to [email] now"),
        ("pay with 4111 1111 1111 1111.", "pay with [card]."),
        ("pay with 4111-1111-1111-1111", "pay with [card]"),
        ("a number 4111 1111 1111 1112", None),
        ("call +49 (30) 901820-17 today", "call [phone] today"),
        ("call 030 / 9018 2017 55", "call [phone]"),
        ("key sk-inf-AbCdEfGhIjKl-0123456789abcdefghij", "key [api_key]"),
        ("token ghp_0123456789abcdefghijABCDEFGHIJ0123456789", "token [api_key]"),
        ("Authorization: Bearer abcdefghijklmnopqrstuvwxyz", "Authorization: [api_key]"),
        ("AKIAIOSFODNN7EXAMPLE", "[api_key]"),
        ("I am EMP-123456, not EMP-1234567", "I am [employee], not EMP-1234567"),
        ("in 2026 there were 12,345 of 99.5 %", "in 2026 there were 12,345 of 99.5 %"),
    ],
)
def test_what_is_replaced(text: str, expected: str | None) -> None:
    found = redact(text)
    assert found == expected if expected is not None else "[card]" not in found


@given(st.text(max_size=50), st.integers(10**11, 10**18 - 1), st.text(max_size=50), st.sampled_from(["", " ", "-"]))
def test_every_number_with_luhns_checksum_is_replaced(before: str, number: int, after: str, sign: str) -> None:
    card = with_checksum(str(number))
    written = sign.join(card[index : index + 4] for index in range(0, len(card), 4))
    text = f"{before}x{written}x{after}"
    assert written not in redact(text)


@given(st.integers(PIECE - 40, PIECE + 40))
def test_a_match_across_two_pieces_is_replaced(start: int) -> None:
    text = "x" * start + " anna@example.com EMP-123456 4111111111111111 " + "y" * 5000
    found = redact(text)
    assert found == "x" * start + " [email] [employee] [card] " + "y" * 5000


@given(st.text(max_size=300))
def test_a_text_without_a_match_is_unchanged(text: str) -> None:
    plain = "".join(letter for letter in text if not (letter.isdecimal() or letter in "@-_"))
    assert Redactor(("email", "card", "phone"))(plain) == plain


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+b",
        r"(a|a){1,30}b",
        r"(\d{1,9}){1,9}x",
        r"\w+@\w+",
        r".*secret",
        r"(a)\1",
        r"(?=a)a",
        r"^a",
        r"a$",
        r"a{1,300}",
        r"[",
        r"a?",
        r"\b",
        r"x{0,4}" * 20,
    ],
)
def test_patterns_without_a_bound_are_refused(pattern: str) -> None:
    sentence = problem_of(pattern)
    if pattern == "a?":
        assert sentence is None  # an empty match replaces nothing
    else:
        assert sentence is not None


@pytest.mark.parametrize(
    "pattern", [r"\bEMP-\d{6}\b", r"[A-Z]{2}\d{2}[A-Z0-9]{11,30}", r"\d{3}-\d{2}-\d{4}", r"(?i)mrn[:# ]{0,3}\d{5,10}"]
)
def test_usual_patterns_are_accepted(pattern: str) -> None:
    assert problem_of(pattern) is None


@given(
    st.recursive(
        st.sampled_from(["a", "b", "[ab]", "."]),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
            st.tuples(inner, st.integers(0, 3), st.integers(0, 20)).map(
                lambda t: f"(?:{t[0]}){{{t[1]},{t[1] + t[2]}}}"
            ),
        ),
        max_leaves=6,
    )
)
def test_an_accepted_pattern_takes_linear_time(pattern: str) -> None:
    """Generous by a factor of a hundred; an exponential search would take years."""
    if problem_of(pattern) is None:
        began = time.process_time()
        Redactor((), {"x": pattern + "c" if problem_of(pattern + "c") is None else pattern})("ab" * 500)
        assert time.process_time() - began < 5.0


def test_the_built_in_patterns_take_linear_time() -> None:
    for text in (
        "a" * 60_000,
        "1 " * 30_000,
        "a@" * 30_000,
        "a.b-" * 15_000,
        "+1 (" * 15_000,
        "eyJ" * 20_000,
        "sk-" * 20_000,
    ):
        began = time.process_time()
        redact(text)
        assert time.process_time() - began < 5.0
