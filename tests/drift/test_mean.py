"""The means of vectors: their spread and their distance are numpy's, and probabilities are those of permutations of the
same vectors and, over many windows, as promised."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

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
    assert found.eigenvalues == pytest.approx(np.linalg.eigvalsh(covariance)[::-1].tolist(), abs=1e-12)
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


def test_a_probability_is_that_of_permutations() -> None:
    """2,000 permutations of reference and window, for windows without and with a change."""
    random = np.random.default_rng(4)
    for share in (0.2, 0.2, 0.25, 0.3):
        before, now = features(embeddings(random, 1000)), features(embeddings(random, 150, share=share))
        both = np.concatenate([before, now])
        found = mean_of(before, before).compare(len(now), now.sum(0).tolist())
        total = both.sum(0)
        as_far = 0
        for _ in range(2000):
            part = both[random.permutation(len(both))[: len(now)]].sum(0)
            as_far += bool(np.linalg.norm(part / len(now) - (total - part) / len(before)) >= found.distance)
        assert found.p == pytest.approx(as_far / 2000, abs=0.05), share
    far = features(embeddings(random, 150, share=0.7))
    assert mean_of(before, before).compare(len(far), far.sum(0).tolist()).p < 1e-6, "a large change is found"


def test_windows_without_a_change_are_below_a_level_as_often_as_it_says_and_a_change_is_found() -> None:
    """Each of 1,500 windows has a reference of its own, so they are independent: the exact binomial 99.9 % band."""
    binomtest = pytest.importorskip("scipy.stats").binomtest
    random = np.random.default_rng(5)
    usual, changed = features(embeddings(random, 4000)), features(embeddings(random, 2000, share=0.3))
    spread = spread_of(usual)
    found, power = [], []
    for number in range(1500):
        reference = usual[random.integers(0, len(usual), 2000)]
        mean = Mean(num=len(reference), sums=tuple(reference.sum(0).tolist()), spread=spread)
        found.append(mean.compare(300, usual[random.integers(0, len(usual), 300)].sum(0).tolist()))
        if number < 200:
            power.append(mean.probability(300, changed[random.integers(0, len(changed), 300)].sum(0).tolist()))
    for level in (0.5, 0.1, 0.05, 0.01):
        band = binomtest(sum(one.p <= level for one in found), len(found), level).proportion_ci(0.999, "exact")
        assert band.low <= level <= band.high, level
    beyond = binomtest(sum(one.distance > one.by_chance for one in found), len(found), 0.05)
    assert beyond.pvalue > 0.001, "what is shown as by chance is that of 95 in 100"
    assert np.mean(np.array(power) <= 0.05) > 0.5, "a topic from 20 % to 30 % in 300 vectors"


def test_a_stream_that_never_varies_alarms_at_any_other_mean_alone() -> None:
    still = Mean(num=500, sums=(1.0,) * NUM_FEATURES, spread=Spread(eigenvalues=(0.0,) * NUM_FEATURES))
    assert (still.compare(500, [1.0] * NUM_FEATURES).p, still.compare(500, [1.1] * NUM_FEATURES).p) == (1.0, 0.0)
