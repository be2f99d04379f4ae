"""What a model can promise: whether it will serve a request, when to come back, and what it says of itself.

Looks at queue and fleet and changes neither.
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
from inferd.router.waiting.queue import RequestQueue, is_batch_work
from inferd.router.waiting.wait_bound import WaitBound
from inferd.types import Failure, ModelInfo

_RETRY_AFTER_S = (1.0, 60.0)

Refusal = tuple[InferdError | None, RefusalReason]
"""What a request hears, and the word for it; the word means nothing where there is no error."""


class Availability:
    """Of one model. ``load_error`` is why it cannot be brought into memory, ``info`` what its last worker said."""

    def __init__(self, name: str, config: ModelConfig, queue: RequestQueue, fleet: Fleet) -> None:
        self._name = name
        self._queue = queue
        self._fleet = fleet
        self._created = clock.wall()
        self.config = config
        self.drain_rate = DrainRate()
        self.wait_bound = WaitBound(config.queue.max_wait_s)
        self._began_at: float | None = None  # to work, as it was last looked
        self.load_error: InferdError | None = None
        self.info: ModelInfo | None = None
        self.is_stopped = False

    # -- for requests -----------------------------------------------------------------------

    def replica_refusal(self, ticket: Ticket, now: float) -> Refusal:
        """Why no replica will work on it in the foreseeable future."""
        if self.is_stopped:
            return self.unavailable(), "unavailable"
        able = [m for m in self._fleet.members if m.replica.runs(ticket) and m.replica not in ticket.avoid]
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
        standings = {member.standing(now) for member in able}
        if standings & {"open", "busy", "coming"}:
            return None, "unavailable"
        if "blocked" in standings:
            message = f"Every replica of {self._name!r} fails at the moment; try again later."
            retry_after_s = _reopens_in_s(able, now)
            return Unavailable(message, code="breaker_open", retry_after_s=retry_after_s), "breaker_open"
        return self.unavailable(), "unavailable"

    def wait_refusal(self, ticket: Ticket, now: float) -> Refusal:
        """Why it would wait beyond its deadline, or for longer than requests may, where that is known well enough."""
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
        """How long requests may wait, apart from batch work; infinite while no replica works."""
        return self.wait_bound.seconds(now) if self._works_since(now) is not None else math.inf

    def expires_since(self, now: float) -> float:
        """Whatever has waited since then or before has waited too long, apart from batch work. The time in which no
        replica worked does not count."""
        works_since = self._works_since(now)
        if works_since is None:
            return -math.inf
        since = now - self.wait_bound.seconds(now)
        return since if since >= works_since else -math.inf

    def next_expiry(self, now: float) -> float | None:
        """When the next waiting request has waited too long; None: no time is known."""
        works_since, oldest_at = self._works_since(now), self._queue.oldest_at
        if works_since is None or oldest_at is None:
            return None
        bound_s = self.wait_bound.seconds(now)
        return None if math.isinf(bound_s) else max(oldest_at, works_since) + bound_s

    def _works_since(self, now: float) -> float | None:
        """Since when at least one replica has been ready; None: none is."""
        if not any(member.replica.is_ready for member in self._fleet.members):
            self._began_at = None
        elif self._began_at is None:
            self._began_at = now
        return self._began_at

    def unavailable(self) -> InferdError:
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
        """Seconds until the queue should have moved on, going by the rate at which it empties."""
        if not any(member.replica.is_ready for member in self._fleet.members):
            return self._ready_in_s(now)
        wait_s = self.drain_rate.roughly_wait_s(len(self._queue) + 1, now)
        return _RETRY_AFTER_S[0] if wait_s is None else _bounded(wait_s)

    def _ready_in_s(self, now: float) -> float:
        """When a model that loads should be ready, by how long it took before."""
        load_s = self._fleet.load_s
        if load_s is None:
            return _RETRY_AFTER_S[0]
        return _bounded(min((member.started_at for member in self._fleet.locals), default=now) + load_s - now)

    # -- for its operators ------------------------------------------------------------------

    @property
    def is_operator_unloaded(self) -> bool:
        """Unloaded by the operator, and no request loads it again."""
        return self._fleet.is_operator_unloaded and self.config.load == "startup"

    @property
    def may_load_on_demand(self) -> bool:
        """Out of memory, and to be loaded when a request needs it."""
        is_free = self.load_error is None and not self.is_operator_unloaded and not self.is_stopped
        return is_free and self._fleet.residency == "absent"

    @property
    def load_failure(self) -> Failure | None:
        """Why the model cannot be served; None while there is hope."""
        return self._fleet.failure if self.load_error is None else self.load_error.to_failure()

    def status(self, num_backing_off: int) -> ModelStatus:
        members = list(self._fleet.members)
        ready = sum(member.replica.is_ready and not member.is_leaving for member in members)
        num_remote = len(self.config.upstreams)
        return ModelStatus(
            name=self._name,
            state=self._state(ready),
            info=self.info,
            replicas=self.config.num_local + num_remote,
            replicas_ready=ready,
            detail=self._detail(),
            created=self._created,
            waiting=len(self._queue) + num_backing_off,
            in_flight=sum(member.replica.num_in_flight for member in members),
            waiting_tokens=self._queue.num_tokens,
            load=self.config.load,
            has_local=self.config.num_local > 0,
            has_remote=num_remote > 0,
            residency=self._fleet.residency,
            memory_bytes=self._fleet.rss_bytes,
            replicas_status=tuple(member.status() for member in members),
        )

    def _state(self, ready: int) -> ModelState:
        if self.is_stopped:
            return "stopped"
        is_away = self._fleet.residency == "absent"
        wanted = len(self.config.upstreams) + (0 if is_away else self.config.num_local)
        if ready and ready >= wanted:
            return "ready"
        if ready:
            return "degraded"
        if self.load_failure is not None:
            return "failed"
        if is_away:
            return "unloaded"
        members = [member for member in self._fleet.members if not member.is_leaving]
        # A failed worker is not mended by waiting, so beside it the server that is away decides.
        is_hopeless = members and all(m.replica.failure or m.replica.state == "unreachable" for m in members)
        return "unavailable" if is_hopeless else "loading"

    def _detail(self) -> str:
        """Fit for everybody's eyes: what exactly went wrong, with its paths, is in the log."""
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
