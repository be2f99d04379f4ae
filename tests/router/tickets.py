"""Tickets for tests of the router's parts."""

from __future__ import annotations

from inferd.router.stream import Stream
from inferd.router.ticket import Ticket
from inferd.types import Item, Request


def ticket_of(stream: Stream) -> Ticket:
    """The ticket that a stream reads."""
    assert isinstance(stream.request, Ticket)
    return stream.request


class Nowhere:
    """A sink and a dispatcher for tickets that are only moved."""

    def deliver(self, item: Item) -> None: ...
    def cancel(self, ticket: Ticket) -> None: ...
    def pause(self, ticket: Ticket, is_paused: bool) -> None: ...


def ticket(
    number: int,
    priority: int = 0,
    *,
    tenant: str = "",
    tokens: int = 0,
    num_bytes: int = 0,
    weight: float = 1.0,
    region: str = "",
    expires_at: float = 1e9,
    deadline_s: float | None = None,
    first_byte_s: float | None = None,
) -> Ticket:
    request = Request(
        id=str(number),
        model="m",
        priority=priority,
        tenant=tenant,
        weight=weight,
        region=region,
        num_tokens=tokens,
        num_bytes=num_bytes,
        deadline_s=deadline_s,
        first_byte_s=first_byte_s,
    )
    return Ticket(request, Nowhere(), Nowhere(), number, expires_at)
