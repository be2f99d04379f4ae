"""Cuts a stream of samples into rolling windows.

Knows sizes and bytes. Knows neither the samples' type nor time nor clients.
"""

from __future__ import annotations

from typing import NamedTuple


class Window(NamedTuple):
    """Samples ``begin`` to ``end`` (exclusive) of the stream. ``data`` has the context before them as well, with zeros
    for samples before the stream's beginning. The last window has zeros behind ``end`` if it is not full."""

    number: int
    begin: int
    end: int
    data: bytes


class WindowCutter:
    """Cuts a stream into windows of ``size`` samples. Each window begins ``hop`` samples after the one before, and has
    ``context`` samples from before its beginning. With ``hop`` above ``size`` the samples between two windows are left
    out."""

    __slots__ = ("_buffer", "_context", "_hop", "_index", "_sample_bytes", "_size", "_skip", "_total")

    def __init__(self, size: int, hop: int, context: int, sample_bytes: int = 1) -> None:
        assert size > 0, "a window has at least one sample"
        assert hop > 0, "each window begins after the one before"
        assert context >= 0
        assert sample_bytes > 0
        self._size = size
        self._hop = hop
        self._context = context
        self._sample_bytes = sample_bytes
        self._buffer = bytearray(context * sample_bytes)  # from the beginning of the next window's context
        self._skip = 0  # bytes to come that belong to no window
        self._total = 0  # samples that were pushed
        self._index = 0  # of the next window

    @property
    def is_empty(self) -> bool:
        """Whether no sample was pushed yet."""
        return not self._total

    def push(self, data: bytes) -> None:
        """Add whole samples to the stream."""
        assert len(data) % self._sample_bytes == 0, "the data is a whole number of samples"
        self._total += len(data) // self._sample_bytes
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        self._buffer += data[skipped:] if skipped else data

    def next_window(self) -> Window | None:
        """The next window; None: its samples are not complete yet."""
        begin = self._index * self._hop
        if self._total < begin + self._size:
            return None
        return self._cut(begin, begin + self._size)

    def last_window(self) -> Window | None:
        """The last window of a stream that is over, filled up with zeros. None: no sample is left for it."""
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
