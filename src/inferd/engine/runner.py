"""Turns a step into tensors and runs the model on it. Knows torch; decides nothing."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from inferd.engine import native
from inferd.engine.attention import FlatBatch, KVCache, create_attention
from inferd.engine.model.load import Decoder
from inferd.engine.native_decoder import native_decoder
from inferd.engine.scheduler import Step


class Runner:
    """The model, its KV arena, and the way from a ``Step`` to hidden states."""

    __slots__ = ("_native", "attention_kind", "cache", "decoder", "device")

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        attention_kind: Literal["auto", "reference", "native"],
        device: torch.device,
        max_rows: int = 0,
    ) -> None:
        """``max_rows``: of a step, where known; memory for its activations is then taken once."""
        self.decoder = decoder
        self.cache = cache
        self.attention_kind = attention_kind
        self.device = device
        self._native = native_decoder(decoder, cache, max_rows) if attention_kind != "reference" else None

    @property
    def is_one_call(self) -> bool:
        """Whether a step's layers are one call of the kernels, not many out of Python."""
        return self._native is not None

    def run(self, step: Step) -> Tensor:
        """Compute the step's rows: hidden states [T, H], rows in the order of its slices."""
        return self.compute(self.prepare(step))

    def prepare(self, step: Step) -> FlatBatch:
        """The step as arrays; shared blocks that it writes to are copied."""
        self.cache.copy_blocks(step.copies)
        return self._flatten(step)

    def compute(self, batch: FlatBatch) -> Tensor:
        """Hidden states [T, H] of the batch's rows."""
        if self._native is not None and native.is_on():
            return self._native.forward(batch)
        return self.decoder.forward(batch, create_attention(self.attention_kind, self.cache, batch))

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """Logits [len(rows), V] float32 of some of the step's rows."""
        if len(rows) != hidden.shape[0]:
            hidden = hidden[torch.tensor(rows, device=self.device)]
        return self.decoder.logits(hidden)

    def _flatten(self, step: Step) -> FlatBatch:
        size = self.cache.block_size
        count = np.array([part.count for part in step.slices], dtype=np.int32)
        start = np.array([part.start for part in step.slices], dtype=np.int32)
        query_start = np.zeros(len(count) + 1, dtype=np.int32)
        np.cumsum(count, out=query_start[1:])
        table = np.zeros((len(count), max(len(p.sequence.blocks) for p in step.slices)), dtype=np.int32)
        tokens = np.empty(int(query_start[-1]), dtype=np.int64)
        for i, part in enumerate(step.slices):
            sequence = part.sequence
            table[i, : len(sequence.blocks)] = sequence.blocks
            tokens[query_start[i] : query_start[i + 1]] = sequence.tokens[part.start : part.start + part.count]
        owner = np.repeat(np.arange(len(count)), count)
        positions = (np.arange(len(tokens)) - query_start[owner] + start[owner]).astype(np.int64)
        slots = table[owner, positions // size].astype(np.int64) * size + positions % size

        def on_device(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(self.device, non_blocking=True)

        return FlatBatch(
            token_ids=on_device(tokens),
            positions=on_device(positions),
            query_start=on_device(query_start),
            seq_len=on_device(start + count),
            block_table=on_device(table),
            slots=on_device(slots),
            num_sequences=len(count),
        )
