"""The store of responses and conversations in the state database.

Changes that wait at the same time share one transaction, and so one flush of the disk. Each of them succeeds or fails
by itself. However many wait, they are one job of the database's thread: a response that was computed waits for its turn,
and is not refused because the thread's queue is full.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, Literal, NamedTuple, TypeVar

from inferd import clock
from inferd.config.server import StoredConfig
from inferd.eager import in_task
from inferd.errors import InferdError, StateUnavailable
from inferd.events import Emit, StoredCounted, StoredDropped, ignore
from inferd.state.database import Database, Transaction
from inferd.state.erasure import Erasure
from inferd.state.presence import Presence
from inferd.state.thread import StateThread
from inferd.stored import bounds, conversations, refusals, responses
from inferd.stored.documents import new_id
from inferd.stored.port import RUNNING, Conversation, Page, PageQuery, StoredResponse, Unfinished
from inferd.stored.totals import Limits, TenantTotal, largest, whole

T = TypeVar("T")

ERASE_S: Final = 1.0
EXPIRE_S: Final = 60.0
COUNT_S: Final = 5.0
"""Time between two counts of what all tenants have stored."""

MAX_TENANTS: Final = 1000
"""Tenants of which ``tenants`` tells; those with the fewest bytes are left out."""

MAX_TOGETHER: Final = 64
"""Changes of one transaction."""
TURN_S: Final = 30.0
"""Time for which a change waits for those before it. A database that does not answer ends it sooner."""


class _Change(NamedTuple):
    work: Callable[[Transaction], Any]
    done: Future[Any]


class DurableStore:
    """Implements ``ResponseStore``. Call ``schedule`` before the state's thread starts.

    ``tell`` is called in that thread with what is counted and deleted.
    """

    def __init__(self, state: StateThread, presence: Presence, config: StoredConfig, tell: Emit = ignore) -> None:
        self._state = state
        self._presence = presence
        self._config = config
        self._changes: deque[_Change] = deque()
        self._erasure = Erasure()
        self._num_dropped = 0  # by the transaction that runs
        self._tell = tell
        self._tenants: list[TenantTotal] = []

    def schedule(self) -> None:
        self._state.run_every(COUNT_S, self._count)
        self._state.run_every(ERASE_S, self._erasure.erase)
        self._state.run_every(EXPIRE_S, self._expire)

    @property
    def max_bytes(self) -> int:
        """The bytes that each tenant may have stored."""
        return self._config.max_bytes

    def tenants(self) -> list[TenantTotal]:
        """What each tenant has stored, as of the last count; the one with the most bytes first."""
        return self._tenants

    # -- responses --------------------------------------------------------------------------

    def check(self) -> None:
        if not self._state.is_connected:
            raise StateUnavailable(
                "The database does not answer, so nothing can be stored; send store=false, or try again.",
                param="store",
                retry_after_s=1.0,
            )

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        limits = self._limits()
        return await self._read(lambda rows: responses.read(rows, tenant, response_id, limits))

    async def history(self, tenant: str, response_id: str) -> list[bytes]:
        limits = self._limits()
        return await self._read(lambda rows: responses.history_of(rows, tenant, response_id, limits))

    async def put(self, response: StoredResponse) -> None:
        limits, me = self._limits(), self._presence.id

        def work(rows: Transaction) -> None:
            if response.background:
                responses.change(rows, response, limits, me)
            else:
                responses.insert(rows, response, limits)
            self._settle(rows, response.tenant, response.id, limits)

        await self._change(work)

    async def delete(self, tenant: str, response_id: str) -> None:
        def work(rows: Transaction) -> None:
            if not responses.remove_response(rows, tenant, response_id):
                raise refusals.unknown_response(response_id)

        await self._delete(work)

    # -- in the background ------------------------------------------------------------------

    async def begin(self, response: StoredResponse, *, key_id: str, request: bytes) -> None:
        limits, me = self._limits(), self._presence.id

        def work(rows: Transaction) -> None:
            responses.refuse_too_many(rows, response.tenant)
            responses.insert(rows, response, limits, gateway=me, key_id=key_id, request=request)
            self._settle(rows, response.tenant, response.id, limits)

        await self._change(work)

    async def cancel(self, tenant: str, response_id: str) -> StoredResponse:
        limits = self._limits()

        def work(rows: Transaction) -> StoredResponse:
            found = responses.read(rows, tenant, response_id, limits)
            if not found.background:
                raise refusals.not_in_background(response_id)
            if found.status in RUNNING:
                responses.end(rows, tenant, response_id, "cancelled")
            return responses.read(rows, tenant, response_id, limits)

        return await self._change(work)

    async def fail(self, tenant: str, response_id: str, code: str, message: str) -> None:
        me = self._presence.id

        def work(rows: Transaction) -> None:
            if responses.is_computed_by(rows, me, tenant, response_id):
                responses.end(rows, tenant, response_id, "failed", refusals.failure(code, message))

        await self._change(work)

    async def computed_here(self) -> frozenset[str]:
        return await self._read(lambda rows: responses.computed_by(rows, self._presence.id))

    async def take_over(self, known: frozenset[str]) -> list[Unfinished]:
        presence = self._presence
        return await self._change(
            lambda rows: responses.take_over(rows, presence.id, presence.members(rows).living, known)
        )

    # -- conversations ----------------------------------------------------------------------

    async def create_conversation(self, tenant: str, metadata: bytes, items: list[bytes]) -> Conversation:
        limits, name = self._limits(), new_id("conv")

        def work(rows: Transaction) -> Conversation:
            conversations.insert_conversation(rows, tenant, name, metadata, items, limits)
            self._settle(rows, tenant, name, limits)
            return conversations.read_conversation(rows, tenant, name, limits)

        return await self._change(work)

    async def conversation(self, tenant: str, conversation_id: str) -> Conversation:
        limits = self._limits()
        return await self._read(lambda rows: conversations.read_conversation(rows, tenant, conversation_id, limits))

    async def update_conversation(self, tenant: str, conversation_id: str, metadata: bytes) -> Conversation:
        limits = self._limits()

        def work(rows: Transaction) -> Conversation:
            found = conversations.replace_metadata(rows, tenant, conversation_id, metadata, limits)
            self._settle(rows, tenant, conversation_id, limits)
            return found

        return await self._change(work)

    async def delete_conversation(self, tenant: str, conversation_id: str) -> None:
        def work(rows: Transaction) -> None:
            if not conversations.remove_conversation(rows, tenant, conversation_id):
                raise refusals.unknown_conversation(conversation_id)

        await self._delete(work)

    async def conversation_items(self, tenant: str, conversation_id: str) -> list[bytes]:
        limits = self._limits()
        return await self._read(lambda rows: conversations.all_items(rows, tenant, conversation_id, limits))

    async def conversation_page(self, tenant: str, conversation_id: str, query: PageQuery) -> Page:
        limits = self._limits()
        return await self._read(lambda rows: conversations.page_of(rows, tenant, conversation_id, query, limits))

    async def append(self, tenant: str, conversation_id: str, items: list[bytes]) -> list[bytes]:
        limits = self._limits()

        def work(rows: Transaction) -> list[bytes]:
            made = conversations.append_items(rows, tenant, conversation_id, items, limits)
            self._settle(rows, tenant, conversation_id, limits)
            return made

        return await self._change(work)

    async def conversation_item(self, tenant: str, conversation_id: str, item_id: str) -> bytes:
        limits = self._limits()
        return await self._read(lambda rows: conversations.read_item(rows, tenant, conversation_id, item_id, limits))

    async def delete_conversation_item(self, tenant: str, conversation_id: str, item_id: str) -> Conversation:
        limits = self._limits()
        return await self._delete(
            lambda rows: conversations.remove_item(rows, tenant, conversation_id, item_id, limits)
        )

    # -- the database's thread --------------------------------------------------------------

    def _limits(self) -> Limits:
        return Limits(self._config.max_bytes, self._config.max_age_s, clock.wall())

    async def _read(self, work: Callable[[Transaction], T]) -> T:
        def job(database: Database) -> T:
            with database.reading() as transaction:
                return work(transaction)

        await in_task()
        return await self._state.call(job)

    def _settle(self, rows: Transaction, tenant: str, kept: str, limits: Limits) -> None:
        num_deleted = bounds.settle(rows, tenant, limits, kept=kept)
        if num_deleted:
            self._erasure.note_deletion()
            self._num_dropped += num_deleted

    async def _delete(self, work: Callable[[Transaction], T]) -> T:
        """As ``_change``, for a work that deletes: it is erased when this returns. It is erased by the next task of the
        database's thread where another process reads the journal, or the request ends before."""

        def deleting(rows: Transaction) -> T:
            result = work(rows)
            self._erasure.note_deletion()
            return result

        deleted = await self._change(deleting)
        await self._state.call(self._erasure.erase)
        return deleted

    async def _change(self, work: Callable[[Transaction], T]) -> T:
        """Carry out a change; durable when it returns."""
        await in_task()
        change = _Change(work, Future())
        self._changes.append(change)
        if len(self._changes) == 1:  # else the job of those before it takes this one too, or begins another
            self._begin_job()
        try:
            async with asyncio.timeout(TURN_S):
                result: T = await asyncio.wrap_future(change.done)
                return result
        except TimeoutError:
            raise StateUnavailable("The database did not answer in time; try again.", retry_after_s=1.0) from None

    def _begin_job(self) -> None:
        self._state.submit(self._carry_out).add_done_callback(self._job_ended)

    def _job_ended(self, job: Future[None]) -> None:
        """Begin the job of the changes that are left. A job that failed ends those that wait."""
        error = job.exception()
        if error is None:
            if self._changes:
                self._begin_job()
            return
        for change in self._taken(len(self._changes)):
            change.done.set_exception(error)

    def _taken(self, most: int) -> list[_Change]:
        """The first of the changes that wait, without those whose request has gone."""
        taken: list[_Change] = []
        with contextlib.suppress(IndexError):  # none is left, or another thread took the last
            for _ in range(most):
                change = self._changes.popleft()
                if change.done.set_running_or_notify_cancel():
                    taken.append(change)
        return taken

    def _carry_out(self, database: Database) -> None:
        taken = self._taken(MAX_TOGETHER)
        if not taken:
            return
        self._num_dropped = 0
        try:
            with database.transaction() as transaction:
                transaction.lock()
                outcomes = [_apart(transaction, change.work) for change in taken]
        except BaseException as error:
            for change in taken:
                change.done.set_exception(error)
            raise
        self._tell_dropped("bytes", self._num_dropped)
        for change, (result, refusal) in zip(taken, outcomes, strict=True):
            if refusal is None:
                change.done.set_result(result)
            else:
                change.done.set_exception(refusal)

    def _expire(self, database: Database) -> None:
        limits = self._limits()
        while True:
            with database.transaction(durable=False) as transaction:
                transaction.lock()
                num_deleted = bounds.remove_expired(transaction, limits)
            if not num_deleted:
                return
            self._erasure.note_deletion()
            self._tell_dropped("age", num_deleted)

    def _count(self, database: Database) -> None:
        with database.reading() as transaction:
            tenants = largest(transaction, MAX_TENANTS)
            num_tenants, num_bytes, num_responses, num_conversations = whole(transaction)
        self._tenants = tenants
        most = tenants[0].num_bytes if tenants else 0
        self._tell(
            StoredCounted(
                num_bytes=num_bytes,
                num_responses=num_responses,
                num_conversations=num_conversations,
                num_tenants=num_tenants,
                most_used=most / self._config.max_bytes,
            )
        )

    def _tell_dropped(self, reason: Literal["bytes", "age"], count: int) -> None:
        if count:
            self._tell(StoredDropped(reason=reason, count=count))


def _apart(transaction: Transaction, work: Callable[[Transaction], T]) -> tuple[T | None, InferdError | None]:
    """The result of a change, or why it was refused; then nothing of it is in the transaction. Raises
    StateUnavailable."""
    transaction.execute("SAVEPOINT change")
    try:
        result = work(transaction)
    except StateUnavailable:
        raise
    except InferdError as error:
        transaction.execute("ROLLBACK TO SAVEPOINT change")
        return None, error
    transaction.execute("RELEASE SAVEPOINT change")
    return result, None
