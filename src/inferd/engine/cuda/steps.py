"""Computes steps on a device: one copy for all arrays, and recorded graphs for steps of single tokens.

Launching a model's kernels one by one takes longer than the arithmetic of a small batch. So the launches for some
numbers of sequences are recorded at load, over arrays at fixed addresses. A step with fewer sequences is padded with
rows that write to an unused block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from inferd.engine.cuda.device import Device, Mark
from inferd.engine.model.load import Decoder
from inferd.native.attention import FlatBatch
from inferd.native.kv_cache import KVCache
from inferd.native.paged_attention import AttentionKind, create_attention

_STEP = 16  # sequences between one graph and the next, from twice as many on
_MOST = 512  # sequences of a graph: beyond, arithmetic takes longer than launching
_ALIGNED = 16  # bytes


def graph_sizes(max_sequences: int) -> tuple[int, ...]:
    """Numbers of sequences that graphs are recorded for: at most 16 rows of a step, or half of it, are padding."""
    most = min(max_sequences, _MOST)
    sizes = [1, 2, 4, 8, *range(_STEP, most, _STEP)]
    return (*(size for size in sizes if size < most), most)


def can_record(decoder: Decoder, kind: AttentionKind) -> bool:
    """Whether a step of this decoder never waits for the device. Experts do: they read which of them were chosen.

    Ranks do not record: exchanges in graphs were tried on no device.
    """
    return kind == "triton" and decoder.share.count == 1 and all(moe is None for moe in decoder.config.moe)


@dataclass(slots=True)
class RecordedBatch(FlatBatch):
    """A step that a graph computes: views of the arrays that it reads."""

    num_filled: int = 0  # sequences of the step; the rest of the rows are filled up


class _Pinned:
    """Two buffers in turn, so that one is written while the device may still read the other."""

    __slots__ = ("_buffers", "_device", "_marks", "_turn")

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        self._buffers = [device.pinned(num_bytes) for _ in range(2)]
        self._marks: list[Mark | None] = [None, None]
        self._turn = 0

    def next(self, num_bytes: int) -> Tensor:
        self._turn = 1 - self._turn
        mark = self._marks[self._turn]
        if mark is not None:
            mark.synchronize()
        if num_bytes > self._buffers[self._turn].numel():
            self._buffers[self._turn] = self._device.pinned(num_bytes)
        return self._buffers[self._turn][:num_bytes]

    def sent(self) -> None:
        self._marks[self._turn] = self._device.mark()


class StepsOnDevice:
    """Brings steps to a device and computes them there."""

    def __init__(self, decoder: Decoder, cache: KVCache, kind: AttentionKind, device: Device, *, max_rows: int) -> None:
        """``cache``: no sequence uses its last block. ``max_rows``: rows of a step, for which memory is pinned."""
        self._decoder, self._cache, self._kind, self._device = decoder, cache, kind, device
        self._null_block = cache.num_blocks - 1
        self._pinned = _Pinned(device, 64 * max_rows)
        self._graphs: dict[int, tuple[Callable[[], None], Tensor]] = {}
        self._sizes: tuple[int, ...] = ()
        # What graphs read: [3, most] tokens, positions, slots; lengths; where rows begin; blocks.
        self._rows = self._lengths = self._starts = self._table = torch.empty(0)

    def record(self, sizes: tuple[int, ...], max_blocks: int) -> None:
        """Record a graph for each of ``sizes``, for sequences with up to ``max_blocks`` blocks.

        The largest is recorded first, and the others reuse its memory.
        """
        most = max(sizes)
        with torch.inference_mode():
            self._table = torch.full((most, max_blocks), self._null_block, dtype=torch.int32, device=self._device.where)
            self._rows = torch.zeros((3, -(-most // 2) * 2), dtype=torch.int64, device=self._device.where)
            self._lengths = torch.ones(most, dtype=torch.int32, device=self._device.where)
            self._starts = torch.arange(most + 1, dtype=torch.int32, device=self._device.where)
            self._sizes = tuple(sorted(sizes))
            empty = np.zeros((3, 0), dtype=np.int64), np.zeros(0, dtype=np.int32), np.zeros((0, 1), dtype=np.int32)
            batches = [self._fill(size, *empty) for size in sorted(sizes, reverse=True)]
            graphs = self._device.record([partial(self._compute, batch) for batch in batches])
            self._graphs = {batch.num_sequences: graph for batch, graph in zip(batches, graphs, strict=True)}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of sequences that have graphs, ascending."""
        return self._sizes

    def stage(
        self, by_row: np.ndarray, by_sequence: np.ndarray, table: np.ndarray, *, has_adapters: bool = False
    ) -> FlatBatch:
        """The step as arrays on the device.

        ``by_row`` [3, T] int64: tokens, positions, slots. ``by_sequence`` [2 S + 1] int32: bounds of rows, then
        lengths. ``table`` [S, n] int32. ``has_adapters``: some rows use an adapter, which no graph has recorded.
        """
        self._device.select()  # the thread that computes may change from step to step
        count, rows = table.shape[0], by_row.shape[1]
        if (
            not has_adapters
            and rows == count
            and self._sizes
            and count <= self._sizes[-1]
            and table.shape[1] <= self._table.shape[1]
        ):
            size = next(size for size in self._sizes if size >= count)
            return self._fill(size, by_row, by_sequence[count + 1 :], table)
        # Each begins at a multiple of 16 bytes in every step: kernels are compiled for how pointers are aligned.
        token_ids, positions, slots, query_start, seq_len, blocks = self._send(
            [*by_row, by_sequence[: count + 1], by_sequence[count + 1 :], table]
        )
        return FlatBatch(
            token_ids=token_ids.view(torch.int64),
            positions=positions.view(torch.int64),
            query_start=query_start.view(torch.int32),
            seq_len=seq_len.view(torch.int32),
            block_table=blocks.view(torch.int32).view(table.shape),
            slots=slots.view(torch.int64),
            num_sequences=count,
        )

    def compute(self, batch: FlatBatch, entering: Tensor | None = None) -> Tensor:
        """See ``DividedDecoder.forward``. Hidden states of a recorded step are valid until the next one."""
        if not isinstance(batch, RecordedBatch):
            return self._compute(batch, entering)
        replay, hidden = self._graphs[batch.num_sequences]
        replay()
        return hidden[: batch.num_filled]

    def _compute(self, batch: FlatBatch, entering: Tensor | None = None) -> Tensor:
        return self._decoder.forward(batch, create_attention(self._kind, self._cache, batch), entering)

    def _send(self, arrays: list[np.ndarray]) -> list[Tensor]:
        """The arrays' bytes on the device, by one copy."""
        places, end = [], 0
        for array in arrays:
            places.append(end)
            end += -(-array.nbytes // _ALIGNED) * _ALIGNED
        pinned = self._pinned.next(end)
        host = pinned.numpy()
        for place, array in zip(places, arrays, strict=True):
            host[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        there = torch.empty(end, dtype=torch.uint8, device=self._device.where)
        there.copy_(pinned, non_blocking=True)
        self._pinned.sent()
        return [there[place : place + array.nbytes] for place, array in zip(places, arrays, strict=True)]

    # -- the arrays of graphs ---------------------------------------------------------------

    def _fill(self, size: int, by_row: np.ndarray, lengths: np.ndarray, table: np.ndarray) -> RecordedBatch:
        """The arrays of the graph for ``size`` sequences, padded at the end."""
        count = by_row.shape[1]
        numbers = np.zeros((4, size), dtype=np.int64)
        numbers[2] = self._null_block * self._cache.block_size
        numbers[3] = 1
        numbers[:3, :count], numbers[3, :count] = by_row, lengths
        padded = np.full((size, table.shape[1]), self._null_block, dtype=np.int32)
        padded[:count] = table
        numbers_there, blocks = self._send([numbers, padded])
        of_rows = numbers_there.view(torch.int64).view(4, size)
        self._rows[:, :size].copy_(of_rows[:3])
        self._lengths[:size].copy_(of_rows[3])
        self._table[:size, : table.shape[1]].copy_(blocks.view(torch.int32).view(padded.shape))
        return RecordedBatch(
            token_ids=self._rows[0, :size],
            positions=self._rows[1, :size],
            query_start=self._starts[: size + 1],
            seq_len=self._lengths[:size],
            block_table=self._table[:size],
            slots=self._rows[2, :size],
            num_sequences=size,
            num_filled=count,
        )
