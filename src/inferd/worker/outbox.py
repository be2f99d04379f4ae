"""Writes what the step loop has to say in a thread of its own.

Every write wakes the gateway, often on the very core that wrote: where all cores are busy, the step loop would stand behind
it with each step. Here the writer does, and what has gathered meanwhile leaves in one write.
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
        self._frames: queue.Queue[bytes | None] = queue.Queue(MAX_FRAMES)

    def post(self, messages: Sequence[FromWorker]) -> None:
        """Have them written in order. Waits where MAX_FRAMES are under way: a gateway that reads slowly slows the step
        loop down instead of filling memory. Raises ChannelError for what fits no frame."""
        self._frames.put(self._channel.frame(messages))

    def run(self) -> None:
        """Until ``close``. Raises OSError when nobody is at the other end."""
        frame = self._frames.get()
        while frame is not None:
            frames = [frame]
            following: bytes | None = b""
            while following is not None and not self._frames.empty():
                following = self._frames.get()
                frames += [following] if following else []
            self._channel.write(b"".join(frames))
            frame = self._frames.get() if following is not None else None

    def close(self) -> None:
        """Nothing more comes; ``run`` returns when all is written."""
        self._frames.put(None)
