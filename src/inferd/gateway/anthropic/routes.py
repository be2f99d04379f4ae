"""The routes of the Messages API."""

from __future__ import annotations

from typing import Final

from inferd.gateway.anthropic.errors import ANTHROPIC_ERRORS
from inferd.gateway.anthropic.messages import count_tokens, create_message, hello
from inferd.gateway.anthropic.wire import CountTokensRequest, Hello, Message, MessagesRequest, StreamEvent, TokenCount
from inferd.gateway.operations import CHAT, TOKENIZE
from inferd.gateway.route import Route
from inferd.observe.payloads.texts import JsonTexts

_STATUSES: Final = (400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 500, 503)
_EVENTS: Final = (
    "Events, each 'event: ', the type of the data, 'data: ' and a StreamEvent as JSON; the last is 'message_stop', or "
    "'error' with the body of an error answer."
)

TEXTS: Final = JsonTexts("text", "thinking", "partial_json", whole=("name",), opaque=("signature", "data"))
"""A thinking block's signature may hold its text, encoded. ``data`` is a file in Base64, or hidden thinking."""

ROUTES: Final = (
    Route(
        *("POST", "/v1/messages", "infer", create_message, "Answer a conversation, as Anthropic's API does."),
        request=MessagesRequest,
        response=Message,
        chunk=StreamEvent,
        operation=CHAT,
        texts=TEXTS,
        events=_EVENTS,
        statuses=_STATUSES,
        errors=ANTHROPIC_ERRORS,
    ),
    Route(
        *("POST", "/v1/messages/count_tokens", "infer", count_tokens, "The tokens of such a conversation's prompt."),
        request=CountTokensRequest,
        response=TokenCount,
        operation=TOKENIZE,
        statuses=_STATUSES,
        errors=ANTHROPIC_ERRORS,
    ),
    # Claude Code asks it with HEAD and without a key before its first request.
    Route("GET", "/api/hello", "public", hello, "Is there a server at this address?", response=Hello),
)
