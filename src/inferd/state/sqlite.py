"""SQLite in WAL mode: a database for the servers of one machine.

WAL lets commands write while a server reads. ``synchronous`` is FULL, because a key that was shown and usage that left
its journal must survive a power cut. Such a commit waits for a flush of the disk, which blocks the database's thread
only. Other commits are not ``durable`` and do not wait.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from inferd.errors import ConfigError, InferdError, StateUnavailable
from inferd.state.database import LOCK_WAIT_S, Instant, Row, Value, migrate, refuse_newer, schema_version
from inferd.state.schema import VERSION

LOCK_POLL_S: Final = 0.01
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class SqliteDatabase:
    """One connection to a SQLite file."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._path = path
        self._is_durable = True
        self._clock = _SharedClock()
        connection: sqlite3.Connection | None = None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _create(path)
            connection = sqlite3.connect(path, timeout=LOCK_WAIT_S, isolation_level=None, check_same_thread=False)
            self._connection = connection
            self._inode = path.stat().st_ino
            self._prepare()
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, OSError):
                raise ConfigError(
                    f"The database {path} cannot be opened ({error.strerror}); "
                    "give this user the right to write there, or name another place: INFERD_STATE__DATA_DIR=/path.",
                    param="state.data_dir",
                ) from None
            if isinstance(error, sqlite3.Error):
                raise _cannot_open(path, error) from error
            raise

    def _prepare(self) -> None:
        """Check the schema's version first: a database with a newer schema is not changed."""
        with self.reading() as transaction:
            version = schema_version(transaction, self._has_schema())
        refuse_newer(version, self.where)
        self._use_wal()
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("PRAGMA secure_delete = ON").fetchall()  # deleted content is overwritten
        with self.transaction() as transaction:  # also shows that the file is writable
            version = schema_version(transaction, self._has_schema())
            refuse_newer(version, self.where)
            if version < VERSION:
                migrate(transaction, version)

    def _use_wal(self) -> None:
        """Switch to WAL. SQLite does not wait for the lock of a process that does the same (SQLITE_BUSY at once)."""
        until = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL").fetchall()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(LOCK_POLL_S)
            else:
                return

    def _has_schema(self) -> bool:
        found = self._connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'inferd_schema'").fetchall()
        return bool(found)

    @contextlib.contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[_Transaction]:
        if durable != self._is_durable:
            self._run(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._is_durable = durable
        with self._between("BEGIN IMMEDIATE", "COMMIT") as transaction:
            yield transaction

    @contextlib.contextmanager
    def reading(self) -> Iterator[_Transaction]:
        with self._between("BEGIN", "COMMIT") as transaction:
            yield transaction

    @contextlib.contextmanager
    def _between(self, begin: str, commit: str) -> Iterator[_Transaction]:
        self._run(begin)
        try:
            yield _Transaction(self._connection, self._clock)
            self._run(commit)
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.rollback()
            raise

    def _run(self, statement: str) -> None:
        try:
            self._connection.execute(statement)
        except sqlite3.Error as error:
            raise _unavailable(error) from error

    def check(self) -> None:
        try:
            is_same = self._path.stat().st_ino == self._inode
        except OSError:
            is_same = False
        if not is_same:
            raise StateUnavailable("The database's file was removed or replaced; the server opens it again.")

    def erase(self) -> bool:
        """Move the log into the file, where deleted content is overwritten, and cut the log off."""
        self._run("PRAGMA busy_timeout = 0")  # a reader in another process is not waited for
        try:
            ((is_busy, _, _),) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:
            raise _unavailable(error) from error
        finally:
            self._run(f"PRAGMA busy_timeout = {LOCK_WAIT_S * 1000:.0f}")
        return not is_busy

    def is_local(self) -> bool:
        return True

    def close(self) -> None:
        self._connection.close()


class _Transaction:
    def __init__(self, connection: sqlite3.Connection, clock: _SharedClock) -> None:
        self._connection = connection
        self._clock = clock

    def execute(self, sql: str, values: Sequence[Value] = ()) -> int:
        try:
            return self._connection.execute(sql, values).rowcount
        except sqlite3.Error as error:
            raise _unavailable(error) from error

    def execute_many(self, sql: str, rows: Iterable[Sequence[Value]]) -> None:
        try:
            self._connection.executemany(sql, rows)
        except sqlite3.Error as error:
            raise _unavailable(error) from error

    def rows(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise _unavailable(error) from error

    def lock(self) -> None:
        """Nothing to do: BEGIN IMMEDIATE holds SQLite's one lock for writing."""

    def now(self) -> Instant:
        return self._clock.now()


class _SharedClock:
    """Seconds of the machine's monotonic clock, which all processes share until the next boot."""

    def __init__(self) -> None:
        try:
            self._epoch = _BOOT_ID.read_text().strip()
        except OSError:
            self._epoch = ""  # boots cannot be told apart on this system

    def now(self) -> Instant:
        return Instant(time.monotonic(), self._epoch)


def _create(path: Path) -> None:
    """Create the file for this user alone, unless it is there. Raises OSError.

    A file that is there is not opened: a process that closes any descriptor of a file loses all its locks on it (POSIX,
    fcntl), those of its other connections too. Another process would then remove the log that they write to.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        if not os.access(path, os.R_OK | os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None


def _unavailable(error: sqlite3.Error) -> StateUnavailable:
    if "locked" in str(error) or "busy" in str(error):
        return StateUnavailable(
            f"Another process has held the database's lock for more than {LOCK_WAIT_S:g} s; try again.",
            retry_after_s=1.0,
        )
    return StateUnavailable(
        f"The database failed: {error}. Check the disk and the permissions of its file, then try again."
    )


def _cannot_open(path: Path, error: sqlite3.Error) -> InferdError:
    said = str(error)
    if "locked" in said or "busy" in said:
        return _unavailable(error)
    if "not a database" in said or "malformed" in said:
        return ConfigError(
            f"{path} is damaged or not a SQLite database ({said}); restore a copy of it, "
            "or move it away to start with an empty one (without its keys and usage).",
            param="state.url",
        )
    return ConfigError(
        f"The database {path} cannot be used ({said}); check that this user may write to it "
        "and that the disk has free space.",
        param="state.url",
    )
