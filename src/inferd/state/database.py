"""One shape for two databases: transactions over plain SQL with ``?`` for parameters.

Synchronous, and used from one thread. Knows how to connect, to migrate and what a failure means;
not what is kept. Waiting is bounded everywhere: a lock, a connection, a statement.
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
    """The database's time: seconds that all its users share, comparable within one epoch."""

    seconds: float
    epoch: str


class Transaction(Protocol):
    """Everything or nothing. Raises StateUnavailable."""

    def execute(self, sql: str, values: Sequence[Value] = ()) -> int:
        """Run one statement; the number of rows it changed."""
        ...

    def execute_many(self, sql: str, rows: Iterable[Sequence[Value]]) -> None: ...
    def rows(self, sql: str, values: Sequence[Value] = ()) -> list[Row]: ...
    def lock(self) -> None:
        """Wait, within bounds, until no other transaction holds this lock; held to the end."""

    def now(self) -> Instant: ...


class Database(Protocol):
    where: str  # for people; without any password

    def transaction(self, *, durable: bool = True) -> AbstractContextManager[Transaction]:
        """Begin; commit at the end of the block, roll back when it raises. Not ``durable``: a crash
        of the machine (not of the process) may undo it, and nobody waits for the disk."""
        ...

    def reading(self) -> AbstractContextManager[Transaction]:
        """A consistent view, without a lock that writers would wait for."""
        ...

    def check(self) -> None:
        """Raise StateUnavailable when this connection no longer reaches what new ones would."""

    def is_local(self) -> bool:
        """Whether every user of this database runs on this machine."""
        ...

    def close(self) -> None: ...


def schema_version(transaction: Transaction, exists: bool) -> int:
    """The number of steps that were applied."""
    if not exists:
        return 0
    ((version,),) = transaction.rows("SELECT version FROM inferd_schema")
    return msgspec.convert(version, int)


def refuse_newer(version: int, where: str) -> None:
    if version > VERSION:
        raise ConfigError(
            f"The database {where} was written by a newer inferd (its schema is {version}, this build knows {VERSION}); "
            "nothing was changed. Run the newer inferd, or name another database with state.url.",
            param="state.url",
        )


def migrate(transaction: Transaction, version: int) -> None:
    """Apply the steps after ``version``, all in the caller's transaction."""
    if version == 0:
        transaction.execute("CREATE TABLE inferd_schema (version BIGINT NOT NULL)")
        transaction.execute("INSERT INTO inferd_schema (version) VALUES (0)")
    for statements in MIGRATIONS[version:]:
        for statement in statements:
            transaction.execute(statement)
    transaction.execute("UPDATE inferd_schema SET version = ?", (VERSION,))


def next_number(transaction: Transaction, name: str) -> int:
    """Take the next value of a counter; whoever polls it sees that something changed."""
    transaction.execute("UPDATE counters SET value = value + 1 WHERE name = ?", (name,))
    return number(transaction, name)


def number(transaction: Transaction, name: str) -> int:
    ((value,),) = transaction.rows("SELECT value FROM counters WHERE name = ?", (name,))
    return msgspec.convert(value, int)
