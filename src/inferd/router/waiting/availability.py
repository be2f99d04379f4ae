"""A model's availability: whether it can serve a request in time, when to retry a refused one, and the model's status.

Reads the queue and the fleet and changes neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from inferd import clock
from inferd.config import ModelConfig
from inferd.errors import InferdError, Overloaded, Unavailable
from inferd.events import RefusalReason, state_words
from inferd.router.replicas.fleet import Fleet
from inferd.router.replicas.member import Member
from inferd.router.status import ModelState, ModelStatus
from inferd.router.ticket import Ticket
from inferd.router.waiting.drain_rate import DrainRate
from inferd.router.waiting.outages import Outages
from inferd.router.waiting.queue import RequestQueue, is_batch_work
from inferd.router.waiting.wait_bound import WaitBound
from inferd.types import Failure, ModelInfo

_RETRY_AFTER_S = (1.0, 60.0)

Refusal = tuple[InferdError | None, RefusalReason]
"""The error of a refused request, and the reason for metrics. The reason has no meaning where the error is None."""


class Availability:
    """The availability of one model.

    ``load_error`` is the error of the last load into memory. ``info`` comes from the worker that was ready last.
    """

    def __init__(self, name: str, config: ModelConfig, queue: RequestQueue, fleet: Fleet) -> None:
        self._name = name
        self._queue = queue
        self._fleet = fleet
        self._created = clock.wall()
        self.config = config
        self.drain_rate = DrainRate()
        self.outages = Outages(fleet)
        self.wait_bound = WaitBound(config.queue.max_wait_s)
        self._ready_at: float | None = None  # see _ready_since
        self.load_error: InferdError | None = None
        self.info: ModelInfo | None = None
        self.is_stopped = False

    # -- for requests -----------------------------------------------------------------------

    def replica_refusal(self, ticket: Ticket, now: float) -> Refusal:
        """The refusal of a request that no replica can serve now or soon; no error while a request loads the model."""
        if self.is_stopped:
            return self.unavailable(), "unavailable"
        able = [m for m in self._fleet.members if m.replica.runs(ticket) and m.replica not in ticket.failed_replicas]
        region = ticket.request.region
        if region:
            able = [member for member in able if member.region == region]
            is_home = ticket.is_local and self.config.num_local and self.config.region == region
            if not able and not is_home:
                message = f"No replica of {self._name!r} is in the region {region!r}, where this request has to stay."
                return Unavailable(message, code="region_unavailable"), "region"
        is_away = self._fleet.residency in ("absent", "unloading")
        if is_away and ticket.is_local and self.load_error is None and not self.is_operator_unloaded:
            return None, "unavailable"
        states = {member.readiness(now) for member in able}
        if states & {"free", "busy", "loading"}:
            return None, "unavailable"
        if "blocked" in states:
            message = f"Every replica of {self._name!r} fails at the moment; try again later."
            retry_after_s = _reopens_in_s(able, now)
            return Unavailable(message, code="breaker_open", retry_after_s=retry_after_s), "breaker_open"
        return self.unavailable(), "unavailable"

    def wait_refusal(self, ticket: Ticket, now: float) -> Refusal:
        """The refusal of a request whose wait would exceed its deadline or the bound of waiting.

        The wait is estimated by the queue's drain rate. Without a sound estimate no request is refused.
        """
        left_s = ticket.due_at - now
        bound_s = self.longest_wait_s(now)
        if is_batch_work(ticket.request):
            bound_s = math.inf
        if math.isinf(left_s) and math.isinf(bound_s):
            return None, "deadline"
        ahead = self._queue.num_ahead(ticket.request)
        if self.drain_rate.surely_longer_than(left_s, ahead + 1, now):
            error = Overloaded(
                f"{ahead} requests wait before this one, which at the present rate takes longer than the "
                f"{left_s:.3g} s that its deadline leaves; allow more time, or try again later.",
                code="deadline_unreachable",
                retry_after_s=self.retry_after_s(now),
            )
            return error, "deadline"
        if self.drain_rate.surely_longer_than(bound_s, ahead, now):
            error = Overloaded(
                f"The model's queue is full: {ahead} requests wait before this one, which at the present rate takes "
                f"longer than the {bound_s:.3g} s that requests may wait (queue.max_wait_s). Try again later, or send "
                "work that can wait as batch work.",
                code="queue_full",
                retry_after_s=self.retry_after_s(now),
            )
            return error, "queue_full"
        return None, "deadline"

    def longest_wait_s(self, now: float) -> float:
        """Seconds that requests other than batch work may wait; infinite while no replica is ready."""
        return self.wait_bound.seconds(now) if self._ready_since(now) is not None else math.inf

    def expired_before(self, now: float) -> float:
        """Requests queued at this time or before, other than batch work, have waited too long; -inf: none has.

        Time in which no replica was ready does not count as waiting.
        """
        ready_since = self._ready_since(now)
        if ready_since is None:
            return -math.inf
        since = now - self.wait_bound.seconds(now)
        return since if since >= ready_since else -math.inf

    def next_expiry(self, now: float) -> float | None:
        """When the next waiting request will have waited too long; None: not known, or never."""
        ready_since, oldest_at = self._ready_since(now), self._queue.oldest_at
        if ready_since is None or oldest_at is None:
            return None
        bound_s = self.wait_bound.seconds(now)
        return None if math.isinf(bound_s) else max(oldest_at, ready_since) + bound_s

    def _ready_since(self, now: float) -> float | None:
        """Since when at least one replica has been ready, as far as calls have noticed; None: none is ready."""
        if not any(member.replica.is_ready for member in self._fleet.members):
            self._ready_at = None
        elif self._ready_at is None:
            self._ready_at = now
        return self._ready_at

    def unavailable(self) -> InferdError:
        """The error for requests while the model cannot be served, with its reason."""
        if self.is_stopped:
            return Unavailable("The server is shutting down; send the request again.", code="shutting_down")
        if self.load_error is not None:
            return self.load_error
        if self._fleet.failure is not None:
            message = f"The model {self._name!r} could not be loaded; the server's log says why."
            return Unavailable(message, code="model_failed")
        if self._fleet.residency == "absent" and self.is_operator_unloaded:
            return Unavailable(f"The model {self._name!r} was unloaded by the operator.", code="model_unloaded")
        return Unavailable(
            f"The model {self._name!r} is not ready yet; try again in a moment.",
            code="model_loading",
            retry_after_s=self._ready_in_s(clock.now()),
        )

    def retry_after_s(self, now: float) -> float:
        """Seconds, 1 to 60, after which a refused request should be sent again, by the queue's drain rate."""
        if not any(member.replica.is_ready for member in self._fleet.members):
            return self._ready_in_s(now)
        wait_s = self.drain_rate.roughly_wait_s(len(self._queue) + 1, now)
        return _RETRY_AFTER_S[0] if wait_s is None else _bounded(wait_s)

    def _ready_in_s(self, now: float) -> float:
        """Seconds, 1 to 60, until a model that loads should be ready, by the duration of its last load."""
        load_s = self._fleet.load_s
        if load_s is None:
            return _RETRY_AFTER_S[0]
        return _bounded(min((member.started_at for member in self._fleet.locals), default=now) + load_s - now)

    # -- status -----------------------------------------------------------------------------

    @property
    def is_operator_unloaded(self) -> bool:
        """Whether the operator unloaded the model and requests do not load it again."""
        return self._fleet.is_operator_unloaded and not self.config.is_on_demand

    @property
    def may_load_on_demand(self) -> bool:
        """Whether the model is not in memory and the next request loads it."""
        is_free = self.load_error is None and not self.is_operator_unloaded and not self.is_stopped
        return is_free and self._fleet.residency == "absent"

    @property
    def load_failure(self) -> Failure | None:
        """Why the model cannot be served; None: it is served, or may still become ready."""
        return self._fleet.failure if self.load_error is None else self.load_error.to_failure()

    def status(self, num_backing_off: int) -> ModelStatus:
        """The status of the model. ``num_backing_off``: the number of requests in backoff before a retry."""
        members = list(self._fleet.members)
        ready = sum(member.replica.is_ready and not member.is_leaving for member in members)
        num_remote = len(self.config.upstreams)
        return ModelStatus(
            name=self._name,
            state=self._state(ready),
            info=self.info,
            replicas=self._fleet.num_wanted + num_remote,
            replicas_ready=ready,
            detail=self._detail(),
            created=self._created,
            waiting=len(self._queue) + num_backing_off,
            in_flight=sum(member.replica.num_in_flight for member in members),
            waiting_tokens=self._queue.num_tokens,
            load="on_demand" if self.config.is_on_demand else "startup",
            has_local=self.config.num_local > 0,
            has_remote=num_remote > 0,
            residency=self._fleet.residency,
            memory_bytes=self._fleet.rss_bytes,
        )

    def _state(self, ready: int) -> ModelState:
        if self.is_stopped:
            return "stopped"
        is_away = self._fleet.residency == "absent"
        wanted = len(self.config.upstreams) + (0 if is_away else self.config.num_at_start)
        if ready and ready >= wanted:
            return "ready"
        if ready:
            return "degraded"
        if self.load_failure is not None:
            return "failed"
        if is_away:
            return "unloaded"
        members = [member for member in self._fleet.members if not member.is_leaving]
        # A failed worker does not recover by itself, so an unreachable server beside it decides.
        is_hopeless = members and all(m.replica.failure or m.replica.state == "unreachable" for m in members)
        return "unavailable" if is_hopeless else "loading"

    def _detail(self) -> str:
        """The reason of the state for every client. Details that name paths are in the log only."""
        if self._fleet.residency == "absent":
            if self.load_error is not None:
                return self.load_error.message
            return "unloaded by the operator" if self.is_operator_unloaded else "is loaded when a request comes"
        away = [m for m in self._fleet.members if not m.replica.is_ready or m.is_leaving]
        return "; ".join(f"replica {m.index} {state_words(m.status().state)}" for m in away)


def _reopens_in_s(members: Iterable[Member], now: float) -> float:
    times = [m.breaker.reopens_at for m in members if m.breaker is not None and m.breaker.reopens_at is not None]
    return max(_RETRY_AFTER_S[0], min(times, default=now) - now)


def _bounded(seconds: float) -> float:
    shortest, longest = _RETRY_AFTER_S
    return min(longest, max(shortest, seconds))
