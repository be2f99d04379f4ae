"""Sizes as people write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.config.units import bytes_text, enough_text, size_text

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (7, "7 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (KIB, "1.00 KiB"),
        (10 * KIB, "10.0 KiB"),
        (99.9 * KIB, "99.9 KiB"),
        (100 * KIB, "100 KiB"),
        (999 * KIB, "999 KiB"),
        (1000 * KIB, "0.98 MiB"),
        (1.5 * GIB, "1.50 GiB"),
        (-10 * MIB, "-10.0 MiB"),
        (3 * TIB, "3.0 TiB"),
    ],
)
def test_bytes_are_told_in_three_digits(num_bytes: float, text: str) -> None:
    assert bytes_text(num_bytes) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0"), (1000, "1000"), (KIB, "1KiB"), (KIB + 1, "1025"), (16 * MIB, "16MiB"), (GIB, "1GiB"), (5 * TIB, "5TiB")],
)
def test_a_size_is_written_exactly(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


@given(st.integers(1, 2**50))
def test_what_is_enough_is_no_less_and_less_than_a_mebibyte_more(num_bytes: int) -> None:
    assert enough_text(num_bytes).endswith("MiB")
    assert 0 <= int(enough_text(num_bytes).removesuffix("MiB")) * MIB - num_bytes < MIB
