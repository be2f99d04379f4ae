"""The exact test's tails are those of the hypergeometric distribution, to the far end."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.drift.exact import is_near, tail

stats = pytest.importorskip("scipy.stats")


@st.composite
def samples(draw: st.DrawFn, most: int = 30_000) -> tuple[int, int, int, int]:
    total = draw(st.integers(2, most))
    window, hits = draw(st.integers(1, total - 1)), draw(st.integers(1, total - 1))
    count = draw(st.integers(max(0, window + hits - total), min(window, hits)))
    return count, window, hits, total


@given(samples())
def test_a_tail_is_scipys(found: tuple[int, int, int, int]) -> None:
    count, window, hits, total = found
    is_upper = count * total >= window * hits
    of = stats.hypergeom(total, hits, window)
    want = float(of.sf(count - 1) if is_upper else of.cdf(count))
    if want > 1e-250:
        assert tail(*found) == pytest.approx(want, rel=1e-8)


@given(samples(most=14))
def test_a_tail_is_the_sum_of_plain_fractions(found: tuple[int, int, int, int]) -> None:
    count, window, hits, total = found
    ways = {
        k: math.comb(hits, k) * math.comb(total - hits, window - k)
        for k in range(max(0, window + hits - total), min(window, hits) + 1)
    }
    is_upper = count * total >= window * hits
    far = sum(way for k, way in ways.items() if (k >= count if is_upper else k <= count))
    assert tail(*found) == pytest.approx(far / math.comb(total, window), rel=1e-12)


@given(samples())
def test_what_is_near_is_no_candidate_for_an_alarm(found: tuple[int, int, int, int]) -> None:
    """Within two standard deviations no tail is small; Chebyshev's inequality is no help there, scipy is."""
    if is_near(*found):
        assert tail(*found) > 0.005
