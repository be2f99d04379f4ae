"""The stored state that a request goes on from, and what is stored of it.

Knows the store's interface, and how ids of items name their response. A server without a store refuses what needs one.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Final

import msgspec

from inferd.eager import in_task
from inferd.errors import StoredNotFound
from inferd.gateway.body.decode import OFF_LOOP_BYTES
from inferd.gateway.call import Call
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid, shown
from inferd.gateway.generation.items import InputItem, Placed, kind_of
from inferd.gateway.responses.given import PREFIXES, as_stored
from inferd.gateway.responses.wire import (
    ConversationRef,
    PromptFields,
    ResponsesRequest,
    item_decoder,
    sent_items_decoder,
)
from inferd.stored.documents import is_name, with_fields
from inferd.stored.port import ResponseStore

_NO_STATE: Final = "this server stores no responses (state.responses.enabled is off)"
_OF_RESPONSE: Final = re.compile(r"[a-z]+_([0-9a-f]{32})i?[0-9a-f]{2,8}")  # an id that this server made
_MOST_REFERRED: Final = 256  # responses whose items one request may refer to
_item_list: Final = msgspec.json.Decoder(list[msgspec.Raw])


class _Output(msgspec.Struct, frozen=True):
    output: list[msgspec.Raw] = []


_output_decoder: Final = msgspec.json.Decoder(_Output)


def conversation_id(body: PromptFields) -> str | None:
    """The conversation that a request is a part of; None: none."""
    given = body.conversation
    return given.id if isinstance(given, ConversationRef) else given


def store_of(context: Context, body: ResponsesRequest) -> ResponseStore | None:
    """Where the response is stored; None: nowhere. Raises InvalidRequest, StateUnavailable."""
    if body.background and body.store is False:
        raise invalid("background", "background needs store, which is false; leave one of them out.")
    if body.store is False:
        return None
    store = context.stored
    if store is None:
        for name in ("store", "background"):
            if getattr(body, name):
                raise invalid(name, f"{name} is true, but {_NO_STATE}; send false.", "unsupported_parameter")
        return None
    store.check()
    return store


async def past_items(context: Context, call: Call, body: PromptFields) -> list[Placed]:
    """The items that the request goes on from, the oldest first. Raises InvalidRequest, StoredNotFound,
    StateUnavailable."""
    previous, conversation = body.previous_response_id, conversation_id(body)
    if not previous and not conversation:
        return []
    at = "previous_response_id" if previous else "conversation"
    if previous and conversation:
        raise invalid(at, "previous_response_id and conversation exclude each other; send one of the two.")
    store = context.stored
    if store is None:
        raise invalid(at, f"{at} needs a stored state, but {_NO_STATE}; send all items in input.", "unsupported_value")
    await in_task()
    tenant = call.principal.tenant
    if previous:
        raws = await store.history(tenant, previous)
    else:
        raws = await store.conversation_items(tenant, conversation or "")
    if sum(map(len, raws)) > OFF_LOOP_BYTES:
        return await asyncio.to_thread(_placed, raws, at)
    return _placed(raws, at)


def _placed(raws: Sequence[bytes], at: str) -> list[Placed]:
    placed: list[Placed] = []
    for i, raw in enumerate(raws):
        place = f"{at}.items[{i}]"
        try:
            placed.append(Placed(place, item_decoder.decode(raw), raw))
        except msgspec.ValidationError as error:
            raise invalid(place, f"{place} is stored in a form that no model here reads: {error}.") from None
    return placed


def _given_items(body: PromptFields) -> list[Placed]:
    """The items of the request itself."""
    given = body.input
    if given is None:
        return []
    if isinstance(given, str):
        return [Placed("input", InputItem(type="message", role="user", content=given))]
    return [Placed(f"input[{i}]", item) for i, item in enumerate(given)]


async def new_items(context: Context, call: Call, body: PromptFields, past: Sequence[Placed]) -> list[Placed]:
    """The items of the request itself, with those in the place of references that they refer to. Raises InvalidRequest,
    StoredNotFound, StateUnavailable."""
    given = _given_items(body)
    if not any(kind_of(placed.item) == "item_reference" for placed in given):
        return given
    known = {placed.item.id: placed for placed in past if placed.item.id}
    read: set[str] = set()
    found: list[Placed] = []
    for placed in given:
        if kind_of(placed.item) != "item_reference":
            found.append(placed)
            continue
        name = placed.item.id or ""
        if not name:
            raise invalid(
                f"{placed.at}.id", f"{placed.at}.id is missing; a reference needs it.", "missing_required_parameter"
            )
        of = _OF_RESPONSE.fullmatch(name)
        if name not in known and of is not None and of[1] not in read and context.stored is not None:
            read.add(of[1])
            if len(read) > _MOST_REFERRED:
                raise invalid(
                    "input",
                    f"input refers to items of more than {_MOST_REFERRED} responses; send previous_response_id, or the "
                    "items themselves.",
                )
            for one in await _items_of(context.stored, call.principal.tenant, f"resp_{of[1]}", placed.at):
                known.setdefault(one.item.id or "", one)
        target = known.get(name)
        if target is None:
            raise StoredNotFound(
                f"{placed.at} refers to the item {shown(name)}, which is not stored; send the item itself.",
                param=f"{placed.at}.id",
                code="item_not_found",
            )
        found.append(Placed(placed.at, target.item, target.raw))
    return found


async def _items_of(store: ResponseStore, tenant: str, response_id: str, at: str) -> list[Placed]:
    await in_task()
    try:
        response = await store.get(tenant, response_id)
    except StoredNotFound:
        return []
    raws = [*_item_list.decode(response.input_items), *_output_decoder.decode(response.body).output]
    return _placed([bytes(raw) for raw in raws], at)


def stored_input(raw: bytes, items: Sequence[Placed], response_id: str) -> bytes:
    """The items that a request adds, as they are stored: each with its type and an id that no other has, its content in
    parts."""
    sent = sent_items_decoder.decode(raw).input
    if isinstance(sent, str):
        sent = [{"type": "message", "role": "user", "content": sent}]
    unique = response_id.removeprefix("resp_")
    taken: set[str] = set()
    made: list[bytes] = []
    for i, (fields, placed) in enumerate(zip(sent or (), items, strict=True)):
        given = placed.item.id or ""
        name = given
        if not is_name(given) or given in taken:
            name = f"{PREFIXES[kind_of(placed.item)]}_{unique}i{i:02x}"
        taken.add(name)
        if not placed.raw:
            made.append(as_stored(fields, placed.item, name))
        else:
            made.append(placed.raw if name == given else with_fields(placed.raw, id=msgspec.json.encode(name)))
    return b"[%b]" % b",".join(made)
