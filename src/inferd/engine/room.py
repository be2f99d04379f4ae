"""Memory for weights, asked of the system before anybody needs it.

The system clears memory when it is first touched, and a virtual machine's host may have to find it first: 0.1 to 1.4 s for
1.2 GB, in which a worker can import torch. So a thread touches one page after the other from the start, without the
interpreter's lock, and weights are then packed into pages that are there. Whoever computes at once has pages found for the KV cache
behind them: what is given back the system gives again without asking its host, if it is soon. Knows no tensor and imports no torch.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import threading
from pathlib import Path

from inferd.config import ModelConfig
from inferd.engine.memory import FREE_SHARE, ahead_bytes, kv_bytes_per_token
from inferd.engine.model.architecture import ITEM_BYTES, dtype_name, read_config
from inferd.engine.model.config import DecoderConfig, Source
from inferd.engine.resident import available_bytes
from inferd.engine.taken import taken_bytes
from inferd.errors import ModelLoadError
from inferd.registry.source import check_folder, resolve

_PAGE = 2 << 20  # a large one
_ALIGNED = 64  # bytes: a cache line, and the kernels' vectors
_AT_ONCE = 16  # large pages that are asked for in one call
_LEAST_BYTES = 64 << 20  # less is there at once
_SECOND_NODE = Path("/sys/devices/system/node/node1")


class Room:
    """Cleared memory that is handed out from its beginning to its end. It lives as long as somebody holds a part of it."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._size = nbytes
        self._taken = 0  # bytes from the beginning that are somebody's
        self._touching = (0, 0)  # bytes that the thread may write to just now
        self._touched = 0  # where it has come to
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._touch, name="inferd-room", daemon=True)
        self._thread.start()

    def take(self, nbytes: int) -> tuple[mmap.mmap, int] | None:
        """Where ``nbytes`` begin; None where there are not so many left. What lies there is 0."""
        with self._changed:
            begin = -(-self._taken // _ALIGNED) * _ALIGNED
            if self._is_closed or begin + nbytes > self._size:
                return None
            self._taken = begin + nbytes
            # The thread writes zeros, which must not meet what is written here.
            self._changed.wait_for(lambda: self._touching[0] >= self._taken or self._touching[1] <= begin)
        return self._memory, begin

    @property
    def spare_bytes(self) -> int:
        """What was touched and nobody took."""
        with self._changed:
            return max(self._touched - self._taken, 0)

    def close(self) -> None:
        """Nothing more is taken: the rest goes back to the system."""
        with self._changed:
            self._is_closed = True
        self._thread.join()
        rest = -(-self._taken // mmap.PAGESIZE) * mmap.PAGESIZE
        if rest < self._size:
            self._memory.madvise(mmap.MADV_DONTNEED, rest, self._size - rest)

    def _touch(self) -> None:
        zeros = os.open("/dev/zero", os.O_RDONLY)
        memory = memoryview(self._memory)
        begin = 0
        try:
            while True:
                with self._changed:
                    begin = max(begin, self._taken)
                    end = min(begin + _AT_ONCE * _PAGE, self._size)
                    if self._is_closed or begin >= end:
                        return
                    self._touching = (begin, end)
                # A byte of each page, read by the system: it waits for no lock of ours, nor for one of the whole process.
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


def weights_room(config: ModelConfig, *, with_cache: bool = False) -> Room | None:
    """Room for the weights of a model that generates; None where it would not be used, or brings nothing.

    ``with_cache``: more by the part of its KV cache that is used first, for as far as the thread comes meanwhile. For a process
    that computes as soon as the model is loaded: a worker gets these pages when it has nothing to do.
    """
    has_kernels = importlib.util.find_spec("inferd._kernels") is not None
    on_gpu = config.device.startswith("cuda") or (config.device == "auto" and os.path.exists("/dev/nvidiactl"))
    if not has_kernels or on_gpu or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    if _SECOND_NODE.exists():  # one thread would put everything into its own socket's memory
        return None
    try:
        folder = check_folder(resolve(config.source))
        source = Source(folder / "config.json")
        dims = read_config(source)
        itemsize = ITEM_BYTES[dtype_name(config.dtype, dims.dtype, on_cpu=True, source=source)]
        nbytes = taken_bytes(folder, source, dims, itemsize, config.quantization)
    except (ModelLoadError, OSError):  # the loader says what is wrong with it
        return None
    if nbytes < _LEAST_BYTES:
        return None
    nbytes += nbytes // 256  # what begins at whole lines takes a little more
    return Room(nbytes + (_used_first_bytes(config, dims, itemsize) if with_cache else 0))


def _used_first_bytes(config: ModelConfig, dims: DecoderConfig, itemsize: int) -> int:
    """Of the cache, as far as it can be told before the plan."""
    cache = config.kv_cache
    of_a_token = kv_bytes_per_token(
        num_layers=dims.num_layers,
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        itemsize=itemsize,
        dtype=cache.dtype,
    )
    asked = cache.memory_bytes if cache.num_blocks is None else cache.num_blocks * cache.block_size * of_a_token
    return min(ahead_bytes(of_a_token), int(available_bytes() * FREE_SHARE) if asked is None else asked)
