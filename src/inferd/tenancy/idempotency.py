"""One execution per Idempotency-Key: the first request is computed, repetitions get its answer.

Knows digests and finished answers. Does not know HTTP or what a request asks for. Answers are looked up in memory, then
in the database through its thread: the event loop awaits and never blocks.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from typing import Final

import msgspec

from inferd import clock
from inferd.errors import IdempotencyConflict, StateUnavailable
from inferd.state.database import Database, Transaction
from inferd.state.presence import Presence
from inferd.state.thread import StateThread

MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024
"""A larger answer is not stored, and a repetition of its request is computed again."""

MAX_MEMORY_BYTES: Final = 16 * 1024 * 1024
OVERHEAD_BYTES: Final = 512
"""Approximate memory of an answer beside its body; bodies of predictions are often smaller."""

MAX_KEY_CHARS: Final = 255
MAX_TENANT_BYTES: Final = 64 * 1024 * 1024
KEEP_WAIT_S: Final = 2.0
WAIT_S: Final = 600.0
"""Longest time that a repetition waits for the first request before it is refused with a time to retry."""


_SQL_ANSWER: Final = "SELECT digest, gateway, status, content_type, body, expires_at FROM answers WHERE name = ?"

_log = logging.getLogger("inferd.idempotency")


class StoredAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A finished answer as it was sent; for a stream, all of its events joined."""

    status: int
    content_type: bytes
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()  # that belong to the body


class _Row(msgspec.Struct, frozen=True, array_like=True):
    digest: bytes
    gateway: str  # the server that computes it; empty: the answer is complete
    status: int
    content_type: bytes  # then the answer's headers, one per line
    body: bytes
    expires_at: float


class Claim:
    """The right to compute the request. It ends by one of ``finish`` and ``abandon``; later calls have no effect."""

    __slots__ = ("_ended", "_store", "digest", "name", "tenant")

    def __init__(self, store: IdempotencyStore, name: bytes, tenant: str, digest: bytes) -> None:
        self._store = store
        self._ended = asyncio.Event()
        self.name = name
        self.tenant = tenant
        self.digest = digest

    async def finish(self, answer: StoredAnswer) -> None:
        """Store the answer. Await this before the last byte of the answer is sent: an answer that a client received
        completely is then repeated even after a crash. Waits ``KEEP_WAIT_S`` at most and never raises."""
        if not self._ended.is_set():
            try:
                await self._store.keep(self, answer)
            finally:
                self.withdraw()

    def abandon(self) -> None:
        """The request failed, or its answer must not be repeated: the next request with this key is computed."""
        if not self._ended.is_set():
            self._store.drop(self)
            self.withdraw()

    def withdraw(self) -> None:
        """Release the key and wake the repetitions that wait for it."""
        self._store.release(self)
        self._ended.set()

    async def ended(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True


class IdempotencyStore:
    """Claims in progress and finished answers, by tenant and key.

    Without ``state`` answers are in memory alone. An answer whose ``finish`` returned survives a crash. A request that
    was still running then is computed again when it is repeated. During an outage of the database only memory is used.
    """

    def __init__(
        self,
        ttl_s: float,
        state: StateThread | None = None,
        presence: Presence | None = None,
        *,
        wait_s: float = WAIT_S,
        max_bytes: int = MAX_MEMORY_BYTES,
    ) -> None:
        self._ttl_s = ttl_s
        self._state = state
        self._presence = presence
        self._wait_s = wait_s
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._claims: dict[bytes, Claim] = {}
        self._answers: OrderedDict[bytes, tuple[bytes, StoredAnswer, float]] = OrderedDict()

    async def begin(self, tenant: str, key: str, digest: bytes) -> Claim | StoredAnswer:
        """A claim for the first request with this key; for a repetition, the first request's answer, once it is there.

        ``digest`` is of the method, path and body. Raises IdempotencyConflict: code
        ``idempotency_key_reused`` (another body, 422) or ``idempotency_in_progress`` (still being
        worked on after ``wait_s`` or by another gateway, 409).
        """
        name = _name(tenant, key)
        deadline = clock.now() + self._wait_s
        while True:
            claim = self._claims.get(name)
            if claim is not None:
                _check(claim.digest, digest)
                if not await claim.ended(deadline - clock.now()):
                    raise _in_progress()
                continue
            kept = self._recall(name)
            if kept is not None:
                _check(kept[0], digest)
                return kept[1]
            claim = self._claims[name] = Claim(self, name, tenant, digest)
            try:
                answer = await self._look_up(claim)
            except BaseException:
                claim.withdraw()
                raise
            if answer is None:
                return claim
            claim.withdraw()
            return answer

    async def keep(self, claim: Claim, answer: StoredAnswer) -> None:
        """Store an answer in memory and, if the database answers in time, in the database."""
        if len(answer.body) > MAX_ANSWER_BYTES:
            self.drop(claim)
            return
        expires_at = clock.wall() + self._ttl_s
        self._remember(claim.name, claim.digest, answer, clock.now() + self._ttl_s)
        if self._state is None:
            return

        def job(database: Database) -> None:
            with database.transaction() as transaction:
                _write(transaction, claim, "", answer, expires_at)
                _limit_tenant(transaction, claim.tenant)

        try:
            await self._state.call(job, wait_s=KEEP_WAIT_S)
        except StateUnavailable as error:
            _log.error("an answer was not kept for its Idempotency-Key beyond this process: %s", error.message)

    def drop(self, claim: Claim) -> None:
        """Store nothing, and make the key free at all servers."""
        if self._state is None or self._presence is None:
            return
        me = self._presence.id

        def job(database: Database) -> None:
            with database.transaction(durable=False) as transaction:
                transaction.execute("DELETE FROM answers WHERE name = ? AND gateway = ?", (claim.name, me))

        self._state.submit(job)

    def release(self, claim: Claim) -> None:
        if self._claims.get(claim.name) is claim:
            del self._claims[claim.name]

    def purge(self, database: Database) -> None:
        """Remove expired answers. Runs in the database's thread."""
        with database.transaction(durable=False) as transaction:
            transaction.execute("DELETE FROM answers WHERE expires_at <= ?", (clock.wall(),))

    async def _look_up(self, claim: Claim) -> StoredAnswer | None:
        """The answer that the database holds; None: the claim of this server was written."""
        if self._state is None or self._presence is None:
            return None
        presence, wall = self._presence, clock.wall()

        def job(database: Database) -> _Row | None:
            with database.transaction(durable=False) as transaction:
                transaction.lock()
                found = transaction.rows(_SQL_ANSWER, (claim.name,))
                row = msgspec.convert(found[0], _Row) if found else None
                if row is not None and row.expires_at > wall:
                    is_ours_to_redo = row.gateway == presence.id or (
                        row.gateway and row.gateway not in presence.members(transaction).living
                    )
                    if not is_ours_to_redo:
                        return row
                _write(transaction, claim, presence.id, StoredAnswer(0, b"", b""), wall + self._ttl_s)
            return None

        try:
            row = await self._state.call(job)
        except StateUnavailable as error:
            _log.error("an Idempotency-Key was looked for in this process alone: %s", error.message)
            return None
        if row is None:
            return None
        _check(row.digest, claim.digest)
        if row.gateway:
            raise _in_progress()
        content_type, *lines = row.content_type.split(b"\n")
        headers = tuple([(name, value) for name, _, value in (line.partition(b": ") for line in lines)])
        answer = StoredAnswer(row.status, content_type, row.body, headers)
        self._remember(claim.name, row.digest, answer, clock.now() + row.expires_at - wall)
        return answer

    def _recall(self, name: bytes) -> tuple[bytes, StoredAnswer] | None:
        kept = self._answers.get(name)
        if kept is None:
            return None
        digest, answer, expires_at = kept
        if clock.now() >= expires_at:
            self._forget(name)
            return None
        self._answers.move_to_end(name)
        return digest, answer

    def _remember(self, name: bytes, digest: bytes, answer: StoredAnswer, expires_at: float) -> None:
        self._forget(name)
        self._answers[name] = (digest, answer, expires_at)
        self._num_bytes += len(answer.body) + OVERHEAD_BYTES
        while self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._answers)))

    def _forget(self, name: bytes) -> None:
        kept = self._answers.pop(name, None)
        if kept is not None:
            self._num_bytes -= len(kept[1].body) + OVERHEAD_BYTES


def _write(transaction: Transaction, claim: Claim, gateway: str, answer: StoredAnswer, expires_at: float) -> None:
    transaction.execute(
        "INSERT INTO answers (name, tenant, digest, gateway, status, content_type, body, expires_at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET tenant = excluded.tenant, "
        "digest = excluded.digest, gateway = excluded.gateway, status = excluded.status, "
        "content_type = excluded.content_type, body = excluded.body, expires_at = excluded.expires_at",
        (
            claim.name,
            claim.tenant,
            claim.digest,
            gateway,
            answer.status,
            b"\n".join((answer.content_type, *(b"%b: %b" % header for header in answer.headers))),
            answer.body,
            expires_at,
        ),
    )


def _limit_tenant(transaction: Transaction, tenant: str) -> None:
    """Remove the oldest answers of a tenant beyond ``MAX_TENANT_BYTES``."""
    rows = transaction.rows(
        "SELECT name, length(body) FROM answers WHERE tenant = ? AND gateway = '' ORDER BY expires_at DESC", (tenant,)
    )
    total = 0
    for row in rows:
        name, num_bytes = msgspec.convert(row, tuple[bytes, int])
        total += num_bytes
        if total > MAX_TENANT_BYTES:
            transaction.execute("DELETE FROM answers WHERE name = ?", (name,))


def _name(tenant: str, key: str) -> bytes:
    """The name of a key in the store: keys of different tenants never collide."""
    return hashlib.sha256(tenant.encode() + b"\0" + key.encode()).digest()


def _check(first: bytes, digest: bytes) -> None:
    if first != digest:
        raise IdempotencyConflict(
            "This Idempotency-Key was used with another request; send the same body, or a new key.",
            code="idempotency_key_reused",
        )


def _in_progress() -> IdempotencyConflict:
    return IdempotencyConflict(
        "The request with this Idempotency-Key is still being worked on; ask again in a moment.",
        code="idempotency_in_progress",
        retry_after_s=1.0,
    )
