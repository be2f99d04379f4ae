"""Token buckets: how much may pass now, and when a given amount will.

Pure: time is an argument, seconds that never go back. A gateway holds a share of each bucket (all of it
where it is alone); what the shares do is ``leases.py``'s. One law holds for any interleaving: what was
taken and not given back is at most ``capacity + rate * time``.
"""

from __future__ import annotations

from typing import Final, Literal

Kind = Literal["requests", "tokens", "in_flight"]
KINDS: Final[tuple[Kind, ...]] = ("requests", "tokens", "in_flight")

_ROUNDING: Final = 1e-9


class Bucket:
    """A share of one limit: ``requests`` and ``tokens`` refill evenly over a minute, ``in_flight`` by give-backs alone.

    ``level`` may be below zero: debt of requests that turned out larger than the whole bucket.
    """

    __slots__ = ("at", "demand", "kind", "level", "need", "share", "whole")

    def __init__(self, kind: Kind, whole: float, *, share: float, level: float, now: float) -> None:
        self.kind = kind
        self.whole = whole  # the limit that all shares together make
        self.share = share
        self.level = level
        self.at = now
        self.demand = 0.0  # amount asked for since the lessor last looked, granted or not
        self.need = 0.0  # largest amount that failed for want of a larger share

    @property
    def capacity(self) -> float:
        return self.whole * self.share

    @property
    def rate(self) -> float:
        """Refill per second of this share."""
        return 0.0 if self.kind == "in_flight" else self.capacity / 60.0

    def refill(self, now: float) -> None:
        if now > self.at:
            self.level = min(self.capacity, self.level + (now - self.at) * self.rate)
            self.at = now

    def capped(self, amount: float) -> float:
        """What an amount costs at first: one larger than the whole bucket waits for a full one."""
        return min(amount, self.whole)

    def lacks(self, amount: float, now: float) -> float:
        """How much is missing for ``amount`` to pass; 0: nothing. Notes what was asked."""
        self.refill(now)
        amount = self.capped(amount)
        missing = amount - self.level
        if missing <= _ROUNDING * self.whole:
            return 0.0
        if amount > self.capacity:
            self.need = max(self.need, amount)
        return missing

    def take(self, amount: float, now: float) -> float:
        """Take an amount that nothing is lacking for; what was taken."""
        self.refill(now)
        amount = self.capped(amount)
        self.level -= amount
        return amount

    def give(self, amount: float, now: float) -> None:
        """Give back; a negative amount is charged."""
        self.refill(now)
        self.level = min(self.capacity, self.level + amount)

    def wait_s(self, missing: float) -> float:
        """Seconds until so much more is there, if nobody else takes it; infinite for ``in_flight``."""
        return missing / self.rate if self.rate > 0 else float("inf")

    def full_in_s(self, now: float) -> float:
        """Seconds until this share is full again."""
        self.refill(now)
        return self.wait_s(self.capacity - self.level) if self.level < self.capacity and self.rate > 0 else 0.0

    # -- the share ---------------------------------------------------------------------------------

    def grow(self, share: float, level: float, now: float) -> None:
        """Add a part of the bucket, with what is in it."""
        self.refill(now)
        self.share += share
        self.level = min(self.capacity, self.level + level)

    def shrink(self, share: float, now: float) -> tuple[float, float]:
        """Give up at most ``share`` of the bucket; what was given up: (share, level in it).

        Level goes in proportion. Of ``in_flight`` only what is free can go, and debt stays here.
        """
        self.refill(now)
        share = min(share, self.share)
        if self.kind == "in_flight":
            share = min(share, max(self.level, 0.0) / self.whole)
            level = share * self.whole
        elif self.share > 0:
            level = max(self.level, 0.0) * share / self.share
        else:
            level = 0.0
        self.share -= share
        self.level -= level
        return share, level

    def configure(self, whole: float, now: float) -> None:
        """Another limit, from now on: what is in use stays in use."""
        self.refill(now)
        before, self.whole = self.capacity, whole
        if self.kind == "in_flight":
            self.level += self.capacity - before
        else:
            self.level = min(self.level, self.capacity)
