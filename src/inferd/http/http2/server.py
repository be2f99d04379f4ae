"""What an HTTP/2 connection requires of its server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from inferd.http.cost import TurnQueue
from inferd.http.http2.hpack import Header
from inferd.http.http2.stream import Stream, StreamConnection
from inferd.http.upgrade import ClientConnection


class Server(Protocol):
    """A server of HTTP/2 connections."""

    connections: set[ClientConnection]
    turn_queue: TurnQueue

    def call_soon(self, call: Callable[[], None], /) -> object:
        """Call ``call`` at the end of this turn of the event loop."""

    @property
    def send_s(self) -> float:
        """Seconds without progress after which blocked output is a timeout."""

    def accepts_connection(self) -> bool:
        """Whether one more connection may be open."""

    def read_head(self, headers: Sequence[Header] | None) -> object | None:
        """Interpret the header fields of a request; None as ``headers``: they exceeded the limits.

        The result is passed to ``open_stream``, and reused for identical header blocks of the connection. None: the
        request is malformed (RFC 9113, section 8.1.1).
        """

    def open_stream(self, connection: StreamConnection, number: int, head: object) -> Stream:
        """The stream ``number`` for a new request. ``head`` is a result of ``read_head``."""

    def connection_closed(self, connection: ClientConnection) -> None:
        """Forget a connection that is closed."""
