"""What a connection asks of the server that it belongs to: room, meanings of header blocks, streams, the turn of the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from inferd.http.cost import TurnQueue
from inferd.http.http2.hpack import Header
from inferd.http.http2.stream import Stream, StreamConnection
from inferd.http.upgrade import ClientConnection


class Server(Protocol):
    """The server, as a connection sees it."""

    connections: set[ClientConnection]
    turn_queue: TurnQueue

    def call_soon(self, call: Callable[[], None], /) -> object:
        """Call it at the end of this turn of the loop."""

    @property
    def send_s(self) -> float:
        """Seconds that a client may take nothing of what is said to it."""

    def accepts_connection(self) -> bool:
        """Whether there may be one more connection."""

    def read_head(self, headers: Sequence[Header] | None) -> object | None:
        """What a header block means, for as long as it is remembered; None of them: they were too large. None: they
        are malformed."""

    def open_stream(self, connection: StreamConnection, number: int, head: object) -> Stream:
        """A stream begins."""

    def connection_closed(self, connection: ClientConnection) -> None: ...
