"""Large bodies put together of their parts, in pieces.

Interpreted in every form of inferd. One call that joins 16 MB holds the interpreter's lock until the last page of the
new memory was touched: up to 50 ms where the operating system has to find the pages first.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Final

PIECE_BYTES: Final = 256 * 1024  # copied in one call


def joined(parts: Iterable[bytes], size: int) -> bytes:
    """The parts, one after the other; ``size``: of all of them. To be called on another thread than the event loop's.

    The memory is asked for as zeros, which no call writes, and ``BytesIO`` gives its buffer away without a copy.
    """
    whole = io.BytesIO(bytes(size))
    for part in parts:
        if len(part) <= PIECE_BYTES:
            whole.write(part)
            continue
        with memoryview(part) as view:
            for at in range(0, len(part), PIECE_BYTES):
                whole.write(view[at : at + PIECE_BYTES])
    return whole.getvalue()
