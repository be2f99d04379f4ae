"""What the engine needs of a CUDA device beside tensors: pinned memory, events, recorded graphs, free memory.

``CudaDevice`` is the only implementation outside the tests, and holds nothing that could be tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in the device's work."""

    def synchronize(self) -> None:
        """Wait until the device has done all work before the mark."""
        ...


class Device(Protocol):
    where: torch.device

    def pinned(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of host memory that the device can read by itself."""
        ...

    def mark(self) -> Mark:
        """A mark after all work that was launched so far."""
        ...

    def select(self) -> None:
        """Make it the current thread's device, on which kernels are launched."""
        ...

    def record(self, computes: Sequence[Callable[[], Tensor]]) -> list[tuple[Callable[[], None], Tensor]]:
        """Record each of ``computes`` as a graph: a function that repeats it, and the tensor that holds its result.

        The functions must use the same memory every time and must not wait for the device. The graphs share their
        memory, so only one runs at a time.
        """
        ...

    def free_bytes(self) -> int:
        """Free device memory, including what this process's allocator holds unused."""
        ...

    def total_bytes(self) -> int: ...

    def peak_bytes(self, compute: Callable[[], object]) -> int:
        """The most device memory that ``compute`` holds at a time, beyond what was allocated before."""
        ...


class CudaDevice:
    """Implements ``Device`` for one of torch's CUDA devices."""

    __slots__ = ("where",)

    def __init__(self, where: torch.device) -> None:
        self.where = where

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Mark:
        event: Mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        torch.cuda.current_stream(self.where).record_event(event)  # type: ignore[arg-type]
        return event

    def select(self) -> None:
        if self.where.index is not None:
            torch.cuda.set_device(self.where)

    def record(self, computes: Sequence[Callable[[], Tensor]]) -> list[tuple[Callable[[], None], Tensor]]:
        found = []
        with torch.cuda.device(self.where):
            # A pool of their own: torch refuses one whose graphs have all gone. One stream for all, as cuBLAS keeps 32
            # MB for each.
            pool = torch.cuda.graph_pool_handle()
            aside = torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]
            for compute in computes:
                # First run without recording: a graph cannot contain the compilation of kernels or the setup of
                # libraries.
                aside.wait_stream(torch.cuda.current_stream(self.where))
                with torch.cuda.stream(aside):
                    for _ in range(2):
                        compute()
                torch.cuda.current_stream(self.where).wait_stream(aside)
                torch.cuda.synchronize(self.where)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    result = compute()
                found.append((graph.replay, result))
        return found

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.where)[0])

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.where)[1])

    def peak_bytes(self, compute: Callable[[], object]) -> int:
        self.select()
        torch.cuda.synchronize(self.where)
        torch.cuda.reset_peak_memory_stats(self.where)
        before = torch.cuda.memory_allocated(self.where)
        compute()
        torch.cuda.synchronize(self.where)
        return int(torch.cuda.max_memory_allocated(self.where)) - before
