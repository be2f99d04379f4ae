"""The handshake of a WebSocket (RFC 6455, section 4.2), which the library ``websockets`` reads and answers.

Interpreted in every form of inferd: the class that reads the handshake inherits from one of that library.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from inferd.errors import InvalidRequest

SUBPROTOCOL: Final = "inferd"

_log = logging.getLogger("inferd.http.websocket")


def answer_handshake(path: str, headers: Iterable[tuple[bytes, bytes]]) -> Response:
    """The answer that accepts the handshake of a request with this path and these headers. Raises InvalidRequest."""
    handshake = _Handshake(logger=_log)
    response = handshake.accept(_request(path, headers))
    handshake.parser.close()  # the parser refers to its owner; without the cycle both are freed at once
    if response.status_code != 101:
        why = " ".join(response.body.decode("utf-8", "replace").split())
        raise InvalidRequest(f"The WebSocket handshake is not valid: {why}", code="invalid_handshake")
    return response


class _Handshake(ServerProtocol):
    def select_subprotocol(self, subprotocols: Sequence[Subprotocol]) -> Subprotocol | None:
        """inferd's subprotocol where the client offers it, else none."""
        return next((word for word in subprotocols if word == SUBPROTOCOL), None)


def _request(path: str, raw: Iterable[tuple[bytes, bytes]]) -> Request:
    """The handshake as ``websockets`` reads it. The connection has removed the Upgrade header after checking it."""
    headers = Headers([("connection", "Upgrade"), ("upgrade", "websocket")])
    for name, value in raw:
        if name.startswith(b"sec-websocket-"):
            headers[name.decode("latin-1")] = value.decode("latin-1")
    return Request(path, headers)
