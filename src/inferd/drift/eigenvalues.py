"""The eigenvalues of a small symmetric matrix, by Jacobi's rotations (G. H. Golub and C. F. Van Loan, "Matrix
Computations", section 8.5). The gateway computes them once for a reference, without an import of numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

NEGLIGIBLE: Final = 1e-12
"""An entry beside the diagonal that is smaller than this part of the largest row counts as 0."""

Row = list[float]


def eigenvalues_of(matrix: Sequence[Sequence[float]]) -> list[float]:
    """The eigenvalues of a symmetric matrix, the largest first. Each is wrong by at most ``NEGLIGIBLE`` times the number
    of rows times the largest."""
    rows: list[Row] = [list(row) for row in matrix]
    size = len(rows)
    least = NEGLIGIBLE * max(math.hypot(*row) for row in rows)
    is_diagonal = False
    while not is_diagonal:
        is_diagonal = True
        for one in range(size):
            for other in range(one):
                if abs(rows[one][other]) > least:
                    is_diagonal = False
                    _rotate(rows, one, other)
    return sorted((rows[place][place] for place in range(size)), reverse=True)


def _rotate(rows: list[Row], one: int, other: int) -> None:
    """Turn the plane of two axes so that their entry beside the diagonal becomes 0."""
    entry = rows[one][other]
    ratio = (rows[one][one] - rows[other][other]) / (2.0 * entry)
    tangent = math.copysign(1.0, ratio) / (abs(ratio) + math.hypot(ratio, 1.0))
    cosine = 1.0 / math.hypot(tangent, 1.0)
    sine = tangent * cosine
    left, right = rows[one], rows[other]
    new_left = [cosine * a + sine * b for a, b in zip(left, right, strict=True)]
    new_right = [cosine * b - sine * a for a, b in zip(left, right, strict=True)]
    new_left[one], new_right[other] = left[one] + tangent * entry, right[other] - tangent * entry
    new_left[other] = new_right[one] = 0.0
    rows[one], rows[other] = new_left, new_right
    for row, a, b in zip(rows, new_left, new_right, strict=True):
        if row is not new_left and row is not new_right:
            row[one], row[other] = a, b
