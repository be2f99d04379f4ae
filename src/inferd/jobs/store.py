"""The store of files and batches: rows in the state database, contents in a folder.

A file's content is complete before its row is written, and its row is deleted before its content is. So a crash between
the two leaves a content without a row, which ``sweep`` removes, and never a row without a content.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple, TypeVar

from inferd import clock
from inferd.config.server import JobsConfig
from inferd.eager import in_task
from inferd.events import Emit, JobsCounted, ignore
from inferd.jobs import machine, refusals, rows
from inferd.jobs.batch import MESSAGES, TERMINAL, Batch, Lease, StoredFile, new_id
from inferd.jobs.folder import Folder
from inferd.jobs.rows import Query
from inferd.state.database import Database, Transaction
from inferd.state.erasure import Erasure
from inferd.state.presence import Presence
from inferd.state.thread import StateThread

T = TypeVar("T")

COUNT_S: Final = 5.0
ERASE_S: Final = 1.0
_SOME: Final = 256

_log = logging.getLogger("inferd.jobs")


class LeaseLost(Exception):
    """Another server works on the batch, or it was deleted."""


class Page(NamedTuple):
    """A part of the list of files or batches."""

    files: list[StoredFile]
    batches: list[Batch]
    has_more: bool


class JobReport(NamedTuple):
    """A batch that has not ended, for the operator."""

    batch: Batch
    is_at_work: bool  # a server works on it


class JobStore:
    """Files and batches of all tenants. Every method that waits for the database raises StateUnavailable.

    Call ``schedule`` before the state's thread starts.
    """

    def __init__(
        self, state: StateThread, presence: Presence, folder: Folder, config: JobsConfig, tell: Emit = ignore
    ) -> None:
        self._state = state
        self._presence = presence
        self._tell = tell
        self._erasure = Erasure()
        self._deletions: set[asyncio.Task[None]] = set()
        self._arriving: dict[str, int] = {}  # bytes of uploads that have not ended, by tenant
        self._open: list[JobReport] = []
        self.folder = folder
        self.config = config

    def schedule(self) -> None:
        self._state.run_every(COUNT_S, self._count)
        self._state.run_every(ERASE_S, self._erasure.erase)

    @property
    def gateway(self) -> str:
        return self._presence.id

    def reports(self) -> list[JobReport]:
        """The batches that have not ended, as of the last count."""
        return self._open

    # -- files ------------------------------------------------------------------------------

    async def check_room(self, tenant: str, num_bytes: int) -> None:
        """Raises InvalidRequest where the tenant may not store so many bytes more."""
        more = num_bytes + self._arriving.get(tenant, 0)
        await self._read(lambda found: self._refuse_bytes(found, tenant, more))

    def arriving(self, tenant: str, num_bytes: int) -> None:
        """Count bytes of an upload; negative: it has ended."""
        left = self._arriving.get(tenant, 0) + num_bytes
        if left > 0:
            self._arriving[tenant] = left
        else:
            self._arriving.pop(tenant, None)

    async def add_file(self, file: StoredFile) -> None:
        """Write the row of a file whose content is there. Raises InvalidRequest where the tenant may not store it."""

        def work(found: Transaction) -> None:
            self._refuse_bytes(found, file.tenant, file.num_bytes)
            rows.insert_file(found, file)

        await self._change(work)

    async def file(self, tenant: str, name: str) -> StoredFile:
        """Raises StoredNotFound."""
        return await self._read(lambda found: rows.read_file(found, tenant, name, clock.wall()))

    async def files(self, tenant: str, purpose: str | None, query: Query) -> Page:
        found = await self._read(lambda read: rows.list_files(read, tenant, purpose, query, clock.wall()))
        return Page(found[: query.limit], [], len(found) > query.limit)

    async def delete_file(self, tenant: str, name: str) -> None:
        """Raises StoredNotFound, InvalidRequest."""

        async def delete() -> None:
            file = await self._delete(lambda found: rows.remove_file(found, tenant, name, clock.wall()))
            if file.folder == self.folder.id:  # else the servers of the other folder sweep it
                await asyncio.to_thread(self.folder.delete, (file.id,))

        await self._to_the_end(delete())

    def _refuse_bytes(self, found: Transaction, tenant: str, more: int) -> None:
        used = rows.used_bytes(found, tenant)
        if used + more + rows.ROW_BYTES > self.config.max_bytes:
            raise refusals.too_many_bytes(used, more, self.config.max_bytes)

    def _refuse_open(self, found: Transaction, tenant: str) -> None:
        if rows.num_open(found, tenant) >= self.config.max_open:
            raise refusals.too_many_open(self.config.max_open)

    # -- batches ----------------------------------------------------------------------------

    async def add_batch(self, batch: Batch, content: StoredFile | None = None) -> None:
        """``content``: its input, where that came with it and has no row yet. Raises StoredNotFound, InvalidRequest and
        Overloaded."""

        def work(found: Transaction) -> None:
            if content is not None:
                self._refuse_bytes(found, content.tenant, content.num_bytes)
                rows.insert_file(found, content)
            file = rows.read_file(found, batch.tenant, batch.input_file_id, clock.wall(), "input_file_id")
            if file.purpose != "batch":
                raise refusals.wrong_purpose(file.id, file.purpose)
            self._refuse_open(found, batch.tenant)
            rows.insert_batch(found, batch, file.folder)

        await self._change(work)

    async def batch(self, tenant: str, name: str) -> Batch:
        """Raises StoredNotFound."""
        return await self._read(lambda found: rows.read_batch(found, tenant, name))

    async def batches(self, tenant: str, query: Query, prefix: str = "") -> Page:
        """Batches whose ids begin so."""
        found = await self._read(lambda read: rows.list_batches(read, tenant, query, prefix))
        listed = found[: query.limit]
        return Page([], listed[::-1] if query.before else listed, len(found) > query.limit)

    async def delete_batch(self, tenant: str, name: str) -> None:
        """Delete a batch that has ended, with its input and results. Raises StoredNotFound, InvalidRequest."""

        async def delete() -> None:
            here = await self._delete(lambda found: rows.remove_batch(found, tenant, name, self.folder.id))
            await asyncio.to_thread(self.folder.delete, here)

        await self._to_the_end(delete())

    async def cancel(self, tenant: str, name: str) -> Batch:
        """Raises StoredNotFound, and InvalidRequest for a batch that has ended."""

        def work(found: Transaction) -> Batch:
            before = rows.read_batch(found, tenant, name)
            if before.status in TERMINAL and before.status != "cancelled":
                raise refusals.has_ended(name, before.status)
            now = clock.wall()
            after = machine.cancelled(before, now)
            if after is not before:
                rows.write_batch(found, after, now)
            return after

        return await self._change(work)

    async def resume(self, tenant: str, name: str) -> Batch:
        """Let a batch go on that was cancelled or has expired. Raises StoredNotFound, also where its input is gone,
        InvalidRequest and Overloaded."""

        def work(found: Transaction) -> Batch:
            before, now = rows.read_batch(found, tenant, name), clock.wall()
            if before.endpoint == MESSAGES:
                raise refusals.messages_not_resumed(name)
            if before.status not in ("cancelled", "expired"):
                raise refusals.cannot_resume(name, before.status)
            rows.read_file(found, tenant, before.input_file_id, now, "input_file_id")
            self._refuse_open(found, tenant)
            after = machine.resumed(before, now)
            rows.write_batch(found, after, now)
            return after

        return await self._change(work)

    # -- working on batches -----------------------------------------------------------------

    async def take(self, known: frozenset[str], most: int) -> list[tuple[Batch, Lease]]:
        """Lease up to ``most`` batches that no living server works on."""
        presence = self._presence

        def work(found: Transaction) -> list[tuple[Batch, Lease]]:
            return rows.take(found, presence.id, presence.members(found).living, known, self.folder.id, most)

        return await self._change(work) if most > 0 else []

    async def held(self, lease: Lease) -> Batch:
        """Raises LeaseLost."""
        return await self._read(lambda found: self._held(found, lease))

    async def change(self, lease: Lease, step: Callable[[Batch], Batch]) -> Batch:
        """Let a batch go on by a function of ``machine``; durable when it returns. Raises LeaseLost."""

        def work(found: Transaction) -> Batch:
            before = self._held(found, lease)
            after = step(before)
            if after is not before:
                rows.write_batch(found, after, clock.wall())
            return after

        return await self._change(work)

    async def finish(self, lease: Lease, step: Callable[[Batch], Batch], files: list[StoredFile]) -> Batch:
        """As ``change``, with the rows of its files of results in the same transaction, in place of those that it had
        before it was resumed."""

        def work(found: Transaction) -> Batch:
            before = self._held(found, lease)
            after = step(before)
            for name in [] if before.former is None else before.former.ids:
                rows.forget_file(found, lease.tenant, name)
                self._erasure.note_deletion()
            for file in files:
                rows.insert_file(found, file)
            rows.write_batch(found, after, clock.wall())
            return after

        return await self._change(work)

    async def has_room(self, tenant: str) -> bool:
        """Whether the tenant may store more results."""
        used = await self._read(lambda found: rows.used_bytes(found, tenant))
        return used < self.config.max_bytes

    async def give_back(self, lease: Lease) -> None:
        """Leave a batch to any server."""
        await self._change(lambda found: rows.give_back(found, lease, self.gateway))

    def _held(self, found: Transaction, lease: Lease) -> Batch:
        batch = rows.held(found, lease, self.gateway)
        if batch is None:
            raise LeaseLost
        return batch

    # -- retention --------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Delete what is too old, and what crashes left in the folder. Raises OSError as well."""
        folder, now = self.folder, clock.wall()

        def remove(found: Transaction) -> list[str]:
            names, has_batches = rows.remove_expired(found, folder.id, now, now - self.config.max_age_s, _SOME)
            if names or has_batches:
                self._erasure.note_deletion()
            return names

        while True:
            names = await self._change(remove)
            await asyncio.to_thread(folder.delete, names)
            if len(names) < _SOME:
                break
        owner = await self._change(lambda found: rows.owner(found, new_id("")))
        if not await asyncio.to_thread(folder.belongs_to, owner):
            _log.error("%s has files of another database, so nothing without a row is removed there", folder.path)
            return
        living = await self._read(lambda found: self._presence.members(found).living)
        await asyncio.to_thread(folder.remove_uploads, living)
        has_results = await asyncio.to_thread(folder.running)
        running = await self._read(rows.running_ids)  # after the folder: a batch that begins now is among them
        for batch in has_results - running:
            await asyncio.to_thread(folder.remove_results, batch)
        there = await asyncio.to_thread(folder.contents, now)
        for start in range(0, len(there), _SOME):
            some = there[start : start + _SOME]
            lost = await self._read(lambda found, some=some: rows.without_row(found, some))  # type: ignore[misc]
            await asyncio.to_thread(folder.delete, lost)

    # -- the database's thread --------------------------------------------------------------

    async def _read(self, work: Callable[[Transaction], T]) -> T:
        def job(database: Database) -> T:
            with database.reading() as transaction:
                return work(transaction)

        await in_task()
        return await self._state.call(job)

    async def _change(self, work: Callable[[Transaction], T]) -> T:
        def job(database: Database) -> T:
            with database.transaction() as transaction:
                transaction.lock()
                return work(transaction)

        await in_task()
        return await self._state.call(job)

    async def _to_the_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Await work that goes on when the request that wants it is cancelled: rows and contents are deleted both."""
        task = asyncio.create_task(work)
        self._deletions.add(task)
        task.add_done_callback(self._deletions.discard)
        await asyncio.shield(task)

    async def _delete(self, work: Callable[[Transaction], T]) -> T:
        """As ``_change``, for a work that deletes."""

        def deleting(found: Transaction) -> T:
            result = work(found)
            self._erasure.note_deletion()
            return result

        return await self._change(deleting)

    def _count(self, database: Database) -> None:
        with database.reading() as transaction:
            found = rows.open_batches(transaction)
            num_files, num_bytes = rows.all_files(transaction)
        self._open = [JobReport(batch, is_at_work) for batch, is_at_work in found]
        by_status: dict[str, int] = {}
        for batch, _ in found:
            by_status[batch.status] = by_status.get(batch.status, 0) + 1
        self._tell(JobsCounted(num_files=num_files, num_bytes=num_bytes, by_status=by_status))
