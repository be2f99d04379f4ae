"""The bytes of one call, while it runs: references to its body and to the parts of its answer, no copies."""

from __future__ import annotations

from typing import Protocol

from inferd.events import HttpServed
from inferd.observe.payloads.texts import Texts

MAX_ANSWER_BYTES = 4 * 1024 * 1024
"""Of an answer that is held; the record of a longer one has its beginning."""


class Head(Protocol):
    """The head of a request."""

    @property
    def path(self) -> str: ...
    def header(self, name: bytes, /) -> bytes | None:
        """The first header of a lower-case name."""


class Receiver(Protocol):
    """Gets the captures of calls that are over."""

    def offer(self, capture: Capture, event: HttpServed) -> None:
        """Never waits and never raises."""


class Capture:
    """What one call received and sent."""

    __slots__ = ("_receiver", "answer", "head", "is_cut", "is_whole", "num_held", "request", "texts", "unique")

    def __init__(self, receiver: Receiver, texts: Texts | None, head: Head | None = None, unique: str = "") -> None:
        """``texts``: those that may be kept; None: sizes and digests alone. ``head``: of a request over HTTP; None: the
        call cannot be asked again. ``unique``: the call's random id."""
        self._receiver = receiver
        self.texts = texts
        self.head = head
        self.unique = unique
        self.request: bytes | None = None
        self.answer: list[bytes] = []
        self.num_held = 0
        self.is_cut = False
        self.is_whole = False

    def take(self, body: bytes) -> None:
        """The whole answer, before it is compressed. Later parts are the same answer again."""
        if not self.is_whole and not self.answer:
            self.is_whole = True
            self._hold(body)

    def add(self, part: bytes) -> None:
        """A part of a streamed answer."""
        if not self.is_whole:
            self._hold(part)

    def _hold(self, part: bytes) -> None:
        if self.num_held + len(part) > MAX_ANSWER_BYTES:
            self.is_cut = True
        else:
            self.num_held += len(part)
            self.answer.append(part)

    @property
    def num_bytes(self) -> int:
        return self.num_held + len(self.request or b"")

    def finish(self, event: HttpServed) -> None:
        """The call is over."""
        self._receiver.offer(self, event)
