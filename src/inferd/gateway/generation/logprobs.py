"""Log-probabilities as JSON can hold them."""

from __future__ import annotations

import math
from typing import Final

FLOOR: Final = -9999.0
"""The log-probability of an impossible token, because JSON has no minus infinity. vLLM uses the same number."""


def finite(logprob: float) -> float:
    """A number JSON can hold; NaN and minus infinity are the floor."""
    return logprob if math.isfinite(logprob) and logprob > FLOOR else FLOOR
