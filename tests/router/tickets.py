"""Tickets for tests of the router's parts."""

from __future__ import annotations

from inferd.router.stream import Stream
from inferd.router.ticket import Ticket
from inferd.types import Request


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
    return Ticket(request, Stream(request.id, lambda: None), number, expires_at)
