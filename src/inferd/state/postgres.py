"""PostgreSQL: a database for servers on several machines. Imported only when ``state.url`` names one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final
from urllib.parse import urlsplit

import msgspec

from inferd.errors import ConfigError, InferdError, StateUnavailable
from inferd.state.database import (
    CONNECT_S,
    LOCK_WAIT_S,
    STATEMENT_S,
    Instant,
    Row,
    Value,
    migrate,
    refuse_newer,
    schema_version,
)
from inferd.state.schema import VERSION

try:
    import psycopg
except ImportError:
    raise ConfigError(
        "state.url names a PostgreSQL database, and the package for it is not installed: "
        "pip install 'inferd[postgres]'.",
        param="state.url",
    ) from None

_LOCK: Final = 0x696E66657264  # "inferd"


class PostgresDatabase:
    """One connection to a PostgreSQL server."""

    def __init__(self, url: str) -> None:
        self.where = _without_password(url)
        try:
            self._connection = psycopg.connect(
                url,
                autocommit=True,
                connect_timeout=int(CONNECT_S),
                application_name="inferd",
                prepare_threshold=None,  # a pooler may give the next transaction another connection
                keepalives_idle=5,
                keepalives_interval=2,
                keepalives_count=3,
                tcp_user_timeout=int(STATEMENT_S * 1000),
            )
        except psycopg.ProgrammingError as error:
            raise ConfigError(
                f"state.url is not an address of a PostgreSQL database ({_said(error)}); "
                "write postgresql://user@host/database.",
                param="state.url",
            ) from None
        except psycopg.Error as error:
            raise StateUnavailable(f"The PostgreSQL database cannot be reached: {_said(error)}.") from error
        try:
            for setting, seconds in (
                ("statement_timeout", STATEMENT_S),
                ("lock_timeout", LOCK_WAIT_S),
                ("idle_in_transaction_session_timeout", 2 * STATEMENT_S),
            ):
                self._connection.execute("SELECT set_config(%s, %s, false)", (setting, f"{seconds:g}s"))
            self._prepare()
        except BaseException as error:
            self._connection.close()
            if isinstance(error, psycopg.Error):
                raise _unavailable(error) from error
            raise

    def _prepare(self) -> None:
        with self.transaction() as transaction:
            transaction.lock()  # servers that start at the same time migrate one after the other
            ((found,),) = transaction.rows("SELECT to_regclass('inferd_schema')::text")
            version = schema_version(transaction, found is not None)
            refuse_newer(version, self.where)
            if version < VERSION:
                migrate(transaction, version)

    @contextlib.contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[_Transaction]:
        try:
            with self._connection.transaction():
                if not durable:
                    self._connection.execute("SET LOCAL synchronous_commit = off")
                yield _Transaction(self._connection)
        except psycopg.Error as error:
            raise _unavailable(error) from error

    @contextlib.contextmanager
    def reading(self) -> Iterator[_Transaction]:
        try:
            with self._connection.transaction():
                self._connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                yield _Transaction(self._connection)
        except psycopg.Error as error:
            raise _unavailable(error) from error

    def check(self) -> None:
        if self._connection.closed or self._connection.broken:
            raise StateUnavailable("The connection to the database is lost; the server connects again.")

    def erase(self) -> bool:
        """Nothing to do: PostgreSQL removes deleted rows by its own vacuum."""
        return True

    def is_local(self) -> bool:
        return False

    def close(self) -> None:
        with contextlib.suppress(psycopg.Error):
            self._connection.close()


class _Transaction:
    def __init__(self, connection: psycopg.Connection[Row]) -> None:
        self._connection = connection

    def execute(self, sql: str, values: Sequence[Value] = ()) -> int:
        try:
            return self._connection.execute(_dialect(sql), values).rowcount
        except psycopg.Error as error:
            raise _unavailable(error) from error

    def execute_many(self, sql: str, rows: Iterable[Sequence[Value]]) -> None:
        try:
            with self._connection.cursor() as cursor:
                cursor.executemany(_dialect(sql), rows)
        except psycopg.Error as error:
            raise _unavailable(error) from error

    def rows(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        try:
            return self._connection.execute(_dialect(sql), values).fetchall()
        except psycopg.Error as error:
            raise _unavailable(error) from error

    def lock(self) -> None:
        self.rows("SELECT pg_advisory_xact_lock(?)::text", (_LOCK,))

    def now(self) -> Instant:
        ((seconds,),) = self.rows("SELECT extract(epoch FROM clock_timestamp())::float8")
        return Instant(msgspec.convert(seconds, float), "")


def _dialect(sql: str) -> bytes:
    """The statement for psycopg. Our statements contain no literal ``?`` or ``%``, and no values."""
    return sql.replace("?", "%s").encode()


def _unavailable(error: psycopg.Error) -> InferdError:
    if isinstance(error, psycopg.errors.LockNotAvailable | psycopg.errors.QueryCanceled):
        return StateUnavailable("The database is busy; try again.", retry_after_s=1.0)
    return StateUnavailable(
        f"The database failed: {_said(error)}. Check its server, then try again.", retry_after_s=1.0
    )


def _said(error: psycopg.Error) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return f"postgresql://{parts.hostname or ''}{parts.path}"
