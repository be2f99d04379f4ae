"""The events that the parts of the server emit, from which ``observe`` makes metrics and log lines.

A part gets an ``emit`` function and knows nothing of metrics or logs. Emitting never raises and never blocks.
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
    """A request that the router accepted has ended. Each request ends once."""

    model: str
    replica: int | None  # None: it was never dispatched
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
    """The router refused a request before it entered a queue."""

    model: str
    reason: RefusalReason
    tenant: str = ""


class QueueChanged(msgspec.Struct, frozen=True, kw_only=True):
    """The queue in front of a model's replicas has changed."""

    model: str
    waiting: int
    in_flight: int
    waiting_by_class: tuple[int, int, int, int] = (0, 0, 0, 0)  # critical, interactive, normal, batch
    waiting_tokens: int = 0
    waiting_bytes: int = 0


class StepDone(msgspec.Struct, frozen=True, kw_only=True):
    """A replica has computed one step."""

    model: str
    replica: int
    stats: StepStats


class ReplicaChanged(msgspec.Struct, frozen=True, kw_only=True):
    """A replica has reached another state."""

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
    """The verb for a replica's state, as in "chat/0 is ready" or "chat/0 died"."""
    return _DID.get(state, f"is {state}")


class LoadProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a loading worker: ``done`` of ``total``, in the unit of the phase."""

    model: str
    replica: int
    phase: str
    done: int
    total: int


class HttpServed(msgspec.Struct, frozen=True, kw_only=True):
    """An HTTP request or gRPC call has ended: it was answered, or its client left. One line of the access log."""

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
    outcome: str | None = None  # of the model's request, where there was one
    finish_reasons: tuple[str, ...] = ()
    error_code: str | None = None
    error_text: str = ""  # the error's sentence, without content of the request
    path: str = ""  # of a request that no route matches
    usage: Usage | None = None
    timings: Timings | None = None


class ClientTurnedAway(msgspec.Struct, frozen=True, kw_only=True):
    """A connection above the limit was refused before anything was read."""


class BreakerChanged(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's breaker changed its state, or the replica was ejected because it is slow."""

    model: str
    replica: int
    state: Literal["closed", "open", "half_open", "ejected"]
    reason: str = ""


class Retried(msgspec.Struct, frozen=True, kw_only=True):
    """A request was sent to another replica, or the retry budget did not allow it."""

    model: str
    kind: Literal["retry", "hedge", "continuation"]
    granted: bool  # False: the retry budget was used up


class CacheLooked(msgspec.Struct, frozen=True, kw_only=True):
    """A lookup in the response cache, or the storing of an answer."""

    model: str
    result: Literal["hit", "miss", "store", "error"]
    bytes: int = 0


class ModelUnloaded(msgspec.Struct, frozen=True, kw_only=True):
    """A model was unloaded; ``freed_bytes`` is the memory that its workers held."""

    model: str
    reason: Literal["asked", "idle", "evicted", "removed"]
    freed_bytes: int = 0


class ConfigReloaded(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration file was read again."""

    accepted: bool
    is_whole: bool  # everything in the file is served: False also where a model did not load
    detail: str = ""  # the problems, or the changes


class StateChanged(msgspec.Struct, frozen=True, kw_only=True):
    """The database failed, or answers again. During an outage known keys stay valid and cannot be changed."""

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
    """Ignore an event; for tests and offline use."""
