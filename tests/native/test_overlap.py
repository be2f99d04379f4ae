"""Reading and arithmetic together: between the longer one and their sum."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.native.overlap import both, fitted

SECONDS = st.floats(1e-6, 1.0)


@given(reading=SECONDS, arithmetic=SECONDS, overlap=st.floats(0, 1), more=st.floats(0, 1))
def test_both_take_at_least_the_longer_one_and_at_most_their_sum(
    reading: float, arithmetic: float, overlap: float, more: float
) -> None:
    found = both(reading, arithmetic, overlap)
    assert max(reading, arithmetic) <= found <= (reading + arithmetic) * (1 + 1e-9)
    assert found == both(arithmetic, reading, overlap)
    assert both(reading + more, arithmetic, overlap) >= found * (1 - 1e-9)
    assert both(reading, arithmetic, min(1.0, overlap + more)) <= found * (1 + 1e-9)


@given(seconds=SECONDS, overlap=st.floats(0, 1))
def test_the_overlap_is_what_passes_of_one_of_two_that_take_equally_long(seconds: float, overlap: float) -> None:
    assert both(seconds, seconds, overlap) == pytest.approx((2 - overlap) * seconds)
    assert both(seconds, 0.0, overlap) == seconds
    assert both(seconds, 2 * seconds, 0.0) == pytest.approx(3 * seconds)
    assert both(seconds, 2 * seconds, 1.0) == 2 * seconds


@given(overlap=st.integers(0, 100), reading=SECONDS)
def test_the_overlap_of_measured_products_is_found(overlap: int, reading: float) -> None:
    known = overlap / 100
    rows = [(reading, reading * part, both(reading, reading * part, known)) for part in (0.1, 0.5, 1.0, 2.0)]
    assert fitted(rows) == pytest.approx(known)
