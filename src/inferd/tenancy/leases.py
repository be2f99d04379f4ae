"""One limit for several servers: each server leases a share of every bucket and refills that share by itself.

The database holds the free part of a bucket (its level and the time of that level) and the share of each server. Shares
never add up to more than 1, and a share moves together with its level, so the servers never grant more than the bucket
holds. A server that is alone holds everything and does not ask the database again.

A server that needs more writes this into its row. Other servers read it and release what they use less. This happens in
the database's thread, at most a few times a second. When a server dies, the level of its share is lost; the share is
free as soon as the death is known, and starts empty. During an outage of the database each server keeps its share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import msgspec

from inferd import clock
from inferd.state.database import Database, Instant, Row, Transaction, next_number, number
from inferd.state.presence import Members, Presence
from inferd.tenancy.buckets import Bucket
from inferd.tenancy.limiter import Limiter

MEASURE_S: Final = 1.0
IDLE_PART: Final = 0.1
"""The part of a bucket in demand that is divided evenly, because the next request may reach any server."""

NOTEWORTHY: Final = 0.05
"""Smaller differences of shares are not written."""

MANY: Final = 50

_SQL_LEASES: Final = "SELECT bucket, gateway, share, demand, need FROM leases"
_SQL_BUCKETS: Final = "SELECT name, level, at, epoch FROM buckets"


class Claimant(NamedTuple):
    """The share of a bucket that a server holds, and what it needs."""

    share: float = 0.0
    demand: float = 0.0  # amount per second that was requested
    need: float = 0.0  # the largest request that its share was too small for


class Free(NamedTuple):
    """The part of a bucket that no server holds."""

    level: float
    at: float
    epoch: str


def split(whole: float, claimants: dict[str, Claimant]) -> dict[str, float]:
    """The share of a bucket that each server should have; they add up to 1.

    ``IDLE_PART`` is divided evenly and the rest by demand; everything evenly without demand. A share that is too small
    for one request of its server is useless, so of these servers those with the least demand get none.
    """
    left = dict(claimants)
    while True:
        total = sum(claimant.demand for claimant in left.values())
        if total > 0:
            even = IDLE_PART / len(left)
            shares = {name: (1 - IDLE_PART) * (c.demand / total) + even for name, c in left.items()}
        else:
            shares = dict.fromkeys(left, 1.0 / len(left))
        useless = [name for name, share in shares.items() if share * whole < max(left[name].need, 1.0) - 1e-9]
        if not useless or len(left) == 1:
            return {name: shares.get(name, 0.0) for name in claimants}
        # Those without demand first; then by demand, and by name so that all servers agree.
        del left[min(useless, key=lambda name: (left[name].demand, left[name].need, name))]


def refilled(free: Free, share: float, bucket: Bucket, now: Instant) -> Free:
    """The free part at ``now``. Nothing is added after a boot of the machine, because its length is unknown."""
    elapsed = max(0.0, now.seconds - free.at) if free.epoch == now.epoch else 0.0
    capacity = share * bucket.whole
    rate = 0.0 if bucket.kind == "in_flight" else capacity / 60.0
    level = capacity if bucket.kind == "in_flight" else min(capacity, free.level + elapsed * rate)
    return Free(level, now.seconds, now.epoch)


class Leases:
    """The shares of this server. All methods run in the database's thread."""

    def __init__(self, limiter: Limiter, presence: Presence, now: Callable[[], float] = clock.now) -> None:
        self._limiter = limiter
        self._presence = presence
        self._now = now
        self._version = -1
        self._living: frozenset[str] = frozenset()
        self._published: dict[str, Claimant] = {}  # by bucket; its keys are what this server has rows of
        self._demands: dict[str, float] = {}
        self._measured_at = now()

    @property
    def has_every_share(self) -> bool:
        """Whether this server holds a share of every bucket."""
        return all(bucket.share > 0 for bucket in self._limiter.buckets().values())

    def reread(self) -> None:
        """Read all leases at the next exchange: the database may be another one."""
        self._living = frozenset()

    def exchange(self, database: Database) -> None:
        """Release shares that other servers need more, and lease free shares that are needed here. Raises
        StateUnavailable."""
        self._exchange(database)
        self._limiter.publish()

    def _exchange(self, database: Database) -> None:
        buckets = self._limiter.buckets()
        needs = self._measure(buckets)
        with database.reading() as transaction:
            version = number(transaction, "leases")
            present = self._presence.members(transaction)
            changed: set[str] = set()
            if version != self._version and len(present.living) > 1:
                rows = transaction.rows(
                    "SELECT DISTINCT bucket FROM leases WHERE version > ? AND gateway <> ?",
                    (self._version if version > self._version else -1, self._presence.id),
                )
                changed = {msgspec.convert(row[0], str) for row in rows}
        if present.living != self._living or present.dead:
            names = set(buckets)
        else:
            names = {name for name in buckets if name in changed or name not in self._published}
            if len(present.living) > 1:
                names |= {name for name in buckets if _is_news(needs[name], self._published.get(name))}
        gone = self._published.keys() - buckets.keys()
        if not names and not gone and not present.dead:
            self._version = version
            return
        self._rebalance(database, present, {name: buckets[name] for name in sorted(names)}, needs, gone)
        self._version = version  # not the number just taken: others may have written since it was read
        self._living = present.living

    def release(self, database: Database) -> None:
        """Return all shares with their levels."""
        with database.transaction(durable=False) as transaction:
            transaction.lock()
            now = transaction.now()
            held = self._limiter.buckets()
            leases, frees = _read(transaction, held)
            for name, bucket in held.items():
                free = frees.get(name, _full(bucket, now))
                free = refilled(free, _free_share(leases.get(name, {})), bucket, now)
                with self._limiter.lock:
                    _, level = bucket.remove_share(bucket.share, self._now())
                    level += min(bucket.level, 0.0)  # debt
                _write_free(transaction, name, free._replace(level=free.level + level))
            transaction.execute("DELETE FROM leases WHERE gateway = ?", (self._presence.id,))
            next_number(transaction, "leases")
        self._published.clear()
        self._living = frozenset()

    def _measure(self, buckets: dict[str, Bucket]) -> dict[str, Claimant]:
        """The needs of this server: the recent rate of requested amounts, granted or not."""
        now = self._now()
        elapsed = now - self._measured_at
        needs: dict[str, Claimant] = {}
        with self._limiter.lock:
            for name, bucket in buckets.items():
                demand = self._demands.get(name, 0.0)
                need = bucket.need
                if elapsed >= MEASURE_S:
                    demand = 0.5 * demand + 0.5 * bucket.demand / elapsed
                    demand = demand if demand > 1e-3 * bucket.whole / 60.0 else 0.0
                    self._demands[name] = demand
                    bucket.demand = bucket.need = 0.0
                elif demand == 0.0:  # a first request need not wait to be measured
                    demand = self._demands[name] = bucket.demand
                needs[name] = Claimant(bucket.share, demand, need)
        if elapsed >= MEASURE_S:
            self._measured_at = now
            self._demands = {name: demand for name, demand in self._demands.items() if name in buckets}
        return needs

    def _rebalance(
        self,
        database: Database,
        present: Members,
        buckets: dict[str, Bucket],
        needs: dict[str, Claimant],
        gone: Iterable[str],
    ) -> None:
        me = self._presence.id
        taken: list[tuple[Bucket, float, float]] = []
        frees: dict[str, Free] = {}
        claims: dict[str, Claimant] = {}
        with database.transaction(durable=False) as transaction:
            transaction.lock()
            now = transaction.now()
            leases, known = _read(transaction, buckets)
            for name, bucket in buckets.items():
                rows = leases.get(name, {})
                # Refilled before shares move: shares of dead servers are added empty.
                free = known.get(name, _full(bucket, now))
                free = refilled(free, _free_share(rows), bucket, now)
                living = {gateway: rows.get(gateway, Claimant()) for gateway in present.living}
                free_share = _free_share(living)
                if bucket.kind == "in_flight":
                    free = free._replace(level=free_share * bucket.whole)
                mine = self._adopt_share(bucket, living[me].share)
                living[me] = needs[name]._replace(share=mine)
                more = split(bucket.whole, living)[me] - mine
                if more < -NOTEWORTHY or (more < 0 and mine <= NOTEWORTHY):
                    with self._limiter.lock:
                        share, level = bucket.remove_share(-more, self._now())
                    mine -= share
                    free = free._replace(level=free.level + level)
                elif more > 0 and free_share > 0:
                    share = min(more, free_share)
                    level = free.level * share / free_share
                    mine += share
                    free = free._replace(level=free.level - level)
                    taken.append((bucket, share, level))
                row = rows.get(me)
                if row is None or row.share != mine or present.dead:
                    frees[name] = free
                if row is None or row.share != mine or _is_news(needs[name], row):
                    claims[name] = needs[name]._replace(share=mine)
            self._write(transaction, frees, claims, gone, present, now)
        with self._limiter.lock:
            for bucket, share, level in taken:
                bucket.add_share(share, level, self._now())
        for name in gone:
            self._published.pop(name, None)
        for name in buckets:
            self._published.setdefault(name, Claimant())
        self._published.update(claims)
        self._presence.remove_dead(present.dead)

    def _write(
        self,
        transaction: Transaction,
        frees: dict[str, Free],
        claims: dict[str, Claimant],
        gone: Iterable[str],
        present: Members,
        now: Instant,
    ) -> None:
        """Write the changes and nothing else: other servers read every row with a new version."""
        me = self._presence.id
        for name, free in frees.items():
            _write_free(transaction, name, free)
        if claims or present.dead:
            version = next_number(transaction, "leases")
            for name, claimant in claims.items():
                _write_lease(transaction, name, me, claimant, version)
        for gateway in present.dead:
            for row in transaction.rows("SELECT bucket FROM leases WHERE gateway = ?", (gateway,)):
                name = msgspec.convert(row[0], str)
                if name not in frees:  # a bucket unknown to this server: its free share starts empty
                    transaction.execute(
                        "UPDATE buckets SET at = ?, epoch = ? WHERE name = ?", (now.seconds, now.epoch, name)
                    )
                    transaction.execute("UPDATE leases SET version = ? WHERE bucket = ?", (version, name))
            transaction.execute("DELETE FROM leases WHERE gateway = ?", (gateway,))
            transaction.execute("DELETE FROM gateways WHERE id = ?", (gateway,))
        for name in gone:
            transaction.execute("DELETE FROM leases WHERE bucket = ? AND gateway = ?", (name, me))
            transaction.execute(
                "DELETE FROM buckets WHERE name = ? AND NOT EXISTS (SELECT 1 FROM leases WHERE bucket = ?)",
                (name, name),
            )

    def _adopt_share(self, bucket: Bucket, share: float) -> float:
        """Set the bucket's share to the share in the database. Returns it.

        The database has more where a transaction failed after a share was released here. It has less where this server
        was counted as dead, or where an older copy of the database replaced it.
        """
        with self._limiter.lock:
            if share < bucket.share:
                bucket.remove_share(bucket.share - share, self._now())
            elif share > bucket.share:
                level = (share - bucket.share) * bucket.whole if bucket.kind == "in_flight" else 0.0
                bucket.add_share(share - bucket.share, level, self._now())
            return bucket.share


def _free_share(claimants: dict[str, Claimant]) -> float:
    return max(0.0, 1.0 - sum(claimant.share for claimant in claimants.values()))


def _is_news(claim: Claimant, published: Claimant | None) -> bool:
    """Whether other servers must know this claim."""
    if published is None or claim.need > published.need:
        return True
    if (claim.demand == 0) != (published.demand == 0):
        return True
    return abs(claim.demand - published.demand) > 0.5 * published.demand


def _full(bucket: Bucket, now: Instant) -> Free:
    """The state of a bucket before its first request."""
    return Free(bucket.whole, now.seconds, now.epoch)


def _read(
    transaction: Transaction, buckets: dict[str, Bucket]
) -> tuple[dict[str, dict[str, Claimant]], dict[str, Free]]:
    lease_rows: list[Row] = []
    free_rows: list[Row] = []
    if len(buckets) > MANY:
        lease_rows, free_rows = transaction.rows(_SQL_LEASES), transaction.rows(_SQL_BUCKETS)
    else:
        for name in buckets:
            lease_rows += transaction.rows(f"{_SQL_LEASES} WHERE bucket = ?", (name,))
            free_rows += transaction.rows(f"{_SQL_BUCKETS} WHERE name = ?", (name,))
    leases: dict[str, dict[str, Claimant]] = {}
    for bucket, gateway, *claim in lease_rows:
        claims = leases.setdefault(msgspec.convert(bucket, str), {})
        claims[msgspec.convert(gateway, str)] = msgspec.convert(claim, Claimant)
    return leases, {msgspec.convert(name, str): msgspec.convert(free, Free) for name, *free in free_rows}


def _write_free(transaction: Transaction, name: str, free: Free) -> None:
    transaction.execute(
        "INSERT INTO buckets (name, level, at, epoch) VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
        "level = excluded.level, at = excluded.at, epoch = excluded.epoch",
        (name, *free),
    )


def _write_lease(transaction: Transaction, name: str, gateway: str, claimant: Claimant, version: int) -> None:
    transaction.execute(
        "INSERT INTO leases (bucket, gateway, share, demand, need, version) VALUES (?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (bucket, gateway) DO UPDATE SET share = excluded.share, demand = excluded.demand, "
        "need = excluded.need, version = excluded.version",
        (name, gateway, *claimant, version),
    )
