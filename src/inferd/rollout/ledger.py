"""The rows of rollouts in the database: their progress, its changes, and the counts of all gateways.

Every decision is made inside a transaction that holds the database's lock, from the rows that it reads there. So no
gateway leads: whichever looks first decides for all, once, and a gateway that was asleep decides from what is true when
it wakes. Counts are stored as each gateway's sums, and its batches have numbers, so writing a batch again after a
doubtful commit changes nothing.

All functions run in the database's thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from inferd.errors import InvalidRequest, ModelNotFound
from inferd.rollout.evidence import Count
from inferd.rollout.judge import Reading, Verdict, judge
from inferd.rollout.machine import ACTIVE, Progress, Seen, held, observed, withdrawn
from inferd.rollout.plan import Plan, Population, plan_named
from inferd.rollout.tally import Batch
from inferd.state.database import Database, Transaction, Value, next_number, number
from inferd.state.presence import Presence

_UNITS: Final[Mapping[Population, str]] = {"": "", "copies": "#copies", "golden": "#golden"}
"""What stands for a guard in the rows that count all units of a population."""

MAX_CHANGES: Final = 100
"""Changes that are read at a time."""

_CHANGE: Final = "number, at, actor, progress, readings"

_encode = msgspec.json.encode
_progress_decoder: Final = msgspec.json.Decoder(Progress)
_readings_decoder: Final = msgspec.json.Decoder(tuple[Reading, ...])

Sums = Mapping[tuple[str, float], Count]
"""A gateway's own counts, by guard (or what stands for it, ``_UNITS``) and share."""


class Stages(Protocol):
    """What keeps the stages of the versions that rollouts bring to production. Both methods are called inside of the
    transaction of the rollout's own rows, so that a server which is killed has changed both or neither."""

    def problem(self, transaction: Transaction, plan: Plan) -> str:
        """Why the new version must not serve at all; empty: nothing."""
        ...

    def follow(
        self, transaction: Transaction, plan: Plan, before: Progress, after: Progress, verdict: Verdict, actor: str
    ) -> None:
        """Make the stages what a change of the rollout says. Raises InvalidRequest, ModelNotFound where the change must
        not be; a rollback and an abort always may."""
        ...


class NoStages:
    """Of versions that are in no registry."""

    def problem(self, transaction: Transaction, plan: Plan) -> str:
        return ""

    def follow(
        self, transaction: Transaction, plan: Plan, before: Progress, after: Progress, verdict: Verdict, actor: str
    ) -> None:
        """There is nothing to be kept."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a rollout's progress."""

    number: int
    at: float  # seconds since the epoch
    actor: str  # as in the audit log; server: by itself
    progress: Progress
    readings: tuple[Reading, ...] = ()  # of the guards, when it was decided


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """What the database knows of a rollout."""

    progress: Progress = Progress()
    verdict: Verdict = Verdict()
    bad: dict[str, dict[float, Count]] = {}  # units with a bad event, by guard and share
    units: dict[Population, dict[float, Count]] = {}  # all units, by population and share
    is_ready: bool = False  # the new version, at every living gateway that has the rollout
    deaths: int = 0
    problem: str = ""  # why the new version must not serve at all; empty: nothing


class Local(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway's part in a rollout."""

    plan: Plan
    is_ready: bool
    deaths: int  # of the new version's workers here, in this run
    run: int = 0
    sums: Sums = {}  # as the database has them
    batch: Batch = Batch({}, [])
    number: int = 0  # of the batch; a batch that is written again has the same
    is_news: bool = True  # the database does not know ``is_ready`` or ``deaths`` yet

    @property
    def must_write(self) -> bool:
        return self.is_news or bool(self.batch.units) or bool(self.batch.bad)


class Exchanged(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an exchange with the database."""

    version: int  # of the rollouts' rows
    living: frozenset[str]  # gateways
    stored: dict[str, Stored]
    sums: dict[str, Sums]  # of this gateway, after its batches
    has_decided: bool = False  # a change was made in this exchange


def exchange(
    database: Database,
    presence: Presence,
    rollouts: Sequence[Local],
    before: Exchanged | None,
    now: Callable[[], float],
    stages: Stages = NoStages(),
) -> Exchanged:
    """Store what was counted here, make the changes that are due, and read how the rollouts are.

    ``before``: the result of the last exchange of these rollouts. Raises StateUnavailable.
    """
    writing = [local for local in rollouts if local.must_write]
    sums = {local.plan.name: local.sums for local in rollouts}
    with database.reading() as transaction:
        version, living = number(transaction, "rollouts"), presence.members(transaction).living
    is_known = before is not None and (before.version, before.living) == (version, living)
    stored = dict(before.stored) if before is not None and is_known else None
    if writing:
        with database.transaction(durable=False) as transaction:
            transaction.lock()
            for local in writing:
                sums[local.plan.name] = _write(transaction, presence.id, local)
            version = next_number(transaction, "rollouts")
        stored = None
    if stored is None:
        with database.reading() as transaction:
            version = number(transaction, "rollouts")
            stored = {local.plan.name: read(transaction, presence, local.plan, stages) for local in rollouts}
    has_decided = False
    for local in rollouts:
        plan, found = local.plan, stored[local.plan.name]
        if _observed(plan, found, now()) is found.progress:
            continue
        try:
            change = _decide(database, presence, plan, functools.partial(_observed, plan, now=now()), now(), stages)
        except (InvalidRequest, ModelNotFound) as error:
            why = f"the registry refuses it: {error.message}"
            change = _decide(database, presence, plan, functools.partial(_held, now=now(), why=why), now())
        has_decided = has_decided or change is not None
        with database.reading() as transaction:
            version = number(transaction, "rollouts")
            stored[plan.name] = read(transaction, presence, plan, stages)
    return Exchanged(version=version, living=living, stored=stored, sums=sums, has_decided=has_decided)


def _decide(
    database: Database,
    presence: Presence,
    plan: Plan,
    decide: Callable[[Stored], Progress],
    now: float,
    stages: Stages = NoStages(),
) -> Change | None:
    """Store what ``decide`` makes of a rollout; None: it leaves it as it is. Raises StateUnavailable, and where the
    stages refuse the change."""
    with database.transaction() as transaction:
        transaction.lock()
        found = read(transaction, presence, plan, stages)
        progress = decide(found)
        if progress is found.progress:
            return None
        stages.follow(transaction, plan, found.progress, progress, found.verdict, "server")
        change = store(transaction, plan.name, progress, found.verdict, now, "server", presence.id)
        next_number(transaction, "rollouts")
    return change


def command(
    database: Database,
    presence: Presence,
    plan: Plan,
    decide: Callable[[Stored], Progress],
    now: float,
    actor: str,
    stages: Stages = NoStages(),
) -> Change:
    """Store what ``decide`` makes of a rollout. Raises StateUnavailable, and what ``decide`` and ``stages`` raise."""
    with database.transaction() as transaction:
        transaction.lock()
        found = read(transaction, presence, plan, stages)
        progress = decide(found)
        stages.follow(transaction, plan, found.progress, progress, found.verdict, actor)
        change = store(transaction, plan.name, progress, found.verdict, now, actor)
        next_number(transaction, "rollouts")
    return change


def withdraw(
    database: Database, presence: Presence, plans: Sequence[Plan], now: float, why: str, stages: Stages = NoStages()
) -> None:
    """End rollouts that the configuration has no more. Raises StateUnavailable."""
    has_changed = False
    with database.transaction() as transaction:
        transaction.lock()
        for plan in plans:
            found = read(transaction, presence, plan, stages)
            progress = withdrawn(found.progress, now, why)
            if progress is not found.progress:
                stages.follow(transaction, plan, found.progress, progress, found.verdict, "config-file")
                store(transaction, plan.name, progress, found.verdict, now, "config-file", presence.id)
                has_changed = True
        if has_changed:
            next_number(transaction, "rollouts")


class Left(NamedTuple):
    """Rollouts under way in the database that are not in a configuration of this gateway."""

    orphans: list[Plan]  # no gateway has them
    has_others: bool  # another gateway that is alive has one


def left(database: Database, presence: Presence, models: Collection[str], names: Collection[str]) -> Left:
    """The rollouts of ``models`` that are under way, and are not among ``names``. Raises StateUnavailable."""
    orphans, has_others = [], False
    with database.reading() as transaction:
        living = presence.members(transaction).living - {presence.id}
        for row in transaction.rows("SELECT name, progress FROM rollouts"):
            name, encoded = msgspec.convert(row, tuple[str, bytes])
            progress = _progress_decoder.decode(encoded)
            plan = plan_named(name, progress.registered_new)
            if name in names or plan.model not in models or progress.state not in ACTIVE:
                continue
            gateways = transaction.rows("SELECT gateway FROM rollout_gateways WHERE name = ?", (name,))
            if living.isdisjoint(msgspec.convert(gateway, str) for (gateway,) in gateways):
                orphans.append(plan)
            else:
                has_others = True
    return Left(orphans, has_others)


def unrecorded(database: Database, presence: Presence) -> list[tuple[str, Change]]:
    """The changes whose lines in the audit log this gateway is to write, by the rollouts' names: its own, and those of
    gateways that have died before they wrote them. Raises StateUnavailable."""
    with database.reading() as transaction:
        if not transaction.rows("SELECT 1 FROM rollout_unrecorded LIMIT 1"):
            return []
    with database.transaction() as transaction:
        transaction.lock()
        living = presence.members(transaction).living
        for (gateway,) in transaction.rows("SELECT DISTINCT gateway FROM rollout_unrecorded"):
            if gateway not in living:
                transaction.execute(
                    "UPDATE rollout_unrecorded SET gateway = ? WHERE gateway = ?", (presence.id, gateway)
                )
        rows = transaction.rows(
            f"SELECT name, {_CHANGE} FROM rollout_unrecorded NATURAL JOIN rollout_changes WHERE gateway = ? "
            "ORDER BY name, number",
            (presence.id,),
        )
    return [(msgspec.convert(name, str), _change(row)) for name, *row in rows]


def set_recorded(database: Database, name: str, number: int) -> None:
    """The audit log has the line of a change. Raises StateUnavailable."""
    with database.transaction() as transaction:
        transaction.execute("DELETE FROM rollout_unrecorded WHERE name = ? AND number = ?", (name, number))


def changes_of(database: Database, name: str) -> list[Change]:
    """The last changes of a rollout, the newest first. Raises StateUnavailable."""
    with database.reading() as transaction:
        rows = transaction.rows(
            f"SELECT {_CHANGE} FROM rollout_changes WHERE name = ? ORDER BY number DESC LIMIT {MAX_CHANGES}", (name,)
        )
    return [_change(row) for row in rows]


def _change(row: Sequence[Value]) -> Change:
    """A change from its columns ``_CHANGE``."""
    count, at, actor, progress, readings = msgspec.convert(row, tuple[int, float, str, bytes, bytes])
    return Change(
        number=count,
        at=at,
        actor=actor,
        progress=_progress_decoder.decode(progress),
        readings=_readings_decoder.decode(readings),
    )


# -- inside a transaction -----------------------------------------------------------------------


def read(transaction: Transaction, presence: Presence, plan: Plan, stages: Stages = NoStages()) -> Stored:
    """What the database knows of a rollout."""
    rows = transaction.rows("SELECT progress FROM rollouts WHERE name = ?", (plan.name,))
    progress = _progress_decoder.decode(msgspec.convert(rows[0][0], bytes)) if rows else Progress()
    bad: dict[str, dict[float, Count]] = {}
    for row in transaction.rows(
        "SELECT guard, share, CAST(SUM(of_stable) AS BIGINT), CAST(SUM(of_new) AS BIGINT) FROM rollout_counts "
        "WHERE name = ? AND run = ? GROUP BY guard, share",
        (plan.name, progress.run),
    ):
        guard, share, of_stable, of_new = msgspec.convert(row, tuple[str, float, int, int])
        bad.setdefault(guard, {})[share] = Count(of_stable, of_new)
    units = {population: bad.pop(row, {}) for population, row in _UNITS.items()}
    living = presence.members(transaction).living
    ready, deaths = [], 0
    for row in transaction.rows(
        "SELECT gateway, run, is_ready, deaths FROM rollout_gateways WHERE name = ?", (plan.name,)
    ):
        gateway, run, is_ready, died = msgspec.convert(row, tuple[str, int, int, int])
        deaths += died if run == progress.run else 0
        if gateway in living:
            ready.append(bool(is_ready))
    return Stored(
        progress=progress,
        verdict=judge(plan, bad, units),
        bad=bad,
        units=units,
        is_ready=bool(ready) and all(ready),
        deaths=deaths,
        problem=stages.problem(transaction, plan),
    )


def store(
    transaction: Transaction,
    name: str,
    progress: Progress,
    verdict: Verdict,
    now: float,
    actor: str,
    recorder: str = "",
) -> Change:
    """Write a changed progress, and the line of the change. ``recorder``: the gateway that is to write the change into
    its audit log afterwards; empty: the command that has asked for it does."""
    encoded = _encode(progress)
    transaction.execute(
        "INSERT INTO rollouts (name, progress) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET "
        "progress = excluded.progress",
        (name, encoded),
    )
    ((last,),) = transaction.rows("SELECT COALESCE(MAX(number), 0) FROM rollout_changes WHERE name = ?", (name,))
    change = Change(
        number=msgspec.convert(last, int) + 1, at=now, actor=actor, progress=progress, readings=verdict.readings
    )
    transaction.execute(
        "INSERT INTO rollout_changes (name, number, at, actor, progress, readings) VALUES (?, ?, ?, ?, ?, ?)",
        (name, change.number, now, actor, encoded, _encode(verdict.readings)),
    )
    if recorder:
        transaction.execute(
            "INSERT INTO rollout_unrecorded (name, number, gateway) VALUES (?, ?, ?)", (name, change.number, recorder)
        )
    if progress.state not in ACTIVE or progress.state == "preparing":
        transaction.execute("DELETE FROM rollout_units WHERE name = ?", (name,))
    return change


def _observed(plan: Plan, found: Stored, now: float) -> Progress:
    seen = Seen(now=now, is_ready=found.is_ready, verdict=found.verdict, deaths=found.deaths, problem=found.problem)
    return observed(plan, found.progress, seen)


def _held(found: Stored, now: float, why: str) -> Progress:
    return held(found.progress, now, why)


def _write(transaction: Transaction, gateway: str, local: Local) -> Sums:
    """Write a gateway's part; returns its sums with the batch. A unit that another gateway has counted is left out."""
    name, run = local.plan.name, local.run
    transaction.execute(
        "INSERT INTO rollout_gateways (name, gateway, run, is_ready, deaths) VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT (name, gateway) DO UPDATE SET run = excluded.run, is_ready = excluded.is_ready, "
        "deaths = excluded.deaths",
        (name, gateway, run, int(local.is_ready), local.deaths),
    )
    sums = dict(local.sums)
    changed = set()
    for (population, share), count in local.batch.units.items():
        changed.add(_add(sums, _UNITS[population], share, count))
    for event in local.batch.bad:
        if event.unit and not _is_first(transaction, (name, run, event.guard, event.unit), (gateway, local.number)):
            continue
        changed.add(_add(sums, event.guard, event.share, Count(new=1) if event.is_new else Count(stable=1)))
    transaction.execute_many(
        "INSERT INTO rollout_counts (name, run, guard, share, gateway, of_stable, of_new) VALUES (?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (name, run, guard, share, gateway) DO UPDATE SET of_stable = excluded.of_stable, "
        "of_new = excluded.of_new",
        [(name, run, guard, share, gateway, *sums[guard, share]) for guard, share in sorted(changed)],
    )
    return sums


def _is_first(transaction: Transaction, unit: tuple[Value, ...], batch: tuple[Value, ...]) -> bool:
    """Whether a unit was not counted yet, or by this batch."""
    if transaction.execute(
        "INSERT INTO rollout_units (name, run, guard, unit, gateway, batch) VALUES (?, ?, ?, ?, ?, ?) "
        "ON CONFLICT DO NOTHING",
        (*unit, *batch),
    ):
        return True
    found = transaction.rows(
        "SELECT gateway, batch FROM rollout_units WHERE name = ? AND run = ? AND guard = ? AND unit = ?", unit
    )
    return found == [batch]


def _add(sums: dict[tuple[str, float], Count], guard: str, share: float, count: Count) -> tuple[str, float]:
    before = sums.get((guard, share), Count())
    sums[guard, share] = Count(before.stable + count.stable, before.new + count.new)
    return guard, share
