"""Limits on the headers of one request. HTTP/1.1 and HTTP/2 share them."""

from __future__ import annotations

from typing import Final

MAX_HEADER_BYTES: Final = 64 * 1024
"""Bytes of the request line and all header fields together."""

MAX_HEADERS: Final = 512
"""Header fields of one request. The parser calls Python once for each field, so short fields cost time as well."""
