"""Rolling windows are what a slow twin cuts out of the whole stream."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.gateway.windows.cutting import Window, WindowCutter


def twin(stream: bytes, size: int, hop: int, context: int, sample_bytes: int) -> tuple[list[Window], Window | None]:
    """Every full window of a stream that is known as a whole, and its last one, padded."""
    samples = [stream[at : at + sample_bytes] for at in range(0, len(stream), sample_bytes)]
    zero = bytes(sample_bytes)

    def data(begin: int) -> bytes:
        return b"".join(samples[at] if 0 <= at < len(samples) else zero for at in range(begin - context, begin + size))

    full: list[Window] = []
    begin = seen = 0
    while begin + size <= len(samples):
        full.append(Window(len(full), begin, begin + size, data(begin)))
        seen = begin + size
        begin += hop
    if len(samples) <= max(begin, seen):
        return full, None
    return full, Window(len(full), begin, len(samples), data(begin))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 12), st.integers(1, 16), st.integers(0, 20), st.integers(1, 4), st.lists(st.integers(0, 30), max_size=12)
)  # fmt: skip
def test_windows_are_those_of_the_whole_stream_however_it_comes(
    size: int, hop: int, context: int, sample_bytes: int, pieces: list[int]
) -> None:
    total = sum(pieces) * sample_bytes
    stream = bytes(1 + at % 255 for at in range(total))
    windows = WindowCutter(size, hop, context, sample_bytes)
    found, at = [], 0
    for piece in pieces:
        end = at + piece * sample_bytes
        windows.push(stream[at:end])
        at = end
        while (window := windows.next_window()) is not None:
            found.append(window)
        assert len(windows._buffer) < (context + size) * sample_bytes  # nothing is kept that no window needs
    assert (found, windows.last_window()) == twin(stream, size, hop, context, sample_bytes)
    assert windows.last_window() is None


def test_the_context_of_the_first_window_is_silence() -> None:
    windows = WindowCutter(4, 4, 2)
    windows.push(b"abcdefgh")
    assert windows.next_window() == Window(0, 0, 4, b"\0\0abcd")
    assert windows.next_window() == Window(1, 4, 8, b"cdefgh")
    assert windows.next_window() is None
