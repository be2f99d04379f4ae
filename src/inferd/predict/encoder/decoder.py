"""Decoders that embed or classify (Qwen3-Embedding, E5-Mistral): the engine's own models over whole texts.

No state remains between batches: an arena of one layer holds the keys and values of the current layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.checkpoints.decoder_config import FAMILIES, DecoderConfig
from inferd.checkpoints.weights import Weights
from inferd.engine.model.llama import LlamaDecoder
from inferd.native.attention import FlatBatch
from inferd.native.kv_cache import KVCache
from inferd.native.paged_attention import OneLayer, create_attention, native_available
from inferd.predict.encoder.ragged import Ragged

_BLOCK = 32


class CausalEncoder:
    """[T] tokens -> [T, hidden]; a token knows those before it."""

    def __init__(self, config: DecoderConfig, weights: Weights, num_positions: int) -> None:
        self.hidden_size = config.hidden_size
        self._decoder = LlamaDecoder(config, FAMILIES[config.architecture], weights, num_positions)

    @property
    def keeps_rows(self) -> bool:
        decoder = self._decoder
        return decoder.keeps_rows and native_available(decoder.dtype, decoder.config.head_dim)

    def forward(self, batch: Ragged) -> Tensor:
        config, device = self._decoder.config, batch.token_ids.device
        lengths = (batch.starts[1:] - batch.starts[:-1]).tolist()
        blocks = [-(-length // _BLOCK) for length in lengths]
        table = torch.zeros((len(lengths), max(blocks)), dtype=torch.int32)
        slots, first = [], 0
        for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
            table[row, :count] = torch.arange(first, first + count, dtype=torch.int32)
            slots.append(torch.arange(first * _BLOCK, first * _BLOCK + length))
            first += count
        cache = KVCache(
            num_layers=1,
            num_blocks=first,
            block_size=_BLOCK,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self._decoder.dtype,
            device=device,
        )
        flat = FlatBatch(
            token_ids=batch.token_ids,
            positions=batch.positions,
            query_start=batch.starts.to(torch.int32),
            seq_len=torch.tensor(lengths, dtype=torch.int32, device=device),
            block_table=table.to(device),
            slots=torch.cat(slots).to(device),
            num_sequences=len(lengths),
        )
        return self._decoder.forward(flat, OneLayer(create_attention("auto", cache, flat))).float()
