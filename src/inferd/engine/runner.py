"""Turns a step into tensors and runs the model on it. Knows torch; decides nothing."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from inferd.engine.hand_over.contents import Contents
from inferd.engine.model.load import Decoder
from inferd.engine.model.pipe import micro_batches
from inferd.engine.native_decoder import Layers, NativeDecoder, native_decoder
from inferd.engine.scheduling.scheduler import Step
from inferd.native import compiled
from inferd.native.attention import FlatBatch
from inferd.native.kv_cache import KVCache
from inferd.native.low_rank import AdapterRows, LoadedAdapter
from inferd.native.paged_attention import AttentionKind, create_attention, uses_kernel

if TYPE_CHECKING:
    from inferd.engine.cuda.steps import StepsOnDevice
    from inferd.engine.ranks.lead import Lead


class Runner:
    """The model, its KV cache, and the computation from a ``Step`` to hidden states."""

    __slots__ = ("_keeps_rows", "_native", "_on_device", "_ranks", "attention_kind", "cache", "decoder", "device")

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        attention_kind: AttentionKind,
        device: torch.device,
        max_rows: int = 0,
        on_device: StepsOnDevice | None = None,
        ranks: Lead | None = None,
    ) -> None:
        """``max_rows``: rows of a step, where known; memory for its activations is then allocated once.

        ``on_device``: computes steps on an accelerator; None: on the CPU. ``ranks``: the
        processes that hold the other shares of the model and compute each step too.
        """
        self.decoder = decoder
        self.cache = cache
        self.attention_kind = attention_kind
        self.device = device
        self._on_device = on_device
        self._ranks = ranks
        is_native = attention_kind in ("auto", "native") and on_device is None
        self._native = native_decoder(decoder, cache, max_rows) if is_native else None
        self._keeps_rows = on_device is None and uses_kernel(attention_kind, cache) and decoder.keeps_rows

    @property
    def one_call(self) -> NativeDecoder | None:
        """The decoder that computes all layers in one call; None where the kernels do not support it or are off."""
        return self._native if compiled.is_on() else None

    @property
    def keeps_rows(self) -> bool:
        """Whether a row has the same bits in any batch: answers do not depend on other requests, and a step may be
        cut."""
        return self._keeps_rows and compiled.is_on() and (self._ranks is None or self._ranks.keep_rows)

    def run(self, step: Step) -> Tensor:
        """Hidden states [T, H] of the step's rows, in the order of its slices."""
        return self.compute(self.prepare(step))

    def prepare(self, step: Step, wanted: list[int] | None = None) -> FlatBatch:
        """The step as arrays. Shared blocks that it writes to are copied first.

        ``wanted``, ascending: rows whose hidden states are needed; others need not be computed to the end.
        """
        self.cache.copy_blocks(step.copies)
        adapters = _adapter_rows(step)
        by_row, by_sequence, table = _flattened(step, self.cache.block_size)
        batch = self.batch(by_row, by_sequence, table, has_adapters=adapters is not None)
        batch.adapters = adapters
        if wanted is not None and self._on_device is None and len(wanted) < len(batch.token_ids):
            batch.output_rows = self.tensor(np.array(wanted, dtype=np.int64))
        if self._ranks is not None:
            with self._ranks.together():
                if self.keeps_rows and (adapters is None or adapters.is_native):
                    batch.cuts = self._ranks.cuts(len(batch.token_ids))
                self._ranks.plan(step.copies, by_row, by_sequence, table, batch)
        return batch

    def batch(
        self, by_row: np.ndarray, by_sequence: np.ndarray, table: np.ndarray, *, has_adapters: bool = False
    ) -> FlatBatch:
        """A step's arrays, on the device that computes it. The arguments are those of ``StepsOnDevice.stage``."""
        if self._on_device is not None:
            return self._on_device.stage(by_row, by_sequence, table, has_adapters=has_adapters)
        count = table.shape[0]
        return FlatBatch(
            token_ids=self.tensor(by_row[0]),
            positions=self.tensor(by_row[1]),
            query_start=self.tensor(by_sequence[: count + 1]),
            seq_len=self.tensor(by_sequence[count + 1 :]),
            block_table=self.tensor(table),
            slots=self.tensor(by_row[2]),
            num_sequences=count,
        )

    @property
    def can_pause(self) -> bool:
        """Whether steps may be computed by ``begin``."""
        return self.one_call is not None and self._ranks is None and self.one_call.can_pause

    def begin(self, batch: FlatBatch) -> Layers | None:
        """The same as ``compute``, as calls between which the step may pause; None: it cannot."""
        if not self.can_pause or not (batch.adapters is None or batch.adapters.is_native):
            return None
        assert self._native is not None
        return self._native.begin(batch)

    def compute(self, batch: FlatBatch) -> Tensor:
        """Hidden states [T, H] of the batch's rows; with stages in rank 0 alone."""
        pipe = self.decoder.pipe
        with nullcontext() if self._ranks is None else self._ranks.together():
            if pipe is None:
                return self._forward(batch)
            parts = micro_batches(batch)
            pipe.begin([len(part.token_ids) for part in parts])
            for part in parts:
                pipe.leave(self._forward(part, pipe.entered()))
            return pipe.end()

    def _forward(self, batch: FlatBatch, entering: Tensor | None = None) -> Tensor:
        """See ``DividedDecoder.forward``."""
        if self._native is not None and compiled.is_on() and (batch.adapters is None or batch.adapters.is_native):
            return self._native.forward(batch, entering)
        if self._on_device is not None:
            return self._on_device.compute(batch, entering)
        attention = create_attention(self.attention_kind, self.cache, batch)
        return self.decoder.forward(batch, attention, entering)

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """Logits [len(rows), V] float32 of some of the step's rows."""
        if rows != list(range(hidden.shape[0])):  # equal length is not enough: rows may repeat or skip
            hidden = hidden[torch.tensor(rows, device=self.device)]
        if self._ranks is None:
            return self.decoder.logits(hidden)
        with self._ranks.together():
            self._ranks.plan_logits(hidden)
            return self.decoder.logits(hidden)

    def contents(self) -> Contents:
        """The contents of whole blocks, also where ranks have parts of them."""
        return Contents(self.cache, self._ranks)

    def close(self) -> None:
        """End the processes that compute with this one."""
        if self._ranks is not None:
            self._ranks.close()

    def tensor(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)


def _flattened(step: Step, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The step's arrays by row, by sequence and of blocks, as ``StepsOnDevice.stage`` takes them. ``size``: of a
    block."""
    # In plain lists as far as it goes: for the single tokens that most steps consist of, a dozen calls of numpy take
    # longer.
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    ends, lengths = [0], []
    for part in step.slices:
        sequence, start, end = part.sequence, part.start, part.start + part.count
        blocks = sequence.blocks
        if part.count == 1:
            tokens.append(sequence.tokens[start])
            positions.append(start)
            slots.append(blocks[start // size] * size + start % size)
        else:
            tokens += part.token_ids
            positions += range(start, end)
            slots += [blocks[at // size] * size + at % size for at in range(start, end)]
        ends.append(len(tokens))
        lengths.append(end)
    held = [part.sequence.blocks for part in step.slices]
    table = np.zeros((len(held), max(map(len, held))), dtype=np.int32)
    for row, blocks in zip(table, held, strict=True):
        row[: len(blocks)] = blocks
    return np.array([tokens, positions, slots], dtype=np.int64), np.array(ends + lengths, dtype=np.int32), table


def _adapter_rows(step: Step) -> AdapterRows | None:
    """Which rows use which adapter; None: every row is the base's."""
    places: dict[LoadedAdapter, int] = {}
    of: list[int] = []
    for part in step.slices:
        adapter = part.sequence.adapter
        place = -1
        if adapter is not None:
            assert isinstance(adapter, LoadedAdapter)
            place = places.setdefault(adapter, len(places))
        of += [place] * part.count
    return AdapterRows(list(places), torch.tensor(of, dtype=torch.int32)) if places else None
