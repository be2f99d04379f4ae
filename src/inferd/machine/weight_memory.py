"""Memory for weights, requested from the system before the weights are read.

The system clears a page when it is first touched, and a virtual machine's host may have to find it first. That takes
0.1 to 1.4 s for 1.2 GB, which is time that a worker needs anyway to import torch. So a thread touches the pages from
the start of the process, without the interpreter's lock, and weights are later packed into pages that exist. Touched
pages that no weight used are returned to the system, which soon gives them to the KV cache without asking its host.

Knows no tensor and imports no torch.
"""

from __future__ import annotations

import mmap
import os
import threading

_PAGE = 2 << 20  # a large one
_ALIGNED = 64  # bytes: a cache line, and the kernels' vectors
_AT_ONCE = 16  # large pages that are asked for in one call


class WeightMemory:
    """Cleared memory that is handed out from its beginning to its end. It lives as long as any part of it is
    referenced."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._size = nbytes
        self._reserved = 0  # bytes from the beginning that were handed out
        self._touching = (0, 0)  # bytes that the thread may write to just now
        self._touched = 0  # end of the pages that it has touched
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._touch, name="inferd-room", daemon=True)
        self._thread.start()

    def reserve(self, nbytes: int) -> tuple[mmap.mmap, int] | None:
        """The memory and the offset of ``nbytes`` zero bytes; None where less is left."""
        with self._changed:
            begin = -(-self._reserved // _ALIGNED) * _ALIGNED
            if self._is_closed or begin + nbytes > self._size:
                return None
            self._reserved = begin + nbytes
            # The thread writes zeros, which must not overwrite the caller's data.
            self._changed.wait_for(lambda: self._touching[0] >= self._reserved or self._touching[1] <= begin)
        return self._memory, begin

    @property
    def spare_bytes(self) -> int:
        """Bytes that were touched and not reserved."""
        with self._changed:
            return max(self._touched - self._reserved, 0)

    def close(self) -> None:
        """Return the rest to the system. Nothing can be reserved afterwards."""
        with self._changed:
            self._is_closed = True
        self._thread.join()
        rest = -(-self._reserved // mmap.PAGESIZE) * mmap.PAGESIZE
        if rest < self._size:
            self._memory.madvise(mmap.MADV_DONTNEED, rest)

    def _touch(self) -> None:
        zeros = os.open("/dev/zero", os.O_RDONLY)
        memory = memoryview(self._memory)
        begin = 0
        try:
            while True:
                with self._changed:
                    begin = max(begin, self._reserved)
                    end = min(begin + _AT_ONCE * _PAGE, self._size)
                    if self._is_closed or begin >= end:
                        return
                    self._touching = (begin, end)
                # The system reads a byte into each page, without the interpreter's lock and without one of the whole
                # process.
                os.readv(zeros, [memory[at : at + 1] for at in range(begin, end, _PAGE)])
                begin = end
                with self._changed:
                    self._touching = (begin, begin)
                    self._touched = begin
                    self._changed.notify_all()
        finally:
            memory.release()
            os.close(zeros)
            with self._changed:
                self._touching = (self._size, self._size)
                self._changed.notify_all()
