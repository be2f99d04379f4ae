"""What is replaced before a text is written, and that no pattern of an operator takes unbounded time."""

from __future__ import annotations

import importlib
import re
import time
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from inferd.config.patterns import problem_of
from inferd.observe.payloads.beginnings import beginning_of
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


SECRETS = [
    "anna.b+x@mail.example.com",
    "4111 1111 1111 1111",
    "+49 (30) 901820-17",
    "030 / 9018 2017 55",
    "sk-inf-AbCdEfGhIjKl-0123456789abcdefghij",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhbm5h",
    "Bearer abcdefghijklmnopqrstuvwxyz",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEvQIBADANBg",
    "EMP-123456",
]


@given(
    st.lists(st.sampled_from(["see", "you", "anna@example.com", "EMP-654321", "2026", "x" * 5000]), max_size=4),
    st.sampled_from(SECRETS),
    st.data(),
)
def test_the_beginning_of_a_match_at_the_end_of_a_cut_text_is_replaced(
    before: list[str], secret: str, data: st.DataObject
) -> None:
    text = "".join(f"{word}; " for word in before)
    assert redact(text + secret) != text + secret
    begun = secret[: data.draw(st.integers(1, len(secret)))]
    assert redact(text + begun, is_cut=True) == redact(text) + "[cut]"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("See you.\n", "See you.\n"),
        ("See you", "See [cut]"),
        ('{"city": "Paris"}', '{"city": "Paris"}'),
        ("anna@example.com and 12,", "[email] and 12,"),
        ("anna@example.com.", "[cut]"),  # .au may follow
        ("anna@example.com, EMP-1", "[email], [cut]"),
        ("EMP-123456-7", "[employee][cut]"),
        ("a number 4111 1111 1111 1112", "a number [cut]"),
        ("", ""),
    ],
)
def test_what_is_left_of_a_cut_text(text: str, expected: str) -> None:
    assert redact(text, is_cut=True) == expected


def test_a_text_that_is_whole_keeps_its_end() -> None:
    assert redact("write to anna@exa") == "write to anna@exa"
    assert Redactor(())("anna@exa", is_cut=True) == "anna@exa"


def _expressions(least: int, more: int, leaves: int) -> st.SearchStrategy[str]:
    """``least``, ``more``: of the numbers of repetitions."""
    return st.recursive(
        st.sampled_from(["a", "b", "[ab]", "."]),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
            st.tuples(inner, st.integers(0, least), st.integers(0, more)).map(
                lambda t: f"(?:{t[0]}){{{t[1]},{t[1] + t[2]}}}"
            ),
        ),
        max_leaves=leaves,
    )


@given(st.text("ab", max_size=7), _expressions(2, 2, 4))
def test_the_beginnings_of_a_pattern_are_those_of_its_matches(text: str, pattern: str) -> None:
    """Against every text that may follow."""
    assume(importlib.import_module("re._parser").parse(pattern).getwidth()[1] <= 7)
    follow = ("".join(more) for count in range(8 - len(text)) for more in product("ab", repeat=count))
    has_match = any(re.fullmatch(pattern, text + more) for more in follow)
    assert (beginning_of(pattern).match(text) is not None) == has_match


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


@given(_expressions(3, 20, 6))
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
