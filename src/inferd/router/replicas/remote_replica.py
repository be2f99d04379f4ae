"""A remote server as a replica of a model: its reachability, the requests in flight, and the room for more.

Connects a pool with the connections to the server. The outcomes are reported to the pool, whose circuit breaker and
health checks decide whether the server gets requests.
"""

from __future__ import annotations

import asyncio
from typing import Final, Literal

from inferd import clock
from inferd.config import RemoteConfig
from inferd.errors import DeadlineExceeded, InferdError, InvalidRequest, Overloaded, UpstreamFailed
from inferd.events import Emit, ReplicaChanged
from inferd.remote.connection import Head, Headers
from inferd.remote.openai import Answer, RequestTemplate
from inferd.remote.origin import Timeouts, client_context, origin_of
from inferd.remote.pool import Exchange, Pool
from inferd.remote.secret import Secret, environment
from inferd.router.replicas.prompt_work import PromptWork
from inferd.router.replicas.replica import Kind, ReplicaOwner
from inferd.router.ticket import Ticket
from inferd.router.waiting.queue import is_batch_work
from inferd.types import End, Failure, ModelInfo, Relay, Relayed

PROBE_PATH: Final = "/models"
PROBE_TIMEOUT_S: Final = 5.0
FIRST_PROBE_S: Final = 0.25  # the first interval between two probes, which doubles
LONGEST_PROBE_S: Final = 5.0

RemoteState = Literal["starting", "unreachable", "ready", "stopped"]


class RemoteReplica:
    """The requests in flight in one remote server. The constructor raises ConfigError for unusable settings."""

    __slots__ = (
        "_busy_until",
        "_config",
        "_emit",
        "_in_flight",
        "_model",
        "_num_batch_work",
        "_origin",
        "_owner",
        "_probing",
        "_prompt_work",
        "_wake",
        "capacity",
        "connections",
        "failure",
        "index",
        "info",
        "is_fallback",
        "is_ready",
        "outstanding",
        "reason",
        "region",
        "state",
        "template",
        "was_ready",
        "weight",
    )

    kind: Kind = "remote"

    def __init__(self, model: str, index: int, config: RemoteConfig, owner: ReplicaOwner, emit: Emit) -> None:
        origin = origin_of(config.url)
        secret = Secret(environment(), variable=config.api_key_env, file=config.api_key_file)
        timeouts = Timeouts(config.connect_timeout_s, config.first_byte_timeout_s, config.idle_timeout_s)
        context = client_context(config.ca_file) if origin.is_secure else None
        self._model = model
        self._config = config
        self._owner = owner
        self._emit = emit
        self._origin = origin
        self.template = RequestTemplate(origin, secret, config.model or model)
        self.connections = Pool(origin, timeouts, config.max_in_flight + 1, context)  # one more for probes
        self._in_flight: dict[str, _Attempt] = {}
        self._prompt_work = PromptWork()
        self._probing: asyncio.Task[None] | None = None
        self._busy_until = 0.0
        self._wake: asyncio.TimerHandle | None = None
        self.index = index
        self.info: ModelInfo | None = None
        self.failure: Failure | None = None
        self.state: RemoteState = "starting"
        self.reason = ""
        self.is_ready = False
        self.was_ready = False
        self.capacity = config.max_in_flight
        self.outstanding = 0
        self._num_batch_work = 0
        self.weight = config.weight
        self.region = config.region or ""
        self.is_fallback = config.fallback

    def __repr__(self) -> str:
        return f"<RemoteReplica {self._model}/{self.index} {self.name} {self.state}, {self.num_in_flight} in flight>"

    @property
    def name(self) -> str:
        """The server's origin, for operators; without the key."""
        return str(self._origin)

    @property
    def load(self) -> float:
        return self.outstanding + self._prompt_work.load

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_but_batch_work(self) -> int:
        return self.num_in_flight - self._num_batch_work

    @property
    def can_take(self) -> bool:
        return (
            self.is_ready
            and len(self._in_flight) < self.capacity
            and (not self._busy_until or clock.now() >= self._busy_until)
        )

    def runs(self, ticket: Ticket) -> bool:
        """Whether the request can be relayed."""
        return ticket.relay is not None

    def accepts(self, ticket: Ticket) -> bool:
        """True: a remote server has no room per class, so ``can_take`` decides."""
        return ticket.relay is not None

    # -- lifecycle --------------------------------------------------------------------------

    def start(self) -> None:
        """Probe the server, which gets no requests before it has answered; without ``probe`` it is ready at once."""
        if self._config.probe:
            self._set_state("starting")
            self.probe()
        else:
            self._reached()

    def probe(self) -> None:
        """Probe the server until it answers. It gets no requests while it does not answer. Idempotent."""
        if self._probing is None and self.state != "stopped":
            self._probing = asyncio.get_running_loop().create_task(self._probe())

    async def stop(self) -> None:
        probing, self._probing = self._probing, None
        if probing is not None:
            probing.cancel()
            await asyncio.wait((probing,))
        if self._wake is not None:
            self._wake.cancel()
        for attempt in self._in_flight.values():
            attempt.cancel()
        self.is_ready = False
        await self.connections.close()
        if self.state != "stopped":
            self._set_state("stopped")

    async def _probe(self) -> None:
        wait_s, longest_s = FIRST_PROBE_S, LONGEST_PROBE_S
        while True:
            failed = await self._probe_once()
            if failed is None:
                break
            if self.state != "unreachable":
                self.is_ready = False
                self._set_state("unreachable", failed.message)
                self._owner.replica_unreachable(self)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, longest_s)
        self._probing = None
        self._reached()

    async def _probe_once(self) -> UpstreamFailed | None:
        """Send one probe, a request without cost for the server; the error, None: the server answered."""
        probing = _Probe()
        self.connections.send(self.template.get(PROBE_PATH), probing)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return await probing.result
        except TimeoutError:
            return UpstreamFailed("The remote server did not answer a probe.", code="upstream_first_byte_timeout")
        finally:
            probing.cut()

    def _reached(self) -> None:
        self.is_ready = self.was_ready = True
        self._set_state("ready")
        self._owner.replica_ready(self)

    def _set_state(self, state: RemoteState, reason: str = "") -> None:
        self.state, self.reason = state, reason
        event: Literal["starting", "died", "ready", "stopped"] = "died" if state == "unreachable" else state
        self._emit(ReplicaChanged(model=self._model, replica=self.index, state=event, reason=reason, is_remote=True))

    # -- requests ---------------------------------------------------------------------------

    def dispatch(self, ticket: Ticket) -> None:
        """Send a request to the server."""
        relay = ticket.relay
        assert relay is not None, "a remote server gets only requests with a relay"
        attempt = _Attempt(self, ticket, relay)
        self._in_flight[ticket.request.id] = attempt
        self.outstanding += ticket.width
        self._num_batch_work += is_batch_work(ticket.request)
        self._prompt_work.add(ticket.request.id, ticket.new_tokens)
        attempt.send(fresh=False)

    def cancel(self, request_id: str) -> None:
        """Close the connection, by which the server notices the cancellation. The end follows after this call."""
        attempt = self._in_flight.get(request_id)
        if attempt is not None:
            attempt.cancel()
            asyncio.get_running_loop().call_soon(attempt.cancelled)

    def pause(self, request_id: str) -> None:
        """Stop reading an answer whose reader is slow."""
        attempt = self._in_flight.get(request_id)
        if attempt is not None:
            attempt.pause()

    def resume(self, request_id: str) -> None:
        attempt = self._in_flight.get(request_id)
        if attempt is not None:
            attempt.resume()

    def prompt_computed(self, request_id: str) -> None:
        self._prompt_work.remove(request_id)

    def ticket(self, request_id: str) -> Ticket | None:
        attempt = self._in_flight.get(request_id)
        return attempt.ticket if attempt is not None else None

    def release(self, ticket: Ticket) -> None:
        """Remove the ticket of a request that has ended."""
        attempt = self._in_flight.pop(ticket.request.id)
        attempt.forget()
        self.outstanding -= ticket.width
        self._num_batch_work -= is_batch_work(ticket.request)
        self._prompt_work.remove(ticket.request.id)

    def release_all(self) -> list[Ticket]:
        """Remove and return all tickets, and close their connections."""
        requests = list(self._in_flight.values())
        self._in_flight.clear()
        self.outstanding = 0
        self._num_batch_work = 0
        self._prompt_work.clear()
        for pending in requests:
            pending.cut()
            pending.forget()
        return [pending.ticket for pending in requests]

    def _refused(self, ticket: Ticket, error: InferdError, *, counts: bool, retry: bool) -> None:
        if isinstance(error, Overloaded) and error.retry_after_s:
            self._pause_for(error.retry_after_s)
        self._owner.replica_refused(self, ticket, error, counts=counts, retry=retry)

    def _pause_for(self, seconds: float) -> None:
        """Send no requests for ``seconds``, as the server demanded with ``Retry-After``."""
        self._busy_until = max(self._busy_until, clock.now() + seconds)
        if self._wake is not None:
            self._wake.cancel()
        self._wake = asyncio.get_running_loop().call_later(self._busy_until - clock.now() + 0.001, self._on_wake)

    def _on_wake(self) -> None:
        self._wake = None
        self._busy_until = 0.0
        self._owner.replica_has_room()


class _Attempt(Answer):
    """One attempt of a request at this server, from the first byte sent to the end of the answer."""

    _deadline: asyncio.TimerHandle | None = None
    _is_fresh = False

    def __init__(self, replica: RemoteReplica, ticket: Ticket, relay: Relay) -> None:
        super().__init__(ticket.request.id, relay)
        self._replica = replica
        self._relay = relay
        self.ticket = ticket
        if ticket.request.deadline_s is not None:
            left_s = max(0.0, ticket.deadline_at - clock.now())
            self._deadline = asyncio.get_running_loop().call_later(left_s, self._expire)

    def send(self, *, fresh: bool) -> None:
        replica = self._replica
        self._is_fresh = fresh
        self._is_over = False
        try:
            request = replica.template.post(self._relay)
        except (ValueError, RecursionError):
            asyncio.get_running_loop().call_soon(self._refuse_body)
            return
        replica.connections.send(request, self, fresh=fresh)

    def _refuse_body(self) -> None:
        """Refuse a body that cannot be rewritten for the server. Not all of its fields were decoded before."""
        error = InvalidRequest("The request body is not valid JSON in UTF-8; correct it.", code="invalid_json")
        if self._replica._in_flight.get(self.ticket.request.id) is self:
            self.refused(error, counts=False, retry=False)

    def forget(self) -> None:
        """End the attempt without calling the pool."""
        self._is_over = True
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def relayed(self, item: Relayed) -> None:
        self._replica._owner.replica_relayed(self._replica, self.ticket, item)

    def broke(self, error: UpstreamFailed) -> None:
        self._replica._owner.replica_broke(self._replica, self.ticket, error)

    def refused(self, error: InferdError, *, counts: bool, retry: bool) -> None:
        self._replica._refused(self.ticket, error, counts=counts, retry=retry)

    def stale(self) -> None:
        assert not self._is_fresh, "a fresh connection is not stale"
        if self.ticket.request.idempotent:
            self.send(fresh=True)
            return
        error = UpstreamFailed(
            "The remote server closed the connection before it answered, and the request may not be sent twice.",
            code="upstream_closed",
        )
        self.refused(error, counts=False, retry=False)

    def _expire(self) -> None:
        """The deadline has passed. The remote server does not know it, so it is enforced here."""
        self._deadline = None
        self.expire(
            DeadlineExceeded(
                f"The request's deadline of {self.ticket.request.deadline_s:g} s passed before the answer was "
                "complete. Allow more time, or ask for fewer tokens."
            )
        )

    def cancelled(self) -> None:
        """End a cancelled request, unless its owner released it before. Called some turns of the loop later."""
        replica, ticket = self._replica, self.ticket
        if replica._in_flight.get(ticket.request.id) is self:
            end = End("cancelled", self.charged_usage)
            replica._owner.replica_relayed(replica, ticket, Relayed(ticket.request.id, end=end))


class _Probe(Exchange):
    """Receives the answer to a probe. Any answer shows that the server is reachable."""

    def __init__(self) -> None:
        self._status = 0
        self.result: asyncio.Future[UpstreamFailed | None] = asyncio.get_running_loop().create_future()

    def answer_whole(self, head: Head, body: bytes) -> None:
        self._status = head.status
        self.answer_ended()

    def answer_head(self, status: int, headers: Headers) -> None:
        self._status = status

    def answer_data(self, data: bytes) -> None:
        pass

    def answer_ended(self) -> None:
        self.ended()
        if self._status >= 500 or self._status in (401, 407, 429):
            self._conclude(UpstreamFailed(f"The remote server answers a probe with status {self._status}."))
        else:
            self._conclude(None)

    def answer_failed(self, error: UpstreamFailed, *, is_stale: bool) -> None:
        self.ended()
        self._conclude(error)

    def answer_broken(self, error: UpstreamFailed) -> None:
        self.ended()
        self._conclude(error)

    def _conclude(self, result: UpstreamFailed | None) -> None:
        if not self.result.done():
            self.result.set_result(result)
