"""The direct path to a remote server: one object per request, without a queue.

Most requests find an empty queue, a server with room and a kept connection, and the answer is complete and valid.
Such a request is handled by one object in place of a ticket, a stream and a reader of the answer. Any exception ends
the direct path: a refusal, a broken connection, a client that disconnects, a deadline, or a shutdown. The object is
then converted into a ticket and a stream in the same state, and the request continues on the general path
(``DirectRelay.convert``). Retries, circuit breakers and cancellation are therefore implemented once, on the general
path.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from inferd import clock
from inferd.errors import UpstreamFailed
from inferd.events import RequestEnded
from inferd.remote.connection import Connection, Head, Headers, media_of
from inferd.remote.events import BadAnswer, EventReader, ReportedError, read_answer
from inferd.remote.openai import BYTES_PER_TOKEN, MAX_ANSWER_BYTES, Answer, RequestTemplate
from inferd.router.replicas.remote_replica import RemoteReplica
from inferd.types import End, Relay, Request, Timings, Usage

if TYPE_CHECKING:
    from inferd.router.pool import Pool
    from inferd.router.replicas.member import Member
    from inferd.router.stream import Stream

_JSON: Final = b"application/json"
_EVENTS: Final = b"text/event-stream"


class RelaySlot:
    """A remote server with room for one more request, and a kept connection to it, reserved for that request."""

    __slots__ = ("connection", "member", "pool", "replica", "template")

    def __init__(self, pool: Pool, member: Member, replica: RemoteReplica, connection: Connection) -> None:
        self.pool = pool
        self.member = member
        self.replica = replica
        self.connection = connection
        self.template: RequestTemplate = replica.template

    def release(self) -> None:
        """Return the connection unused."""
        self.replica.put_back(self.connection)


def find_relay_slot(pool: Pool, now: float, tenant: str, body: bytes) -> RelaySlot | None:
    """A slot for a request that can be sent at once; None: the request has to use the general path.

    The slot's connection is out of the connection pool: the caller must either send on it or call ``release``.
    ``tenant`` and ``body`` choose the server that has probably cached the beginning of the prompt.
    """
    member = pool.direct_member(now, tenant, body)
    if member is None:
        return None
    replica = member.replica
    if not isinstance(replica, RemoteReplica):
        return None
    connection = replica.take_connection(now)
    return RelaySlot(pool, member, replica, connection) if connection is not None else None


class DirectRelay(ABC):
    """One relayed request on the direct path, which receives the server's answer. A subclass writes to the client.

    Exactly one of ``deliver_whole``, ``deliver_last`` and ``converted`` is called.
    """

    __slots__ = (
        "_body_bytes",
        "_connection",
        "_head",
        "_num_bytes",
        "_pieces",
        "_reader",
        "_request",
        "_sent_at",
        "_slot",
        "_timer",
        "first_at",
    )

    _pieces: list[bytes]
    _num_bytes: int

    id: str
    model: str
    tenant: str
    priority: int
    max_tokens: int | None
    is_stream: bool
    drops_usage: bool  # of a stream: the client did not ask for the usage event, so it is not forwarded
    started_at: float

    # -- the client's side --------------------------------------------------------------------

    @abstractmethod
    def to_request(self) -> tuple[Request, Relay]:
        """The request and the relay with which the general path would have begun."""

    @abstractmethod
    def converted(self, stream: Stream) -> None:
        """The request continues on the general path: the rest of the answer comes from ``stream``."""

    @abstractmethod
    def deliver_whole(self, head: Head, body: bytes, end: End) -> None:
        """Write a complete answer to the client. Its head has status 200 and a JSON media type."""

    @abstractmethod
    def deliver(self, data: bytes) -> None:
        """Write a piece of a streamed answer, whole server-sent events, to the client."""

    @abstractmethod
    def deliver_last(self, end: End) -> None:
        """End a streamed answer."""

    @abstractmethod
    def cut_off(self) -> None:
        """Close the client's connection: an exception was raised while the end of the answer was written to it."""

    # -- sending ------------------------------------------------------------------------------

    def send(
        self, slot: RelaySlot, request: bytes, body_bytes: int, now: float, deadline_s: float | None = None
    ) -> None:
        """Send ``request``, the bytes of a complete HTTP request.

        ``body_bytes`` is the size of the client's own body, for an estimate of its tokens. ``deadline_s`` is in
        seconds from now.
        """
        self._slot = slot
        self._timer: asyncio.TimerHandle | None = None
        if deadline_s is not None:
            self._timer = asyncio.get_running_loop().call_later(deadline_s, self.convert)
        self._connection: Connection | None = slot.connection
        self._request = request
        self._body_bytes = body_bytes
        self._head: Head | None = None  # of an answer that is not streamed and arrives in several pieces
        self._reader: EventReader | None = None
        self._sent_at = now
        self.first_at: float | None = None
        replica = slot.replica
        replica.direct.add(self)
        replica.outstanding += 1
        slot.pool.direct_began(slot.member, now)
        slot.connection.send(request, self)

    def pause(self) -> None:
        """Stop reading the answer, because the client reads slowly."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """Continue reading the answer after ``pause``."""
        if self._connection is not None:
            self._connection.resume()

    def convert(self) -> Answer:
        """Continue on the general path. The rest of the server's answer must be passed to the reader returned."""
        slot = self._slot
        self._release()
        request, relay = self.to_request()
        ticket = slot.pool.adopt_direct(request, relay, slot.member, self._sent_at, self.first_at)
        answer = slot.replica.adopt(
            ticket, relay, self._request, self._connection, self._reader, has_begun=self.first_at is not None
        )
        self._connection = self._reader = None
        self.converted(ticket.stream)
        head, self._head = self._head, None
        if head is not None:
            answer.answer_head(head.status, head.headers)
            for piece in self._pieces:
                answer.answer_data(piece)
        return answer

    def _release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None  # a reference cycle would delay freeing
        replica = self._slot.replica
        replica.direct.remove(self)
        replica.outstanding -= 1

    # -- the answer ---------------------------------------------------------------------------

    def answer_whole(self, head: Head, body: bytes) -> None:
        """A complete answer arrived. It is delivered if it is valid; other answers go to the general path."""
        self._connection = None
        if head.status == 200 and head.media == _JSON and not self.is_stream:
            try:
                usage = read_answer(body)
            except (BadAnswer, ReportedError):
                pass  # the general path reports the error
            else:
                now = self.first_at = clock.now()
                self._slot.pool.fleet.health.answered(self._slot.member, now - self._sent_at, self._sent_at, now)
                if usage is None:
                    usage = Usage(self._body_bytes // BYTES_PER_TOKEN, len(body) // BYTES_PER_TOKEN)
                end = self._end(usage, now)
                try:
                    self.deliver_whole(head, body, end)
                finally:
                    self._slot.pool.direct_ended(self._ended(end), self._sent_at, now)
                return
        self.convert().answer_whole(head, body)

    def answer_head(self, status: int, headers: Headers) -> None:
        """The head of an answer arrived whose body follows in pieces."""
        media = media_of(headers)
        if status == 200 and self.is_stream and media == _EVENTS:
            self._reader = EventReader(drop_usage=self.drops_usage)
        elif status == 200 and not self.is_stream and media == _JSON:
            self._head = Head(status, headers, False, media)
            self._pieces = []
            self._num_bytes = 0
        else:
            self.convert().answer_head(status, headers)

    def answer_data(self, data: bytes) -> None:
        """A piece of the answer's body arrived."""
        reader = self._reader
        if reader is None:
            self._pieces.append(data)
            self._num_bytes += len(data)
            if self._num_bytes > MAX_ANSWER_BYTES:
                self.convert()
            return
        whole = reader.feed(data)
        if reader.broken is not None:
            self.convert().forward(whole)
        elif whole:
            if self.first_at is None:
                now = self.first_at = clock.now()
                self._slot.pool.fleet.health.answered(self._slot.member, now - self._sent_at, self._sent_at, now)
            self.deliver(whole)

    def answer_ended(self) -> None:
        """The answer is complete."""
        self._connection = None
        reader = self._reader
        if self._head is not None:
            head, self._head = self._head, None
            self.answer_whole(head, b"".join(self._pieces))
            return
        if reader is None or not reader.is_done or self.first_at is None:
            self.convert().answer_ended()
            return
        now = clock.now()
        end = self._end(reader.usage or Usage(self._body_bytes // BYTES_PER_TOKEN, reader.num_tokens), now)
        try:
            self.deliver_last(end)
        finally:
            self._slot.pool.direct_ended(self._ended(end), self._sent_at, now)

    def answer_broken(self, error: UpstreamFailed) -> None:
        """A method of this object raised an exception: end the request, if it has not ended."""
        replica = self._slot.replica
        self._connection = None
        if self in replica.direct:
            self.convert().answer_broken(error)
        else:
            replica.broke(self.id, error)
            self.cut_off()

    def answer_failed(self, error: UpstreamFailed, *, is_stale: bool) -> None:
        """The server or the connection failed. ``is_stale``: the server had closed the kept connection before."""
        self._connection = None
        self.convert().answer_failed(error, is_stale=is_stale)

    # -- the end ------------------------------------------------------------------------------

    def _end(self, usage: Usage, now: float) -> End:
        self._release()
        started_at, first_at = self.started_at, self.first_at
        assert first_at is not None
        return End(
            "done", usage, Timings(self._sent_at - started_at, None, None, first_at - started_at, now - started_at)
        )

    def _ended(self, end: End) -> RequestEnded:
        return RequestEnded(
            model=self.model,
            replica=self._slot.member.index,
            request_id=self.id,
            tenant=self.tenant,
            outcome="done",
            usage=end.usage,
            timings=end.timings,
            max_tokens=self.max_tokens,
            priority=self.priority,
        )
