"""How rank 0 divides a step among the stages of a pipeline. Other ranks do what its plan says."""

from __future__ import annotations

from math import sqrt
from typing import Final

READ_ROWS: Final = 16
"""Rows whose arithmetic takes as long as reading all weights once, which a micro-batch of few rows takes at least.

Layers of Qwen3-0.6B's shape on one thread of an AVX-512 BF16 core: 9 rows in bfloat16 and 20 in int8.
"""


def cuts(num_rows: int, stages: int) -> list[int]:
    """The rows before which a step of ``num_rows`` is cut into micro-batches; empty where a cut does not pay.

    ``n`` micro-batches pass ``stages`` stages in ``n + stages - 1`` turns. A turn takes as long as the arithmetic of
    ``READ_ROWS + num_rows / n`` rows. The product is least where ``n`` is the root below. No micro-batch has fewer than
    ``READ_ROWS``, because those take no shorter turns.
    """
    count = max(min(round(sqrt((stages - 1) * num_rows / READ_ROWS)), num_rows // READ_ROWS), 1)
    return [num_rows * index // count for index in range(1, count)]
