"""How long a step takes: a line through the steps there were. Knows numbers of tokens and seconds, no clock.

    seconds = fixed + per token * tokens

fitted by least squares in which older steps count less and less, so that it follows a machine whose other
programs come and go.
"""

from __future__ import annotations

_KEEP = 0.98  # weight of everything before, at each step: about the last fifty count
_ENOUGH = 4.0  # steps' worth of weight before the fit is believed


class StepCost:
    """``note`` steps as they are done; ask for ``tokens_within`` a time."""

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        if tokens <= 0 or seconds <= 0.0:
            return
        self._n = self._n * _KEEP + 1.0
        self._x = self._x * _KEEP + tokens
        self._y = self._y * _KEEP + seconds
        self._xx = self._xx * _KEEP + tokens * tokens
        self._xy = self._xy * _KEEP + tokens * seconds

    @property
    def is_known(self) -> bool:
        return self._n >= _ENOUGH

    def line(self) -> tuple[float, float]:
        """(seconds of an empty step, seconds per token), neither below 0."""
        if not self._n:
            return 0.0, 0.0
        mean_x, mean_y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - mean_x * mean_x
        if variance < 1.0:  # steps of one size say nothing about the slope: all of it is the tokens'
            return 0.0, mean_y / mean_x
        slope = max((self._xy / self._n - mean_x * mean_y) / variance, 0.0)
        fixed = mean_y - slope * mean_x
        return (fixed, slope) if fixed >= 0.0 else (0.0, mean_y / mean_x)

    def seconds(self, tokens: int) -> float:
        fixed, slope = self.line()
        return fixed + slope * tokens

    def tokens_within(self, seconds: float) -> int:
        """The largest step that is expected to take no longer. Only where ``is_known``."""
        fixed, slope = self.line()
        if slope <= 0.0:
            return 2**31 - 1 if fixed <= seconds else 0
        return max(int((seconds - fixed) / slope), 0)

    @property
    def free_tokens(self) -> float:
        """Tokens that cost as much as a step's fixed part; 0 while that is unknown."""
        fixed, slope = self.line()
        return fixed / slope if self.is_known and slope > 0.0 else 0.0
