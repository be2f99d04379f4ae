"""A remote replica with an owner that writes down what it hears."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from tests.router.tickets import Nowhere

from inferd import clock
from inferd.config import RemoteConfig
from inferd.errors import InferdError
from inferd.events import Event
from inferd.router.replicas.remote_replica import RemoteReplica
from inferd.router.replicas.replica import Replica
from inferd.router.ticket import Ticket
from inferd.types import End, Output, Relay, Relayed, Request, StepStats

BODY = b'{"model":"here","messages":[{"role":"user","content":"hi"}]}'
_numbers = itertools.count()


class Refusal(msgspec.Struct):
    error: InferdError
    counts: bool
    retry: bool


class Heard:
    """What became of one ticket."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.items: list[Relayed] = []
        self.refusal: Refusal | None = None
        self.news = asyncio.Event()
        self.over = asyncio.Event()

    @property
    def data(self) -> bytes:
        return b"".join(item.data for item in self.items)

    @property
    def end(self) -> End:
        end = self.items[-1].end
        assert end is not None
        return end

    async def refused(self) -> Refusal:
        await asyncio.wait_for(self.over.wait(), 10)
        assert self.refusal is not None, self.items
        assert self.items == []
        return self.refusal

    async def ended(self) -> End:
        await asyncio.wait_for(self.over.wait(), 10)
        assert self.refusal is None, self.refusal
        assert all(item.end is None for item in self.items[:-1])
        assert self.items[0].head is not None or self.end.outcome == "cancelled"
        return self.end

    async def reached(self, size: int) -> None:
        async with asyncio.timeout(10):
            while len(self.data) < size:
                self.news.clear()
                await self.news.wait()


class Owner:
    """In the pool's place."""

    def __init__(self) -> None:
        self.heard: dict[str, Heard] = {}
        self.ready = asyncio.Event()
        self.unreachable = asyncio.Event()
        self.room = asyncio.Event()

    def replica_ready(self, replica: Replica) -> None:
        self.ready.set()

    def replica_unreachable(self, replica: Replica) -> None:
        self.unreachable.set()

    def replica_lost(self, replica: Replica, tickets: list[Ticket], reason: str, *, is_machine_lost: bool) -> None:
        raise AssertionError("a remote replica loses nothing")

    def replica_unplaced(self, replica: Replica) -> None:
        raise AssertionError("a remote replica has no machine")

    def replica_failed(self, replica: Replica) -> None:
        raise AssertionError("a remote replica never fails for good")

    def replica_outputs(self, replica: Replica, outputs: list[Output], stats: StepStats | None) -> None:
        raise AssertionError("a remote replica has no outputs")

    def replica_has_room(self) -> None:
        self.room.set()

    def replica_broke(self, replica: Replica, ticket: Ticket, error: InferdError) -> None:
        if replica.ticket(ticket.request.id) is ticket:
            self.replica_refused(replica, ticket, error, counts=True, retry=False)

    def replica_relayed(self, replica: Replica, ticket: Ticket, item: Relayed) -> None:
        heard = self.heard[ticket.request.id]
        assert not heard.over.is_set(), "it ended twice"
        heard.items.append(item)
        heard.news.set()
        if item.end is not None:
            replica.release(ticket)
            heard.over.set()

    def replica_refused(
        self, replica: Replica, ticket: Ticket, error: InferdError, *, counts: bool, retry: bool
    ) -> None:
        heard = self.heard[ticket.request.id]
        assert not heard.over.is_set(), "it ended twice"
        replica.release(ticket)
        heard.refusal = Refusal(error, counts, retry)
        heard.over.set()


class Bench:
    """The replica under test."""

    def __init__(self, replica: RemoteReplica, owner: Owner, events: list[Event]) -> None:
        self.replica = replica
        self.owner = owner
        self.events = events

    def ask(
        self,
        *,
        stream: bool = False,
        body: bytes = BODY,
        idempotent: bool = True,
        wants_usage: bool = False,
        headers: tuple[tuple[bytes, bytes], ...] = (),
        deadline_s: float | None = None,
    ) -> Heard:
        request = Request(
            id=f"r{next(_numbers)}", model="here", idempotent=idempotent, deadline_s=deadline_s, arrived_at=clock.now()
        )
        relay = Relay(path="/chat/completions", body=body, stream=stream, wants_usage=wants_usage, headers=headers)
        ticket = Ticket(request, Nowhere(), Nowhere(), 0, clock.now() + 60, relay)
        heard = self.owner.heard[request.id] = Heard(ticket)
        assert self.replica.can_take
        assert self.replica.runs(ticket)
        self.replica.dispatch(ticket)
        return heard


@contextlib.asynccontextmanager
async def bench(url: str, **settings: Any) -> AsyncIterator[Bench]:
    """A replica that was found ready, unless ``probe`` is off; nothing may be left of it afterwards."""
    owner, events = Owner(), list[Event]()
    replica = RemoteReplica("here", 0, RemoteConfig(url=url, **settings), owner, events.append)
    replica.start()
    try:
        await asyncio.wait_for(owner.ready.wait(), 10)
        yield Bench(replica, owner, events)
    finally:
        await replica.stop()
    assert replica.connections.num_connections == 0
