"""The objects that are built once and passed to every endpoint: router, configuration, keys, caches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from inferd.cache.port import CachedAnswer, ResponseCache
from inferd.config import Config, ModelCacheConfig
from inferd.events import Emit
from inferd.gateway.background import Background
from inferd.gateway.control import ControlActions
from inferd.gateway.upstream import Upstream
from inferd.observe.statistics import ModelTally
from inferd.tenancy.idempotency import IdempotencyStore
from inferd.tenancy.principal import Door

_NOT_CACHED = ModelCacheConfig()

Flights = dict[bytes, asyncio.Future[CachedAnswer | None]]
"""By cache key: answers that are being computed and will be cached. A result of None: there is no answer to cache."""


def no_tally(model: str) -> ModelTally:
    """The statistics of a server that counts nothing."""
    return ModelTally()


class Context(NamedTuple):
    """Is replaced as a whole when the configuration changes. A call keeps the context that it began with."""

    router: Upstream
    config: Config
    door: Door
    emit: Emit
    metrics: Callable[[], bytes]
    openapi: Callable[[], bytes]
    control: ControlActions | None
    idempotency: IdempotencyStore | None
    cache: ResponseCache | None
    flights: Flights
    background: Background
    tally_of: Callable[[str], ModelTally] = no_tally

    @property
    def max_body_bytes(self) -> int:
        return self.config.server.max_body_bytes

    @property
    def body_timeout_s(self) -> float:
        return self.config.server.body_timeout_s

    def caching_of(self, model: str) -> ModelCacheConfig:
        """Whether a model's answers are cached, and for how long."""
        config = self.config.models.get(model)
        return config.cache if config is not None else _NOT_CACHED
