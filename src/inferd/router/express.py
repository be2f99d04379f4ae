"""The short way to a remote server: for a request that nobody is ahead of, on a connection that is there.

Most requests find an empty queue, a server with room and a kept connection, and its answer is whole and well.
For these one object is what else a ticket, a stream and an answer's reader are together. As soon as anything is
otherwise (the server refuses, the connection breaks, the client leaves, the deadline passes, the server stops) it is turned into
those, as if it had been one of them from the beginning, and goes the ordinary way from there (``Transit.convert``):
what retries, breakers and cancellations do is written once.
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
from inferd.remote.openai import BYTES_PER_TOKEN, MAX_ANSWER_BYTES, Answer, Letterhead
from inferd.router.replicas.remote_replica import RemoteReplica
from inferd.types import End, Relay, Request, Timings, Usage

if TYPE_CHECKING:
    from inferd.router.pool import Pool
    from inferd.router.replicas.member import Member
    from inferd.router.stream import Stream

_JSON: Final = b"application/json"
_EVENTS: Final = b"text/event-stream"


class Way:
    """A member with room, and a connection to it that was lent for one exchange."""

    __slots__ = ("connection", "letterhead", "member", "pool", "replica")

    def __init__(self, pool: Pool, member: Member, replica: RemoteReplica, connection: Connection) -> None:
        self.pool = pool
        self.member = member
        self.replica = replica
        self.connection = connection
        self.letterhead: Letterhead = replica.letterhead

    def give_back(self) -> None:
        """It is not taken after all."""
        self.replica.give_back(self.connection)


def find_way(pool: Pool, now: float, tenant: str, body: bytes) -> Way | None:
    """None: the ordinary way is the one. A way that was found must be taken: its connection is out of the pool."""
    member = pool.next_taker(now, tenant, body)
    if member is None:
        return None
    replica = member.replica
    if not isinstance(replica, RemoteReplica):
        return None
    connection = replica.lend(now)
    return Way(pool, member, replica, connection) if connection is not None else None


class Transit(ABC):
    """One request on the short way; receives the answer. A subclass knows the client.

    Exactly one of ``deliver_whole``, ``deliver_last`` and ``taken_over`` is called.
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
        "_timer",
        "_way",
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
    drops_usage: bool  # of a stream: the event that tells it is for our books alone
    started_at: float

    # -- the client's side --------------------------------------------------------------------

    @abstractmethod
    def ordinary(self) -> tuple[Request, Relay]:
        """What the ordinary way would have been given."""

    @abstractmethod
    def taken_over(self, stream: Stream) -> None:
        """From now on ``stream`` says what happens."""

    @abstractmethod
    def deliver_whole(self, head: Head, body: bytes, end: End) -> None: ...
    @abstractmethod
    def deliver(self, data: bytes) -> None:
        """A piece of a stream."""

    @abstractmethod
    def deliver_last(self, end: End) -> None: ...
    @abstractmethod
    def cut_off(self) -> None:
        """Something was raised while the client was told the end: it gets no more, unless ``stream`` has it."""

    # -- the way ------------------------------------------------------------------------------

    def depart(self, way: Way, request: bytes, body_bytes: int, now: float, deadline_s: float | None = None) -> None:
        """Send the bytes of a whole request, of which so many are the client's body."""
        self._way = way
        self._timer: asyncio.TimerHandle | None = None
        if deadline_s is not None:
            self._timer = asyncio.get_running_loop().call_later(deadline_s, self.convert)
        self._connection: Connection | None = way.connection
        self._request = request
        self._body_bytes = body_bytes
        self._head: Head | None = None  # of an answer that comes in pieces
        self._reader: EventReader | None = None
        self._sent_at = now
        self.first_at: float | None = None
        replica = way.replica
        replica.transits.add(self)
        replica.outstanding += 1
        way.pool.transit_begins(way.member, now)
        way.connection.send(request, self)

    def pause(self) -> None:
        """The client is slow."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    def convert(self) -> Answer:
        """Go the ordinary way from here; what comes now is for the answer's reader that this returns."""
        way = self._way
        self._let_go()
        request, relay = self.ordinary()
        ticket = way.pool.take_over(request, relay, way.member, self._sent_at, self.first_at)
        answer = way.replica.take_over(
            ticket, relay, self._request, self._connection, self._reader, has_begun=self.first_at is not None
        )
        self._connection = self._reader = None
        self.taken_over(ticket.stream)
        head, self._head = self._head, None
        if head is not None:
            answer.answer_head(head.status, head.headers)
            for piece in self._pieces:
                answer.answer_data(piece)
        return answer

    def _let_go(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None  # it refers back
        replica = self._way.replica
        replica.transits.remove(self)
        replica.outstanding -= 1

    # -- the answer ---------------------------------------------------------------------------

    def answer_whole(self, head: Head, body: bytes) -> None:
        self._connection = None
        if head.status == 200 and head.media == _JSON and not self.is_stream:
            try:
                usage = read_answer(body)
            except (BadAnswer, ReportedError):
                pass  # the ordinary way has the words for it
            else:
                now = self.first_at = clock.now()
                self._way.pool.fleet.health.answered(self._way.member, now - self._sent_at, self._sent_at, now)
                if usage is None:
                    usage = Usage(self._body_bytes // BYTES_PER_TOKEN, len(body) // BYTES_PER_TOKEN)
                end = self._end(usage, now)
                try:
                    self.deliver_whole(head, body, end)
                finally:
                    self._way.pool.transit_ended(self._ended(end), self._sent_at, now)
                return
        self.convert().answer_whole(head, body)

    def answer_head(self, status: int, headers: Headers) -> None:
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
        reader = self._reader
        if reader is None:
            self._pieces.append(data)
            self._num_bytes += len(data)
            if self._num_bytes > MAX_ANSWER_BYTES:
                self.convert()
            return
        whole = reader.feed(data)
        if reader.broken is not None:
            self.convert().pass_on(whole)
        elif whole:
            if self.first_at is None:
                now = self.first_at = clock.now()
                self._way.pool.fleet.health.answered(self._way.member, now - self._sent_at, self._sent_at, now)
            self.deliver(whole)

    def answer_ended(self) -> None:
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
            self._way.pool.transit_ended(self._ended(end), self._sent_at, now)

    def answer_broken(self, error: UpstreamFailed) -> None:
        replica = self._way.replica
        self._connection = None
        if self in replica.transits:
            self.convert().answer_broken(error)
        else:
            replica.broke(self.id, error)
            self.cut_off()

    def answer_failed(self, error: UpstreamFailed, *, is_stale: bool) -> None:
        self._connection = None
        self.convert().answer_failed(error, is_stale=is_stale)

    # -- the end ------------------------------------------------------------------------------

    def _end(self, usage: Usage, now: float) -> End:
        self._let_go()
        started_at, first_at = self.started_at, self.first_at
        assert first_at is not None
        return End(
            "done", usage, Timings(self._sent_at - started_at, None, None, first_at - started_at, now - started_at)
        )

    def _ended(self, end: End) -> RequestEnded:
        return RequestEnded(
            model=self.model,
            replica=self._way.member.index,
            request_id=self.id,
            tenant=self.tenant,
            outcome="done",
            usage=end.usage,
            timings=end.timings,
            max_tokens=self.max_tokens,
            priority=self.priority,
        )
