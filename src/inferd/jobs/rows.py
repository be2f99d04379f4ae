"""The rows of files and batches. Every statement names the tenant: another tenant's id is as an unknown one."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import msgspec

from inferd.jobs import refusals
from inferd.jobs.batch import Batch, Lease, StoredFile
from inferd.state.database import Transaction

ROW_BYTES: Final = 4096
"""Bytes that a file counts beside its content, so that the bytes bound the number of files too."""

_FILE: Final = "id, tenant, created_at, expires_at, purpose, filename, num_bytes, folder"
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_encode: Final = msgspec.msgpack.Encoder().encode
_batch_decoder: Final = msgspec.msgpack.Decoder(Batch)


class Query(NamedTuple):
    """The part of a list that a client asks for."""

    after: str = ""  # the id of the last entry before it; empty: from the beginning
    limit: int = 20
    is_newest_first: bool = True
    before: str = ""  # the id of the first entry behind it, in place of ``after``


class _FileRow(msgspec.Struct, array_like=True, frozen=True):
    id: str
    tenant: str
    created_at: float
    expires_at: float
    purpose: str
    filename: str
    num_bytes: int
    folder: str


# -- files -----------------------------------------------------------------------------------


def insert_file(rows: Transaction, file: StoredFile) -> None:
    """Write the row of a file; again without effect."""
    rows.execute(
        f"INSERT INTO files ({_FILE}) VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (tenant, id) DO NOTHING",
        (
            *(file.id, file.tenant, file.created_at, file.expires_at),
            *(file.purpose, file.filename, file.num_bytes, file.folder),
        ),
    )


def used_bytes(rows: Transaction, tenant: str) -> int:
    """The bytes of a tenant's files and of the results that its batches write."""
    ((used,),) = rows.rows(
        f"SELECT CAST(COALESCE(SUM(num_bytes + {ROW_BYTES}), 0) AS BIGINT) FROM files WHERE tenant = ?", (tenant,)
    )
    ((results,),) = rows.rows(
        "SELECT CAST(COALESCE(SUM(num_bytes), 0) AS BIGINT) FROM batches WHERE tenant = ? AND ended_at IS NULL",
        (tenant,),
    )
    return msgspec.convert(used, int, strict=False) + msgspec.convert(results, int, strict=False)


def read_file(rows: Transaction, tenant: str, name: str, now: float, param: str = "file_id") -> StoredFile:
    """Raises StoredNotFound."""
    found = _is_name(name) and rows.rows(
        f"SELECT {_FILE} FROM files WHERE tenant = ? AND id = ? AND expires_at > ?", (tenant, name, now)
    )
    if not found:
        raise refusals.unknown_file(name, param)
    return _file(found[0])


def list_files(rows: Transaction, tenant: str, purpose: str | None, query: Query, now: float) -> list[StoredFile]:
    """At most one more than the limit. Raises InvalidRequest."""
    where, values = "tenant = ? AND expires_at > ?", [tenant, now]
    if purpose is not None:
        where += " AND purpose = ?"
        values.append(purpose)
    return [_file(row) for row in _page(rows, "files", _FILE, where, values, tenant, query)]


def remove_file(rows: Transaction, tenant: str, name: str, now: float) -> StoredFile:
    """Delete the row of a file. Raises StoredNotFound, and InvalidRequest for the input of a batch that has not
    ended."""
    found = read_file(rows, tenant, name, now)
    using = rows.rows(
        "SELECT id FROM batches WHERE tenant = ? AND input_file = ? AND ended_at IS NULL LIMIT 1", (tenant, name)
    )
    if using:
        raise refusals.in_use(name, str(using[0][0]))
    forget_file(rows, tenant, name)
    return found


def forget_file(rows: Transaction, tenant: str, name: str) -> None:
    """Delete the row of a file; again without effect."""
    rows.execute("DELETE FROM files WHERE tenant = ? AND id = ?", (tenant, name))


def remove_expired(rows: Transaction, folder: str, now: float, oldest: float, most: int) -> tuple[list[str], bool]:
    """Delete some rows of files and batches that are too old; returns the ids of the files in this folder, and whether
    there were batches."""
    found = rows.rows(
        "SELECT tenant, id FROM files WHERE folder = ? AND expires_at <= ? AND NOT EXISTS (SELECT 1 FROM batches "
        "WHERE batches.tenant = files.tenant AND batches.input_file = files.id AND batches.ended_at IS NULL) "
        f"LIMIT {most}",
        (folder, now),
    )
    for tenant, name in found:
        forget_file(rows, str(tenant), str(name))
    has_batches = rows.execute("DELETE FROM batches WHERE ended_at <= ?", (oldest,)) > 0
    return [str(name) for _, name in found], has_batches


def without_row(rows: Transaction, names: list[str]) -> list[str]:
    """Of these ids of files, those that no row has. A running batch may have reserved an id."""
    if not names:
        return []
    marks = ", ".join("?" * len(names))
    known = {str(name) for (name,) in rows.rows(f"SELECT id FROM files WHERE id IN ({marks})", names)}
    for (record,) in rows.rows("SELECT record FROM batches WHERE ended_at IS NULL"):
        batch = _batch(record)
        known.update(name for name in (batch.output_file_id, batch.error_file_id) if name is not None)
    return [name for name in names if name not in known]


# -- batches ---------------------------------------------------------------------------------


def insert_batch(rows: Transaction, batch: Batch, folder: str) -> None:
    rows.execute(
        "INSERT INTO batches (tenant, id, created_at, ended_at, input_file, folder, gateway, fence, num_bytes, record) "
        "VALUES (?, ?, ?, NULL, ?, ?, '', 0, 0, ?)",
        (batch.tenant, batch.id, batch.created_at, batch.input_file_id, folder, _encode(batch)),
    )


def num_open(rows: Transaction, tenant: str) -> int:
    ((count,),) = rows.rows("SELECT count(*) FROM batches WHERE tenant = ? AND ended_at IS NULL", (tenant,))
    return msgspec.convert(count, int)


def read_batch(rows: Transaction, tenant: str, name: str) -> Batch:
    """Raises StoredNotFound."""
    found = _is_name(name) and rows.rows("SELECT record FROM batches WHERE tenant = ? AND id = ?", (tenant, name))
    if not found:
        raise refusals.unknown_batch(name)
    return _batch(found[0][0])


def list_batches(rows: Transaction, tenant: str, query: Query, prefix: str = "") -> list[Batch]:
    """At most one more than the limit, of the ids that begin so. Raises InvalidRequest."""
    where, values = "tenant = ?", list[object]([tenant])
    if prefix:
        where += f" AND substr(id, 1, {len(prefix)}) = ?"
        values.append(prefix)
    return [_batch(row[0]) for row in _page(rows, "batches", "record", where, values, tenant, query)]


def write_batch(rows: Transaction, batch: Batch, now: float) -> None:
    ended_at = now if batch.has_ended else None
    rows.execute(
        "UPDATE batches SET ended_at = ?, num_bytes = ?, record = ? WHERE tenant = ? AND id = ?",
        (ended_at, batch.num_bytes, _encode(batch), batch.tenant, batch.id),
    )
    if batch.has_ended:
        rows.execute("UPDATE batches SET gateway = '' WHERE tenant = ? AND id = ?", (batch.tenant, batch.id))


def remove_batch(rows: Transaction, tenant: str, name: str, folder: str) -> list[str]:
    """Delete the rows of a batch that has ended and of its files; returns the ids of those that are in this folder.
    Raises StoredNotFound, InvalidRequest."""
    batch = read_batch(rows, tenant, name)
    if not batch.has_ended:
        raise refusals.not_ended(name, batch.status)
    rows.execute("DELETE FROM batches WHERE tenant = ? AND id = ?", (tenant, name))
    here: list[str] = []
    for file in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
        if file is not None:
            found = rows.rows(
                "SELECT folder FROM files WHERE tenant = ? AND id = ? AND NOT EXISTS (SELECT 1 FROM batches WHERE "
                "batches.tenant = files.tenant AND batches.input_file = files.id AND batches.ended_at IS NULL)",
                (tenant, file),
            )
            if found:
                forget_file(rows, tenant, file)
                here += [file for (where,) in found if where == folder]
    return here


def held(rows: Transaction, lease: Lease, gateway: str) -> Batch | None:
    """The batch of a lease; None: the lease is lost."""
    found = rows.rows(
        "SELECT record FROM batches WHERE tenant = ? AND id = ? AND gateway = ? AND fence = ? AND ended_at IS NULL",
        (lease.tenant, lease.id, gateway, lease.fence),
    )
    return _batch(found[0][0]) if found else None


def take(
    rows: Transaction, me: str, living: frozenset[str], known: frozenset[str], folder: str, most: int
) -> list[tuple[Batch, Lease]]:
    """Lease up to ``most`` batches that no living server works on, nor this one (``known``). The tenants with the
    fewest batches at work come first, then the oldest batch."""
    others = sorted(living - {me})
    marks = "".join(" AND gateway <> ?" for _ in others)
    at_work: dict[str, int] = {}
    for tenant, count in rows.rows(
        "SELECT tenant, count(*) FROM batches WHERE ended_at IS NULL AND gateway <> '' GROUP BY tenant"
    ):
        at_work[str(tenant)] = msgspec.convert(count, int)
    waiting = [
        msgspec.convert(row, tuple[str, str, float, int])
        for row in rows.rows(
            f"SELECT tenant, id, created_at, fence FROM batches WHERE ended_at IS NULL AND folder = ?{marks}",
            (folder, *others),
        )
    ]
    waiting = [row for row in waiting if row[1] not in known]
    taken: list[tuple[Batch, Lease]] = []
    while waiting and len(taken) < most:
        row = min(waiting, key=lambda row: (at_work.get(row[0], 0), row[2], row[1]))
        waiting.remove(row)
        tenant, name, _, fence = row
        lease = Lease(tenant, name, fence + 1)
        rows.execute(
            "UPDATE batches SET gateway = ?, fence = ? WHERE tenant = ? AND id = ?", (me, lease.fence, tenant, name)
        )
        at_work[tenant] = at_work.get(tenant, 0) + 1
        taken.append((read_batch(rows, tenant, name), lease))
    return taken


def give_back(rows: Transaction, lease: Lease, gateway: str) -> None:
    rows.execute(
        "UPDATE batches SET gateway = '' WHERE tenant = ? AND id = ? AND gateway = ? AND fence = ?",
        (lease.tenant, lease.id, gateway, lease.fence),
    )


def open_batches(rows: Transaction) -> list[tuple[Batch, bool]]:
    """All batches that have not ended, and whether a server works on each."""
    found = rows.rows("SELECT record, gateway FROM batches WHERE ended_at IS NULL ORDER BY created_at, id")
    return [(_batch(record), bool(gateway)) for record, gateway in found]


def running_ids(rows: Transaction) -> set[str]:
    return {str(name) for (name,) in rows.rows("SELECT id FROM batches WHERE ended_at IS NULL")}


def all_files(rows: Transaction) -> tuple[int, int]:
    """The number of all files, and their bytes."""
    (found,) = rows.rows("SELECT count(*), CAST(COALESCE(SUM(num_bytes), 0) AS BIGINT) FROM files")
    return msgspec.convert(found, tuple[int, int], strict=False)


def owner(rows: Transaction, made: str) -> str:
    """The database's identity; ``made``, where it has none."""
    rows.execute("INSERT INTO jobs_owner (one, id) VALUES (1, ?) ON CONFLICT (one) DO NOTHING", (made,))
    ((found,),) = rows.rows("SELECT id FROM jobs_owner")
    return str(found)


# -- both ------------------------------------------------------------------------------------


def _page(
    rows: Transaction, table: str, columns: str, where: str, values: list[object], tenant: str, query: Query
) -> list[tuple[object, ...]]:
    """The entries in the order of the list behind ``after``, in the opposite order those before ``before``."""
    edge, is_falling = query.before or query.after, query.is_newest_first is not bool(query.before)
    if edge:
        found = _is_name(edge) and rows.rows(
            f"SELECT created_at FROM {table} WHERE tenant = ? AND id = ?", (tenant, edge)
        )
        if not found:
            raise refusals.unknown_edge(edge, "before" if query.before else "after")
        sign = "<" if is_falling else ">"
        where += f" AND (created_at {sign} ? OR (created_at = ? AND id {sign} ?))"
        at = msgspec.convert(found[0][0], float)
        values += [at, at, edge]
    direction = "DESC" if is_falling else "ASC"
    return list(
        rows.rows(
            f"SELECT {columns} FROM {table} WHERE {where} ORDER BY created_at {direction}, id {direction} "
            f"LIMIT {query.limit + 1}",
            values,  # type: ignore[arg-type]
        )
    )


def _file(row: object) -> StoredFile:
    read = msgspec.convert(row, _FileRow)
    return msgspec.convert(msgspec.structs.asdict(read), StoredFile)


def _batch(record: object) -> Batch:
    assert isinstance(record, bytes)
    return _batch_decoder.decode(record)


def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None
