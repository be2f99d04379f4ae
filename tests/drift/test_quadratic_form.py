"""The tail of a weighted sum of chi-squared variables is scipy's, a closed form's, a printed table's and a simulation's;
eigenvalues are numpy's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.drift.eigenvalues import eigenvalues_of
from inferd.drift.quadratic_form import quantile, tail

WEIGHTS = st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=8)


@given(st.integers(1, 40), st.floats(1e-6, 1e6), st.floats(1e-9, 1400.0))
def test_equal_weights_give_a_chi_squared_variable_to_the_last_digits_far_out(
    count: int, weight: float, value: float
) -> None:
    chi2 = pytest.importorskip("scipy.stats").chi2
    assert tail([weight] * count, weight * value) == pytest.approx(float(chi2.sf(value, count)), rel=1e-10)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6, unique=True), st.floats(0.0, 400.0))
def test_weights_that_each_occur_twice_give_a_sum_of_exponentials(weights: list[int], value: float) -> None:
    """Partial fractions; where the terms cancel, the sum of their sizes says how far."""
    terms = [
        math.prod(one / (one - other) for other in weights if other != one) * math.exp(-value / (2.0 * one))
        for one in weights
    ]
    rounding = 1e-13 * sum(abs(term) for term in terms)
    doubled = [float(weight) for weight in weights for _ in range(2)]
    assert tail(doubled, value) == pytest.approx(math.fsum(terms), rel=1e-10, abs=rounding)


@pytest.mark.parametrize(
    ("weights", "value", "printed"),
    [
        ((0.6, 0.3, 0.1), 0.1, 0.9458),
        ((0.6, 0.3, 0.1), 0.7, 0.5064),
        ((0.6, 0.3, 0.1), 2.0, 0.1240),
        ((*(0.6,) * 6, *(0.3,) * 4, *(0.1,) * 2), 1.0, 0.9973),
        ((*(0.6,) * 6, *(0.3,) * 4, *(0.1,) * 2), 5.0, 0.4353),
        ((*(0.6,) * 6, *(0.3,) * 4, *(0.1,) * 2), 12.0, 0.0088),
        ((*(0.6,) * 2, *(0.3,) * 4, *(0.1,) * 6), 1.0, 0.9666),
        ((*(0.6,) * 2, *(0.3,) * 4, *(0.1,) * 6), 3.0, 0.4196),
        ((*(0.6,) * 2, *(0.3,) * 4, *(0.1,) * 6), 8.0, 0.0087),
    ],
)
def test_the_values_are_those_of_imhofs_table(weights: tuple[float, ...], value: float, printed: float) -> None:
    """J. P. Imhof, "Computing the Distribution of Quadratic Forms in Normal Variables", 1961, table 1."""
    assert tail(weights, value) == pytest.approx(printed, abs=6e-5)


@pytest.mark.parametrize("weights", [(3.0, 1.0, 0.2), (1.0, 0.9, 0.05, 0.001), tuple(0.7**n for n in range(32))])
def test_imhofs_integral_along_the_imaginary_axis_is_the_same(weights: tuple[float, ...]) -> None:
    """0.5 + 1/pi times the integral of sin(theta(u)) / (u rho(u)), by the midpoints of 400,000 steps."""
    u = (np.arange(400_000) + 0.5) / 1000.0
    for value in (0.5, 2.0, 8.0, 15.0):
        theta, rho = -0.5 * value * u, np.ones_like(u)
        for weight in weights:
            theta += 0.5 * np.arctan(weight * u)
            rho *= (1.0 + (weight * u) ** 2) ** 0.25
        found = float((np.sin(theta) / (u * rho)).sum()) / 1000.0
        assert tail(weights, value) == pytest.approx(0.5 + found / math.pi, abs=1e-4)


@given(WEIGHTS, st.floats(1e-10, 0.999))
def test_the_tail_falls_and_the_quantile_is_its_inverse(weights: list[float], probability: float) -> None:
    limit = quantile(tuple(weights), probability)
    assert tail(weights, limit) == pytest.approx(probability, rel=1e-6)
    assert tail(weights, 1.01 * limit) < tail(weights, limit) < tail(weights, 0.99 * limit)


def test_sums_that_were_drawn_are_above_values_as_often() -> None:
    random = np.random.default_rng(1)
    weights = [0.6**n for n in range(12)]
    drawn = (random.standard_normal((100_000, 12)) ** 2 * weights).sum(1)
    for value in (0.5, 2.0, 6.0, 12.0):
        p = tail(weights, value)
        assert (drawn > value).mean() == pytest.approx(p, abs=4.0 * math.sqrt(p * (1.0 - p) / len(drawn))), value


def test_ends_are_exact() -> None:
    assert (tail([1.0, 2.0], 0.0), tail([1.0, 2.0], -1.0), tail([0.0, 0.0], 0.1), tail([], 0.1)) == (1.0, 1.0, 0.0, 0.0)
    assert tail([1.0, 2.0], 1e15) == quantile((0.0, 0.0), 0.5) == 0.0
    assert tail([1.0, 2.0, 0.0], 3.0) == tail([1.0, 2.0], 3.0)


@given(st.integers(1, 12), st.integers(0, 10**6), st.floats(0.0, 3.0))
def test_eigenvalues_are_those_of_numpy(size: int, seed: int, range_of_sizes: float) -> None:
    random = np.random.default_rng(seed)
    root = random.standard_normal((size, size)) * np.exp(range_of_sizes * random.standard_normal(size))
    matrix = root @ root.T
    expected = np.linalg.eigvalsh(matrix)[::-1]
    assert eigenvalues_of(matrix.tolist()) == pytest.approx(expected.tolist(), abs=1e-10 * expected[0])
