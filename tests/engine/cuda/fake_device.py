"""A device at the bottom of the tests: the CPU, whose graphs compute again what they recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from inferd.engine.cuda.device import Mark


class FakeMark:
    def __init__(self, waited: list[int], number: int) -> None:
        self._waited, self._number = waited, number

    def synchronize(self) -> None:
        self._waited.append(self._number)


class FakeDevice:
    """Implements ``Device``; tells what was asked of it."""

    def __init__(self, *, total: int = 1 << 30, free: int = 1 << 29, peak: int = 0) -> None:
        self.where = torch.device("cpu")
        self.recorded: list[int] = []  # rows of each graph, in order
        self.replayed: list[int] = []
        self.waited: list[int] = []  # marks
        self.num_marks = 0
        self.num_selected = 0
        self.is_replaying = False
        self._total, self._free, self._peak = total, free, peak

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0x7F, dtype=torch.uint8)

    def mark(self) -> Mark:
        self.num_marks += 1
        return FakeMark(self.waited, self.num_marks)

    def select(self) -> None:
        self.num_selected += 1

    def record(self, computes: Sequence[Callable[[], Tensor]]) -> list[tuple[Callable[[], None], Tensor]]:
        return [self._record(compute) for compute in computes]

    def _record(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        result = compute()
        self.recorded.append(len(result))

        def replay() -> None:
            self.replayed.append(len(result))
            result.copy_(compute())

        return replay, result

    def free_bytes(self) -> int:
        return self._free

    def total_bytes(self) -> int:
        return self._total

    def peak_bytes(self, compute: Callable[[], object]) -> int:
        compute()
        return self._peak
