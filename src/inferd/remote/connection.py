"""One HTTP/1.1 connection to a remote server, which is reused: requests as bytes out, strictly parsed answers in.

Knows framing (RFC 9112). An answer that violates it (garbage, a wrong length, a head without end) ends the exchange
with UpstreamFailed and closes the connection: later bytes are never taken for the next answer. Does not know what
requests mean, nor other connections.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from enum import IntEnum
from typing import Final, NamedTuple, Protocol, cast

import httptools

from inferd import clock
from inferd.config.units import bytes_text
from inferd.errors import UpstreamFailed
from inferd.head_pattern import SplitHead, is_exact, pattern_of

MAX_HEAD_BYTES: Final = 64 * 1024
"""Bytes of an answer's head; likewise of chunk headers and trailers between two bytes of its body."""

FULL_READ_BYTES: Final = 256_000
"""A read of this size may have left bytes in the kernel: uvloop reads at most so many at once, asyncio 262,144."""

_log = logging.getLogger("inferd.remote")

Headers = list[tuple[bytes, bytes]]
_MAX_KNOWN_HEADS: Final = 256
_MAX_KNOWN_HEADS_BYTES: Final = 1536
_MAX_CHUNK_SIZES: Final = 1024
_SIZE = re.compile(rb"[0-9a-fA-F]{1,7}")


class Head(NamedTuple):
    """The head of an answer, which several answers can share."""

    status: int
    headers: Headers  # without Content-Length, which differs between answers
    is_chunked: bool
    media: bytes = b""  # its type without parameters; empty where the body is encoded
    content_type: bytes = b""


class Receiver(Protocol):
    """What an answer is delivered to.

    Either all of it at once (``answer_whole``), or its head, its body in pieces, and its end. An answer that fails ends
    with ``answer_failed`` or ``answer_broken`` instead, at any time.
    """

    def answer_whole(self, head: Head, body: bytes) -> None:
        """A complete answer."""

    def answer_head(self, status: int, headers: Headers) -> None:
        """The status and headers of an answer that is delivered in parts."""

    def answer_data(self, data: bytes) -> None:
        """A part of its body."""

    def answer_ended(self) -> None:
        """Its end."""

    def answer_failed(self, error: UpstreamFailed, *, is_stale: bool) -> None:
        """The server or the connection failed.

        ``is_stale``: the server closed a reused connection before the first byte of an answer. Servers do so after an
        idle time, so the request may be sent again on a new connection.
        """

    def answer_broken(self, error: UpstreamFailed) -> None:
        """A method of the receiver raised an exception: end the request, if it has not ended."""


class Stage(IntEnum):
    """How much of an answer was parsed, or delivered to the receiver. Stages follow in this order."""

    NOTHING = 0
    PARTIAL_HEAD = 1
    HEAD = 2
    BODY = 3
    END = 4


_NOTHING, _PARTIAL_HEAD, _HEAD, _BODY, _END = Stage


class Connection(asyncio.Protocol):
    """Carries one exchange at a time. ``on_free`` is called when it can be reused, ``on_lost`` when it is closed.

    Most answers of a server begin with the same bytes, so parsed heads are cached, for all connections. An answer with
    a cached head, and with a complete body or complete chunks, is not parsed again. The parser gets everything else; it
    gets the head as well when an answer with a cached head continues in another way.
    """

    __slots__ = (
        "_chunked_head",
        "_delivered",
        "_first_bytes",
        "_framing_bytes",
        "_head_bytes",
        "_headers",
        "_is_full_read",
        "_is_informational",
        "_latest",
        "_latest_head",
        "_must_close",
        "_on_free",
        "_on_lost",
        "_parsed",
        "_parser",
        "_pieces",
        "_receiver",
        "_transport",
        "_until_close",
        "idle_since",
        "is_closed",
        "is_paused",
        "keep_alive_s",
        "last_at",
        "made_at",
        "num_exchanges",
        "sent_at",
    )
    __deletable__ = ("_parser",)

    def __init__(self, on_free: Callable[[Connection], None], on_lost: Callable[[Connection], None]) -> None:
        self._on_free = on_free
        self._on_lost = on_lost
        self._receiver: Receiver | None = None
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []
        self._headers: Headers = []
        self._head_bytes = 0
        self._framing_bytes = 0  # since the last byte of the body: chunk sizes, chunk extensions and trailers
        self._parsed = _NOTHING  # of this answer, by the parser; or the head, if it was cached
        self._delivered = _NOTHING  # of this answer, to the receiver
        self._is_informational = False  # the parser is in an interim answer (RFC 9110, section 15.2)
        self._until_close = False  # the body ends with the connection
        self._must_close = False  # the connection cannot be reused after this answer
        self._is_full_read = False  # the last read may have left bytes in the kernel
        self._first_bytes = b""  # the read that holds all of this answer so far, and its whole head
        self._chunked_head = b""  # this answer's head, if it was cached and the parser got nothing of the answer yet
        self._latest = SplitHead(b"")  # of the answer before
        self._latest_head: Head | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.is_closed = False
        self.is_paused = False
        self.made_at = self.sent_at = self.last_at = self.idle_since = clock.now()
        self.keep_alive_s: float | None = None  # seconds for which the server keeps an idle connection, if it told them
        self.num_exchanges = 0

    # -- the pool's side --------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether some of the answer's body was delivered."""
        return self._delivered >= _BODY

    @property
    def is_busy(self) -> bool:
        """Whether an exchange is in progress."""
        return self._receiver is not None

    def send(self, request: bytes, receiver: Receiver, now: float) -> None:
        """Begin an exchange with the bytes of a complete request."""
        assert self._receiver is None, "a connection carries one exchange at a time"
        assert self._transport is not None, "a connection is used when it is made"
        self._receiver = receiver
        if self._parsed is not _NOTHING:
            self._parsed = self._delivered = _NOTHING
            self._headers = []
            self._head_bytes = self._framing_bytes = 0
            self._is_informational = self._until_close = False
            self._first_bytes = self._chunked_head = b""
        self.num_exchanges += 1
        self.sent_at = self.last_at = now
        self._transport.write(request)

    def pause(self) -> None:
        """Stop reading. Idempotent."""
        if not self.is_paused and self._transport is not None and not self.is_closed:
            self.is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Continue reading. Idempotent."""
        if self.is_paused and self._transport is not None and not self.is_closed:
            self.is_paused = False
            self.last_at = clock.now()
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close the connection. The receiver is not called any more."""
        self._receiver = None
        self._close()

    def fail(self, error: UpstreamFailed) -> None:
        """End the exchange with an error and the connection with it."""
        receiver, self._receiver = self._receiver, None
        self._close()
        if receiver is not None:
            try:
                receiver.answer_failed(error, is_stale=False)
            except Exception:
                self._fail_on_defect(receiver)

    def _fail_on_defect(self, receiver: Receiver) -> None:
        """End the exchange after an exception in a callback, so that other exchanges go on.

        ``receiver``: of the exchange when the callback began.
        """
        _log.exception("the answer of a remote server could not be taken")
        receiver, self._receiver = self._receiver or receiver, None
        self._close()
        try:
            receiver.answer_broken(_bad_answer("its answer could not be taken"))
        except Exception:
            _log.exception("a request to a remote server could not be ended")

    def _close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()
        self._on_lost(self)

    # -- called by the transport ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        receiver = self._receiver
        if receiver is None:  # bytes without a request are not the answer to the next one
            self._close()
            return
        try:
            self.last_at = clock.now()
            self._is_full_read = len(data) >= FULL_READ_BYTES
            if self._chunked_head:
                line_end = data.find(b"\r\n", 0, 10)
                size = _chunk_sizes.get(data[: max(line_end, 0)])
                if size is not None and len(data) == line_end + 4 + size and data.endswith(b"\r\n"):
                    self._delivered = _BODY
                    receiver.answer_data(data[line_end + 2 : -2])
                elif not self._take_chunks(data, 0):
                    self._parse(data)
                return
            if self._parsed is _NOTHING:
                if self._latest_head is not None and (begin := self._latest.body_at(data)) > 0:
                    self._take_whole(receiver, self._latest_head, data[begin:])
                    return
                end = data.find(b"\r\n\r\n")
                pattern, digits = pattern_of(data, end)
                head = _known_heads.get(pattern)
                if head is not None:
                    if digits.isdigit() and int(digits) == len(data) - end - 4:
                        self._latest, self._latest_head = SplitHead(data[:end]), head
                        self._take_whole(receiver, head, data[end + 4 :])
                        return
                    if head.is_chunked:
                        self._begin_chunks(receiver, head, data, end)
                        return
                self._first_bytes = data if 0 < end < _MAX_KNOWN_HEADS_BYTES else b""
            self._parse(data)
        except Exception:
            self._fail_on_defect(receiver)

    def _take_whole(self, receiver: Receiver, head: Head, body: bytes) -> None:
        self._receiver = None
        self.idle_since = self.last_at
        if self.is_paused or self._is_full_read:
            self._close()
        else:
            self._on_free(self)
        receiver.answer_whole(head, body)

    def _begin_chunks(self, receiver: Receiver, head: Head, data: bytes, end: int) -> None:
        """Deliver a cached head, and the chunks that follow it."""
        self._chunked_head = data[: end + 4]
        self._parsed = self._delivered = _HEAD
        receiver.answer_head(head.status, head.headers)
        if self._receiver is not None and len(data) > end + 4 and not self._take_chunks(data, end + 4):
            self._parse(data[end + 4 :])

    def _take_chunks(self, data: bytes, at: int) -> bool:
        """Deliver the chunks from ``at`` on, if all of them are complete. Otherwise pass the head to the parser and
        return False: the parser has to get the chunks as well."""
        pieces: list[bytes] = []
        length = len(data)
        is_last = False
        while at < length:
            line_begin = at
            line_end = data.find(b"\r\n", at, at + 10)
            if line_end < 0 or not _SIZE.fullmatch(data, at, line_end):
                break
            size = int(data[at:line_end], 16)
            begin = line_end + 2
            at = begin + size + 2
            if at > length or data[at - 2 : at] != b"\r\n" or is_last:
                break
            if size:
                pieces.append(data[begin : at - 2])
                if len(_chunk_sizes) < _MAX_CHUNK_SIZES:
                    _chunk_sizes[data[line_begin:line_end]] = size
            else:
                is_last = True
        else:
            receiver = self._receiver
            assert receiver is not None
            if pieces:
                self._delivered = _BODY
                receiver.answer_data(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            if is_last and (receiver := self._receiver) is not None:
                self._finish(receiver)
            return True
        head, self._chunked_head = self._chunked_head, b""
        self._parser.feed_data(head)
        return False

    def _parse(self, data: bytes) -> None:
        """Parse in pieces, so that the limit on bytes around the body holds within a large read."""
        if len(data) <= MAX_HEAD_BYTES:
            self._parse_piece(data, is_last=True)
            return
        for begin in range(0, len(data), MAX_HEAD_BYTES):
            end = begin + MAX_HEAD_BYTES
            self._parse_piece(data[begin:end], is_last=end >= len(data))
            if self._receiver is None:
                return

    def _parse_piece(self, data: bytes, *, is_last: bool) -> None:
        if self._parsed is _NOTHING:
            self._parsed = _PARTIAL_HEAD
        self._framing_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a defect of inferd
        except httptools.HttpParserError as error:
            if self._parsed is not _END:
                self._deliver()
                self.fail(_bad_answer(f"its answer is no valid HTTP ({type(error).__name__})"))
                return
            self._must_close = True
        if self._parsed < _HEAD:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.fail(_bad_answer(f"the head of its answer is larger than {bytes_text(MAX_HEAD_BYTES)}"))
            return
        self._deliver()
        receiver = self._receiver
        if receiver is None:
            return
        if self._parsed is _END:
            self._must_close = self._must_close or not is_last  # bytes after the answer
            self._finish(receiver)
        elif self._framing_bytes > MAX_HEAD_BYTES:  # the parser buffers a whole trailer
            self.fail(
                _bad_answer(
                    f"more than {bytes_text(MAX_HEAD_BYTES)} of its answer's body are chunk headers or trailers"
                )
            )

    def _deliver(self) -> None:
        """Deliver what was parsed. Each call of the receiver may end the exchange or replace the receiver."""
        if self._parsed >= _HEAD and self._delivered < _HEAD and self._receiver is not None:
            self._delivered = _HEAD
            self._receiver.answer_head(self._parser.get_status_code(), self._headers)
        if self._pieces and self._receiver is not None:
            data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces.clear()
            self._delivered = _BODY
            self._receiver.answer_data(data)

    def _finish(self, receiver: Receiver) -> None:
        self._receiver = None
        self.idle_since = self.last_at
        if self._must_close or self.is_paused or self._is_full_read:
            self._close()
        else:
            self._on_free(self)
        receiver.answer_ended()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        was_closed, self.is_closed = self.is_closed, True
        receiver, self._receiver = self._receiver, None
        if not was_closed:
            self._on_lost(self)
        del self._parser  # it refers to this object; without the cycle both are freed at once
        if receiver is None:
            return
        is_stale = self.num_exchanges > 1 and self._parsed is _NOTHING
        what = "in the middle of an answer" if self._parsed >= _HEAD else "before it answered"
        try:
            if self._parsed >= _HEAD and self._until_close and exc is None:
                receiver.answer_ended()
                return
            receiver.answer_failed(
                UpstreamFailed(f"The remote server closed the connection {what}; try again.", code="upstream_closed"),
                is_stale=is_stale,
            )
        except Exception:
            self._fail_on_defect(receiver)

    # -- called by the parser ---------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._parsed is _END:
            self._must_close = True  # a second answer to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._parsed < _HEAD:  # otherwise it is a trailer, which is not used
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._parsed is _END:
            return
        status: int = self._parser.get_status_code()
        if status < 200:
            if status == 101:
                self._must_close = True
            self._is_informational = True
            self._headers = []
            self._first_bytes = b""
            return
        if self._parsed is _HEAD:
            return  # it was cached, and delivered before
        self._parsed = _HEAD
        self._framing_bytes = 0
        framed = status in (204, 304)
        for name, value in self._headers:
            if name == b"content-length" or (name == b"transfer-encoding" and value.strip().lower() == b"chunked"):
                framed = True
            elif name == b"keep-alive":
                self.keep_alive_s = _keep_alive_s(value)
        self._until_close = not framed
        first, self._first_bytes = self._first_bytes, b""
        if first and not self._must_close:
            self._remember(first, status)

    def _remember(self, first: bytes, status: int) -> None:
        """Cache the head. ``first``: the read that began with it and has all of it."""
        names = [name for name, _ in self._headers]
        head = first[: first.find(b"\r\n\r\n")]
        if not self._parser.should_keep_alive() or status in (204, 304) or b"keep-alive" in names:
            return
        lengths = names.count(b"content-length")
        encodings = [value.lower() for name, value in self._headers if name == b"transfer-encoding"]
        is_chunked = not lengths and encodings == [b"chunked"] and not pattern_of(head, len(head))[1]
        if not is_chunked and not (lengths == 1 and not encodings and is_exact(head)):
            return
        kept = [header for header in self._headers if header[0] != b"content-length"]
        if len(_known_heads) >= _MAX_KNOWN_HEADS:
            _known_heads.clear()  # an answer with a Date header has a new head in each second
        _known_heads[pattern_of(first, len(head))[0]] = Head(
            status,
            kept,
            is_chunked,
            media_of(kept),
            next((value for name, value in kept if name == b"content-type"), b""),
        )

    def on_body(self, body: bytes) -> None:
        if self._parsed is not _END:
            self._framing_bytes = 0
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._is_informational:
            self._is_informational = False
            return
        self._parsed = _END
        if not self._parser.should_keep_alive():
            self._must_close = True


_known_heads: dict[bytes, Head] = {}
"""Cached heads by their patterns (``head_pattern``). Their meaning does not depend on the server."""


_chunk_sizes: dict[bytes, int] = {}
"""Cached chunk sizes by their text. The chunks of a stream have similar sizes."""


def media_of(headers: Headers) -> bytes:
    """The media type of an answer without parameters; empty where it has none, or where its body is compressed."""
    found = b""
    for name, value in headers:
        if name == b"content-type":
            found = value.partition(b";")[0].strip().lower()
        elif name == b"content-encoding" and value.lower() != b"identity":
            return b""
    return found


def _keep_alive_s(value: bytes) -> float | None:
    """The seconds of a header such as ``Keep-Alive: timeout=5, max=100``; None: it has none."""
    for part in value.split(b","):
        name, _, number = part.strip().partition(b"=")
        if name.lower() == b"timeout" and number.isdigit() and len(number) < 8:
            return float(number)
    return None


def _bad_answer(what: str) -> UpstreamFailed:
    return UpstreamFailed(f"The remote server cannot be understood: {what}.", code="upstream_bad_answer")
