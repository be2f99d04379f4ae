"""The exact test of two samples' counts of one cell: Fisher's, with the tails of the hypergeometric distribution.

If the values of a reference and of a window are independent and have one distribution, and the cell was chosen without
looking at either, then, of the ``hits`` values in the cell, the number that is in the window is hypergeometric:
whatever the cell's probability is, and however small the samples are (R. A. Fisher, 1935). So a p-value is right also
far out in the tail, where the chi-squared approximation is not, and where a low rate of false alarms needs it.
"""

from __future__ import annotations

import math
from typing import Final

_NEAR: Final = 4.0
"""Squared standard deviations within which a count is by chance, and no tail is summed up."""

_NEGLIGIBLE: Final = 1e-17


def is_near(count: int, window: int, hits: int, total: int) -> bool:
    """Whether a window's count is within two standard deviations of its mean; see ``tail`` for the arguments."""
    mean = window * hits / total
    variance = mean * (total - hits) * (total - window) / (total * max(1, total - 1))
    return (count - mean) ** 2 <= _NEAR * variance


def tail(count: int, window: int, hits: int, total: int) -> float:
    """The probability that so many of the window's values are in the cell, or more; or so many or fewer, whichever
    side of its mean ``count`` is on.

    ``window``: values of the window; ``hits``: values of both samples in the cell; ``total``: values of both samples.
    """
    if count * total < window * hits:  # fewer in the cell are more outside of it
        count, hits = window - count, total - hits
    least, most = max(0, window + hits - total), min(window, hits)
    if count <= least:
        return 1.0
    term = math.exp(_log_choose(hits, count) + _log_choose(total - hits, window - count) - _log_choose(total, window))
    found = 0.0
    while count <= most and term > _NEGLIGIBLE * found:
        found += term
        term *= (hits - count) * (window - count) / ((count + 1) * (total - hits - window + count + 1))
        count += 1
    return min(1.0, found)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
