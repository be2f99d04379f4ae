"""Rolling windows over a stream of samples: which bytes each of them has.

Pure: knows sizes and bytes, no sample's type, no time and no client.
"""

from __future__ import annotations

from typing import NamedTuple


class Window(NamedTuple):
    """Samples ``begin`` to ``end`` of the stream. ``data`` has the context before them as well: zeros where the stream
    had not begun, and zeros behind ``end`` where it is the last window and not full."""

    number: int
    begin: int
    end: int
    data: bytes


class WindowCutter:
    """Cuts a stream into windows of ``size`` samples, each ``hop`` samples behind the one before, and each with
    ``context`` samples from before it. With ``hop`` above ``size`` the samples between two windows are left out."""

    __slots__ = ("_buffer", "_context", "_hop", "_index", "_sample_bytes", "_size", "_skip", "_total")

    def __init__(self, size: int, hop: int, context: int, sample_bytes: int = 1) -> None:
        assert size > 0, "a window has samples"
        assert hop > 0, "the next window is another one"
        assert context >= 0
        assert sample_bytes > 0
        self._size = size
        self._hop = hop
        self._context = context
        self._sample_bytes = sample_bytes
        self._buffer = bytearray(context * sample_bytes)  # from the next window's context on
        self._skip = 0  # bytes to come that belong to no window
        self._total = 0  # samples that came
        self._index = 0  # of the next window

    @property
    def is_empty(self) -> bool:
        """Nothing came yet."""
        return not self._total

    def push(self, data: bytes) -> None:
        """Further samples: whole ones."""
        assert len(data) % self._sample_bytes == 0, "a sample is not cut"
        self._total += len(data) // self._sample_bytes
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        self._buffer += data[skipped:] if skipped else data

    def next_window(self) -> Window | None:
        """The next window; None: its last sample has not come yet."""
        begin = self._index * self._hop
        if self._total < begin + self._size:
            return None
        return self._cut(begin, begin + self._size)

    def last_window(self) -> Window | None:
        """The stream is over: what came and was in no window yet, with zeros behind it. None: everything was, or
        would have been left out."""
        begin = self._index * self._hop
        covered = begin - self._hop + self._size if self._index else 0
        if self._total <= max(begin, covered):
            return None
        end = min(self._total, begin + self._size)
        self._buffer += bytes((begin + self._size - end) * self._sample_bytes)
        return self._cut(begin, end)

    def _cut(self, begin: int, end: int) -> Window:
        window = Window(
            self._index, begin, end, bytes(self._buffer[: (self._context + self._size) * self._sample_bytes])
        )
        self._index += 1
        step = self._hop * self._sample_bytes
        self._skip = max(0, step - len(self._buffer))
        del self._buffer[:step]
        return window
