"""The pattern of an HTTP/1.1 message's head: its bytes without the digits of Content-Length.

Two heads with equal bytes have equal meanings, so a head that was parsed once need not be parsed again. Successive
messages often differ only in Content-Length. Its digits are left out of the comparison and read separately.
"""

from __future__ import annotations

from typing import Final

_WORD: Final = b"ength: "
_LINE: Final = b"\r\ncontent-length: "
_BEFORE: Final = len(b"\ncontent-l")
MAX_DIGITS: Final = 8


def pattern_of(data: bytes, end: int) -> tuple[bytes, bytes]:
    """The head ``data[:end]`` without the digits of Content-Length, and these digits; empty where there are none.

    The search is fast and inexact: it takes the first header whose name ends in the same letters. ``is_exact`` tells
    whether that header was Content-Length. A head that is incomplete (``end`` < 0) has the empty pattern.
    """
    if end < 0:
        return b"", b""
    at = _length_at(data, end)
    if at < 0:
        return data[:end], b""
    stop = data.find(b"\r", at, end)
    if stop < 0:
        stop = end
    if stop - at > MAX_DIGITS:
        return data[:end], b""
    return data[:at] + data[stop:end], data[at:stop]


def _length_at(data: bytes, end: int) -> int:
    """The position of the digits; -1: there are none. Skips Inference-Header-Content-Length in front of them."""
    at = data.find(_WORD, 0, end)
    if at > _BEFORE and data[at - _BEFORE] != 0x0A:
        at = data.find(_WORD, at + len(_WORD), end)
    return at + len(_WORD) if at >= 0 else -1


def is_exact(head: bytes) -> bool:
    """Whether the digits that ``pattern_of`` finds in ``head`` are those of a Content-Length header."""
    at = _length_at(head, len(head))
    stop = head.find(b"\r", at)
    digits = head[at : len(head) if stop < 0 else stop]
    return head[max(0, at - len(_LINE)) : at].lower() == _LINE and digits.isdigit() and len(digits) <= MAX_DIGITS


class SplitHead:
    """A head that ``is_exact``, split around the digits of Content-Length. A comparison finds the same head again."""

    __slots__ = ("_after", "_after_size", "_before", "_before_size")

    def __init__(self, head: bytes) -> None:
        """``head``: without the empty line after it."""
        at = _length_at(head, len(head))
        stop = head.find(b"\r", at)
        self._before = head[:at]
        self._after = (head[stop:] if stop >= 0 else b"") + b"\r\n\r\n"
        self._before_size, self._after_size = len(self._before), len(self._after)

    def body_at(self, data: bytes) -> int:
        """The position of the body, if ``data`` is this head with any length, and a complete body; -1: it is not."""
        if data.startswith(self._before):
            at = self._before_size
            stop = data.find(b"\r", at, at + MAX_DIGITS + 1)
            digits = data[at:stop]
            if data.startswith(self._after, stop) and digits.isdigit():
                begin = stop + self._after_size
                if int(digits) == len(data) - begin:
                    return begin
        return -1
