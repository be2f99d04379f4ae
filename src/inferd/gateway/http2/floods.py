"""How often a peer may do what costs it nothing and us something: a bucket that fills by itself."""

from __future__ import annotations

from typing import Final


class Allowance:
    """``burst`` at once, ``per_s`` in the long run."""

    __slots__ = ("_at", "_burst", "_left", "_per_s")

    def __init__(self, burst: int, per_s: float, now: float) -> None:
        self._burst: Final = float(burst)
        self._per_s: Final = per_s
        self._left = self._burst
        self._at = now

    def take(self, now: float) -> bool:
        """Once more. False: that is too often."""
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
