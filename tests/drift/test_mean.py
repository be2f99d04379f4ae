"""The means of vectors: their spread and their distance are numpy's, and a change is told by chance more rarely than
promised: against permutations of the same vectors, and against the sums of chi-squared variables themselves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.drift.mean import Mean, Spread, Spreading, add_vectors, vector_of
from inferd.predict.facts import SCALES, features_of
from inferd.types import NUM_FEATURES

Vectors = npt.NDArray[np.float64]


def embeddings(random: np.random.Generator, count: int, share: float = 0.2, size: int = 64) -> Vectors:
    """Directions around two centres, of which the second one has this share."""
    centres = np.random.default_rng(7).standard_normal((2, size))
    which = (random.random(count) < share).astype(int)
    return np.asarray(centres[which] + 0.8 * random.standard_normal((count, size)))


def features(rows: Vectors) -> Vectors:
    return np.array([np.frombuffer(features_of(row), np.float32) for row in rows], np.float64)


def spread_of(vectors: Vectors) -> Spread:
    spreading = Spreading()
    for part in np.array_split(vectors, 3):
        spreading.add(part.tolist())
    return spreading.spread()


def mean_of(vectors: Vectors, pilot: Vectors) -> Mean:
    sums = [0.0] * NUM_FEATURES
    add_vectors(vectors.tolist(), sums)
    return Mean(num=len(vectors), sums=tuple(sums), spread=spread_of(pilot))


def test_the_spread_and_the_distance_are_those_of_numpy() -> None:
    random = np.random.default_rng(1)
    vectors, window = features(embeddings(random, 300)), features(embeddings(random, 50, share=0.6))
    covariance = np.cov(vectors.T)
    found = spread_of(vectors)
    powers = [np.trace(np.linalg.matrix_power(covariance, power)) for power in (1, 2, 4)]
    assert (found.trace, found.square, found.fourth) == pytest.approx(powers)
    distance = mean_of(vectors, vectors).compare(len(window), window.sum(0).tolist()).distance
    assert distance == pytest.approx(float(np.linalg.norm(vectors.mean(0) - window.mean(0))))


def test_the_distance_is_the_mean_discrepancy_of_the_kernel() -> None:
    """The double sums of Gretton's biased estimate, with the kernel that the features are of."""
    random = np.random.default_rng(2)
    before, now = features(embeddings(random, 60)), features(embeddings(random, 40, share=0.7))
    squared = (before @ before.T).mean() + (now @ now.T).mean() - 2.0 * (before @ now.T).mean()
    found = mean_of(before, before).compare(len(now), now.sum(0).tolist())
    assert found.distance**2 == pytest.approx(float(squared))


def test_the_kernel_is_about_the_mean_of_two_gaussians_of_the_directions() -> None:
    random = np.random.default_rng(3)
    rows = embeddings(random, 40)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    squared = ((unit[:, None] - unit[None]) ** 2).sum(-1)
    exact = np.mean([np.exp(-squared / (2.0 * width**2)) for width in SCALES], axis=0)
    found = features(rows)
    assert np.abs(found @ found.T - exact).mean() < 1.0 / np.sqrt(NUM_FEATURES), "the deviation of so few features"
    assert np.corrcoef((found @ found.T).ravel(), exact.ravel())[0, 1] > 0.7
    longer = np.frombuffer(features_of(3.5 * rows[0]), np.float32)
    assert np.allclose(longer, found[0], atol=1e-5), "the length does not matter"
    assert features_of(np.zeros(20)) == features_of(np.array([np.nan] * 20)) == b""
    assert list(vector_of(features_of(rows[0]))) == pytest.approx(found[0].tolist())


def test_a_probability_is_not_below_that_of_permutations() -> None:
    """2,000 permutations of reference and window, for windows without and with a change."""
    random = np.random.default_rng(4)
    for share in (0.2, 0.2, 0.3, 0.35, 0.45):
        before, now = features(embeddings(random, 1000)), features(embeddings(random, 150, share=share))
        both = np.concatenate([before, now])
        found = mean_of(before, before).compare(len(now), now.sum(0).tolist())
        total = both.sum(0)
        as_far = 0
        for _ in range(2000):
            part = both[random.permutation(len(both))[: len(now)]].sum(0)
            as_far += bool(np.linalg.norm(part / len(now) - (total - part) / len(before)) >= found.distance)
        assert found.p >= as_far / 2000 - 0.02, share
    far = features(embeddings(random, 150, share=0.7))
    assert mean_of(before, before).compare(len(far), far.sum(0).tolist()).p < 1e-6, "a large change is found"


@given(st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=6), st.floats(0.0, 30.0))
def test_the_bound_is_above_the_tail_of_the_sum_it_is_of(weights: list[float], x: float) -> None:
    """For equal weights the sum is one chi-squared variable, whose tail scipy has; else it is below the sum with all
    weights at their largest."""
    chi2 = pytest.importorskip("scipy.stats").chi2
    spread = Spread(trace=sum(weights), square=sum(w * w for w in weights), fourth=sum(w**4 for w in weights))
    limit = spread.limit(float(np.exp(-x)))
    assert spread.probability(limit) == pytest.approx(float(np.exp(-x)), rel=1e-6)
    equal = Spread(trace=2.0 * len(weights), square=4.0 * len(weights), fourth=16.0 * len(weights))
    value = equal.limit(float(np.exp(-x)))
    assert chi2.sf(value / 2.0, len(weights)) <= np.exp(-x) * (1 + 1e-9)


def test_a_stream_that_never_varies_alarms_at_any_other_mean_alone() -> None:
    still = Spread(trace=0.0, square=0.0, fourth=0.0)
    assert (still.probability(0.0), still.probability(0.1)) == (1.0, 0.0)
