"""The routes of the Responses API."""

from __future__ import annotations

from typing import Final

from inferd.gateway.operations import CHAT, TOKENIZE
from inferd.gateway.responses.create import count_input_tokens, create_response, refuse_compaction
from inferd.gateway.responses.errors import RESPONSES_ERRORS
from inferd.gateway.responses.payloads import TEXTS
from inferd.gateway.responses.wire import (
    InputTokens,
    InputTokensRequest,
    ResponseObject,
    ResponsesRequest,
    StreamEvent,
)
from inferd.gateway.route import Route

_STATUSES: Final = (400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 500, 503)
_EVENTS: Final = (
    "Events, each 'event: ', the type of the data, 'data: ' and a StreamEvent as JSON; after a complete response the "
    "last is 'data: [DONE]'."
)

ROUTES: Final = (
    Route(
        *("POST", "/v1/responses", "infer", create_response, "Answer a conversation, as OpenAI's Responses API does."),
        request=ResponsesRequest,
        response=ResponseObject,
        chunk=StreamEvent,
        operation=CHAT,
        texts=TEXTS,
        events=_EVENTS,
        statuses=_STATUSES,
        errors=RESPONSES_ERRORS,
    ),
    Route(
        *("POST", "/v1/responses/input_tokens", "infer", count_input_tokens, "The tokens of such a prompt."),
        request=InputTokensRequest,
        response=InputTokens,
        operation=TOKENIZE,
        statuses=_STATUSES,
        errors=RESPONSES_ERRORS,
    ),
    Route(
        *(
            "POST",
            "/v1/responses/compact",
            "infer",
            refuse_compaction,
            "Not served: the answer says what to do instead.",
        ),
        statuses=(400, 401, 403),
        errors=RESPONSES_ERRORS,
    ),
)
