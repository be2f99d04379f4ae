"""Estimates how long a step takes, by a linear model of past steps. Knows counts and seconds, no clock.

    seconds = fixed + per prefill token * prefill tokens + per decode * decodes

The model is fitted by least squares with decaying weights, so it follows a machine whose other programs come and go. A
decode is one token of one sequence; it has attention and sampling of its own, and costs several times a prompt's token.
"""

from __future__ import annotations

_KEEP = 0.995  # weight of everything before, at each step: about the last two hundred count
_ENOUGH = 4.0  # total weight of steps from which the fit is used
_RIDGE = 1e-6  # of each regressor's own square: keeps the fit solvable where a regressor never varied


class StepCost:
    """``record`` every step; ``prefill_within`` gives the prefill that fits a time."""

    __slots__ = ("_decode", "_fixed", "_fresh", "_n", "_p", "_pd", "_pp", "_prefill", "_py", "_q", "_qq", "_qy", "_y")

    def __init__(self) -> None:
        # Weighted sums over steps: n, prefill p, decodes q, seconds y, and products.
        self._n = self._p = self._q = self._y = 0.0
        self._pp = self._pd = self._qq = self._py = self._qy = 0.0
        self._fixed = self._prefill = self._decode = 0.0
        self._fresh = True

    def record(self, prefill_tokens: int, decodes: int, seconds: float) -> None:
        if seconds <= 0.0 or not (prefill_tokens or decodes):
            return
        keep = _KEEP
        self._n = self._n * keep + 1.0
        self._p = self._p * keep + prefill_tokens
        self._q = self._q * keep + decodes
        self._y = self._y * keep + seconds
        self._pp = self._pp * keep + prefill_tokens * prefill_tokens
        self._pd = self._pd * keep + prefill_tokens * decodes
        self._qq = self._qq * keep + decodes * decodes
        self._py = self._py * keep + prefill_tokens * seconds
        self._qy = self._qy * keep + decodes * seconds
        self._fresh = False

    @property
    def is_known(self) -> bool:
        return self._n >= _ENOUGH

    def plane(self) -> tuple[float, float, float]:
        """(seconds of an empty step, per prefill token, per decode), none below 0."""
        if not self._fresh:
            self._fixed, self._prefill, self._decode = self._fit()
            self._fresh = True
        return self._fixed, self._prefill, self._decode

    def prefill_within(self, seconds: float, *, decodes: int) -> int:
        """Prefill tokens that fit beside so many decodes in a step of ``seconds``. Only where ``is_known``."""
        fixed, prefill, decode = self.plane()
        left = seconds - fixed - decode * decodes
        if prefill <= 0.0:
            return 2**31 - 1 if left >= 0 else 0
        return max(int(left / prefill), 0)

    @property
    def decode_in_prefill(self) -> float:
        """Prefill tokens that cost as much as one decode, at least 1; 1 while that is unknown."""
        _, prefill, decode = self.plane()
        return max(decode / prefill, 1.0) if self.is_known and prefill > 0.0 else 1.0

    @property
    def fixed_in_prefill(self) -> float:
        """Prefill tokens that cost as much as a step's fixed part; 0 while that is unknown."""
        fixed, prefill, _ = self.plane()
        return fixed / prefill if self.is_known and prefill > 0.0 else 0.0

    def _fit(self) -> tuple[float, float, float]:
        # Variances and covariances about the weighted means: the fixed part drops out.
        n = self._n
        p, q, y = self._p / n, self._q / n, self._y / n
        pp, qq = self._pp / n - p * p + _RIDGE * self._pp / n, self._qq / n - q * q + _RIDGE * self._qq / n
        pq, py, qy = self._pd / n - p * q, self._py / n - p * y, self._qy / n - q * y
        determinant = pp * qq - pq * pq
        if determinant > 0.0:
            prefill, decode = (py * qq - qy * pq) / determinant, (qy * pp - py * pq) / determinant
        else:  # no step had prefill, or none had decodes
            prefill, decode = (py / pp if pp > 0.0 else 0.0), (qy / qq if qq > 0.0 else 0.0)
        fixed = y - prefill * p - decode * q
        if fixed >= 0.0 and prefill >= 0.0 and decode >= 0.0 and (prefill or decode):
            return fixed, prefill, decode
        # Noise, or steps of equal composition: all time is attributed to the tokens.
        each = y / (p + q)
        return 0.0, each, each
