"""Several servers, one limit: each holds a leased share of every bucket, and refills that share by itself.

The database keeps the free part (its level, and when that was true) and who holds which share. Shares never
add up to more than 1, and a share travels with what is in it, so together the servers never grant more
than the bucket holds. A server alone holds everything, and then the database is not asked again.

Who needs more than it holds says so in its row; the others see that and give up what they use less. All
of it happens in the database's thread, at most a few times a second. A server that dies takes the
level of its share with it; the share itself is free again as soon as its death is known, and begins
empty. While the database is away each goes on with the share it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import msgspec

from inferd import clock
from inferd.state.database import Database, Instant, Transaction, next_number, number
from inferd.state.presence import Presence, Present
from inferd.tenancy.buckets import Bucket
from inferd.tenancy.limiter import Limiter

MEASURE_S: Final = 1.0
IDLE_PART: Final = 0.1
"""Of a bucket in demand, the part that stays spread evenly: somebody's next request may come anywhere."""

NOTEWORTHY: Final = 0.05
"""Smaller differences of shares are not worth a transaction."""

MANY: Final = 50

_SQL_LEASES: Final = "SELECT bucket, gateway, share, demand, need FROM leases"
_SQL_BUCKETS: Final = "SELECT name, level, at, epoch FROM buckets"


class Claimant(NamedTuple):
    """What a server holds of a bucket and would like to."""

    share: float = 0.0
    demand: float = 0.0  # amount per second that was asked for
    need: float = 0.0  # the largest request that its share was too small for


class Free(NamedTuple):
    """The part of a bucket that nobody holds."""

    level: float
    at: float
    epoch: str


class _Row(msgspec.Struct, frozen=True, array_like=True):
    bucket: str
    gateway: str
    share: float
    demand: float
    need: float


class _FreeRow(msgspec.Struct, frozen=True, array_like=True):
    name: str
    level: float
    at: float
    epoch: str


def split(whole: float, claimants: dict[str, Claimant]) -> dict[str, float]:
    """The share of a bucket that each should have; they add up to 1.

    By demand, a tenth evenly; evenly without any demand. A share too small for a single request of
    its holder is of no use, so the least demanding of such go without.
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
    """The free part at ``now``. After the machine was booted nobody knows how long that took: nothing is added."""
    elapsed = max(0.0, now.seconds - free.at) if free.epoch == now.epoch else 0.0
    capacity = share * bucket.whole
    rate = 0.0 if bucket.kind == "in_flight" else capacity / 60.0
    level = capacity if bucket.kind == "in_flight" else min(capacity, free.level + elapsed * rate)
    return Free(level, now.seconds, now.epoch)


class Leases:
    """This server's shares. Everything here runs in the database's thread."""

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
    def is_settled(self) -> bool:
        """Whether this server holds something of every bucket."""
        return all(bucket.share > 0 for bucket in self._limiter.buckets().values())

    def reread(self) -> None:
        """Look at everything again: the database may be another one."""
        self._living = frozenset()

    def exchange(self, database: Database) -> None:
        """Give up what others need more, take what is free and wanted here. Raises StateUnavailable."""
        self._exchange(database)
        self._limiter.publish()

    def _exchange(self, database: Database) -> None:
        buckets = self._limiter.buckets()
        wishes = self._measure(buckets)
        with database.reading() as transaction:
            version = number(transaction, "leases")
            present = self._presence.look(transaction)
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
                names |= {name for name in buckets if _is_news(wishes[name], self._published.get(name))}
        gone = self._published.keys() - buckets.keys()
        if not names and not gone and not present.dead:
            self._version = version
            return
        self._settle(database, present, {name: buckets[name] for name in sorted(names)}, wishes, gone)
        self._version = version  # not the number just taken: others may have written since it was read
        self._living = present.living

    def release(self, database: Database) -> None:
        """Give everything back, with what is in it."""
        with database.transaction(durable=False) as transaction:
            transaction.lock()
            now = transaction.now()
            held = self._limiter.buckets()
            leases, frees = _read(transaction, held)
            for name, bucket in held.items():
                free = frees.get(name, _full(bucket, now))
                free = refilled(free, _free_share(leases.get(name, {})), bucket, now)
                with self._limiter.lock:
                    _, level = bucket.shrink(bucket.share, self._now())
                    level += min(bucket.level, 0.0)  # debt
                _write_free(transaction, name, free._replace(level=free.level + level))
            transaction.execute("DELETE FROM leases WHERE gateway = ?", (self._presence.id,))
            next_number(transaction, "leases")
        self._published.clear()
        self._living = frozenset()

    def _measure(self, buckets: dict[str, Bucket]) -> dict[str, Claimant]:
        """What this server would like: the recent rate of what was asked, whether or not it was granted."""
        now = self._now()
        elapsed = now - self._measured_at
        wishes: dict[str, Claimant] = {}
        with self._limiter.lock:
            for name, bucket in buckets.items():
                demand = self._demands.get(name, 0.0)
                need = bucket.need
                if elapsed >= MEASURE_S:
                    demand = 0.5 * demand + 0.5 * bucket.demand / elapsed
                    demand = demand if demand > 1e-3 * bucket.whole / 60.0 else 0.0
                    self._demands[name] = demand
                    bucket.demand = bucket.need = 0.0
                elif demand == 0.0 and bucket.demand > 0:  # a first request need not wait to be measured
                    demand = self._demands[name] = bucket.demand
                wishes[name] = Claimant(bucket.share, demand, need)
        if elapsed >= MEASURE_S:
            self._measured_at = now
            self._demands = {name: demand for name, demand in self._demands.items() if name in buckets}
        return wishes

    def _settle(
        self,
        database: Database,
        present: Present,
        buckets: dict[str, Bucket],
        wishes: dict[str, Claimant],
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
                # Refilled before it changes hands: what the dead left joins it empty.
                free = known.get(name, _full(bucket, now))
                free = refilled(free, _free_share(rows), bucket, now)
                living = {gateway: rows.get(gateway, Claimant()) for gateway in present.living}
                free_share = _free_share(living)
                if bucket.kind == "in_flight":
                    free = free._replace(level=free_share * bucket.whole)
                mine = self._agree(bucket, living[me].share)
                living[me] = wishes[name]._replace(share=mine)
                more = split(bucket.whole, living)[me] - mine
                if more < -NOTEWORTHY or (more < 0 and mine <= NOTEWORTHY):
                    with self._limiter.lock:
                        share, level = bucket.shrink(-more, self._now())
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
                if row is None or row.share != mine or _is_news(wishes[name], row):
                    claims[name] = wishes[name]._replace(share=mine)
            self._write(transaction, frees, claims, gone, present, now)
        with self._limiter.lock:
            for bucket, share, level in taken:
                bucket.grow(share, level, self._now())
        for name in gone:
            self._published.pop(name, None)
        for name in buckets:
            self._published.setdefault(name, Claimant())
        self._published.update(claims)
        self._presence.sweep(present.dead)

    def _write(
        self,
        transaction: Transaction,
        frees: dict[str, Free],
        claims: dict[str, Claimant],
        gone: Iterable[str],
        present: Present,
        now: Instant,
    ) -> None:
        """What changed, and nothing else: others look at whatever takes the next number."""
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
                if name not in frees:  # a bucket that this server does not know: it may have none of that share's past
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

    def _agree(self, bucket: Bucket, share: float) -> float:
        """Make the bucket's share what the database says it is; what it then is.

        More there than here: a transaction failed after something had been given up here. Less: this
        server was taken for dead, or an older copy of the database was put in its place.
        """
        with self._limiter.lock:
            if share < bucket.share:
                bucket.shrink(bucket.share - share, self._now())
            elif share > bucket.share:
                level = (share - bucket.share) * bucket.whole if bucket.kind == "in_flight" else 0.0
                bucket.grow(share - bucket.share, level, self._now())
            return bucket.share


def _free_share(claimants: dict[str, Claimant]) -> float:
    return max(0.0, 1.0 - sum(claimant.share for claimant in claimants.values()))


def _is_news(wish: Claimant, published: Claimant | None) -> bool:
    """Whether others must hear of it."""
    if published is None or wish.need > published.need:
        return True
    if (wish.demand == 0) != (published.demand == 0):
        return True
    return abs(wish.demand - published.demand) > 0.5 * published.demand


def _full(bucket: Bucket, now: Instant) -> Free:
    """What a bucket is before its first request."""
    return Free(bucket.whole, now.seconds, now.epoch)


def _read(
    transaction: Transaction, buckets: dict[str, Bucket]
) -> tuple[dict[str, dict[str, Claimant]], dict[str, Free]]:
    lease_rows: list[_Row] = []
    free_rows: list[_FreeRow] = []
    if len(buckets) > MANY:
        lease_rows = [msgspec.convert(row, _Row) for row in transaction.rows(_SQL_LEASES)]
        free_rows = [msgspec.convert(row, _FreeRow) for row in transaction.rows(_SQL_BUCKETS)]
    else:
        for name in buckets:
            found = transaction.rows(f"{_SQL_LEASES} WHERE bucket = ?", (name,))
            lease_rows += [msgspec.convert(row, _Row) for row in found]
            found = transaction.rows(f"{_SQL_BUCKETS} WHERE name = ?", (name,))
            free_rows += [msgspec.convert(row, _FreeRow) for row in found]
    leases: dict[str, dict[str, Claimant]] = {}
    for row in lease_rows:
        leases.setdefault(row.bucket, {})[row.gateway] = Claimant(row.share, row.demand, row.need)
    return leases, {row.name: Free(row.level, row.at, row.epoch) for row in free_rows}


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
