"""The population stability index: how large a change of shares is, and how large it is by chance alone.

Between samples of ``n`` and ``m`` values of one distribution in ``B`` cells, the index is about ``1/n + 1/m`` times a
chi-squared variable with ``B - 1`` degrees of freedom (B. Yurdakul, "Statistical Properties of Population Stability
Index", 2018). So a limit such as 0.1 or 0.2 means another thing for each size of a sample; ``by_chance`` is the limit
that fits these sizes. The index is shown and decides nothing (``exact.py`` does).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Final

COVERED: Final = 0.95
"""Part of the samples without a change whose index is below ``by_chance``."""


def psi(reference: Sequence[int], window: Sequence[int]) -> float:
    """The sum over cells of ``(q - p) ln(q / p)``; shares are ``(count + 0.5) / (total + 0.5 B)``, so none is 0."""
    cells = len(reference)
    before, now = sum(reference) + 0.5 * cells, sum(window) + 0.5 * cells
    found = 0.0
    for old, new in zip(reference, window, strict=True):
        p, q = (old + 0.5) / before, (new + 0.5) / now
        found += (q - p) * math.log(q / p)
    return found


def by_chance(reference: int, window: int, cells: int) -> float:
    """What the index is below in 95 of 100 windows without a change. ``reference``, ``window``: values of each."""
    if cells < 2 or not reference or not window:
        return 0.0
    return (1.0 / reference + 1.0 / window) * chi2_quantile(COVERED, cells - 1)


@functools.cache
def chi2_quantile(probability: float, freedom: int) -> float:
    """What a chi-squared variable is below with this probability; by bisection."""
    low, high = 0.0, freedom + 40.0 * math.sqrt(freedom)
    for _ in range(200):
        middle = 0.5 * (low + high)
        if gamma_below(0.5 * freedom, 0.5 * middle) < probability:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def gamma_below(shape: float, x: float) -> float:
    """The regularised lower incomplete gamma function P(shape, x), by its power series (Abramowitz and Stegun, 6.5.29).
    All terms are positive, so that nothing cancels."""
    if x <= 0.0:
        return 0.0
    term = found = 1.0 / shape
    n = shape
    while term > 1e-17 * found:
        n += 1.0
        term *= x / n
        found += term
    return min(1.0, found * math.exp(shape * math.log(x) - x - math.lgamma(shape)))
