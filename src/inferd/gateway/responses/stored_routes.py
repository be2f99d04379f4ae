"""The routes of stored responses and conversations."""

from __future__ import annotations

from typing import Final

from inferd.gateway.responses import conversations, stored
from inferd.gateway.responses.errors import RESPONSES_ERRORS
from inferd.gateway.responses.wire import ResponseObject, StreamEvent
from inferd.gateway.route import Route

_FOUND: Final = (400, 401, 403, 404, 503)
_CHANGED: Final = (400, 401, 403, 404, 408, 413, 415, 503)
_RESPONSE: Final = "/v1/responses/{response_id}"
_CONVERSATION: Final = "/v1/conversations/{conversation_id}"
_ITEM: Final = "/v1/conversations/{conversation_id}/items/{item_id}"

STORED_ROUTES: Final = (
    Route(
        *("GET", _RESPONSE, "infer", stored.retrieve, "A stored response, or its events with stream=true."),
        response=ResponseObject,
        chunk=StreamEvent,
        statuses=_FOUND,
        errors=RESPONSES_ERRORS,
        query=stored.RetrieveQuery,
    ),
    Route(
        *("DELETE", _RESPONSE, "infer", stored.delete, "Delete a stored response."),
        response=stored.DeletedResponse,
        statuses=_FOUND,
        errors=RESPONSES_ERRORS,
    ),
    Route(
        *("POST", f"{_RESPONSE}/cancel", "infer", stored.cancel, "Cancel a background response."),
        response=ResponseObject,
        statuses=_FOUND,
        errors=RESPONSES_ERRORS,
    ),
    Route(
        *(
            "GET",
            f"{_RESPONSE}/input_items",
            "infer",
            stored.list_input_items,
            "The items that a response was made of.",
        ),
        response=stored.ItemList,
        statuses=_FOUND,
        errors=RESPONSES_ERRORS,
        query=stored.ListQuery,
    ),
    Route(
        *("POST", "/v1/conversations", "infer", conversations.create, "Begin a conversation."),
        request=conversations.ConversationRequest,
        response=conversations.Conversation,
        statuses=_CHANGED,
        errors=RESPONSES_ERRORS,
    ),
    Route(
        *("GET", _CONVERSATION, "infer", conversations.retrieve, "A conversation, without its items."),
        response=conversations.Conversation,
        statuses=_FOUND,
        errors=RESPONSES_ERRORS,
    ),
    Route(
        *("POST", _CONVERSATION, "infer", conversations.update, "Replace a conversation's metadata."),
        request=conversations.MetadataRequest,
        response=conversations.Conversation,
        statuses=_CHANGED,
        errors=RESPONSES_ERRORS,
    ),
    Route(
        *("DELETE", _CONVERSATION, "infer", conversations.delete, "Delete a conversation and its items."),
        response=conversations.DeletedConversation,
        statuses=_FOUND,
        errors=RESPONSES_ERRORS,
    ),
    Route(
        *("POST", f"{_CONVERSATION}/items", "infer", conversations.add_items, "Append items to a conversation."),
        request=conversations.ItemsRequest,
        response=stored.ItemList,
        statuses=_CHANGED,
        errors=RESPONSES_ERRORS,
    ),
    Route(
        *("GET", f"{_CONVERSATION}/items", "infer", conversations.list_items, "The items of a conversation."),
        response=stored.ItemList,
        statuses=_FOUND,
        errors=RESPONSES_ERRORS,
        query=stored.ListQuery,
    ),
    Route(
        *("GET", _ITEM, "infer", conversations.retrieve_item, "One item of a conversation."),
        response=stored.Item,
        statuses=_FOUND,
        errors=RESPONSES_ERRORS,
    ),
    Route(
        *("DELETE", _ITEM, "infer", conversations.delete_item, "Delete an item; the answer is its conversation."),
        response=conversations.Conversation,
        statuses=_FOUND,
        errors=RESPONSES_ERRORS,
    ),
)
