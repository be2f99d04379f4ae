"""What the rooms tell the observer: a few typed events, emitted as they happen.

A room gets an ``emit`` callable and knows nothing of metrics or logs; ``observe`` turns events into
both. Emitting never raises and never blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from inferd.types import StepStats, Timings, Usage

RefusalReason = Literal[
    "queue_full",
    "tenant_queue_full",
    "unavailable",
    "draining",
    "queue_timeout",
    "deadline",
    "breaker_open",
    "region",
    "quota_requests",
    "quota_tokens",
    "quota_in_flight",
]


class RequestEnded(msgspec.Struct, frozen=True, kw_only=True):
    """A generate request that was accepted by the router reached its one end."""

    model: str
    replica: int | None  # None: never dispatched
    request_id: str
    tenant: str
    outcome: Literal["done", "failed", "cancelled", "refused"]
    finish_reasons: tuple[str, ...] = ()
    error_kind: str | None = None
    usage: Usage = Usage()
    timings: Timings = Timings()
    inter_token_s: tuple[float, ...] = ()  # gaps between outputs of one choice, seconds per token
    n: int = 1
    max_tokens: int | None = None
    priority: int = 0
    num_preemptions: int = 0


class RequestRefused(msgspec.Struct, frozen=True, kw_only=True):
    """Refused at the router's door; it never entered a queue."""

    model: str
    reason: RefusalReason
    tenant: str = ""


class QueueChanged(msgspec.Struct, frozen=True, kw_only=True):
    """The router's own queue in front of a model's replicas."""

    model: str
    waiting: int
    in_flight: int
    waiting_by_class: tuple[int, int, int, int] = (0, 0, 0, 0)  # critical, interactive, normal, batch
    waiting_tokens: int = 0
    waiting_bytes: int = 0


class StepDone(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    replica: int
    stats: StepStats


class ReplicaChanged(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    replica: int
    state: Literal["starting", "loading", "ready", "hung", "died", "failed", "draining", "stopped"]
    reason: str = ""
    restarts: int = 0
    load_s: dict[str, float] = {}
    kv_blocks: int = 0
    block_size: int = 0
    rss_bytes: int = 0
    max_model_len: int = 0


_DID = {"died": "died", "failed": "failed", "hung": "hangs", "stopped": "has stopped"}


def state_words(state: str) -> str:
    """A replica's state behind its name: "chat/0 is ready", "chat/0 died"."""
    return _DID.get(state, f"is {state}")


class LoadProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that loads tells how far it is; ``done`` of ``total`` in the phase's own unit."""

    model: str
    replica: int
    phase: str
    done: int
    total: int


class HttpServed(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request was answered to its end (or its client left). The access log's line."""

    request_id: str
    method: str
    route: str  # the route's pattern, never the raw path; "unmatched" otherwise
    status: int  # 499: the client left before the answer was complete
    duration_s: float
    request_bytes: int = 0
    response_bytes: int = 0
    model: str | None = None
    tenant: str = ""
    key_id: str = ""
    stream: bool = False
    outcome: str | None = None  # the generate request's outcome, when there was one
    finish_reasons: tuple[str, ...] = ()
    error_code: str | None = None
    error_text: str = ""  # the error's sentence, without anything that a request's text may be part of
    path: str = ""  # of a request that no route matches
    usage: Usage | None = None
    timings: Timings | None = None


class ClientTurnedAway(msgspec.Struct, frozen=True, kw_only=True):
    """A connection beyond the number that there may be was refused before anything was read."""


class BreakerChanged(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's breaker, or its being set aside for slowness, changed."""

    model: str
    replica: int
    state: Literal["closed", "open", "half_open", "ejected"]
    reason: str = ""


class Retried(msgspec.Struct, frozen=True, kw_only=True):
    """A request was given to another replica, or would have been."""

    model: str
    kind: Literal["retry", "hedge", "continuation"]
    granted: bool  # False: the budget of retries was used up


class CacheLooked(msgspec.Struct, frozen=True, kw_only=True):
    """The response cache was asked."""

    model: str
    result: Literal["hit", "miss", "store", "error"]
    bytes: int = 0


class ModelUnloaded(msgspec.Struct, frozen=True, kw_only=True):
    """A model left memory; ``freed_bytes`` is what its workers held before."""

    model: str
    reason: Literal["asked", "idle", "evicted", "removed"]
    freed_bytes: int = 0


class ConfigReloaded(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration file was read again."""

    accepted: bool
    is_whole: bool  # what is served is what the file says: False also where a model of an accepted file did not load
    detail: str = ""  # what is wrong, what changed


class StateChanged(msgspec.Struct, frozen=True, kw_only=True):
    """The database went away, or answers again. Without it known keys go on and none can be changed."""

    available: bool


Event = (
    RequestEnded
    | RequestRefused
    | QueueChanged
    | StepDone
    | ReplicaChanged
    | LoadProgress
    | HttpServed
    | ClientTurnedAway
    | BreakerChanged
    | Retried
    | CacheLooked
    | ModelUnloaded
    | ConfigReloaded
    | StateChanged
)
Emit = Callable[[Event], None]


def ignore(event: Event) -> None:
    """An observer that looks away, for tests and offline use."""
