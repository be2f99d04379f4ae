"""One gRPC call on an HTTP/2 stream: it reads and writes messages, has a deadline and ends with a status.

Knows messages as bytes within limits, and not their content. The task or object that serves a call is its ``owner``,
which is cancelled when the client disconnects or the deadline passes.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import Final, Protocol

from inferd import clock
from inferd.config.units import bytes_text
from inferd.errors import InvalidRequest
from inferd.events import Operation
from inferd.gateway.body.compression import OFF_LOOP_BYTES, decompressed
from inferd.gateway.errors import BodyTooLarge
from inferd.gateway.grpc.statuses import Status
from inferd.gateway.grpc.wire import HEAD, OK, PREFIX_BYTES, Head, Refusal, only_head, status_block, trailers_block
from inferd.http.cost import DECOMPRESSED_BYTE, FRAME, PROTOBUF_FIELD
from inferd.http.http2.frames import FIRST_WINDOW
from inferd.http.http2.hpack import Header
from inferd.http.http2.stream import SLOWEST, Stream, StreamConnection
from inferd.tenancy.principal import LOCAL, Principal, Scope

TURN_BYTES: Final = 8192  # bytes of messages that one stream reads before other tasks run
MESSAGE_BYTES: Final = 512  # counted for each message in addition to its bytes
MAX_UNREAD: Final = 4096  # unread messages of a stream; the flow control window does not limit tiny ones

_READ_BYTES: Final = 4096  # at most this many bytes of a message are counted as one field each
EXPIRED: Final = "The request's deadline has passed; give it more time."


class RpcClosed(Exception):
    """The call has ended and its client receives nothing more: it disconnected, or the deadline passed."""


class Cancellable(Protocol):
    def cancel(self) -> object: ...


class Limits(Protocol):
    """The current limits of all calls, and where their refusals are logged."""

    @property
    def max_bytes(self) -> int:
        """The largest message, in bytes after decompression."""

    @property
    def message_s(self) -> float:
        """Seconds in which a message must arrive, if it arrives more slowly than ``SLOWEST``."""

    def log_refusal(self, rpc: Rpc, refusal: Refusal) -> None:
        """Log a call, or a message of a stream, that no method has begun to serve."""


class Method(Protocol):
    """The name, scope and limits of a method, which are needed before a call's messages are read."""

    @property
    def name(self) -> str: ...
    @property
    def scope(self) -> Scope:
        """The scope that a call's key must have."""

    @property
    def operation(self) -> Operation | None:
        """What it asks a model for; None: nothing."""

    @property
    def max_bytes(self) -> int | None:
        """The largest message, in bytes after decompression; None: ``Limits.max_bytes``."""


class UnaryMethod(Method, Protocol):
    """A method with one message in and one answer."""

    def take(self, rpc: UnaryRpc, body: bytes) -> None:
        """Serve a call with this message. The method must finish the call or set its ``owner``."""

    def given_up(self, rpc: UnaryRpc, num_bytes: int) -> None:
        """Record a call that the client cancelled before its message, of ``num_bytes`` bytes, was processed."""

    def take_compressed(self, rpc: UnaryRpc, body: bytes) -> None:
        """Serve a call with a compressed message, which ``UnaryRpc.decompressed`` decompresses."""


class StreamMethod(Method, Protocol):
    """A method with any number of messages in and answers."""

    def begin(self, rpc: StreamRpc) -> None: ...


class Rpc(Stream):
    """What calls with one message and calls with streams of messages share."""

    __slots__ = (
        "_begun_at",
        "_buffer",
        "_has_begun",
        "_limits",
        "_max_bytes",
        "_need",
        "_received",
        "_timer",
        "deadline",
        "has_expired",
        "head",
        "is_ended",
        "method",
        "owner",
        "principal",
    )

    def __init__(
        self, connection: StreamConnection, number: int, head: Head, limits: Limits, method: Method | None = None
    ) -> None:
        """Without a ``method`` the call is to be refused."""
        super().__init__(connection, number)
        self.head = head
        self.method = method
        self.principal: Principal = LOCAL  # by the key in its metadata
        self._limits = limits
        most = None if method is None else method.max_bytes
        self._max_bytes = limits.max_bytes if most is None else most
        self.owner: Cancellable | None = None
        self._buffer: bytearray | None = None  # a message that spans several frames
        self._need = PREFIX_BYTES  # bytes until the message's prefix or its end
        self._received = 0
        self._has_begun = False  # the answer's head was written
        self.is_ended = False  # the status was written, or the client disconnected
        self.has_expired = False  # it ended by its deadline
        self._begun_at = clock.now()  # the beginning of the current message
        self._timer: asyncio.TimerHandle | None = None
        self.deadline: float | None = None
        if head.timeout_s is not None:
            self.deadline = self._begun_at + head.timeout_s
            self._timer = asyncio.get_running_loop().call_later(head.timeout_s, self._expire)

    # -- the request ------------------------------------------------------------------------

    def _gather(self, data: bytes, start: int, stop: int, is_end: bool) -> None:
        """Assemble messages from frames. Calls ``_message`` with each complete message, and ``_request_ended`` at the
        end of the request."""
        buffer = self._buffer
        if buffer is None:
            buffer = self._buffer = bytearray()
            self._begun_at = clock.now()
        buffer += memoryview(data)[start:stop]
        self._received += stop - start
        while len(buffer) >= self._need:
            if self._need == PREFIX_BYTES:
                size = int.from_bytes(buffer[1:PREFIX_BYTES], "big")
                problem = self._problem(buffer[0], size)
                if problem is not None:
                    self.refuse(problem)
                    return
                self._need += size
                if len(buffer) < self._need:
                    break
            message = bytes(memoryview(buffer)[PREFIX_BYTES : self._need])
            self.connection.cost += FRAME + min(len(message), _READ_BYTES) * PROTOBUF_FIELD
            is_compressed = buffer[0] == 1
            if is_compressed:
                self.connection.cost += min(len(message), OFF_LOOP_BYTES) * DECOMPRESSED_BYTE
            del buffer[: self._need]
            self._need = PREFIX_BYTES
            self._begun_at = clock.now()
            if self.reserved_bytes or self.wanted_bytes:
                self.connection.receive_budget.release(self)
            self._message(message, is_compressed)
            if self.is_ended:
                return
        if not is_end:
            self._open_window()
        elif buffer:
            told = f"The request ends within a message, of which {len(buffer)} bytes came."
            self.refuse(Refusal(Status.INTERNAL, told))
        elif self.head.length not in (None, self._received):
            told = f"content-length is {self.head.length}, and {self._received} bytes came; leave it out."
            self.refuse(Refusal(Status.INTERNAL, told))
        else:
            self._request_ended()

    def _problem(self, flag: int, size: int) -> Refusal | None:
        """The refusal of a message by its prefix; None: the prefix is valid."""
        if flag > 1:
            return Refusal(Status.INTERNAL, f"A message begins with {flag}; 0 or 1 is expected.")
        if flag and self.head.encoding is None:
            return Refusal(Status.INTERNAL, "A message is compressed, and grpc-encoding does not say how; send it.")
        if size > self._max_bytes:
            return Refusal(Status.RESOURCE_EXHAUSTED, f"A message is larger than the {self._allowed()}.")
        return None

    def _allowed(self) -> str:
        """The limit of a message and its remedy, as a part of an error message."""
        if self.method is None or self.method.max_bytes is None:
            return f"{bytes_text(self._max_bytes)} that are allowed; send less, or raise server.max_body_bytes"
        return f"{bytes_text(self._max_bytes)} that {self.method.name} takes; send less"

    def _open_window(self) -> None:
        """Extend the stream's flow control window as far as there is room for unread bytes."""
        unread, buffer = self._unread(), self._buffer
        if self.wanted_bytes or self.is_request_complete or self.is_ended or unread >= FIRST_WINDOW:
            return
        partial = len(buffer) if buffer is not None else 0
        missing = self._need - partial
        if missing > self.receivable:
            self.request_window(missing - self.receivable)
            return
        more = FIRST_WINDOW - unread - partial - self.receivable
        if more >= FIRST_WINDOW // 2:
            self.grant_window(more)

    def grant_window(self, size: int) -> None:
        self._begun_at = clock.now()  # the wait for the grant does not count
        super().grant_window(size)

    async def decompressed(self, message: bytes) -> bytes | None:
        """The decompressed message; None: it could not be decompressed, and the call has failed."""
        try:
            return await decompressed(message, self.head.encoding, self._max_bytes)
        except BodyTooLarge:
            problem = f"A message is, when it is opened, larger than the {self._allowed()}."
            self.refuse(Refusal(Status.RESOURCE_EXHAUSTED, problem))
        except InvalidRequest:
            self.refuse(Refusal(Status.INTERNAL, f"A message is not {self.head.encoding}, as grpc-encoding says."))
        return None

    @abstractmethod
    def _message(self, message: bytes, is_compressed: bool) -> None: ...
    @abstractmethod
    def _request_ended(self) -> None: ...
    @abstractmethod
    def _waits_for_message(self) -> bool:
        """Whether the call waits for a message, which may be too slow."""

    def _unread(self) -> int:
        """Bytes of complete messages that were not read yet."""
        return 0

    # -- the answer -------------------------------------------------------------------------

    def time_left(self) -> float | None:
        """Seconds until the deadline; None: there is none."""
        return None if self.deadline is None else self.deadline - clock.now()

    def finish(self, answer: bytes, trailers: bytes) -> None:
        """Send the only answer with the status OK. No effect if the call has ended."""
        if self.is_ended:
            return
        self._mark_ended()
        self.send_answer(HEAD, b"\0" + len(answer).to_bytes(4, "big"), answer, OK + trailers)

    def fail(self, status: Status, details: str, trailers: Iterable[Header] = (), http: bytes = b"200") -> None:
        """End the call with an error status, after any answers that were sent. No effect if the call has ended."""
        if self.is_ended:
            return
        self._mark_ended()
        block = status_block(status, details, trailers)
        if self._has_begun:
            self.send_trailers(block)
        else:
            self.send_headers_only(only_head(http) + block)

    def refuse(self, refusal: Refusal) -> None:
        """Fail the call, and log it, before a method serves it or its next message. No effect if it has ended."""
        if not self.is_ended:
            self._limits.log_refusal(self, refusal)
            self.fail(refusal.status, refusal.details, http=refusal.http)

    def _mark_ended(self) -> None:
        self.is_ended = True
        self.owner = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        """Schedule the call's end. Thousands of deadlines may pass at the same time, so each call ends in a turn of its
        own."""
        self.connection.call_in_turn(self._end_expired)

    def _end_expired(self) -> None:
        if self.is_ended:
            return
        owner = self.owner
        self.has_expired = True
        self.discard_pending()
        self.fail(Status.DEADLINE_EXCEEDED, EXPIRED)
        if owner is not None:
            owner.cancel()

    # -- the connection's side --------------------------------------------------------------

    def peer_cancelled(self) -> None:
        owner = self.owner
        self._mark_ended()
        if owner is not None:
            owner.cancel()

    def drained(self) -> None: ...

    def check_timeouts(self, now: float, timeout_s: float) -> None:
        super().check_timeouts(now, timeout_s)
        if self.is_request_complete or self.is_ended or self.wanted_bytes or not self._waits_for_message():
            return
        if now - self._begun_at > self._limits.message_s + self._received / SLOWEST:
            owner = self.owner
            problem = "The request's message did not arrive in time; send it faster."
            self.refuse(Refusal(Status.DEADLINE_EXCEEDED, problem))
            if owner is not None:
                owner.cancel()


class UnaryRpc(Rpc):
    """A call with one message in and one answer."""

    __slots__ = ("_method", "_received_message")

    def __init__(
        self,
        connection: StreamConnection,
        number: int,
        head: Head,
        limits: Limits,
        method: UnaryMethod,
    ) -> None:
        super().__init__(connection, number, head, limits, method)
        self._method = method
        self._received_message: tuple[bytes, bool] | None = None

    def data_received(self, data: bytes, start: int, stop: int, is_end: bool) -> None:
        begin = start + PREFIX_BYTES
        if (
            is_end
            and self._buffer is None
            and begin <= stop
            and not data[start]
            and int.from_bytes(data[start + 1 : begin], "big") == stop - begin <= self._max_bytes
            and self.head.length in (None, stop - start)
        ):
            self._received_message = data[begin:stop], False  # nearly all messages come in one frame
            self.connection.after_frames(self._take_message)
        else:
            self._gather(data, start, stop, is_end)

    def _message(self, message: bytes, is_compressed: bool) -> None:
        if self._received_message is not None:
            problem = "The call takes one message, and another one came; send one in each call."
            self.refuse(Refusal(Status.UNIMPLEMENTED, problem))
        else:
            self._received_message = message, is_compressed

    def _request_ended(self) -> None:
        if self._received_message is None:
            problem = "The call takes one message, and none came; send one, if an empty one."
            self.refuse(Refusal(Status.UNIMPLEMENTED, problem))
            return
        self._buffer = None
        self.connection.after_frames(self._take_message)

    def _take_message(self) -> None:
        """Begin the call, unless a frame of the same read cancelled it."""
        assert self._received_message is not None, "its message is complete"
        (message, is_compressed), self._received_message = self._received_message, None
        if self.is_ended:
            self._method.given_up(self, len(message))
        elif is_compressed:
            self._method.take_compressed(self, message)
        else:
            self._method.take(self, message)

    def _waits_for_message(self) -> bool:
        return True

    def send_timed_out(self) -> None:
        self.reset()


class StreamRpc(Rpc):
    """A call with any number of messages in and answers."""

    __slots__ = ("_messages", "_num_unread", "_read_ahead", "_reader", "_writer")

    def __init__(
        self, connection: StreamConnection, number: int, head: Head, limits: Limits, method: StreamMethod | None = None
    ) -> None:
        super().__init__(connection, number, head, limits, method)
        self._messages: deque[tuple[bytes, bool]] = deque()
        self._num_unread = 0  # bytes
        self._read_ahead = 0  # bytes that were read since other tasks ran
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    def data_received(self, data: bytes, start: int, stop: int, is_end: bool) -> None:
        self._gather(data, start, stop, is_end)

    def _message(self, message: bytes, is_compressed: bool) -> None:
        if len(self._messages) >= MAX_UNREAD:
            owner = self.owner
            problem = f"{MAX_UNREAD} messages wait to be read; send them as answers come."
            self.refuse(Refusal(Status.RESOURCE_EXHAUSTED, problem))
            self._wake_reader()
            if owner is not None:
                owner.cancel()
            return
        self._messages.append((message, is_compressed))
        self._num_unread += PREFIX_BYTES + len(message)
        self._wake_reader()

    def _request_ended(self) -> None:
        self._wake_reader()

    def _waits_for_message(self) -> bool:
        return bool(self._buffer)

    def _unread(self) -> int:
        return self._num_unread

    async def read(self) -> bytes | None:
        """The next message; None: the request has no more messages. Raises RpcClosed."""
        while not self._messages:
            if self.is_ended:
                raise RpcClosed
            if self.is_request_complete:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        message, is_compressed = self._messages.popleft()
        self._num_unread -= PREFIX_BYTES + len(message)
        self._open_window()
        self._read_ahead += TURN_BYTES if is_compressed else len(message) + MESSAGE_BYTES
        if self._read_ahead > TURN_BYTES:
            self._read_ahead = 0
            await asyncio.sleep(0)  # let other tasks run
            if self.is_ended:
                raise RpcClosed
        if not is_compressed:
            return message
        found = await self.decompressed(message)
        if found is None:
            raise RpcClosed
        return found

    async def write(self, message: bytes) -> float:
        """Send one answer; waits while the client does not read, and returns for how long. Raises RpcClosed."""
        if self.is_ended:
            raise RpcClosed
        if not self._has_begun:
            self._has_begun = True
            self.send_headers(HEAD)
        self.send_data(b"\0" + len(message).to_bytes(4, "big") + message)
        blocked_at: float | None = None
        while (self.is_blocked or not self.connection.is_writable) and not self.is_ended:
            if blocked_at is None:
                blocked_at = clock.now()
            if self._writer is None:
                self._writer = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._writer)
        if self.is_ended:
            raise RpcClosed
        return 0.0 if blocked_at is None else clock.now() - blocked_at

    def close(self, trailers: Iterable[Header] = ()) -> None:
        """End the call with the status OK. No effect if the call has ended."""
        if self.is_ended:
            return
        self._mark_ended()
        if self._has_begun:
            self.send_trailers(OK + trailers_block(trailers))
        else:
            self._has_begun = True
            self.send_headers_only(HEAD + OK + trailers_block(trailers))

    def drained(self) -> None:
        if self._writer is not None:
            if not self._writer.done():
                self._writer.set_result(None)
            self._writer = None

    def peer_cancelled(self) -> None:
        super().peer_cancelled()
        self._messages.clear()
        self._wake_reader()
        self.drained()

    def send_timed_out(self) -> None:
        """End the call and cancel its owner, because the client has not read for ``server.send_timeout_s``."""
        owner = self.owner
        self.discard_pending()
        self.fail(Status.ABORTED, "No answer was taken for server.send_timeout_s; read answers as they come.")
        self._wake_reader()
        self.drained()
        if owner is not None:
            owner.cancel()

    def _wake_reader(self) -> None:
        if self._reader is not None:
            if not self._reader.done():
                self._reader.set_result(None)
            self._reader = None
