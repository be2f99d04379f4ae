"""What the router says of a model and of its replicas, for health checks, lists and people."""

from __future__ import annotations

from typing import Literal

import msgspec

from inferd.router.choosing.breaker import BreakerState
from inferd.router.replicas.replica import Kind, ReplicaState
from inferd.types import ModelInfo

ModelState = Literal["loading", "ready", "degraded", "unavailable", "failed", "stopped", "unloaded"]
"""unavailable: none of its remote servers can be reached"""
Residency = Literal["resident", "loading", "unloading", "absent"]


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    kind: Kind
    name: str
    state: ReplicaState | Literal["draining"]
    in_flight: int
    outstanding: int
    breaker: BreakerState
    ejected: bool  # set aside for slowness
    rss_bytes: int = 0  # of this machine's memory; 0: none, or unknown
    weight: float = 1.0
    region: str = ""
    is_fallback: bool = False
    restarts: int = 0  # of its worker
    pid: int | None = None  # of its worker
    artifact: str = ""  # which content its files had when it loaded them
    detail: str = ""  # why it is in this state, for its operator


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the router knows of one served model."""

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
    memory_bytes: int = 0  # of this machine, as last heard from its workers
    replicas_status: tuple[ReplicaStatus, ...] = ()


class Applied(msgspec.Struct, kw_only=True):
    """What came of another configuration, a sentence each; whoever passes it on adds their own."""

    done: list[str]
    failed: list[str]  # it is in use, and yet these models are not what it says


class Unloaded(msgspec.Struct, frozen=True, kw_only=True):
    """A model's workers are gone; ``freed_bytes`` is what they held."""

    name: str
    freed_bytes: int
