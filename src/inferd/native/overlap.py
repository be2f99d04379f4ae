"""How long reading and arithmetic take together, where a core or a kernel overlaps them in part. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

_STEPS: Final = 100


def both(reading: float, arithmetic: float, overlap: float) -> float:
    """Seconds of a product that reads for ``reading`` and multiplies for ``arithmetic`` seconds.

    ``overlap``: where both take equally long, the part of one that passes during the other. 1: the longer one alone
    counts (the roofline); 0: their sum. Where one is much longer, the other one hides in it. The smooth maximum of the
    two: the norm with the exponent p for which equal times a take (2 - overlap) x a, so 2^(1/p) = 2 - overlap.
    """
    longer, shorter = max(reading, arithmetic), min(reading, arithmetic)
    if overlap >= 1.0 or shorter <= 0.0:
        return longer
    power = math.log(2.0) / math.log1p(1.0 - overlap)  # exact next to 1, where log2(2 - overlap) is 0
    return float(longer * (1.0 + (shorter / longer) ** power) ** (1.0 / power))


def fitted(measured: Iterable[tuple[float, float, float]]) -> float:
    """The overlap, in hundredths, with the least squares of relative errors.

    ``measured``: reading, arithmetic, and both as it was measured, in seconds.
    """
    found = list(measured)

    def error(overlap: float) -> float:
        return sum((both(reading, arithmetic, overlap) / whole - 1.0) ** 2 for reading, arithmetic, whole in found)

    return min((step / _STEPS for step in range(_STEPS + 1)), key=error)
