"""The errors of the Messages API. The statuses are those of all dialects (``gateway/errors.py``)."""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.errors import InferdError
from inferd.gateway.anthropic.wire import MessagesError, MessagesErrorCode, MessagesErrorDetail
from inferd.gateway.errors import MAX_MESSAGE_CHARS, ErrorShape, kind_of, known_error, printable

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_answer(error: InferdError, request_id: str) -> bytes:
    """The JSON body of an error.

    A prompt that is too long is told in the words by which Anthropic's agents know that they must shorten it.
    """
    error = known_error(error)
    status = kind_of(error).status
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = error.message
    if error.kind == "context_length_exceeded":
        message = f"prompt is too long: {message}"
    code = MessagesErrorCode(error.code, error.param)
    detail = MessagesErrorDetail(kind, printable(message, MAX_MESSAGE_CHARS), code)
    return msgspec.json.encode(MessagesError(detail, request_id))


ANTHROPIC_ERRORS: Final = ErrorShape(MessagesError, error_answer, b"event: error\ndata: ", id_header=b"request-id")
