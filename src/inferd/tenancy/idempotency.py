"""One execution per Idempotency-Key: who comes first works, the others get that answer.

Knows digests and finished answers, not HTTP, and not what a request is. Answers are looked up in
memory, then in the database through its thread: the event loop awaits, and never blocks.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from typing import Final

import msgspec

from inferd import clock
from inferd.errors import IdempotencyConflict

MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024
"""A larger answer is not kept: the same key runs again."""

MAX_MEMORY_BYTES: Final = 16 * 1024 * 1024
MAX_KEY_CHARS: Final = 255
WAIT_S: Final = 600.0
"""Longest time a duplicate waits for the first before it is told to come back."""


class StoredAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A finished answer as it was sent; a stream's is all of its events, joined."""

    status: int
    content_type: bytes
    body: bytes


class Claim:
    """The right to execute. Ends in exactly one of ``finish`` and ``abandon``; later calls do nothing."""

    __slots__ = ("_done", "_name", "_store", "digest")

    def __init__(self, store: IdempotencyStore, name: bytes, digest: bytes) -> None:
        self._store = store
        self._name = name
        self._done = asyncio.Event()
        self.digest = digest

    async def finish(self, answer: StoredAnswer) -> None:
        """Keep the answer. Await it before the answer's last byte is sent: what the client has then
        seen complete is replayed even after a crash. Bounded wait; never raises."""
        if not self._done.is_set():
            await self._store.keep(self._name, self.digest, answer)
            self._end()

    def abandon(self) -> None:
        """The execution failed, or its answer is not to be repeated: the next one with this key runs."""
        if not self._done.is_set():
            self._end()

    def _end(self) -> None:
        self._store.release(self._name, self)
        self._done.set()

    async def ended(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._done.wait()
        except TimeoutError:
            return False
        return True


class IdempotencyStore:
    """Claims in progress and finished answers, by tenant and key."""

    def __init__(self, ttl_s: float, *, wait_s: float = WAIT_S, max_bytes: int = MAX_MEMORY_BYTES) -> None:
        self._ttl_s = ttl_s
        self._wait_s = wait_s
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._claims: dict[bytes, Claim] = {}
        self._answers: OrderedDict[bytes, tuple[bytes, StoredAnswer, float]] = OrderedDict()

    async def begin(self, tenant: str, key: str, digest: bytes) -> Claim | StoredAnswer:
        """A claim for whoever is first, else the first one's answer, waited for if need be.

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
            claim = self._claims[name] = Claim(self, name, digest)
            return claim

    async def keep(self, name: bytes, digest: bytes, answer: StoredAnswer) -> None:
        if len(answer.body) <= MAX_ANSWER_BYTES:
            self._remember(name, digest, answer, clock.now() + self._ttl_s)

    def release(self, name: bytes, claim: Claim) -> None:
        if self._claims.get(name) is claim:
            del self._claims[name]

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
        self._num_bytes += len(answer.body)
        while self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._answers)))

    def _forget(self, name: bytes) -> None:
        kept = self._answers.pop(name, None)
        if kept is not None:
            self._num_bytes -= len(kept[1].body)


def _name(tenant: str, key: str) -> bytes:
    """What a key is known by: no tenant can guess or meet another's."""
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
