"""Conversations: /v1/conversations, and the items of each."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from inferd.gateway.body.decode import json_body
from inferd.gateway.call import Answer, Call, Response
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid
from inferd.gateway.generation.fields import decode_open_body
from inferd.gateway.generation.requests import ignored_header
from inferd.gateway.generation.writer import encode
from inferd.gateway.responses.form import check_metadata
from inferd.gateway.responses.given import kept_item
from inferd.gateway.responses.stored import item_list, page_query, store_of
from inferd.stored import port

MAX_ITEMS: Final = 20
"""Items of one request."""

_BETWEEN: Final = "/items/"


class Conversation(msgspec.Struct, frozen=True, tag="conversation", tag_field="object"):
    """A conversation."""

    id: str
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(msgspec.Struct, frozen=True, tag="conversation.deleted", tag_field="object"):
    """DELETE /v1/conversations/{id}"""

    id: str
    deleted: bool = True


class ConversationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/conversations"""

    items: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None


class MetadataRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/conversations/{id}"""

    metadata: dict[str, str] | None


class ItemsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/conversations/{id}/items"""

    items: list[dict[str, Any]]


_create_decoder: Final = msgspec.json.Decoder(ConversationRequest)
_metadata_decoder: Final = msgspec.json.Decoder(MetadataRequest)
_items_decoder: Final = msgspec.json.Decoder(ItemsRequest)


async def create(context: Context, call: Call, rest: str) -> Answer:
    """Begin a conversation. Raises InvalidRequest, StateUnavailable."""
    store = store_of(context)
    raw = await json_body(call, context.max_body_bytes, context.body_timeout_s)
    body, ignored = await decode_open_body(raw, _create_decoder)
    metadata, items = body.metadata or {}, _kept_items(body.items or [])
    check_metadata(metadata)
    made = await store.create_conversation(call.principal.tenant, encode(metadata), items)
    return Response(200, _encoded(made), headers=ignored_header(ignored))


async def retrieve(context: Context, call: Call, rest: str) -> Answer:
    """Raises StoredNotFound, StateUnavailable."""
    return Response(200, _encoded(await store_of(context).conversation(call.principal.tenant, rest)))


async def update(context: Context, call: Call, rest: str) -> Answer:
    """Replace a conversation's metadata. Raises StoredNotFound, InvalidRequest, StateUnavailable."""
    store = store_of(context)
    raw = await json_body(call, context.max_body_bytes, context.body_timeout_s)
    body, ignored = await decode_open_body(raw, _metadata_decoder)
    metadata = body.metadata or {}
    check_metadata(metadata)
    found = await store.update_conversation(call.principal.tenant, rest, encode(metadata))
    return Response(200, _encoded(found), headers=ignored_header(ignored))


async def delete(context: Context, call: Call, rest: str) -> Answer:
    """Delete a conversation and its items for good. Raises StoredNotFound, StateUnavailable."""
    await store_of(context).delete_conversation(call.principal.tenant, rest)
    return Response(200, encode(DeletedConversation(rest)))


async def add_items(context: Context, call: Call, rest: str) -> Answer:
    """Append items, all or none. Raises StoredNotFound, InvalidRequest, StateUnavailable."""
    store = store_of(context)
    raw = await json_body(call, context.max_body_bytes, context.body_timeout_s)
    body, ignored = await decode_open_body(raw, _items_decoder)
    made = await store.append(call.principal.tenant, rest, _kept_items(body.items))
    return Response(200, encode(item_list(made)), headers=ignored_header(ignored))


async def list_items(context: Context, call: Call, rest: str) -> Answer:
    """Raises StoredNotFound, InvalidRequest, StateUnavailable."""
    query, ignored = page_query(call)
    page = await store_of(context).conversation_page(call.principal.tenant, rest, query)
    return Response(200, encode(item_list(page.items, has_more=page.has_more)), headers=ignored_header(ignored))


async def retrieve_item(context: Context, call: Call, rest: str) -> Answer:
    """Raises StoredNotFound, StateUnavailable."""
    conversation, _, item = rest.partition(_BETWEEN)
    return Response(200, await store_of(context).conversation_item(call.principal.tenant, conversation, item))


async def delete_item(context: Context, call: Call, rest: str) -> Answer:
    """Delete an item for good; the answer is its conversation. Raises StoredNotFound, StateUnavailable."""
    conversation, _, item = rest.partition(_BETWEEN)
    found = await store_of(context).delete_conversation_item(call.principal.tenant, conversation, item)
    return Response(200, _encoded(found))


def _kept_items(given: list[dict[str, Any]]) -> list[bytes]:
    if len(given) > MAX_ITEMS:
        raise invalid("items", f"items may have at most {MAX_ITEMS} entries, not {len(given)}; send several requests.")
    return [kept_item(fields, f"items[{i}]") for i, fields in enumerate(given)]


def _encoded(found: port.Conversation) -> bytes:
    metadata = msgspec.json.decode(found.metadata, type=dict[str, str])
    return encode(Conversation(found.id, int(found.created_at), metadata))
