"""The objects that are built once and passed to every endpoint: router, configuration, keys, caches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from inferd.cache.port import CachedAnswer, ResponseCache
from inferd.config import Config, ModelCacheConfig
from inferd.events import Emit
from inferd.gateway.admin.auditor import Auditor
from inferd.gateway.background import Background
from inferd.gateway.console.parts import Console
from inferd.gateway.control import ControlActions
from inferd.gateway.runs import Runs
from inferd.gateway.upstream import Upstream
from inferd.jobs.runner import Runner
from inferd.observe import MetricsPage
from inferd.observe.payloads.log import PayloadLog
from inferd.observe.statistics import ModelTally
from inferd.observe.traces.context import Sampler
from inferd.observe.why import Explainer
from inferd.rollout.copies import Copies
from inferd.rollout.split import Split
from inferd.stored.port import ResponseStore
from inferd.tenancy.idempotency import IdempotencyStore
from inferd.tenancy.principal import Door

_NOT_CACHED = ModelCacheConfig()

Flights = dict[bytes, asyncio.Future[CachedAnswer | None]]
"""By cache key: answers that are being computed and will be cached. A result of None: there is no answer to cache."""


Metrics = Callable[[str], Awaitable[MetricsPage]]
"""The page of metrics in the format that the header ``Accept`` prefers."""


def no_tally(model: str) -> ModelTally:
    """The statistics of a server that counts nothing."""
    return ModelTally()


class Context(NamedTuple):
    """Is replaced as a whole when the configuration changes. A call keeps the context that it began with."""

    router: Upstream
    config: Config
    door: Door
    emit: Emit
    metrics: Metrics
    openapi: Callable[[], bytes]
    control: ControlActions | None
    idempotency: IdempotencyStore | None
    cache: ResponseCache | None
    flights: Flights
    background: Background
    explainer: Explainer
    console: Console
    tally_of: Callable[[str], ModelTally] = no_tally
    remote_models: frozenset[str] = frozenset()
    """Names of the models that have remote replicas alone."""
    on_demand_models: frozenset[str] = frozenset()
    """Names of the models that a request loads."""
    payloads: PayloadLog | None = None
    """Records prompts and answers, of the tenants that the configuration names."""
    audit: Auditor | None = None
    """Records admin actions; None: the server keeps no audit log."""
    stored: ResponseStore | None = None
    """Stored responses and conversations; None: the server stores none."""
    runs: Runs | None = None
    """Background responses; None: the server stores none."""
    jobs: Runner | None = None
    """Files and batches; None: the server has none."""
    max_body_bytes: int = 0
    body_timeout_s: float = 0.0
    splits: Mapping[str, Split] = {}
    """How rollouts divide the units of their models now."""
    copies: Copies | None = None
    """Copies requests to the new version of a rollout; None: the server copies none."""
    sampler: Sampler | None = None
    """Decides which calls are traced. None: the server makes no spans."""

    def caching_of(self, model: str) -> ModelCacheConfig:
        """Whether a model's answers are cached, and for how long."""
        config = self.config.models.get(model)
        return config.cache if config is not None else _NOT_CACHED
