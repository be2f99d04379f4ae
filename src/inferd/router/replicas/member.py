"""The fleet's record of a replica: its breaker, its weight, and whether it may get a request now."""

from __future__ import annotations

from typing import Literal

from inferd.config import BreakerConfig, ModelConfig, RemoteConfig
from inferd.remote.origin import origin_of
from inferd.router.choosing.breaker import Breaker, BreakerState
from inferd.router.replicas.machines import HERE
from inferd.router.replicas.replica import Kind, LocalReplica, Replica
from inferd.router.status import ReplicaStatus
from inferd.types import Role

Readiness = Literal["free", "busy", "loading", "blocked", "gone"]
"""``free``: takes a request now; ``busy``: takes one when another ends; ``loading``: loads or restarts;
``blocked``: its breaker is open, or it does not answer; ``gone``: it has failed, or is being removed."""


class Member:
    """The record of one replica. ``made_from`` is the configuration with which the replica was started."""

    __slots__ = (
        "breaker",
        "breaker_state",
        "identity",
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
        # Another gateway may have the same remote server under another number, and may spell its address otherwise.
        if isinstance(made_from, RemoteConfig):
            self.identity = f"{origin_of(made_from.url)} {made_from.model or ''}"
        else:
            self.identity = str(replica.index)
        self.region = replica.region
        self.is_fallback = replica.is_fallback
        self.weight = replica.weight
        self.started_at = now
        self.ready_at: float | None = None
        self.is_leaving = False
        self.is_ejected = False
        self.is_last_resort = False  # gets requests only if no other replica can; updated by Fleet.available
        self.configure(breaker)

    def configure(self, config: BreakerConfig) -> None:
        """Replace the breaker by a new one without history."""
        self.breaker = Breaker(config) if config.enabled else None
        self.breaker_state: BreakerState = "closed"

    @property
    def can_take(self) -> bool:
        """Whether the replica has room for one more request and is not being removed."""
        return not self.is_leaving and self.replica.can_take

    @property
    def outstanding(self) -> int:
        """Sequences dispatched to the replica and not finished."""
        return self.replica.outstanding

    @property
    def load(self) -> float:
        """The outstanding work: sequences, and prompts that are not computed yet."""
        return self.replica.load

    @property
    def rss_bytes(self) -> int:
        """The resident memory on this machine; 0 for a remote server, and for a worker on a node."""
        replica = self.replica
        return replica.rss_bytes if isinstance(replica, LocalReplica) and not replica.node else 0

    @property
    def role(self) -> Role:
        """What the replica computes."""
        return self.replica.role if isinstance(self.replica, LocalReplica) else "both"

    @property
    def layout(self) -> str:
        """How the replica is divided among ranks, in words; empty: it is one process, or not known."""
        info = self.replica.info if isinstance(self.replica, LocalReplica) else None
        return "" if info is None else info.layout

    @property
    def node(self) -> str:
        """The node that the worker is on; empty: this machine, or none."""
        return self.replica.node if isinstance(self.replica, LocalReplica) else ""

    @property
    def rank_nodes(self) -> tuple[str, ...]:
        """The nodes with ranks of the replica that are not on the worker's machine."""
        return self.replica.spot.others if isinstance(self.replica, LocalReplica) else ()

    @property
    def planned_bytes(self) -> int:
        """The memory of this machine that the worker has or was promised, with its ranks here."""
        replica = self.replica
        return replica.spot.taken_bytes if isinstance(replica, LocalReplica) and replica.spot.machine == HERE else 0

    @property
    def artifact(self) -> str:
        """The identity of the model files that the worker loaded; empty: not known, or no files."""
        return self.replica.info.artifact if self.replica.info is not None else ""

    def accepts(self, now: float) -> bool:
        """Whether a request may be dispatched to the replica now."""
        breaker = self.breaker
        return (
            not self.is_leaving
            and self.replica.can_take
            and (breaker is None or breaker.state == "closed" or breaker.allows(now))
        )

    @property
    def is_suspect(self) -> bool:
        """Whether the replica fails, does not answer, or was ejected as slow: other gateways are told so."""
        return self.is_ejected or self.breaker_state != "closed" or self.replica.state == "unreachable"

    def readiness(self, now: float) -> Readiness:
        """How soon the replica can take a request."""
        replica = self.replica
        if self.is_leaving or replica.failure is not None or replica.state == "stopped":
            return "gone"
        if replica.state == "unreachable":
            return "blocked"
        if not replica.is_ready:
            return "loading"
        # A local replica with an open breaker still gets requests as the last resort: a broken worker is restarted.
        if self.kind == "remote" and self.breaker is not None and not self.breaker.allows(now):
            reopens_at = self.breaker.reopens_at
            is_probed = reopens_at is None or reopens_at <= now
            return "busy" if is_probed else "blocked"
        return "free" if replica.can_take else "busy"

    def status(self) -> ReplicaStatus:
        """The status of the replica, for operators."""
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
            rss_bytes=replica.rss_bytes if isinstance(replica, LocalReplica) else 0,
            node=self.node,
            rank_nodes=self.rank_nodes,
            role=self.role,
            layout=self.layout,
            weight=self.weight,
            region=self.region,
            is_fallback=self.is_fallback,
            restarts=replica.restarts if isinstance(replica, LocalReplica) else 0,
            pid=replica.pid if isinstance(replica, LocalReplica) else None,
            artifact=self.artifact,
            detail=replica.reason,
        )
