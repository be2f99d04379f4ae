"""Writes the outputs of the step loop in a thread of its own.

Every write wakes the gateway, often on the core of the writer. When all cores are busy, the step loop would wait for
the gateway at each step. With a thread of its own only the writer waits, and the outputs of several steps leave in one
write.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Final

from inferd.worker.channel import BlockingChannel
from inferd.worker.messages import FromWorker

MAX_FRAMES: Final = 64


class Outbox:
    """``post`` belongs to the step loop, ``run`` to the thread that writes."""

    def __init__(self, channel: BlockingChannel) -> None:
        self._channel = channel
        self._frames: queue.Queue[bytes | bytearray | None] = queue.Queue(MAX_FRAMES)

    def post(self, messages: Sequence[FromWorker]) -> None:
        """Queue messages to be written in order. Waits while MAX_FRAMES are queued, so that a gateway that reads slowly
        slows the step loop down instead of filling memory. Raises ChannelError for messages that fit no frame."""
        self._frames.put(self._channel.frame(messages))

    def run(self) -> None:
        """Write until ``close``. Raises OSError when the other end is closed."""
        frame = self._frames.get()
        while frame is not None:
            frames = [frame]
            following: bytes | bytearray | None = b""
            while following is not None and not self._frames.empty():
                following = self._frames.get()
                frames += [following] if following else []
            self._channel.write(frame if len(frames) == 1 else b"".join(frames))
            frame = self._frames.get() if following is not None else None

    def close(self) -> None:
        """Post nothing more. ``run`` returns when everything is written."""
        self._frames.put(None)
