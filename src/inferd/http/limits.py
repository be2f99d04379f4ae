"""The largest head that a request may have, over HTTP/1.1 and over HTTP/2."""

from __future__ import annotations

from typing import Final

MAX_HEADER_BYTES: Final = 64 * 1024
"""Of the request line and all headers."""

MAX_HEADERS: Final = 512
"""Of one request. Each costs a call into Python, however short it is."""
