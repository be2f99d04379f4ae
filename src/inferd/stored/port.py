"""The interface of stored responses and conversations."""

from __future__ import annotations

import os
from typing import Final, Literal, NamedTuple, Protocol

import msgspec

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

RUNNING: Final = ("queued", "in_progress")
"""The statuses of a response that is still computed. Only a background response is stored with one of them."""

MAX_ATTEMPTS: Final = 2
"""How often a background response is begun, where its server or its worker ends in the middle."""


def response_id() -> str:
    """The id of a new response. It cannot be guessed."""
    return f"resp_{os.urandom(16).hex()}"


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response as it is stored."""

    id: str
    tenant: str
    created_at: float
    status: Status
    body: bytes  # the Response object as the client gets it, JSON
    input_items: bytes  # JSON array: the items that this request added, each with its id
    previous: str = ""  # the response before it
    conversation: str = ""  # to which its items are appended when it is completed or incomplete
    background: bool = False
    events: bytes = b""  # of ``EventRecord.finish``; empty: the response was not streamed


class Conversation(msgspec.Struct, frozen=True, array_like=True):
    """A conversation without its items."""

    id: str
    created_at: float
    metadata: bytes  # JSON object


class Page(NamedTuple):
    """A part of a list of items, JSON each."""

    items: list[bytes]
    has_more: bool


class PageQuery(NamedTuple):
    """The part of a list that a client asks for."""

    after: str = ""  # the id of the last item before it; empty: from the beginning
    limit: int = 20
    is_newest_first: bool = True


class Unfinished(msgspec.Struct, frozen=True, array_like=True):
    """A background response whose server does not compute it any more."""

    tenant: str
    id: str
    created_at: float
    key_id: str
    attempts: int  # with the one that now begins
    request: bytes
    body: bytes


class ResponseStore(Protocol):
    """Every method takes the tenant: another tenant's id is an unknown id. All raise StateUnavailable."""

    def check(self) -> None:
        """Raise StateUnavailable while the database is known not to answer. Waits for nothing."""

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises StoredNotFound."""
        ...

    async def history(self, tenant: str, response_id: str) -> list[bytes]:
        """The items of a chain up to and with this response, the oldest first, input and output, JSON each. Raises
        StoredNotFound (param ``previous_response_id``), also where a response of the chain was deleted, and
        InvalidRequest for a response in progress and for a chain beyond the bounds."""
        ...

    async def put(self, response: StoredResponse) -> None:
        """Store a response; with a ``conversation`` its items are appended in the same transaction. Durable when it
        returns, so await it before the last byte of the answer. For the end of a background response the row of its
        beginning is changed: raises Cancelled where that was cancelled or deleted meanwhile. Raises StoredNotFound for
        an unknown conversation, InvalidRequest where the tenant may not store so much."""

    async def delete(self, tenant: str, response_id: str) -> None:
        """Raises StoredNotFound."""

    async def conversation_items(self, tenant: str, conversation_id: str) -> list[bytes]:
        """The items of a conversation, the oldest first, JSON each. Raises StoredNotFound (param ``conversation``), and
        InvalidRequest for a conversation beyond the bounds."""
        ...

    async def append(self, tenant: str, conversation_id: str, items: list[bytes]) -> list[bytes]:
        """Append items to a conversation, in one piece; returns them as they are stored, each with an id of its own.
        Raises StoredNotFound, InvalidRequest."""
        ...

    # -- conversations ----------------------------------------------------------------------

    async def create_conversation(self, tenant: str, metadata: bytes, items: list[bytes]) -> Conversation:
        """Raises InvalidRequest where the tenant may not store so much."""
        ...

    async def conversation(self, tenant: str, conversation_id: str) -> Conversation:
        """Raises StoredNotFound."""
        ...

    async def update_conversation(self, tenant: str, conversation_id: str, metadata: bytes) -> Conversation:
        """Raises StoredNotFound, InvalidRequest."""
        ...

    async def delete_conversation(self, tenant: str, conversation_id: str) -> None:
        """Delete a conversation and its items. Raises StoredNotFound."""

    async def conversation_page(self, tenant: str, conversation_id: str, query: PageQuery) -> Page:
        """Raises StoredNotFound, InvalidRequest."""
        ...

    async def conversation_item(self, tenant: str, conversation_id: str, item_id: str) -> bytes:
        """Raises StoredNotFound."""
        ...

    async def delete_conversation_item(self, tenant: str, conversation_id: str, item_id: str) -> Conversation:
        """Raises StoredNotFound."""
        ...

    # -- in the background ------------------------------------------------------------------

    async def begin(self, response: StoredResponse, *, key_id: str, request: bytes) -> None:
        """Store a queued response that this server computes in the background, with the request to compute it from.
        Raises as ``put``, and Overloaded where too many of the tenant's are computed."""

    async def cancel(self, tenant: str, response_id: str) -> StoredResponse:
        """Cancel a background response; one that has ended stays as it is. Raises StoredNotFound, and InvalidRequest
        for a response that is no background response."""
        ...

    async def fail(self, tenant: str, response_id: str, code: str, message: str) -> None:
        """End a background response of this server as failed. One that has ended, or is gone, stays as it is."""

    async def computed_here(self) -> frozenset[str]:
        """The ids of the background responses that this server is to compute."""
        ...

    async def take_over(self, known: frozenset[str]) -> list[Unfinished]:
        """Some background responses of servers that have ended, or of this one beyond those that it knows. They are
        this server's now; one that was begun twice is ended as failed instead."""
        ...
