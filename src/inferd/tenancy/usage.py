"""Usage: a journal with one record per request, and the ledger of sums in the database.

The journal is a memory-mapped file, so a record costs a copy of some bytes and survives a killed process in the page
cache. The database's thread enters records into the ledger: sums and the position in the journal are written in one
transaction, so each record counts exactly once. A process locks its files while it lives; the next process that starts
enters the files without a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import secrets
import struct
import time
import zlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from inferd.state.database import Database, Transaction

SEGMENT_BYTES: Final = 2 * 1024 * 1024
MAX_KEPT_IN_MEMORY: Final = 100_000
"""Records held in memory while the disk has no space for a segment. Further records are lost and counted."""

_HEAD: Final = struct.Struct("<II")  # length, CRC-32 of the payload; a length of 0 ends the segment
_DAY_S: Final = 86_400

_log = logging.getLogger("inferd.usage")

Column = Literal["day", "tenant", "key_id", "model"]
COLUMNS: Final[tuple[Column, ...]] = ("day", "tenant", "key_id", "model")


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One request's usage, or what requests of a tenant used of devices. ``at``: seconds since the epoch."""

    at: float
    tenant: str
    key_id: str
    model: str
    prompt_tokens: int
    completion_tokens: int
    requests: int = 1
    device_s: float = 0.0
    energy_j: float | None = None


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over all values of the columns that are empty."""

    day: str = ""  # UTC, 2026-11-21
    tenant: str = ""
    key_id: str = ""
    model: str = ""
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    device_s: float = 0.0  # of the steps of the requests
    energy_j: float | None = None  # None: no device told


class _Sums:
    """Of the entries of one account."""

    __slots__ = ("completion_tokens", "device_s", "energy_j", "prompt_tokens", "requests")

    def __init__(self) -> None:
        self.requests = self.prompt_tokens = self.completion_tokens = 0
        self.device_s = 0.0
        self.energy_j: float | None = None

    def add(self, entry: Entry) -> None:
        self.requests += entry.requests
        self.prompt_tokens += entry.prompt_tokens
        self.completion_tokens += entry.completion_tokens
        self.device_s += entry.device_s
        if entry.energy_j is not None:
            self.energy_j = (self.energy_j or 0.0) + entry.energy_j

    @property
    def row(self) -> tuple[int, int, int, float, float | None]:
        return self.requests, self.prompt_tokens, self.completion_tokens, self.device_s, self.energy_j


class _Account(NamedTuple):
    day: str
    tenant: str
    key_id: str
    model: str


class _Segment:
    """One file of the journal, locked by the process that writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left = SEGMENT_BYTES  # zeros, not a hole: a hole that the disk cannot fill later raises SIGBUS
            while left:
                left -= os.write(self._file, bytes(left))
            self.memory = mmap.mmap(self._file, SEGMENT_BYTES)
        except BaseException:
            os.close(self._file)
            path.unlink(missing_ok=True)
            raise
        self.written = 0  # end of the last complete record
        self.entered = 0

    def append(self, payload: bytes) -> bool:
        """False: the segment is full."""
        end = self.written + _HEAD.size + len(payload)
        if end > SEGMENT_BYTES:
            return False
        self.memory[self.written : end] = _HEAD.pack(len(payload), zlib.crc32(payload)) + payload
        self.written = end
        return True

    def remove(self) -> None:
        self.memory.close()
        self.path.unlink(missing_ok=True)
        os.close(self._file)


class UsageJournal:
    """The event loop writes records, and the database's thread enters them into the ledger."""

    def __init__(self, folder: Path, url: str | None) -> None:
        self._folder = folder / "usage"
        # A journal belongs to one database.
        self._tag = hashlib.sha256((url or "").encode()).hexdigest()[:8]
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder(Entry)
        self._segments: deque[_Segment] = deque()
        self._spares: deque[_Segment] = deque()
        self._in_memory: deque[Entry] = deque()
        self.num_lost = 0
        self._num_reported = 0

    # -- the event loop ----------------------------------------------------------------------------

    def record(self, entry: Entry) -> None:
        """Write one record. Copies into memory; never waits and never raises."""
        payload = self._encode(entry)
        if self._segments and self._segments[-1].append(payload):
            return
        try:
            segment: _Segment | None = self._spares.popleft()
        except IndexError:
            segment = self._make()
        if segment is not None and segment.append(payload):
            self._segments.append(segment)
        elif len(self._in_memory) < MAX_KEPT_IN_MEMORY:
            self._in_memory.append(entry)
        else:
            self.num_lost += 1

    def _make(self) -> _Segment | None:
        path = self._folder / f"{self._tag}-{time.time_ns():x}-{secrets.token_hex(4)}.journal"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return _Segment(path)
        except OSError as error:
            _log.error("no space for the usage journal %s, records are held in memory: %s", path, error.strerror)
            return None

    # -- the database's thread ---------------------------------------------------------------------

    def recover(self, database: Database) -> int:
        """Enter the journals of processes that ended. Returns the number of records."""
        count = 0
        for path in sorted(self._folder.glob(f"{self._tag}-*.journal")):
            with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file.fileno()).st_nlink == 0:
                    continue  # another process that started meanwhile has entered it
                data = file.read()
                with database.transaction() as transaction:
                    transaction.lock()
                    start = _position(transaction, path.name)
                    found, end = self._read(data, start, len(data))
                    self._enter(transaction, found)
                    _set_position(transaction, path.name, end)
                count += len(found)
                path.unlink(missing_ok=True)
                with database.transaction() as transaction:
                    transaction.execute("DELETE FROM journals WHERE name = ?", (path.name,))
        return count

    def enter(self, database: Database) -> None:
        """Enter the records since the last call. Raises StateUnavailable, and loses nothing then."""
        for segment in list(self._segments):
            is_full = segment is not self._segments[-1]  # read before ``written``: a full segment gets no more records
            written = segment.written
            if written > segment.entered:
                found, _ = self._read(segment.memory, segment.entered, written)
                with database.transaction() as transaction:
                    self._enter(transaction, found)
                    _set_position(transaction, segment.path.name, written)
                segment.entered = written
            if is_full:
                self._segments.popleft()
                segment.remove()
                with database.transaction(durable=False) as transaction:
                    transaction.execute("DELETE FROM journals WHERE name = ?", (segment.path.name,))
        if self.num_lost > self._num_reported:
            _log.error(
                "the usage of %d requests is lost: no space on the disk or in memory",
                self.num_lost - self._num_reported,
            )
            self._num_reported = self.num_lost
        waiting = [self._in_memory[index] for index in range(len(self._in_memory))]
        if waiting:
            with database.transaction() as transaction:
                self._enter(transaction, waiting)
            for _ in waiting:
                self._in_memory.popleft()
        self.prepare()

    def prepare(self) -> None:
        """Create a spare segment before the event loop needs it."""
        if not self._spares:
            made = self._make()
            if made is not None:
                self._spares.append(made)

    def close(self, database: Database) -> None:
        """Enter the last records and remove the files. No record may be written afterwards."""
        self.enter(database)
        for segment in (*self._segments, *self._spares):
            segment.remove()
            with database.transaction(durable=False) as transaction:
                transaction.execute("DELETE FROM journals WHERE name = ?", (segment.path.name,))
        self._segments.clear()
        self._spares.clear()

    def _read(self, data: bytes | mmap.mmap, start: int, end: int) -> tuple[list[Entry], int]:
        """The complete records from ``start``, and the position behind the last of them."""
        found: list[Entry] = []
        while start + _HEAD.size <= end:
            length, check = _HEAD.unpack_from(data, start)
            payload = data[start + _HEAD.size : start + _HEAD.size + length]
            if length == 0 or len(payload) < length or zlib.crc32(payload) != check:
                break
            found.append(self._decoder.decode(payload))
            start += _HEAD.size + length
        return found, start

    def _enter(self, transaction: Transaction, entries: Sequence[Entry]) -> None:
        sums: dict[_Account, _Sums] = {}
        for entry in entries:
            account = _Account(day_of(entry.at), entry.tenant, entry.key_id, entry.model)
            sums.setdefault(account, _Sums()).add(entry)
        transaction.execute_many(
            "INSERT INTO usage (day, tenant, key_id, model, requests, prompt_tokens, completion_tokens, device_s, "
            "energy_j) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (day, tenant, key_id, model) DO UPDATE SET "
            "requests = usage.requests + excluded.requests, "
            "prompt_tokens = usage.prompt_tokens + excluded.prompt_tokens, "
            "completion_tokens = usage.completion_tokens + excluded.completion_tokens, "
            "device_s = usage.device_s + excluded.device_s, "
            "energy_j = COALESCE(usage.energy_j + excluded.energy_j, usage.energy_j, excluded.energy_j)",
            [(*account, *sums[account].row) for account in sorted(sums)],  # sorted, so that servers cannot deadlock
        )


def day_of(at: float) -> str:
    """The UTC day of a time in seconds since the epoch."""
    return time.strftime("%Y-%m-%d", time.gmtime(at))


def forget_before(database: Database, retention_days: int, now: float) -> int:
    """Remove usage older than ``retention_days``. Returns the number of rows."""
    with database.transaction() as transaction:
        return transaction.execute("DELETE FROM usage WHERE day < ?", (day_of(now - retention_days * _DAY_S),))


def read_usage(
    database: Database,
    *,
    by: Sequence[Column] = COLUMNS,
    tenant: str | None = None,
    key_id: str | None = None,
    since: str | None = None,
) -> list[UsageRow]:
    """Sums per combination of the columns ``by``. ``since``: the first UTC day, 2026-11-21."""
    columns = [column for column in COLUMNS if column in by]
    conditions: list[tuple[str, str]] = []
    for condition, value in (("tenant = ?", tenant), ("key_id = ?", key_id), ("day >= ?", since)):
        if value is not None:
            conditions.append((condition, value))
    sql = "SELECT " + "".join(f"{column}, " for column in columns)
    # PostgreSQL sums bigints to numerics, which are no integers in Python.
    sql += ", ".join(
        f"CAST(COALESCE(SUM({name}), 0) AS BIGINT)" for name in ("requests", "prompt_tokens", "completion_tokens")
    )
    sql += ", COALESCE(SUM(device_s), 0), SUM(energy_j) FROM usage"
    if conditions:
        sql += " WHERE " + " AND ".join(condition for condition, _ in conditions)
    if columns:
        sql += f" GROUP BY {', '.join(columns)} ORDER BY {', '.join(columns)}"
    with database.reading() as transaction:
        rows = transaction.rows(sql, [value for _, value in conditions])
    names = (*columns, "requests", "prompt_tokens", "completion_tokens", "device_s", "energy_j")
    return [msgspec.convert(dict(zip(names, row, strict=True)), UsageRow) for row in rows]


def _position(transaction: Transaction, name: str) -> int:
    rows = transaction.rows("SELECT position FROM journals WHERE name = ?", (name,))
    return msgspec.convert(rows[0][0], int) if rows else 0


def _set_position(transaction: Transaction, name: str, position: int) -> None:
    transaction.execute(
        "INSERT INTO journals (name, position) VALUES (?, ?) "
        "ON CONFLICT (name) DO UPDATE SET position = excluded.position",
        (name, position),
    )
