"""The errors of text-generation-inference. The statuses are those of all dialects (``gateway/errors.py``)."""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.errors import InferdError
from inferd.gateway.errors import MAX_MESSAGE_CHARS, ErrorShape, kind_of, known_error, printable
from inferd.gateway.tgi.wire import TgiError


def error_answer(error: InferdError, request_id: str = "") -> bytes:
    """The JSON body of an error."""
    error = known_error(error)
    status = kind_of(error).status
    message = printable(error.message, MAX_MESSAGE_CHARS)
    if status in (429, 503):
        return msgspec.json.encode(TgiError(message, "overloaded"))
    return msgspec.json.encode(TgiError(message, "validation" if status < 500 else "generation"))


TGI_ERRORS: Final = ErrorShape(TgiError, error_answer)
