"""Token buckets: how much a quota allows at this time, and how long a given amount has to wait.

Time is an argument, in seconds of a clock that never goes back. A server holds a share of each bucket, and all of it
where it is the only server; ``leases.py`` moves shares between servers. One law holds for any order of calls: the
amount that was withdrawn and not credited is at most ``capacity + rate * time``.
"""

from __future__ import annotations

from typing import Final, Literal

Kind = Literal["requests", "tokens", "in_flight"]
KINDS: Final[tuple[Kind, ...]] = ("requests", "tokens", "in_flight")

_ROUNDING: Final = 1e-9


class Bucket:
    """A share of one limit: ``requests`` and ``tokens`` refill evenly over a minute, ``in_flight`` by credits alone.

    ``level`` may be below zero: the debt of requests that were larger than the whole bucket.
    """

    __slots__ = ("at", "demand", "kind", "level", "need", "share", "whole")

    def __init__(self, kind: Kind, whole: float, *, share: float, level: float, now: float) -> None:
        self.kind = kind
        self.whole = whole  # the limit: the sum of the shares of all servers
        self.share = share
        self.level = level
        self.at = now
        self.demand = 0.0  # amount requested since the last measurement, granted or not
        self.need = 0.0  # largest amount that was refused because the share was too small

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
        """The part of an amount that is withdrawn at first: an amount above the limit waits for a full bucket."""
        return min(amount, self.whole)

    def shortage(self, amount: float, now: float) -> float:
        """The part of ``amount`` that is missing now; 0: it can be withdrawn. Records a share that is too small."""
        self.refill(now)
        amount = self.capped(amount)
        missing = amount - self.level
        if missing <= _ROUNDING * self.whole:
            return 0.0
        if amount > self.capacity:
            self.need = max(self.need, amount)
        return missing

    def withdraw(self, amount: float, now: float) -> float:
        """Withdraw an amount without a shortage. Returns what was withdrawn."""
        self.refill(now)
        amount = self.capped(amount)
        self.level -= amount
        return amount

    def credit(self, amount: float, now: float) -> None:
        """Return an amount to the bucket; a negative amount is charged."""
        self.refill(now)
        self.level = min(self.capacity, self.level + amount)

    def wait_s(self, missing: float) -> float:
        """Seconds until ``missing`` is refilled, without other withdrawals; infinite for ``in_flight``."""
        return missing / self.rate if self.rate > 0 else float("inf")

    def full_in_s(self, now: float) -> float:
        """Seconds until this share is full again."""
        self.refill(now)
        return self.wait_s(self.capacity - self.level) if self.rate > 0 else 0.0

    # -- the share ---------------------------------------------------------------------------------

    def add_share(self, share: float, level: float, now: float) -> None:
        """Add a share of the bucket and the level that belongs to it."""
        self.refill(now)
        self.share += share
        self.level = min(self.capacity, self.level + level)

    def remove_share(self, share: float, now: float) -> tuple[float, float]:
        """Remove at most ``share`` of the bucket. Returns the removed share and the level that belonged to it.

        The level is divided in proportion. Only the free part of ``in_flight`` can be removed, and debt stays here.
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
        """Set another limit. Amounts in use stay in use."""
        self.refill(now)
        before, self.whole = self.capacity, whole
        if self.kind == "in_flight":
            self.level += self.capacity - before
        else:
            self.level = min(self.level, self.capacity)
