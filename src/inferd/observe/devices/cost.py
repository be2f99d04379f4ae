"""What the use of devices costs, by the prices of the configuration."""

from __future__ import annotations

from inferd.config import DevicesConfig
from inferd.observe.devices.energy import Use

_JOULES_PER_KWH = 3.6e6


def cost_of(use: Use, prices: DevicesConfig) -> float | None:
    """Energy and device time at their prices; None: there is no price for anything that was measured."""
    parts = []
    if prices.price_per_kwh is not None and use.energy_j is not None:
        parts.append(use.energy_j / _JOULES_PER_KWH * prices.price_per_kwh)
    if prices.price_per_device_hour is not None:
        parts.append(use.device_s / 3600 * prices.price_per_device_hour)
    return sum(parts) if parts else None


def per_1000_tokens(amount: float | None, tokens: int) -> float | None:
    """None: nothing was measured, or the model has no tokens."""
    return None if amount is None or not tokens else amount * 1000 / tokens
