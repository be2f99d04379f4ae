"""The index is its definition, and its limit by chance is the chi-squared quantile that it should be."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.drift.psi import by_chance, chi2_quantile, gamma_below, psi

stats = pytest.importorskip("scipy.stats")
special = pytest.importorskip("scipy.special")

counts = st.lists(st.integers(0, 5000), min_size=2, max_size=12)


@given(counts, st.data())
def test_the_index_is_its_definition(reference: list[int], data: st.DataObject) -> None:
    window = data.draw(st.lists(st.integers(0, 5000), min_size=len(reference), max_size=len(reference)))
    p = (np.array(reference) + 0.5) / (sum(reference) + 0.5 * len(reference))
    q = (np.array(window) + 0.5) / (sum(window) + 0.5 * len(window))
    assert psi(reference, window) == pytest.approx(float(np.sum((q - p) * np.log(q / p))), abs=1e-12)
    assert psi(reference, window) == pytest.approx(psi(window, reference), abs=1e-12)
    assert psi(reference, reference) == 0.0


@given(st.floats(0.5, 60), st.floats(0, 200))
def test_the_gamma_function_is_scipys(shape: float, x: float) -> None:
    assert gamma_below(shape, x) == pytest.approx(float(special.gammainc(shape, x)), abs=1e-12)


def test_quantiles_are_scipys() -> None:
    for freedom in range(1, 40):
        assert chi2_quantile(0.95, freedom) == pytest.approx(float(stats.chi2.ppf(0.95, freedom)), rel=1e-9)
    assert by_chance(9000, 1000, 10) == pytest.approx((1 / 9000 + 1 / 1000) * stats.chi2.ppf(0.95, 9))
    assert by_chance(0, 1000, 10) == by_chance(1000, 1000, 1) == 0.0


def test_ninety_five_of_a_hundred_windows_without_a_change_are_below_the_limit() -> None:
    random = np.random.default_rng(7)
    shares = np.full(8, 1 / 8)
    below = sum(
        psi(random.multinomial(8000, shares).tolist(), random.multinomial(2000, shares).tolist())
        < by_chance(8000, 2000, 8)
        for _ in range(2000)
    )
    assert abs(below - 1900) < 4 * math.sqrt(2000 * 0.95 * 0.05)
