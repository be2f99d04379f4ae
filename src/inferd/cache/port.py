"""The interface of a response cache, for memory and for Redis."""

from __future__ import annotations

from typing import Protocol

import msgspec


class CachedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A complete answer as it was sent; a hit repeats it byte for byte."""

    content_type: bytes
    body: bytes
    prompt_tokens: int = 0
    completion_tokens: int = 0
    headers: tuple[tuple[bytes, bytes], ...] = ()  # that belong to the body


class ResponseCache(Protocol):
    """Keys come from ``cache/key.py`` and begin with the tenant's digest. A failure is a miss, never an error."""

    async def get(self, key: bytes) -> CachedAnswer | None: ...
    async def put(self, key: bytes, answer: CachedAnswer, ttl_s: float) -> None: ...
    async def close(self) -> None: ...
