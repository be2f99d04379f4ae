"""Heads of messages that come again and again, but for the length of what follows them.

A head that was parsed once need not be parsed when its bytes come again: they mean the same. Only the digits of
Content-Length differ from one message to the next, so they are taken out of what is compared.
"""

from __future__ import annotations

from typing import Final

_WORD: Final = b"ength: "
_LINE: Final = b"\r\ncontent-length: "
_BEFORE: Final = len(b"\ncontent-l")
MAX_DIGITS: Final = 8


def pattern_of(data: bytes, end: int) -> tuple[bytes, bytes]:
    """The head ``data[:end]`` without the digits of its length, and these digits; empty where there are none.

    Takes the first header that looks like it: ``is_exact`` tells whether that was the one. A head whose end has not
    been read yet (``end`` < 0) is like none.
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
    """Where the digits begin; -1: nowhere. Inference-Header-Content-Length, which may come before, is another length."""
    at = data.find(_WORD, 0, end)
    if at > _BEFORE and data[at - _BEFORE] != 0x0A:
        at = data.find(_WORD, at + len(_WORD), end)
    return at + len(_WORD) if at >= 0 else -1


def is_exact(head: bytes) -> bool:
    """Whether ``pattern_of`` finds the length of this head's message where it is, and nothing else."""
    at = _length_at(head, len(head))
    stop = head.find(b"\r", at)
    digits = head[at : len(head) if stop < 0 else stop]
    return head[max(0, at - len(_LINE)) : at].lower() == _LINE and digits.isdigit() and len(digits) <= MAX_DIGITS
