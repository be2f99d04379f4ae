"""Sizes as people write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.config.units import (
    NotAllowedError,
    bytes_text,
    count,
    enough_text,
    is_count,
    is_size,
    scale_of,
    size,
    size_text,
)

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
    [
        (0, "0"),
        (1000, "1000"),
        (KIB, "1KiB"),
        (KIB + 1, "1025"),
        (16 * MIB, "16MiB"),
        (1025 * MIB, "1025MiB"),
        (GIB, "1GiB"),
        (5 * TIB, "5TiB"),
    ],
)
def test_a_size_is_written_exactly(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


@given(st.integers(1, 2**50))
def test_what_is_enough_is_no_less_and_less_than_a_mebibyte_more(num_bytes: int) -> None:
    assert enough_text(num_bytes).endswith("MiB")
    assert 0 <= int(enough_text(num_bytes).removesuffix("MiB")) * MIB - num_bytes < MIB


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("0", 0),
        ("7b", 7),
        ("1k", 1000),
        ("1KB", 1000),
        ("1Ki", KIB),
        ("1kib", KIB),
        ("2M", 2_000_000),
        ("512 MB", 512_000_000),
        ("1.5GiB", 3 * GIB // 2),
        (" 4GiB ", 4 * GIB),
        ("3T", 3 * 10**12),
        ("3TiB", 3 * TIB),
    ],
)
def test_a_size_is_read_with_its_unit(text: str, num_bytes: int) -> None:
    assert size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4 potatoes", "4PiB", "1e3", "1,5GiB", "0x10"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(NotAllowedError, match="a size such as 4GiB"):
        size(text)


@given(st.integers(0, 2**60))
def test_a_size_that_was_written_is_read_back(num_bytes: int) -> None:
    assert size(size_text(num_bytes)) == num_bytes


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("4096", 4096), ("200k", 200_000), ("200 K", 200_000), ("1.5M", 1_500_000), ("2g", 2_000_000_000)],
)
def test_a_count_is_read_with_its_letter(text: str, number: int) -> None:
    assert count(text) == number


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5", "0.0005k", "1t", "1kk", "1Ki"])
def test_what_is_no_whole_count_is_refused(text: str) -> None:
    with pytest.raises(NotAllowedError, match="an integer, or a count"):
        count(text)


@pytest.mark.parametrize(
    ("name", "reads"),
    [
        ("memory_bytes", ("2k", 2000, "2Ki", 2048)),
        ("max_tokens", ("2k", 2000, "2M", 2_000_000)),
        ("rpm", ("2k", 2000, "2M", 2_000_000)),
        ("tpm", ("2k", 2000, "2M", 2_000_000)),
        ("bytes", None),
        ("port", None),
        (0, None),
        (1, None),
    ],
)
def test_a_fields_name_tells_how_a_text_is_read(name: str | int, reads: tuple[str, int, str, int] | None) -> None:
    scale = scale_of(name)
    if reads is None:
        assert scale is None
    else:
        assert scale is not None
        assert (scale.read(reads[0]), scale.read(reads[2])) == (reads[1], reads[3])
        assert isinstance(name, str)
        assert is_size(name) != is_count(name)
