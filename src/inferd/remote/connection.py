"""One kept-alive HTTP/1.1 connection to a remote server: bytes out, a strictly parsed answer in.

Knows framing. Whatever breaks it (garbage, a length that is not kept, a head without end) ends the
exchange with UpstreamFailed and the connection with it: bytes that follow something unexpected are
never taken for the next answer. Knows nothing of what is asked, nor of other connections.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, cast

import httptools

from inferd import clock
from inferd.errors import UpstreamFailed
from inferd.remote.head_pattern import is_exact, pattern_of

MAX_HEAD_BYTES: Final = 64 * 1024

FULL_READ_BYTES: Final = 256_000
"""A read of this size or more may have left bytes in the kernel: uvloop reads as many at once, asyncio 262,144."""

_log = logging.getLogger("inferd.remote")

Headers = list[tuple[bytes, bytes]]
_MAX_KNOWN_HEADS: Final = 256
_MAX_KNOWN_HEADS_BYTES: Final = 1536
_MAX_SIZES: Final = 1024
_SIZE = re.compile(rb"[0-9a-fA-F]{1,7}")


class Head(NamedTuple):
    """The head of an answer that keeps its connection open."""

    status: int
    headers: Headers  # without the length, which differs from answer to answer
    is_chunked: bool
    media: bytes = b""  # its type without parameters; empty where the body is encoded


class Receiver(Protocol):
    """Who gets an answer: one ``answer_head``, any number of ``answer_data``, and one of the last two; or all of
    it at once by ``answer_whole``."""

    def answer_whole(self, head: Head, body: bytes) -> None: ...
    def answer_head(self, status: int, headers: Headers) -> None: ...
    def answer_data(self, data: bytes) -> None: ...
    def answer_ended(self) -> None: ...
    def answer_failed(self, error: UpstreamFailed, *, is_stale: bool) -> None:
        """``is_stale``: a kept connection was closed by the other side before any byte of an answer, as
        servers do that have had enough of waiting: asking again on a fresh one is fair."""

    def answer_broken(self, error: UpstreamFailed) -> None:
        """Something was raised while the answer was taken, at any depth: the request ends now, if it has not ended."""


class Connection(asyncio.Protocol):
    """Carries one exchange at a time. ``on_free`` is told when it can be used again, ``on_lost`` when never.

    Most answers of a server begin with the same bytes: heads that the parser has read once are remembered (for all
    connections), and where one comes again with a whole body behind it, or with chunks that are whole, nothing is
    parsed twice. The parser gets everything else, and the head again when a remembered one was the beginning.
    """

    __slots__ = (
        "_bare_bytes",
        "_began",
        "_chunked_head",
        "_complete",
        "_first_bytes",
        "_head_bytes",
        "_head_done",
        "_head_told",
        "_headers",
        "_is_dirty",
        "_is_fresh",
        "_is_full_read",
        "_is_informational",
        "_on_free",
        "_on_lost",
        "_parser",
        "_pieces",
        "_receiver",
        "_transport",
        "_until_close",
        "idle_since",
        "is_closed",
        "is_paused",
        "keep_s",
        "last_at",
        "made_at",
        "num_exchanges",
        "sent_at",
    )

    def __init__(self, on_free: Callable[[Connection], None], on_lost: Callable[[Connection], None]) -> None:
        self._on_free = on_free
        self._on_lost = on_lost
        self._receiver: Receiver | None = None
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []
        self._headers: Headers = []
        self._head_bytes = 0
        self._bare_bytes = 0  # since the last byte of the body: sizes of chunks, their extensions, trailers
        self._began = self._head_done = self._head_told = self._complete = False
        self._is_dirty = self._is_informational = self._until_close = False
        self._is_full_read = False  # what follows the answer may not have been read yet
        self._first_bytes = b""  # of this answer, while a single read holds all of it
        self._chunked_head = b""  # a familiar one whose chunks the parser has not seen
        self._is_fresh = True  # what belongs to an answer is as in the beginning
        self._parser = httptools.HttpResponseParser(self)
        self.is_closed = False
        self.is_paused = False
        self.made_at = self.sent_at = self.last_at = self.idle_since = clock.now()
        self.keep_s: float | None = None  # how long the other side said it keeps an idle connection
        self.num_exchanges = 0

    # -- the pool's side --------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Something of the answer's body has arrived."""
        return self._began

    @property
    def is_busy(self) -> bool:
        return self._receiver is not None

    def send(self, request: bytes, receiver: Receiver) -> None:
        """Begin an exchange with the bytes of a whole request."""
        assert self._receiver is None, "a connection carries one exchange at a time"
        assert self._transport is not None, "a connection is used when it is made"
        self._receiver = receiver
        if not self._is_fresh:
            self._is_fresh = True
            self._headers = []
            self._head_bytes = self._bare_bytes = 0
            self._began = self._head_done = self._head_told = self._complete = False
            self._is_informational = self._until_close = False
            self._first_bytes = self._chunked_head = b""
        self.num_exchanges += 1
        self.sent_at = self.last_at = clock.now()
        self._transport.write(request)

    def hand_to(self, receiver: Receiver) -> None:
        """Somebody else gets the rest of the answer under way."""
        assert self._receiver is not None, "there is no answer under way"
        self._receiver = receiver

    def pause(self) -> None:
        if not self.is_paused and self._transport is not None and not self.is_closed:
            self.is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.is_paused and self._transport is not None and not self.is_closed:
            self.is_paused = False
            self.last_at = clock.now()
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once; the receiver hears nothing more."""
        self._receiver = None
        self._shut()

    def fail(self, error: UpstreamFailed) -> None:
        """End the exchange with an error and the connection with it."""
        receiver, self._receiver = self._receiver, None
        self._shut()
        if receiver is not None:
            try:
                receiver.answer_failed(error, is_stale=False)
            except Exception:
                self._broke(receiver)

    def _broke(self, receiver: Receiver) -> None:
        """A boundary: what is raised in a callback ends the exchange, and no other. ``receiver`` had it before."""
        _log.exception("the answer of a remote server could not be taken")
        receiver, self._receiver = self._receiver or receiver, None
        self._shut()
        try:
            receiver.answer_broken(_bad("its answer could not be taken"))
        except Exception:
            _log.exception("a request to a remote server could not be ended")

    def _shut(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()
        self._on_lost(self)

    # -- the transport's side ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        receiver = self._receiver
        if receiver is None:  # nobody asked: not to be taken for the answer of who asks next
            self._shut()
            return
        try:
            self.last_at = clock.now()
            self._is_full_read = len(data) >= FULL_READ_BYTES
            if self._chunked_head:
                line_end = data.find(b"\r\n", 0, 10)
                size = _sizes.get(data[: max(line_end, 0)])
                if size is not None and len(data) == line_end + 4 + size and data.endswith(b"\r\n"):
                    self._began = True
                    receiver.answer_data(data[line_end + 2 : -2])
                elif not self._take_chunks(data, 0):
                    self._parse(data)
                return
            if self._is_fresh:
                end = data.find(b"\r\n\r\n")
                pattern, digits = pattern_of(data, end)
                head = _known_heads.get(pattern)
                if head is not None:
                    if digits.isdigit() and int(digits) == len(data) - end - 4:
                        self._receiver = None
                        self.idle_since = self.last_at
                        if self.is_paused or self._is_full_read:
                            self._shut()
                        else:
                            self._on_free(self)
                        receiver.answer_whole(head, data[end + 4 :])
                        return
                    if head.is_chunked:
                        self._begin_chunks(receiver, head, data, end)
                        return
                self._first_bytes = data if 0 < end < _MAX_KNOWN_HEADS_BYTES else b""
            self._parse(data)
        except Exception:
            self._broke(receiver)

    def _begin_chunks(self, receiver: Receiver, head: Head, data: bytes, end: int) -> None:
        self._is_fresh = False
        self._chunked_head = data[: end + 4]
        self._head_done = self._head_told = True
        receiver.answer_head(head.status, head.headers)
        if self._receiver is not None and len(data) > end + 4 and not self._take_chunks(data, end + 4):
            self._parse(data[end + 4 :])

    def _take_chunks(self, data: bytes, at: int) -> bool:
        """Hand over the chunks from ``at`` on if they are whole; False: they are the parser's, which has been
        shown the head."""
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
                if len(_sizes) < _MAX_SIZES:
                    _sizes[data[line_begin:line_end]] = size
            else:
                is_last = True
        else:
            receiver = self._receiver
            assert receiver is not None
            if pieces:
                self._began = True
                receiver.answer_data(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            if is_last and (receiver := self._receiver) is not None:
                self._finish(receiver)
            return True
        head, self._chunked_head = self._chunked_head, b""
        self._parser.feed_data(head)
        return False

    def _parse(self, data: bytes) -> None:
        """In pieces, so that what surrounds a body is bounded whatever one read brings."""
        if len(data) <= MAX_HEAD_BYTES:
            self._parse_piece(data, is_last=True)
            return
        for begin in range(0, len(data), MAX_HEAD_BYTES):
            end = begin + MAX_HEAD_BYTES
            self._parse_piece(data[begin:end], is_last=end >= len(data))
            if self._receiver is None:
                return

    def _parse_piece(self, data: bytes, *, is_last: bool) -> None:
        self._is_fresh = False
        self._bare_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a defect of ours
        except httptools.HttpParserError as error:
            if not self._complete:
                self._forward()
                self.fail(_bad(f"its answer is no valid HTTP ({type(error).__name__})"))
                return
            self._is_dirty = True
        if not self._head_done:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.fail(_bad(f"the head of its answer is larger than {MAX_HEAD_BYTES} bytes"))
            return
        self._forward()
        receiver = self._receiver
        if receiver is None:
            return
        if self._complete:
            self._is_dirty = self._is_dirty or not is_last  # bytes behind the answer
            self._finish(receiver)
        elif self._bare_bytes > MAX_HEAD_BYTES:  # the parser keeps a trailer whole
            self.fail(_bad(f"more than {MAX_HEAD_BYTES} bytes of its answer's body are chunk headers or trailers"))

    def _forward(self) -> None:
        """Hand over what has arrived; the receiver may let go meanwhile, or pass the rest on to another."""
        if self._head_done and not self._head_told and self._receiver is not None:
            self._head_told = True
            self._receiver.answer_head(self._parser.get_status_code(), self._headers)
        if self._pieces and self._receiver is not None:
            data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces.clear()
            self._began = True
            self._receiver.answer_data(data)

    def _finish(self, receiver: Receiver) -> None:
        self._receiver = None
        self.idle_since = self.last_at
        if self._is_dirty or self.is_paused or self._is_full_read:
            self._shut()
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
        del self._parser  # refers back here; without it the connection is freed now
        if receiver is None:
            return
        is_stale = self.num_exchanges > 1 and not self._head_done and not self._head_bytes
        what = "in the middle of an answer" if self._head_done else "before it answered"
        try:
            if self._head_done and self._until_close and exc is None:
                receiver.answer_ended()
                return
            receiver.answer_failed(
                UpstreamFailed(f"The remote server closed the connection {what}; try again.", code="upstream_closed"),
                is_stale=is_stale,
            )
        except Exception:
            self._broke(receiver)

    # -- the parser's side ------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            self._is_dirty = True  # a second answer to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_done:  # else it is a trailer, which nobody wants
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        status: int = self._parser.get_status_code()
        if status < 200:
            if status == 101:
                self._is_dirty = True
            self._is_informational = True
            self._headers = []
            self._first_bytes = b""
            return
        if self._head_done:
            return  # a familiar one, which was told when it came
        self._head_done = True
        self._bare_bytes = 0
        framed = status in (204, 304)
        for name, value in self._headers:
            if name == b"content-length" or (name == b"transfer-encoding" and value.strip().lower() == b"chunked"):
                framed = True
            elif name == b"keep-alive":
                self.keep_s = _keep_s(value)
        self._until_close = not framed
        first, self._first_bytes = self._first_bytes, b""
        if first and not self._is_dirty:
            self._remember(first, status)

    def _remember(self, first: bytes, status: int) -> None:
        """``first``: the one read that the whole head came with."""
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
            _known_heads.clear()  # a server that dates its answers makes a new one each second
        _known_heads[pattern_of(first, len(head))[0]] = Head(status, kept, is_chunked, media_of(kept))

    def on_body(self, body: bytes) -> None:
        if not self._complete:
            self._bare_bytes = 0
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._is_informational:
            self._is_informational = False
            return
        self._complete = True
        if not self._parser.should_keep_alive():
            self._is_dirty = True


_known_heads: dict[bytes, Head] = {}
"""By their patterns. What they mean does not depend on who sent them."""


_sizes: dict[bytes, int] = {}
"""Sizes of chunks as they are written; those of a stream are much alike."""


def media_of(headers: Headers) -> bytes:
    """The media type of an answer, without parameters; empty where it has none, or where its body is compressed."""
    found = b""
    for name, value in headers:
        if name == b"content-type":
            found = value.partition(b";")[0].strip().lower()
        elif name == b"content-encoding" and value.lower() != b"identity":
            return b""
    return found


def _keep_s(value: bytes) -> float | None:
    """Seconds of ``Keep-Alive: timeout=5, max=100``."""
    for part in value.split(b","):
        name, _, number = part.strip().partition(b"=")
        if name.lower() == b"timeout" and number.isdigit() and len(number) < 8:
            return float(number)
    return None


def _bad(what: str) -> UpstreamFailed:
    return UpstreamFailed(f"The remote server cannot be understood: {what}.", code="upstream_bad_answer")
