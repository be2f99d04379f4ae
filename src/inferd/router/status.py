"""The status of models and replicas, for health checks, lists of models and operators."""

from __future__ import annotations

from typing import Literal

import msgspec

from inferd.router.choosing.breaker import BreakerState
from inferd.router.replicas.replica import Kind, ReplicaState
from inferd.types import ModelInfo, Role

ModelState = Literal["loading", "ready", "degraded", "unavailable", "failed", "stopped", "unloaded"]
"""``unavailable``: none of the model's remote servers can be reached."""
Residency = Literal["resident", "loading", "unloading", "absent"]


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    kind: Kind
    name: str
    state: ReplicaState | Literal["draining"]
    in_flight: int
    outstanding: int
    breaker: BreakerState
    ejected: bool  # gets no requests for now, as it is slower than the other replicas
    rss_bytes: int = 0  # of the memory of the machine that it is on; 0: none, or not known
    node: str = ""  # where its worker is; empty: on this machine, or nowhere
    rank_nodes: tuple[str, ...] = ()  # the nodes with its ranks that are not on the worker's machine
    role: Role = "both"
    layout: str = ""  # of its ranks; empty: one process, or not known
    weight: float = 1.0
    region: str = ""
    is_fallback: bool = False
    restarts: int = 0  # of its worker
    pid: int | None = None  # of its worker
    artifact: str = ""  # the identity of the model's files when the worker loaded them
    detail: str = ""  # the reason of the state, for the operator


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of one served model."""

    name: str
    state: ModelState
    info: ModelInfo | None
    replicas: int
    replicas_ready: int
    detail: str
    created: float  # seconds since the epoch
    waiting: int
    in_flight: int
    waiting_tokens: int = 0  # as estimated
    load: Literal["startup", "on_demand"] = "startup"
    has_local: bool = True
    has_remote: bool = False
    residency: Residency = "resident"  # of the local replicas; a model without any is always resident
    memory_bytes: int = 0  # of this machine, by the last reports of the workers
    parent: str = ""  # of an adapter: the model that it changes


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What a model has to do now, and what does it. Replicas are the local ones. Batch work is in no number but
    ``deferred`` and ``idle_s``."""

    accepted: int  # requests since the model is served
    ended: int  # of them
    waiting: int  # in the queue, in backoff before a retry, or in a worker that computes others
    deferred: int = 0  # requests of batch work, in work and waiting
    oldest_wait_s: float  # of those in the queue, batch work not counted
    in_flight: int  # the others
    busy: float  # ready replicas with at least one request, each counting as its last step was utilized
    ready: int
    starting: int  # they load, or their workers are started again
    failed: int  # they do not load
    leaving: int  # they end what they have
    ready_s: float | None  # seconds from the start of a worker to ready, the last time; None: not known
    idle_s: float  # seconds without a request; 0: there is one
    num_threads: int  # compute threads of a replica; 0: not known
    num_cores: int  # where they may run; 0: not known
    is_changing: bool  # a load, a replacement or another configuration is under way


class Applied(msgspec.Struct, kw_only=True):
    """The changes made for a new configuration, as sentences. Callers add sentences of their own."""

    done: list[str]
    failed: list[str]  # changes that could not be made; the new configuration is in use all the same


class Unloaded(msgspec.Struct, frozen=True, kw_only=True):
    """A model was unloaded; ``freed_bytes`` is the memory that its workers had used."""

    name: str
    freed_bytes: int
