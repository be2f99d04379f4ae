"""What endpoints work with: the parts that were built once and are handed to every call."""

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
"""Answers that are being computed and will be kept; None: it came to nothing."""


def no_tally(model: str) -> ModelTally:
    return ModelTally()


class Context(NamedTuple):
    """Replaced as a whole when the configuration changes; calls under way keep the one they began with."""

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
        """Whether and for how long a model's answers are kept."""
        config = self.config.models.get(model)
        return config.cache if config is not None else _NOT_CACHED
