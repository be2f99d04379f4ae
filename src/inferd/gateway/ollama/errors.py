"""The errors of Ollama's API: a sentence, as a body or as the last line of a stream."""

from __future__ import annotations

from typing import Final

from inferd.gateway.errors import ErrorShape, ErrorText, error_text

OLLAMA_ERRORS: Final = ErrorShape(ErrorText, error_text, b"", b"\n")
