"""The messages between ranks within a step, over torch.distributed's gloo.

Partial sums are gathered and added here in the order of the ranks. A ring's order would depend on the number of rows,
so a row's result would depend on the rest of its batch.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from inferd.engine.model.share import Share

_HOST = "127.0.0.1"


class GlooPeers:
    """Implements ``Peers`` for the ranks of one machine."""

    def __init__(self, share: Share, store: Store, timeout_s: float) -> None:
        """``store``: where the ranks find each other; ``timeout_s``: the longest that one waits for another."""
        self._share, self._store, self._timeout = share, store, timedelta(seconds=timeout_s)
        self._stage: ProcessGroupGloo | None = None
        self._pairs: dict[int, ProcessGroupGloo] = {}  # by the other rank
        self._meetings = 0
        self.waits_in: int | None = None  # the number of the meeting that this rank waits in

    def join(self) -> None:
        """Meet the other ranks, which call this too. Raises RuntimeError where they do not in time."""
        share = self._share
        if share.tensor > 1:
            self._stage = self._group(f"stage {share.stage}", share.place, share.tensor)
        for one, other in share.links():
            if share.rank in (one, other):
                group = self._group(f"{one} and {other}", int(share.rank == other), 2)
                self._pairs[other if share.rank == one else one] = group

    def _group(self, name: str, rank: int, size: int) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=_HOST)]
        options._timeout = self._timeout
        return ProcessGroupGloo(PrefixStore(name, self._store), rank, size, options)

    def sum(self, partial: Tensor) -> Tensor:
        parts = self.gather(partial)
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        return total

    def gather(self, part: Tensor) -> list[Tensor]:
        assert self._stage is not None, "join() was not called"
        stage, place = self._stage, self._share.place
        part = part.contiguous()
        parts = [part if other == place else torch.empty_like(part) for other in range(self._share.tensor)]
        # Messages are sent by this thread. A collective of gloo is handed to another one, which takes longer than a
        # message of some kilobytes.
        works = [stage.recv([into], other, 0) for other, into in enumerate(parts) if other != place]  # type: ignore[attr-defined]
        works += [stage.send([part], other, 0) for other in range(len(parts)) if other != place]  # type: ignore[attr-defined]
        self._meet(works)
        return parts

    def collect(self, part: Tensor) -> list[Tensor]:
        stage, count = self._stage, self._share.tensor
        assert stage is not None, "join() was not called"
        part = part.contiguous()
        if self._share.place:
            self._meet([stage.send([part], 0, 0)])  # type: ignore[attr-defined]
            return [part]
        parts = [part, *(torch.empty_like(part) for _ in range(count - 1))]
        self._meet([stage.recv([parts[other]], other, 0) for other in range(1, count)])  # type: ignore[attr-defined]
        return parts

    def send(self, tensor: Tensor, rank: int) -> None:
        self._meet([self._pairs[rank].send([tensor.contiguous()], int(rank > self._share.rank), 0)])  # type: ignore[attr-defined]

    def receive(self, into: Tensor, rank: int) -> Tensor:
        self._meet([self._pairs[rank].recv([into], int(rank > self._share.rank), 0)])  # type: ignore[attr-defined]
        return into

    def _meet(self, works: list[Work]) -> None:
        self._meetings += 1
        self.waits_in = self._meetings
        for work in works:
            work.wait()
        self.waits_in = None
