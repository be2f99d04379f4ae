"""Presence: which servers use a database now, and which have died.

A server on this machine holds the lock of a file while its process lives, so its death is known at once. A server on
another machine writes heartbeats to the database, and counts as alive for ``TERM_S`` after the last one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec

from inferd.state.database import Database, Transaction
from inferd.state.folder import is_locked

BEAT_S: Final = 2.0
TERM_S: Final = 30.0


class Members(NamedTuple):
    """The servers in the table of gateways, by id."""

    living: frozenset[str]  # with this server
    dead: frozenset[str]


class Presence(Protocol):
    """This server among the users of a database."""

    @property
    def id(self) -> str: ...
    def members(self, transaction: Transaction) -> Members:
        """The servers that use the database, from its table of gateways."""
        ...

    def remove_dead(self, dead: frozenset[str]) -> None:
        """Remove what dead servers left outside the database."""


class LockedPresence:
    """This process as a row of the table of gateways and a locked file in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.id = secrets.token_hex(8)
        self._folder = folder
        self._file: int | None = None
        self._is_local = False

    def enter(self, database: Database) -> None:
        """Lock the file and write the row. All users of a local database use the same ``folder``.
        Raises OSError, StateUnavailable."""
        self._is_local = database.is_local()
        if self._file is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(self._path(self.id), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with database.transaction(durable=False) as transaction:
            self._write(transaction)

    def beat(self, database: Database) -> None:
        """Write a heartbeat. On one machine the lock is enough, and nothing is written."""
        if not self._is_local:
            with database.transaction(durable=False) as transaction:
                self._write(transaction)

    def leave(self, database: Database) -> None:
        with database.transaction(durable=False) as transaction:
            transaction.execute("DELETE FROM gateways WHERE id = ?", (self.id,))
        self.unlock()

    def unlock(self) -> None:
        """Remove the file, also where the row could not be removed."""
        if self._file is not None:
            self._path(self.id).unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def members(self, transaction: Transaction) -> Members:
        living: set[str] = {self.id}
        dead: set[str] = set()
        rows = transaction.rows("SELECT id, host, seen_at FROM gateways")
        now = transaction.now().seconds if len(rows) > 1 else 0.0
        for row in rows:
            gateway, _, seen_at = msgspec.convert(row, tuple[str, str, float])
            if gateway != self.id:
                (living if self._is_alive(gateway, now - seen_at) else dead).add(gateway)
        return Members(frozenset(living), frozenset(dead))

    def _is_alive(self, gateway: str, silent_s: float) -> bool:
        try:
            file = os.open(self._path(gateway), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return not self._is_local and silent_s < TERM_S
        return is_locked(file)

    def remove_dead(self, dead: frozenset[str]) -> None:
        """Remove the files of dead servers."""
        for gateway in dead:
            with contextlib.suppress(OSError):
                self._path(gateway).unlink()

    def _write(self, transaction: Transaction) -> None:
        transaction.execute(
            "INSERT INTO gateways (id, host, seen_at) VALUES (?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at",
            (self.id, os.uname().nodename, transaction.now().seconds),
        )

    def _path(self, gateway: str) -> Path:
        return self._folder / f"{gateway}.gateway"
