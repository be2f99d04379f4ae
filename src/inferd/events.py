"""The events that the parts of the server emit, from which ``observe`` makes metrics and log lines.

A part gets an ``emit`` function and knows nothing of metrics or logs. Emitting never raises and never blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from inferd.types import End, Facts, StepStats, Timings, Usage

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


class Operation(NamedTuple):
    """What a route asks a model for."""

    name: str  # as in OpenTelemetry's gen_ai.operation.name
    generates: bool = False  # the answer is a text that an engine generates


class Assigned(msgspec.Struct, frozen=True, kw_only=True):
    """The version of a model that a rollout has assigned to a unit, by chance."""

    rollout: str  # its name: model:stable:new
    run: int
    share: float  # the new version's share of the units then, 0 to 1
    is_new: bool
    unit: bytes  # a digest of it; empty: of a request that is a unit of its own
    is_refusal: bool = False  # its answer was generated and is a refusal, where a guard of the rollout wants to know


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
    facts: Facts | None = None  # where its model's drift is watched, from a worker of this server


class RequestRefused(msgspec.Struct, frozen=True, kw_only=True):
    """The router refused a request."""

    model: str
    reason: RefusalReason
    tenant: str = ""
    was_queued: bool = False  # it had entered the queue, so that a RequestEnded follows


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
    verified: str = ""  # why its files were accepted, or FAILED and why not; empty: they were not verified
    is_remote: bool = False  # the replica is another server, which loads nothing here


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
    at: float = 0.0  # time.monotonic() of the worker; 0: unknown


class HttpServed(msgspec.Struct, frozen=True, kw_only=True):
    """An HTTP request or gRPC call has ended: it was answered, or its client left. One line of the access log."""

    request_id: str
    method: str
    route: str  # the route's pattern, never the raw path; "unmatched" otherwise
    operation: Operation | None = None  # None: the route asks no model for anything
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
    end: End | None = None  # of the call's requests, the end that came last
    started_at: float = 0.0  # time.monotonic() when its head had arrived; the other times are seconds after it
    received_s: float | None = None  # its body was complete and decoded
    submitted_s: float | None = None  # its request was handed to the router
    blocked_s: float = 0.0  # writing the answer waited for a slow reader
    trace: str = ""  # the W3C traceparent of the request's own span; empty: it is not traced
    trace_parent: str = ""  # the span id of the caller's span, where this server makes a span
    trace_state: str = ""  # the caller's header tracestate
    priority: int = 0
    replica: int | None = None  # that computed the answer, or that the last attempt went to
    assigned: Assigned | None = None  # None: its model's versions are in no rollout, or it had no choice
    rescued_from: str = ""  # kind of the assigned new version's error, where the stable version answered instead


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


class HandedOver(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt of a request was computed by one replica for another one, or could not be."""

    model: str
    replica: int  # that computed the prompt
    seconds: float  # from the dispatch until the other replica was asked to go on
    num_blocks: int = 0
    num_bytes: int = 0
    failure: str = ""  # why blocks are missing; empty: all came


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


class GatewaysCompared(msgspec.Struct, frozen=True, kw_only=True):
    """The gateways that share the database, or their settings, have changed."""

    digest: str  # of this gateway's settings
    num_gateways: int  # that are alive, with this one
    num_differing: int  # whose settings are not those of this one


class HintsExchanged(msgspec.Struct, frozen=True, kw_only=True):
    """Hints were exchanged with the other gateways of the database. ``counts``: since the last event, by what became of
    them (the fields of ``router.hints.HintReport``)."""

    counts: dict[str, int]


class StoredCounted(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of responses and conversations in the database, of all tenants and all servers that share it."""

    num_bytes: int
    num_responses: int
    num_conversations: int
    num_tenants: int  # that have something stored
    most_used: float  # of the bytes that a tenant may store: the share of the tenant with the most


class StoredDropped(msgspec.Struct, frozen=True, kw_only=True):
    """This server deleted the oldest of stored responses and conversations, because of a bound of their tenants."""

    reason: Literal["bytes", "age"]
    count: int


class JobsCounted(msgspec.Struct, frozen=True, kw_only=True):
    """Files and batches in the database, of all tenants and all servers that share it."""

    num_files: int
    num_bytes: int  # of their contents
    by_status: dict[str, int]  # batches that have not ended


class LinesAnswered(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a batch were answered: their answers count and are on the disk."""

    num_done: int
    num_failed: int


class BatchEnded(msgspec.Struct, frozen=True, kw_only=True):
    """A batch has ended at this server."""

    status: str  # completed, failed, expired, cancelled


class AdminActed(msgspec.Struct, frozen=True, kw_only=True):
    """An admin action has a line in the audit log. Its number and hash, kept elsewhere, show whether that log was cut
    off."""

    seq: int
    hash: str
    actor: str
    tenant: str
    action: str
    target: str
    outcome: str
    request_id: str = ""


class GuardRead(NamedTuple):
    """The evidence of a rollout's guard, as a part of what decides: 1 is enough. The scale is logarithmic."""

    guard: str
    against: float  # that the new version is worse
    in_favour: float  # that it is good enough
    text: str  # the numbers in words


class RolloutChanged(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout's progress or evidence, as this gateway has just adopted it."""

    model: str
    stable: str
    new: str
    state: str
    share: float  # the new version's share of the units, 0 to 1
    step: int
    is_paused: bool
    reason: str
    is_news: bool  # its progress has changed; else the evidence has, or the server has just started
    guards: tuple[GuardRead, ...] = ()


CopyResult = Literal[
    "equal", "differs", "failed", "busy", "memory", "late", "unavailable", "large", "random", "sequence", "form"
]
"""What became of a request of a shadowed unit that the stable version has answered.

- ``equal``, ``differs``: the answers were compared. ``failed``: the new version gave no answer.
- The copy was dropped. ``busy``: the new version had other work, or as many copies as it may have. ``memory``: it would
  have taken memory from other requests. ``late``: it took too long. ``unavailable``: no worker was ready.
- Nothing can be compared. ``large``: the request or its answer is too large. ``random``: the answer is drawn by chance,
  and no seed of it is known. ``sequence``: the request belongs to a sequence with a state. ``form``: the answer is one
  of several, comes from another server, or cannot be read.
"""


class CopyEnded(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a unit that a rollout shadows was copied to the new version, or was not."""

    model: str
    assigned: Assigned  # of the request
    result: CopyResult
    request_id: str = ""
    part: str = ""  # of the answer, where it differs first
    position: int | None = None  # in that part: of a character or a number


class RolloutRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration has no more this rollout of the model."""

    model: str


class DriftRead(msgspec.Struct, frozen=True, kw_only=True):
    """A window of a model's stream was compared with its reference."""

    model: str
    stream: str
    size: int  # values of the window
    is_smallest: bool  # of the sizes of windows
    measure: Literal["psi", "mmd"]
    distance: float  # in that measure
    is_alarm: bool
    is_drifting: bool  # the last window of any size was an alarm
    is_news: bool  # that has just changed
    sentence: str


class DriftForgotten(msgspec.Struct, frozen=True, kw_only=True):
    """A model's drift is not watched any more, or is compared with another reference from now on."""

    model: str


WebhookResult = Literal["accepted", "forged", "old", "replayed", "unset"]
"""What became of a message: accepted; refused for its signature, its age, or as it came before; or because this server
has no secret."""


class WebhookCame(msgspec.Struct, frozen=True, kw_only=True):
    """A message of an MLflow server came, or of something that pretends to be one."""

    result: WebhookResult
    delivery: str = ""  # its id; empty: it is forged


class Scaled(msgspec.Struct, frozen=True, kw_only=True):
    """The number of replicas that a model is to have, as it was just decided, and what the decision was made of."""

    model: str
    desired: int
    before: int  # replicas, those that started included
    ready: int
    starting: int
    leaving: int
    rule: str  # the input that decided, or another word for why
    reason: str
    needs: dict[str, int]  # replicas that each input needs
    waiting: int
    in_flight: int
    requests_per_s: float | None
    served_per_s: float | None  # by one replica
    ready_s: float | None  # from the start of a replica until it is ready
    is_news: bool  # the number was changed, or is held against what is needed; else other counts have changed


class ScalingRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """The model's number of replicas follows the load no more."""

    model: str


class NodeChanged(msgspec.Struct, frozen=True, kw_only=True):
    """A node, another machine that gives memory and cores, has reached another state.

    ``late``: it sends no beat, though its machine answers. ``left``: after its workers had ended. ``gone``: with them.
    """

    node: str
    state: Literal["ready", "late", "leaving", "left", "gone", "refused"]
    reason: str = ""


class NodeSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a node now, once a second."""

    node: str
    heartbeat_age_s: float
    sent_bytes: int  # over all connections to it, since it joined
    received_bytes: int


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
    | HandedOver
    | CacheLooked
    | ModelUnloaded
    | ConfigReloaded
    | StateChanged
    | GatewaysCompared
    | HintsExchanged
    | StoredCounted
    | StoredDropped
    | JobsCounted
    | LinesAnswered
    | BatchEnded
    | AdminActed
    | CopyEnded
    | RolloutChanged
    | RolloutRemoved
    | DriftRead
    | DriftForgotten
    | WebhookCame
    | Scaled
    | ScalingRemoved
    | NodeChanged
    | NodeSeen
)
Emit = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Ignore an event; for tests and offline use."""
