"""The response cache in a Redis or Valkey server, which several inferd servers may share.

Knows the server's commands and the time to wait for them. A failure is a miss. After several failures the server is not
asked for a while, so that it delays no request. Only this module imports the package ``redis``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from inferd.cache.port import CachedAnswer
from inferd.config import CacheConfig
from inferd.events import CacheLooked, Emit, ignore

PATIENCE_S = 0.05
"""Longest time that a request waits for the Redis server."""
FAILURES_TO_OPEN = 3
FIRST_COOLDOWN_S = 0.5
LONGEST_COOLDOWN_S = 30.0
_SOCKET_PATIENCE_S = 10.0
_PREFIX = b"inferd:cache:2:"

_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(CachedAnswer).decode
_Answered = TypeVar("_Answered")


class RedisCache:
    """Each entry is one key of the Redis server, which expires it."""

    def __init__(self, config: CacheConfig, emit: Emit = ignore) -> None:
        url = (config.url or "").replace("valkey", "redis", 1)
        self._client = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=_SOCKET_PATIENCE_S,
            socket_connect_timeout=1.0,
            max_connections=64,
            retry=None,
            client_name="inferd",
        )
        self._max_entry_bytes = config.max_entry_bytes
        self._emit = emit
        self._num_failures = 0  # in a row
        self._revival: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the Redis server is not asked because it failed."""
        return self._revival is not None

    async def get(self, key: bytes) -> CachedAnswer | None:
        """The answer of a key; None also when the server does not answer in time."""
        return await self._bounded(self._get(key)) if not self.is_open else None

    async def put(self, key: bytes, answer: CachedAnswer, ttl_s: float) -> None:
        """Store an answer for ``ttl_s`` seconds. It is not stored when the server does not confirm in time."""
        if len(answer.body) + len(answer.content_type) <= self._max_entry_bytes and not self.is_open:
            await self._bounded(self._put(key, answer, ttl_s))

    async def close(self) -> None:
        if self._revival is not None:
            self._revival.cancel()
            await asyncio.gather(self._revival, return_exceptions=True)
        await self._client.aclose()

    # -- the server's commands -----------------------------------------------------------------

    async def _get(self, key: bytes) -> CachedAnswer | None:
        kept = await self._client.get(_PREFIX + key.hex().encode())
        return _decode(kept) if isinstance(kept, bytes) else None

    async def _put(self, key: bytes, answer: CachedAnswer, ttl_s: float) -> None:
        await self._client.set(_PREFIX + key.hex().encode(), _encode(answer), px=max(1, round(ttl_s * 1000)))

    # -- bounds and failures -------------------------------------------------------------------

    async def _bounded(self, asking: Awaitable[_Answered]) -> _Answered | None:
        """The server's answer within PATIENCE_S; None after a failure, which is counted."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                answered = await asking
        except (OSError, RedisError, ValueError):  # TimeoutError is an OSError
            self._emit(CacheLooked(model="", result="error"))
            self._num_failures += 1
            if self._num_failures >= FAILURES_TO_OPEN and self._revival is None:
                self._revival = asyncio.create_task(self._revive(), name="cache-revival")
            return None
        self._num_failures = 0
        return answered

    async def _revive(self) -> None:
        """Ask a failed server until it answers. Requests do not ask it meanwhile."""
        cooldown = FIRST_COOLDOWN_S
        while True:
            await asyncio.sleep(cooldown)
            try:
                async with asyncio.timeout(1.0):
                    await self._client.set(_PREFIX + b"revival", b"", px=1000)
            except (OSError, RedisError):
                cooldown = min(cooldown * 2, LONGEST_COOLDOWN_S)
                continue
            self._num_failures = 0
            self._revival = None
            return
