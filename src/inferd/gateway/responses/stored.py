"""Stored responses: GET, also as a stream, DELETE, POST .../cancel and GET .../input_items of /v1/responses/{id}."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from inferd.eager import in_task
from inferd.gateway.body.query import last_values
from inferd.gateway.call import Answer, Call, EventStream, Response
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid, shown
from inferd.gateway.generation.requests import ignored_header
from inferd.gateway.generation.writer import encode
from inferd.stored.documents import elements, id_of
from inferd.stored.port import RUNNING, Page, PageQuery, ResponseStore
from inferd.stored.refusals import unknown_after

MAX_PAGE: Final = 100

_BOOLEANS: Final = {"true": True, "false": False, "1": True, "0": False}
_WITHOUT_EFFECT: Final = ("include", "include[]", "include_obfuscation")


class DeletedResponse(msgspec.Struct, frozen=True):
    """DELETE /v1/responses/{id}"""

    id: str
    object: str = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, frozen=True):
    """A page of a list of items."""

    data: list[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class Item(msgspec.Struct, frozen=True):
    """An item of a conversation. Its other fields are those of its type."""

    id: str
    type: str


class RetrieveQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of GET /v1/responses/{response_id}."""

    stream: bool = False  # its events, those that are still to come included
    starting_after: int | None = None  # the sequence number of the last event that the client has


class ListQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of a list of items."""

    after: str | None = None  # the id of the last item of the page before
    limit: int = 20  # at most 100
    order: str = "desc"  # or asc: the oldest first


async def retrieve(context: Context, call: Call, rest: str) -> Answer:
    """A stored response, or its events. Raises StoredNotFound, InvalidRequest, StateUnavailable."""
    query = _Query(call)
    is_streamed = query.flag("stream")
    after = query.number("starting_after", least=0)
    if after is not None and not is_streamed:
        raise invalid("starting_after", "starting_after belongs to a stream; send stream=true as well.")
    headers = query.ignored()
    await in_task()
    found = await store_of(context).get(call.principal.tenant, rest)
    if not is_streamed:
        return Response(200, found.body, headers=headers)
    has_events = found.events or found.background or found.status in RUNNING
    if not has_events:
        raise invalid(
            "stream",
            f"The response {shown(rest)} has no events to read, because it was not made as a stream; leave stream out.",
        )
    assert context.runs is not None, "there is a store"
    call.stream = True
    return EventStream(context.runs.events(found, -1 if after is None else after), headers)


async def delete(context: Context, call: Call, rest: str) -> Answer:
    """Delete a response for good; one that is computed is ended. Raises StoredNotFound, StateUnavailable."""
    await in_task()
    await store_of(context).delete(call.principal.tenant, rest)
    assert context.runs is not None, "there is a store"
    context.runs.stop(rest)
    return Response(200, encode(DeletedResponse(rest)))


async def cancel(context: Context, call: Call, rest: str) -> Answer:
    """Cancel a background response. Raises StoredNotFound, InvalidRequest, StateUnavailable."""
    await in_task()
    store_of(context)
    assert context.runs is not None, "there is a store"
    found = await context.runs.cancel(call.principal.tenant, rest)
    return Response(200, found.body)


async def list_input_items(context: Context, call: Call, rest: str) -> Answer:
    """The items that the request of a response added. Raises StoredNotFound, InvalidRequest, StateUnavailable."""
    query = _Query(call)
    wanted, headers = query.page(), query.ignored()
    await in_task()
    found = await store_of(context).get(call.principal.tenant, rest)
    page = _page_of(elements(found.input_items), wanted)
    return Response(200, encode(item_list(page.items, has_more=page.has_more)), headers=headers)


def store_of(context: Context) -> ResponseStore:
    """Raises InvalidRequest where the server stores nothing."""
    if context.stored is None:
        raise invalid(
            "store",
            "This server stores no responses and conversations; state.responses.enabled turns it on.",
            "unsupported_value",
        )
    return context.stored


def item_list(items: Sequence[bytes], *, has_more: bool = False) -> ItemList:
    return ItemList(
        [msgspec.Raw(item) for item in items],
        id_of(items[0]) if items else None,
        id_of(items[-1]) if items else None,
        has_more,
    )


def page_query(call: Call) -> tuple[PageQuery, list[str]]:
    """The part of a list that is asked for, and the names of what has no effect. Raises InvalidRequest."""
    query = _Query(call)
    return query.page(), query.without_effect


def _page_of(items: list[bytes], query: PageQuery) -> Page:
    """Raises InvalidRequest."""
    if query.is_newest_first:
        items.reverse()
    begin = 0
    if query.after:
        begin = next((i + 1 for i, item in enumerate(items) if id_of(item) == query.after), 0)
        if not begin:
            raise unknown_after(query.after)
    return Page(items[begin : begin + query.limit], begin + query.limit < len(items))


class _Query:
    """The query of a call."""

    __slots__ = ("_values",)

    def __init__(self, call: Call) -> None:
        self._values = last_values(call.head.query)

    @property
    def without_effect(self) -> list[str]:
        return [name.removesuffix("[]") for name in _WITHOUT_EFFECT if name in self._values]

    def ignored(self) -> tuple[tuple[bytes, bytes], ...]:
        return ignored_header(self.without_effect)

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def flag(self, name: str) -> bool:
        given = self.text(name)
        if given is None:
            return False
        if given.lower() not in _BOOLEANS:
            raise invalid(name, f"{name} must be true or false, not {shown(given)}.")
        return _BOOLEANS[given.lower()]

    def number(self, name: str, *, least: int, most: int = 2**53) -> int | None:
        given = self.text(name)
        if given is None:
            return None
        if not (given.isascii() and given.isdigit() and len(given) < 17 and least <= int(given) <= most):
            bounds = f"from {least} to {most}" if most < 2**53 else f"of at least {least}"
            raise invalid(name, f"{name} must be an integer {bounds}, not {shown(given)}.")
        return int(given)

    def page(self) -> PageQuery:
        order = self.text("order") or "desc"
        if order not in ("asc", "desc"):
            raise invalid("order", f"order must be asc or desc, not {shown(order)}.")
        limit = self.number("limit", least=1, most=MAX_PAGE)
        return PageQuery(self.text("after") or "", 20 if limit is None else limit, order == "desc")
