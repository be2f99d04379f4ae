"""The interface of a database: transactions of plain SQL with ``?`` for parameters, and the schema's migration.

Synchronous, and used from one thread. Each wait for a lock, a connection or a statement has a bound. Does not know what
the tables mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple, Protocol

import msgspec

from inferd.errors import ConfigError
from inferd.state.schema import MIGRATIONS, VERSION

LOCK_WAIT_S: Final = 2.0
STATEMENT_S: Final = 5.0
CONNECT_S: Final = 5.0

Value = str | int | float | bytes | None
Row = tuple[Value, ...]


class Instant(NamedTuple):
    """The database's time in seconds. All users of the database share it within one epoch."""

    seconds: float
    epoch: str


class Transaction(Protocol):
    """A transaction: all of its changes are kept, or none. Every method raises StateUnavailable."""

    def execute(self, sql: str, values: Sequence[Value] = ()) -> int:
        """Run one statement. Returns the number of changed rows."""
        ...

    def execute_many(self, sql: str, rows: Iterable[Sequence[Value]]) -> None: ...
    def rows(self, sql: str, values: Sequence[Value] = ()) -> list[Row]: ...
    def lock(self) -> None:
        """Wait for the database's one lock, and hold it until the transaction ends."""

    def now(self) -> Instant: ...


class Database(Protocol):
    where: str  # for display, without a password

    def transaction(self, *, durable: bool = True) -> AbstractContextManager[Transaction]:
        """Begin; commit at the end of the block, roll back when the block raises. Not ``durable``: the commit does not
        wait for the disk, so a crash of the machine (not of the process) may undo it."""
        ...

    def reading(self) -> AbstractContextManager[Transaction]:
        """A consistent view, which blocks no writer."""
        ...

    def check(self) -> None:
        """Raise StateUnavailable when this connection does not reach the database that a new connection would."""

    def erase(self) -> bool:
        """Overwrite what was deleted where only this database's journal still has it. False: another connection reads
        it now, so call this again. Raises StateUnavailable."""
        ...

    def is_local(self) -> bool:
        """Whether every user of this database runs on this machine."""
        ...

    def close(self) -> None: ...


def schema_version(transaction: Transaction, exists: bool) -> int:
    """The number of migrations that were applied."""
    if not exists:
        return 0
    ((version,),) = transaction.rows("SELECT version FROM inferd_schema")
    return msgspec.convert(version, int)


def refuse_newer(version: int, where: str) -> None:
    if version > VERSION:
        raise ConfigError(
            f"The database {where} was written by a newer inferd (its schema is {version}, "
            f"this build knows {VERSION}); nothing was changed. "
            "Run the newer inferd, or name another database with state.url.",
            param="state.url",
        )


def migrate(transaction: Transaction, version: int) -> None:
    """Apply the migrations after ``version`` in the caller's transaction."""
    if version == 0:
        transaction.execute("CREATE TABLE inferd_schema (version BIGINT NOT NULL)")
        transaction.execute("INSERT INTO inferd_schema (version) VALUES (0)")
    for statements in MIGRATIONS[version:]:
        for statement in statements:
            transaction.execute(statement)
    transaction.execute("UPDATE inferd_schema SET version = ?", (VERSION,))


def next_number(transaction: Transaction, name: str) -> int:
    """Increase a counter and return its value; servers poll counters to see changes."""
    transaction.execute("UPDATE counters SET value = value + 1 WHERE name = ?", (name,))
    return number(transaction, name)


def number(transaction: Transaction, name: str) -> int:
    ((value,),) = transaction.rows("SELECT value FROM counters WHERE name = ?", (name,))
    return msgspec.convert(value, int)
