"""A step on its way through the stages of a pipeline, as one rank sees it: its micro-batches and their hidden states.

Micro-batches are consecutive rows of a step (Huang et al. 2019, GPipe). A stage computes one of them while the next
stage computes the one before. Each stage computes them in order, so the keys and values that a row attends to are in
its cache.

All receives of a step begin with it, and a send is waited for at the end of the step alone. So a rank waits for nothing
but a micro-batch of the stage before, or for the other ranks of its stage in the same micro-batch. Both come earlier in
one order, by step, micro-batch and stage, so no ranks wait for each other in a circle.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from inferd.engine.model.cuts import Peers, Transfer
from inferd.engine.model.share import Share
from inferd.native.attention import FlatBatch
from inferd.native.low_rank import AdapterRows


def micro_batches(batch: FlatBatch) -> list[FlatBatch]:
    """The rows of a step between its ``cuts``, each as a step of its own."""
    if not batch.cuts:
        return [batch]
    starts, lengths = batch.query_start.tolist(), batch.seq_len.tolist()
    return [_rows(batch, first, end, starts, lengths) for first, end in pairwise((0, *batch.cuts, starts[-1]))]


def _rows(batch: FlatBatch, first: int, end: int, starts: list[int], lengths: list[int]) -> FlatBatch:
    """The rows ``first`` to ``end``. ``starts``, ``lengths``: the batch's ``query_start`` and ``seq_len``."""
    mine = range(bisect_right(starts, first) - 1, bisect_left(starts, end))  # the sequences that have rows there
    wanted, adapters = batch.output_rows, batch.adapters
    return FlatBatch(
        token_ids=batch.token_ids[first:end],
        positions=batch.positions[first:end],
        query_start=torch.tensor(
            [max(starts[i], first) - first for i in mine] + [end - first], dtype=batch.query_start.dtype
        ),
        # Rows behind the cut have no keys yet.
        seq_len=torch.tensor([lengths[i] - max(starts[i + 1] - end, 0) for i in mine], dtype=batch.seq_len.dtype),
        block_table=batch.block_table[mine.start : mine.stop],
        slots=batch.slots[first:end],
        num_sequences=len(mine),
        output_rows=None if wanted is None else wanted[(wanted >= first) & (wanted < end)] - first,
        adapters=None if adapters is None else AdapterRows(adapters.adapters, adapters.of[first:end]),
    )


class Pipe:
    """What a rank receives from the stage before and sends to the next one. The last stage sends to rank 0."""

    __slots__ = ("_device", "_dtype", "_entering", "_hidden", "_peers", "_returning", "_sent", "_shape", "_share")

    def __init__(
        self,
        share: Share,
        peers: Peers,
        num_passed: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``num_passed``: tensors [T, H] that a stage passes to the next one."""
        self._share, self._peers = share, peers
        self._shape, self._dtype, self._device = (num_passed, hidden_size), dtype, device
        self._entering: deque[tuple[Tensor, Transfer]] = deque()
        self._sent: list[Transfer] = []
        self._returning: list[Transfer] = []
        self._hidden = torch.empty((0, hidden_size), dtype=dtype, device=device)

    def begin(self, sizes: Sequence[int]) -> None:
        """Begin a step, whose micro-batches have so many rows."""
        share, peers, (num_passed, width) = self._share, self._peers, self._shape
        if not share.is_first:
            for rows in sizes:
                states = torch.empty((num_passed, rows, width), dtype=self._dtype, device=self._device)
                self._entering.append((states, peers.receive(states, share.rank - share.tensor)))
        elif share.rank == 0:
            self._hidden = torch.empty((sum(sizes), width), dtype=self._dtype, device=self._device)
            last = share.count - share.tensor
            self._returning = [peers.receive(rows, last) for rows in torch.split(self._hidden, list(sizes))]

    def entered(self) -> Tensor | None:
        """[n, T, H] what the stage before passed of the next micro-batch; None: this is the first stage."""
        if self._share.is_first:
            return None
        states, arriving = self._entering.popleft()
        arriving.wait()
        return states

    def leave(self, states: Tensor) -> None:
        """Send what this stage made of a micro-batch: [n, T, H], or of the last stage the hidden states [T, H]."""
        share = self._share
        if not share.is_last:
            self._sent.append(self._peers.send(states, share.rank + share.tensor))
        elif share.place == 0:
            self._sent.append(self._peers.send(states, 0))

    def end(self) -> Tensor:
        """The step's hidden states [T, H] in rank 0; [0, H] in others."""
        for transfer in (*self._returning, *self._sent):
            transfer.wait()
        self._returning, self._sent = [], []
        return self._hidden
