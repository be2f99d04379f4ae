"""Reserves a request in all of its quotas or in none, and charges exactly what it used when it ends.

Knows the buckets of keys and tenants; does not know HTTP or the database. The event loop reserves and settles, and the
database's thread moves shares (``leases.py``). One lock, held for microseconds, protects the buckets.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from inferd.errors import QuotaExceeded
from inferd.tenancy.buckets import KINDS, Bucket, Kind
from inferd.tenancy.principal import Limits

SHARE_WAIT_S: Final = 1.0
"""Time to retry for a request that needs a larger share than this server holds."""

Headers = tuple[tuple[bytes, bytes], ...]

_WORDS: Final[dict[Kind, tuple[str, str]]] = {
    "requests": ("requests per minute", "rpm"),
    "tokens": ("tokens per minute", "tpm"),
    "in_flight": ("requests at the same time", "max_in_flight"),
}


class Refusal(msgspec.Struct, frozen=True):
    """Why a request was refused."""

    kind: Kind
    owner: str
    whole: float
    asked: float
    retry_after_s: float


class QuotaUse(msgspec.Struct, frozen=True):
    """How much of one limit is in use at this server."""

    owner: str
    kind: Kind
    whole: float
    used: float


class Quota:
    """The buckets of one owner: a family of keys, or a tenant."""

    __slots__ = ("buckets", "hold_s", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.buckets: dict[Kind, Bucket] = {}
        self.hold_s = 1.0  # moving average (EWMA) of the duration of requests


class Reservation:
    """The amounts that one request withdrew from the buckets of its quotas."""

    __slots__ = ("began_at", "flights", "quotas", "requests", "tokens")

    def __init__(self, quotas: tuple[Quota, ...], began_at: float) -> None:
        self.quotas = quotas
        self.began_at = began_at
        self.requests: list[Bucket] = []
        self.flights: list[tuple[Quota, Bucket]] = []
        self.tokens: list[tuple[Bucket, float]] = []


class Limiter:
    """All quotas by the name of their owner. ``is_whole``: new buckets start with the whole share, without leases."""

    def __init__(self, *, is_whole: bool = False) -> None:
        self.lock = threading.Lock()
        self._quotas: dict[str, Quota] = {}
        self._is_whole = is_whole
        self._coming: list[tuple[Quota, Bucket]] = []  # not in force: their shares are not leased yet

    def configure(self, wanted: Mapping[str, Limits], now: float) -> None:
        """Set the limits of all owners. Amounts in use stay counted. New buckets come into force with ``publish``,
        because without a share they would refuse every request."""
        with self.lock:
            for name in [name for name in self._quotas if name not in wanted]:
                del self._quotas[name]
            before = {(quota.name, bucket.kind): bucket for quota, bucket in self._coming}
            self._coming.clear()
            for name, limits in wanted.items():
                wholes = {"requests": limits.rpm, "tokens": limits.tpm, "in_flight": limits.max_in_flight}
                quota = self._quotas.get(name)
                if quota is None:
                    quota = self._quotas[name] = Quota(name)
                for kind in KINDS:
                    whole, bucket = wholes[kind], quota.buckets.get(kind) or before.get((name, kind))
                    if whole is None:
                        quota.buckets.pop(kind, None)
                        continue
                    if bucket is None:
                        share = 1.0 if self._is_whole else 0.0
                        bucket = Bucket(kind, float(whole), share=share, level=share * whole, now=now)
                    elif bucket.whole != whole:
                        bucket.configure(float(whole), now)
                    if kind not in quota.buckets:
                        self._coming.append((quota, bucket))
        if self._is_whole:
            self.publish()

    def publish(self) -> None:
        """Put new buckets in force."""
        with self.lock:
            for quota, bucket in self._coming:
                quota.buckets[bucket.kind] = bucket
            self._coming.clear()

    def use(self, now: float) -> list[QuotaUse]:
        """The use of every limit that is in force, for display."""
        with self.lock:
            found = []
            for quota in self._quotas.values():
                for bucket in quota.buckets.values():
                    bucket.refill(now)
                    used = max(bucket.capacity - bucket.level, 0.0)
                    found.append(QuotaUse(quota.name, bucket.kind, bucket.whole, used))
            return found

    def buckets(self) -> dict[str, Bucket]:
        """All buckets by their names in the database, with those not in force. Hold the lock to change one."""
        with self.lock:
            found = {
                f"{quota.name}/{kind}": bucket
                for quota in self._quotas.values()
                for kind, bucket in quota.buckets.items()
            }
            return found | {f"{quota.name}/{bucket.kind}": bucket for quota, bucket in self._coming}

    def quotas_of(self, names: Iterable[str]) -> tuple[Quota, ...]:
        """The quotas of these owners."""
        return tuple(quota for quota in map(self._quotas.get, names) if quota is not None)

    def reserve(self, quotas: tuple[Quota, ...], tokens: int, now: float) -> Reservation:
        """Reserve one request of at most ``tokens`` tokens. Raises QuotaExceeded, and then reserves nothing."""
        with self.lock:
            refusal: Refusal | None = None
            for quota in quotas:
                for kind, bucket in quota.buckets.items():
                    amount = float(tokens) if kind == "tokens" else 1.0
                    bucket.demand += bucket.capped(amount)
                    missing = bucket.shortage(amount, now)
                    if missing > 0:
                        wait_s = _wait_s(quota, bucket, amount, missing)
                        if refusal is None or wait_s > refusal.retry_after_s:
                            refusal = Refusal(kind, quota.name, bucket.whole, amount, wait_s)
            if refusal is not None:
                raise _refused(refusal, _headers(quotas, now))
            taken = Reservation(quotas, now)
            for quota in quotas:
                for kind, bucket in quota.buckets.items():
                    if kind == "tokens":
                        taken.tokens.append((bucket, bucket.withdraw(float(tokens), now)))
                        continue
                    bucket.withdraw(1.0, now)
                    if kind == "requests":
                        taken.requests.append(bucket)
                    else:
                        taken.flights.append((quota, bucket))
        return taken

    def reduce(self, taken: Reservation, tokens: int, now: float) -> None:
        """Return what was reserved beyond ``tokens``, the new upper bound of the request."""
        with self.lock:
            for index, (bucket, amount) in enumerate(taken.tokens):
                if tokens < amount:
                    bucket.credit(amount - tokens, now)
                    taken.tokens[index] = (bucket, float(tokens))

    def settle(self, taken: Reservation, tokens: int, *, refund: bool, now: float) -> None:
        """Charge a request that ended for ``tokens``. ``refund``: it does not count as a request."""
        with self.lock:
            for bucket, amount in taken.tokens:
                bucket.credit(amount - tokens, now)
            for quota, bucket in taken.flights:
                bucket.credit(1.0, now)
                quota.hold_s += 0.2 * (max(now - taken.began_at, 0.0) - quota.hold_s)
            if refund:
                for bucket in taken.requests:
                    bucket.credit(1.0, now)

    def headers(self, taken: Reservation, now: float) -> Headers:
        """``x-ratelimit-*`` of the tightest quota of each kind."""
        with self.lock:
            return _headers(taken.quotas, now)


def _wait_s(quota: Quota, bucket: Bucket, amount: float, missing: float) -> float:
    """Estimated seconds until the same request would be admitted."""
    if bucket.kind == "in_flight":
        in_use = max(bucket.capacity - bucket.level, 1.0)
        return max(quota.hold_s / in_use, 0.05) if bucket.capacity >= 1 else SHARE_WAIT_S
    if bucket.capped(amount) > bucket.capacity:  # another server holds the rest
        return max(SHARE_WAIT_S, missing * 60.0 / bucket.whole)
    return bucket.wait_s(missing)


def _refused(refusal: Refusal, headers: Headers) -> QuotaExceeded:
    words, field = _WORDS[refusal.kind]
    owner = "The tenant" if refusal.owner.startswith("tenant:") else "This API key"
    asked = f" of {refusal.asked:g} tokens (prompt and the longest answer)" if refusal.kind == "tokens" else ""
    error = QuotaExceeded(
        f"{owner} may use {refusal.whole:g} {words} ({field}); "
        f"a request{asked} passes in {refusal.retry_after_s:.3g} s.",
        retry_after_s=refusal.retry_after_s,
    )
    error.limit = refusal.kind
    milliseconds = math.ceil(refusal.retry_after_s * 1000)
    error.headers = ((b"retry-after-ms", b"%d" % milliseconds), *headers)
    return error


def _headers(quotas: tuple[Quota, ...], now: float) -> Headers:
    made: list[tuple[bytes, bytes]] = []
    kind: Kind
    for kind in ("requests", "tokens"):
        tightest: Bucket | None = None
        for quota in quotas:
            bucket = quota.buckets.get(kind)
            if bucket is not None:
                bucket.refill(now)
                if tightest is None or bucket.level < tightest.level:
                    tightest = bucket
        if tightest is not None:
            name = kind.encode()
            made.append((b"x-ratelimit-limit-" + name, b"%d" % tightest.whole))
            made.append((b"x-ratelimit-remaining-" + name, b"%d" % max(tightest.level + 1e-6, 0.0)))
            made.append((b"x-ratelimit-reset-" + name, duration(tightest.full_in_s(now))))
    return tuple(made)


def duration(seconds: float) -> bytes:
    """As OpenAI writes it: ``6m0s``, ``1.5s``, ``20ms``, ``1h2m3s``. Never early: rounded up."""
    milliseconds = math.ceil(seconds * 1000 - 1e-6)
    if milliseconds < 1000:
        return b"%dms" % milliseconds
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    words = f"{rest / 1000:g}s"
    if minutes or hours:
        words = f"{minutes}m{words}"
    return (f"{hours}h{words}" if hours else words).encode()
