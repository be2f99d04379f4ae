"""A connection without a network: a transport that keeps what is written, and a host that keeps what it sees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from inferd.http.cost import TurnQueue
from inferd.http.http2 import frames as f
from inferd.http.http2.connection import Connection
from inferd.http.http2.hpack import Header, literal
from inferd.http.http2.request import Request, read_request
from inferd.http.http2.stream import Stream, StreamConnection
from inferd.http.upgrade import ClientConnection

HEAD = b"\x88"
PREFACE = f.PREFACE + f.settings(())
ASKING: list[Header] = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x"), (b":authority", b"here")]


def block(headers: Sequence[Header] = ASKING) -> bytes:
    return b"".join([literal(*header) for header in headers])


def asking(number: int, *, is_end: bool = False, headers: Sequence[Header] = ASKING) -> bytes:
    return f.headers(number, block(headers), f.MAX_FRAME, is_end=is_end)


def data(number: int, content: bytes = b"", *, is_end: bool = False) -> bytes:
    return f.frame(f.DATA, f.END_STREAM if is_end else 0, number, content)


class Wire:
    """In a transport's place."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False
        self.is_paused = False

    def write(self, piece: bytes) -> None:
        if not self.is_closed:
            self.written += piece

    def write_eof(self) -> None: ...
    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int) -> None: ...


class Echo(Stream):
    """Answers with what it was sent, when all of it came."""

    def __init__(self, connection: StreamConnection, number: int, host: Host, request: Request) -> None:
        super().__init__(connection, number)
        self.host = host
        self.request = request
        self.content = b""
        self.has_left = False
        self.was_stuck = False

    def data_received(self, data: bytes, start: int, stop: int, is_end: bool) -> None:
        self.content += data[start:stop]
        if is_end:
            self.host.seen.append((self.id, self.request, self.content))
            if self.host.answers:
                self.send_answer(HEAD, b"", self.host.answer or self.content, b"")

    def peer_cancelled(self) -> None:
        self.has_left = True
        self.host.left.append(self.id)

    def drained(self) -> None: ...
    def send_timed_out(self) -> None:
        self.was_stuck = True
        self.reset()


class Host:
    """Keeps every request that came whole."""

    send_s = 60.0

    def __init__(self) -> None:
        self.connections: set[ClientConnection] = set()
        self.seen: list[tuple[int, Request, bytes]] = []
        self.left: list[int] = []
        self.streams: list[Echo] = []
        self.answer = b""
        self.answers = True
        self.is_full = False
        self._turn: list[Callable[[], None]] = []
        self.turn_queue = TurnQueue(self.call_soon)

    def call_soon(self, call: Callable[[], None], /) -> None:
        self._turn.append(call)

    def end_turn(self) -> None:
        """And those after it, until there is nothing left to do."""
        while self._turn:
            turn, self._turn = self._turn, []
            for call in turn:
                call()

    def accepts_connection(self) -> bool:
        return not self.is_full

    def read_head(self, headers: Sequence[Header] | None) -> object | None:
        return read_request(headers) if headers is not None else None

    def open_stream(self, connection: StreamConnection, number: int, head: object) -> Stream:
        assert isinstance(head, Request)
        stream = Echo(connection, number, self, head)
        self.streams.append(stream)
        return stream

    def connection_closed(self, connection: ClientConnection) -> None:
        self.connections.discard(connection)


class Peer:
    """A client's end of a connection."""

    def __init__(self, host: Host | None = None) -> None:
        self.host = host or Host()
        self.wire = Wire()
        self.connection = Connection(self.host)
        self.connection.connection_made(self.wire)  # type: ignore[arg-type]

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.connection.data_received(piece)
            self.host.end_turn()

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """Kind, flags, stream and content of every frame that was written so far."""
        self.host.end_turn()
        return list(frames_in(self.wire.written))

    def goodbye(self) -> tuple[int, bytes] | None:
        """Code and words of the last GOAWAY."""
        told = [content for kind, _, _, content in self.frames() if kind == f.GOAWAY]
        return (int.from_bytes(told[-1][4:8], "big"), told[-1][8:]) if told else None

    @property
    def is_sent_away(self) -> bool:
        """Nothing more is read of what it sends."""
        return self.connection.is_closing

    def of(self, number: int) -> list[tuple[int, bytes]]:
        """What was written to a stream: kinds and contents."""
        return [(kind, content) for kind, _, stream, content in self.frames() if stream == number]


def frames_in(written: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    at = 0
    while at < len(written):
        high, low, kind, flags, number = f.HEAD.unpack_from(written, at)
        end = at + f.HEAD_BYTES + (high << 8 | low)
        yield kind, flags, number, written[at + f.HEAD_BYTES : end]
        at = end


def in_loop(check: Callable[[], Any]) -> None:
    """For what needs a running loop."""

    async def main() -> None:
        check()

    asyncio.run(main())
