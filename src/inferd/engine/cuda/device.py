"""What the engine asks of a CUDA device beside tensors: pinned memory, marks in its stream, recorded graphs, its memory.

``CudaDevice`` is the only one outside the tests, and holds nothing that could be tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in the device's work."""

    def synchronize(self) -> None:
        """Return when the device has come there."""
        ...


class Device(Protocol):
    where: torch.device

    def pinned(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] on the host, which the device reads by itself."""
        ...

    def mark(self) -> Mark:
        """Behind everything that was asked for so far."""
        ...

    def record(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """``compute`` as a graph: what repeats it, and the tensor that then has its result. It must work on the same memory
        every time, and wait for nothing."""
        ...

    def free_bytes(self) -> int:
        """Device memory that nobody has, this process's allocator included."""
        ...

    def total_bytes(self) -> int: ...

    def peak_bytes(self, compute: Callable[[], object]) -> int:
        """Most device memory that ``compute`` has at a time, beyond what was taken before."""
        ...


class CudaDevice:
    """Implements ``Device`` for one of torch's CUDA devices."""

    __slots__ = ("_pool", "where")

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self._pool = torch.cuda.graph_pool_handle()  # graphs share their memory: only one is computed at a time

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Mark:
        event: Mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        torch.cuda.current_stream(self.where).record_event(event)  # type: ignore[arg-type]
        return event

    def record(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        with torch.cuda.device(self.where):
            # First without recording: kernels are compiled and libraries set up, which a graph cannot have in it.
            aside = torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream(self.where))
            with torch.cuda.stream(aside):
                for _ in range(2):
                    compute()
            torch.cuda.current_stream(self.where).wait_stream(aside)
            torch.cuda.synchronize(self.where)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                result = compute()
        return graph.replay, result

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.where)[0])

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.where)[1])

    def peak_bytes(self, compute: Callable[[], object]) -> int:
        torch.cuda.synchronize(self.where)
        torch.cuda.reset_peak_memory_stats(self.where)
        before = torch.cuda.memory_allocated(self.where)
        compute()
        torch.cuda.synchronize(self.where)
        return int(torch.cuda.max_memory_allocated(self.where)) - before
