"""The one interface of a response cache, whatever keeps the bytes."""

from __future__ import annotations

from typing import Protocol

import msgspec


class CachedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A whole answer as it was sent: a hit repeats it byte for byte."""

    content_type: bytes
    body: bytes
    prompt_tokens: int = 0
    completion_tokens: int = 0
    headers: tuple[tuple[bytes, bytes], ...] = ()  # those that the body cannot be read without


class ResponseCache(Protocol):
    """Keys are digests that begin with the tenant. A cache that fails is a miss, never an error."""

    async def get(self, key: bytes) -> CachedAnswer | None: ...
    async def put(self, key: bytes, answer: CachedAnswer, ttl_s: float) -> None: ...
    async def drop_tenant(self, tenant: str) -> None:
        """Forget everything kept for a tenant."""

    async def close(self) -> None: ...
