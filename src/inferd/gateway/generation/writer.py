"""The frames of a streamed answer, as each dialect writes them."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import msgspec

from inferd.errors import InferdError
from inferd.gateway.call import EVENTS_TYPE
from inferd.types import Output, Usage

encode: Final = msgspec.json.Encoder().encode


class StreamForm(NamedTuple):
    """The form of a dialect's streams."""

    ending: bytes  # the last bytes of the last frame of a complete answer; no other frame ends with them
    heartbeat: bytes  # a frame without content, while the first output is awaited
    always_beats: bool = False  # also for models that are loaded; a late failure is then an event and no status
    content_type: bytes = EVENTS_TYPE


class AnswerWriter(Protocol):
    """Turns outputs into the frames of one dialect."""

    def write(self, number: int, output: Output) -> bytes:
        """The frames for one output of the request ``number``, possibly none."""
        ...

    def ending(self, usage: Usage | None) -> bytes:
        """The frames after the last output of an answer without an error."""
        ...

    def failed(self, error: InferdError) -> bytes:
        """The last frames of an answer that failed after it had begun. Records the error in the call."""
        ...
