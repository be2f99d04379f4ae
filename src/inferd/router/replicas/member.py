"""A replica as its pool keeps it: whether it may get a request now, and how much of the work."""

from __future__ import annotations

from typing import Literal

from inferd.config import BreakerConfig, ModelConfig, RemoteConfig
from inferd.router.choosing.breaker import Breaker, BreakerState
from inferd.router.replicas.replica import Kind, LocalReplica, Replica
from inferd.router.status import ReplicaStatus

Readiness = Literal["free", "busy", "loading", "blocked", "gone"]
"""open: takes a request now; busy: once something ends; coming: it loads, or is being restarted;
blocked: left alone after failures; gone: it failed for good, or is leaving."""


class Member:
    """One of a model's replicas. ``made_from`` is the configuration it was started with."""

    __slots__ = (
        "breaker",
        "breaker_state",
        "index",
        "is_ejected",
        "is_fallback",
        "is_last_resort",
        "is_leaving",
        "kind",
        "made_from",
        "ready_at",
        "region",
        "replica",
        "started_at",
        "weight",
    )

    def __init__(
        self, replica: Replica, made_from: ModelConfig | RemoteConfig, breaker: BreakerConfig, now: float
    ) -> None:
        self.replica = replica
        self.made_from = made_from
        self.kind: Kind = replica.kind
        self.index = replica.index
        self.region = replica.region
        self.is_fallback = replica.is_fallback
        self.weight = replica.weight
        self.started_at = now
        self.ready_at: float | None = None
        self.is_leaving = False
        self.is_ejected = False
        self.is_last_resort = False  # as of the last look
        self.configure(breaker)

    def configure(self, config: BreakerConfig) -> None:
        """Another breaker counts from here; what the old one had seen is forgotten."""
        self.breaker = Breaker(config) if config.enabled else None
        self.breaker_state: BreakerState = "closed"

    @property
    def can_take(self) -> bool:
        return not self.is_leaving and self.replica.can_take

    @property
    def outstanding(self) -> int:
        return self.replica.outstanding

    @property
    def rss_bytes(self) -> int:
        """Of this machine's memory."""
        return self.replica.rss_bytes if isinstance(self.replica, LocalReplica) else 0

    @property
    def artifact(self) -> str:
        """Which content the files had that it loaded; empty: not known, or none."""
        return self.replica.info.artifact if self.replica.info is not None else ""

    def accepts(self, now: float) -> bool:
        """Whether a request may go there now."""
        return not self.is_leaving and self.replica.can_take and (self.breaker is None or self.breaker.allows(now))

    def readiness(self, now: float) -> Readiness:
        replica = self.replica
        if self.is_leaving or replica.failure is not None or replica.state == "stopped":
            return "gone"
        if replica.state == "unreachable":
            return "blocked"
        if not replica.is_ready:
            return "loading"
        # A local replica whose breaker is open is better than none: its supervisor restarts what is broken.
        if self.kind == "remote" and self.breaker is not None and not self.breaker.allows(now):
            reopens_at = self.breaker.reopens_at
            is_probed = reopens_at is None or reopens_at <= now
            return "busy" if is_probed else "blocked"
        return "free" if replica.can_take else "busy"

    def status(self) -> ReplicaStatus:
        replica = self.replica
        return ReplicaStatus(
            index=self.index,
            kind=self.kind,
            name=replica.name,
            state="draining" if self.is_leaving and replica.is_ready else replica.state,
            in_flight=replica.num_in_flight,
            outstanding=replica.outstanding,
            breaker=self.breaker_state,
            ejected=self.is_ejected,
            rss_bytes=self.rss_bytes,
            weight=self.weight,
            region=self.region,
            is_fallback=self.is_fallback,
            restarts=replica.restarts if isinstance(replica, LocalReplica) else 0,
            pid=replica.pid if isinstance(replica, LocalReplica) else None,
            artifact=self.artifact,
            detail=replica.reason,
        )
