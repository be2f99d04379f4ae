"""The header fields of a request, with the checks of RFC 9113, sections 8.2 and 8.3.

The checks prevent request smuggling: a program that reads a malformed request in another way would see another request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from inferd.http.http2.hpack import Header

_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_VALUE: Final = re.compile(rb"[\x00\r\n]|^[ \t]|[ \t]$")
_OF_ONE_CONNECTION: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
_PSEUDO: Final = frozenset((b":method", b":scheme", b":path", b":authority"))


class Request(NamedTuple):
    """A well-formed request."""

    method: bytes
    path: bytes
    headers: list[Header]  # without pseudo-header fields, whose names begin with a colon
    length: int | None  # Content-Length, in bytes


def read_request(headers: Sequence[Header]) -> Request | None:
    """The request of decoded header fields; None: it is malformed."""
    pseudo: dict[bytes, bytes] = {}
    others: list[Header] = []
    length: int | None = None
    for header in headers:
        name, value = header
        if _BAD_VALUE.search(value):
            return None
        if name[:1] == b":":
            if others or name not in _PSEUDO or name in pseudo:
                return None
            pseudo[name] = value
            continue
        if not is_fit(name) or (name == b"te" and value != b"trailers"):
            return None
        if name == b"content-length":
            if not (value.isdigit() and len(value) < 19) or length not in (None, int(value)):
                return None
            length = int(value)
        others.append(header)
    method, path = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    if not method or b":scheme" not in pseudo or not path:
        return None
    return Request(method, path, others, length)


def is_fit(name: bytes) -> bool:
    """Whether a header or trailer field may have this name (RFC 9113, sections 8.2.1 and 8.2.2)."""
    return _NAME.fullmatch(name) is not None and name not in _OF_ONE_CONNECTION
