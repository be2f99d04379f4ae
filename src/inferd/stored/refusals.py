"""The errors of stored responses and conversations."""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.config.units import bytes_text
from inferd.errors import InvalidRequest, Overloaded, StoredNotFound

MAX_HISTORY_BYTES: Final = 32 * 1024 * 1024
"""Bytes of the items that one request may bring by ``previous_response_id`` or ``conversation``."""

MAX_CHAIN: Final = 32_768
"""Responses of one chain."""


def unknown_response(name: str) -> StoredNotFound:
    return StoredNotFound(
        f"There is no response {shown(name)}; it was deleted, is too old, or was not stored (store=false).",
        param="response_id",
        code="response_not_found",
    )


def unknown_previous(name: str) -> StoredNotFound:
    return StoredNotFound(
        f"There is no response {shown(name)} to go on from; it was deleted, is too old, or was not stored "
        "(store=false). Send the whole conversation as input.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def unknown_conversation(name: str) -> StoredNotFound:
    return StoredNotFound(
        f"There is no conversation {shown(name)}; it was deleted or is too old. Create another with POST "
        "/v1/conversations, or send the whole conversation as input.",
        param="conversation",
        code="conversation_not_found",
    )


def unknown_item(name: str) -> StoredNotFound:
    return StoredNotFound(
        f"There is no item {shown(name)} in this conversation.", param="item_id", code="item_not_found"
    )


def unknown_after(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"after is {shown(name)}, and the list has no item with this id; send the id of an item that was listed.",
        param="after",
    )


def too_large(noun: str, param: str, num_bytes: int, max_bytes: int) -> InvalidRequest:
    return InvalidRequest(
        f"This {noun} has {bytes_text(num_bytes)}, and {bytes_text(max_bytes)} may be stored; send less, or raise "
        "state.responses.max_bytes. A response is not stored with store=false.",
        param=param,
        code="stored_bytes_exceeded",
    )


def filled_by_running(max_bytes: int) -> Overloaded:
    return Overloaded(
        f"Responses that are still computed fill the {bytes_text(max_bytes)} that may be stored; try again when "
        "some have ended, or raise state.responses.max_bytes.",
        code="stored_bytes_exceeded",
        retry_after_s=5.0,
    )


def not_in_background(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"The response {shown(name)} was not made with background=true, so it cannot be cancelled; end a stream by "
        "closing the connection.",
        param="response_id",
        code="not_a_background_response",
    )


def failure(code: str, message: str) -> bytes:
    """The error of a failed response, as JSON."""
    return msgspec.json.encode({"code": code, "message": message})


def too_many_running(count: int) -> Overloaded:
    return Overloaded(
        f"{count} background responses of this tenant are not complete yet; wait for some, or cancel them.",
        code="too_many_background_responses",
        retry_after_s=10.0,
    )


def shown(name: str) -> str:
    return repr(name if len(name) <= 80 else name[:80] + "...")


def too_long(size: str, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"The conversation so far has {size}, and a request may bring {bytes_text(MAX_HISTORY_BYTES)} in at most "
        f"{MAX_CHAIN} responses; begin a new one with a summary as input.",
        param=param,
        code="history_too_long",
    )
