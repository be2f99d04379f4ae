"""A hand-over as its sender sees it: blocks of a prompt go to another worker while the prompt is computed.

The step loop gives the contents of blocks as they are computed and is never held up: a thread of the hand-over's own
writes them. Its report comes exactly once, whatever happens to the receiver.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from inferd import clock
from inferd.engine.hand_over.frames import (
    FRAME_BYTES,
    Blocks,
    Done,
    Frame,
    FrameError,
    FrameReader,
    Grant,
    Offer,
    Receipt,
    Refusal,
    encode,
)
from inferd.types import Handed

WAIT_S: Final = 10.0
"""Seconds for the receiver to answer or to read. Its loop answers between two steps."""

MOST_WAITING_BYTES: Final = 512 * 1024 * 1024
"""Of contents that the receiver has not read; more end the hand-over."""

_RECEIVE_BYTES: Final = 64 * 1024


class Sending(Protocol):
    """A hand-over as the engine uses it. ``give`` and ``finish`` are called in the order of the prompt's blocks."""

    @property
    def num_unwanted(self) -> int:
        """The prompt's first blocks that need not be given, as far as it is known."""
        ...

    def give(self, first: int, contents: list[bytes]) -> None:
        """Blocks from the ``first`` of the prompt on were computed."""
        ...

    def finish(self, *, num_computed: int) -> None:
        """Nothing more comes. ``num_computed``: tokens of the prompt that were computed."""
        ...


class Outgoing:
    """One hand-over. ``run`` belongs to a thread of its own, ``num_unwanted`` to the step loop, and ``give`` and
    ``finish`` to the step loop or the thread that reads the parts of ranks."""

    def __init__(
        self, offer: Offer, num_tokens: int, address: str, key: bytes, report: Callable[[Handed], None]
    ) -> None:
        """``num_tokens``: of the prompt. ``address``: where the receiver listens."""
        self._offer = offer
        self._num_tokens = num_tokens
        self._address = address
        self._key = key
        self._report = report
        self._parts: queue.SimpleQueue[Blocks | Done] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_waiting = 0  # bytes
        self._failure = ""
        self._num_present = 0  # the prompt's first blocks that the receiver has from elsewhere
        self._began_at = clock.now()
        self._done_at = self._began_at
        self._num_computed = 0
        self._num_bytes = 0
        self._is_done = False  # the last part was taken out of ``_parts``

    @property
    def num_unwanted(self) -> int:
        with self._lock:
            return len(self._offer.keys) if self._failure else self._num_present

    def give(self, first: int, contents: list[bytes]) -> None:
        size = sum(map(len, contents))
        with self._lock:
            if self._failure:
                return
            if self._num_waiting + size > MOST_WAITING_BYTES:
                self._failure = f"the receiver left {self._num_waiting} bytes unread"
                return
            self._num_waiting += size
        self._parts.put(Blocks(self._offer.hand_over, first, contents))

    def finish(self, *, num_computed: int) -> None:
        self._done_at, self._num_computed = clock.now(), num_computed
        self._parts.put(Done(self._offer.hand_over))

    def run(self) -> None:
        """Send everything and report."""
        num_blocks = 0
        try:
            num_blocks = self._send_all()
        except TimeoutError:
            self._fail(f"the receiver did not answer within {WAIT_S:g} s")
        except (OSError, FrameError) as error:
            self._fail(f"the connection to the receiver broke: {error}")
        while not self._is_done:  # the report has the time of the whole prompt
            self._next_part()
        missing = len(self._offer.keys) - num_blocks
        if missing and not self._failure:
            self._failure = f"{missing} of {len(self._offer.keys)} blocks did not arrive"
        self._report(
            Handed(
                request_id=self._offer.request_id,
                num_tokens=self._num_tokens,
                num_computed=self._num_computed,
                num_blocks=num_blocks,
                num_bytes=self._num_bytes,
                compute_s=self._done_at - self._began_at,
                wait_s=max(clock.now() - self._done_at, 0.0),
                failure=self._failure,
            )
        )

    def _next_part(self) -> Blocks | Done:
        part = self._parts.get()
        self._is_done = isinstance(part, Done)
        return part

    def _fail(self, why: str) -> None:
        with self._lock:
            self._failure = self._failure or why

    def _send_all(self) -> int:
        """The prompt's first blocks that the receiver has. Raises OSError and FrameError."""
        with _Connection(self._address, self._key) as connection:
            connection.send(self._offer)
            answer = connection.receive()
            if isinstance(answer, Refusal):
                self._fail(f"the receiver refused: {answer.reason}")
                return 0
            if not isinstance(answer, Grant):
                raise FrameError("an offer was not answered")
            with self._lock:
                self._num_present = answer.first
            while isinstance(part := self._next_part(), Blocks):
                self._num_bytes += _send_wanted(connection, part, answer)
                with self._lock:
                    self._num_waiting -= sum(map(len, part.contents))
            connection.send(part)
            receipt = connection.receive()
            if not isinstance(receipt, Receipt):
                raise FrameError("the end of a hand-over was not answered")
            return receipt.num_blocks


def _send_wanted(connection: _Connection, part: Blocks, grant: Grant) -> int:
    """Send what the receiver lacks of some blocks; the bytes of their contents."""
    begin = max(grant.first - part.first, 0)
    end = min(grant.first + grant.count - part.first, len(part.contents))
    wanted = part.contents[begin:end]
    if not wanted:
        return 0
    each = max(1, FRAME_BYTES // len(wanted[0]))
    for at in range(0, len(wanted), each):
        connection.send(msgspec.structs.replace(part, first=part.first + begin + at, contents=wanted[at : at + each]))
    return sum(map(len, wanted))


class _Connection:
    """A blocking connection to a receiver. Raises OSError (TimeoutError after ``WAIT_S``) and FrameError."""

    def __init__(self, address: str, key: bytes) -> None:
        self._address = address
        self._key = key
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(WAIT_S)
        self._reader = FrameReader(key)

    def __enter__(self) -> _Connection:
        try:
            self._socket.connect(self._address)
        except OSError:
            self._socket.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, frame: Frame) -> None:
        self._socket.sendall(encode(frame, self._key))

    def receive(self) -> Frame:
        while data := self._socket.recv(_RECEIVE_BYTES):
            for frame in self._reader.feed(data):
                if frame is None:
                    raise FrameError("an answer was changed on its way")
                return frame
        raise FrameError("the receiver closed the connection")
