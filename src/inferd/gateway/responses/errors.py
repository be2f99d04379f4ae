"""The errors of the Responses API: OpenAI's bodies, and in a stream an event named ``error``."""

from __future__ import annotations

from typing import Final

from inferd.gateway.errors import ErrorBody, ErrorShape, error_body

RESPONSES_ERRORS: Final = ErrorShape(ErrorBody, error_body, b"event: error\ndata: ")
