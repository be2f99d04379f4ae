"""Computes a Llama-like model layer by layer over calibration texts, with one layer's weights in memory at a time.

Each layer is computed twice: first as it is, while the inputs of its products are observed, and then with the replaced
products. So the layers after it see, and compensate, the errors before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from inferd.checkpoints.decoder_config import DecoderConfig, Family
from inferd.checkpoints.weights import Weights
from inferd.engine.calibrate.observe import Observed
from inferd.engine.model.llama import Layer, embedding_of, embedding_scale, tables_of
from inferd.native import ops
from inferd.native.attention import Attention, FlatBatch
from inferd.native.kv_cache import KVCache
from inferd.native.paged_attention import OneLayer, create_attention

_BLOCK = 16  # tokens of the arena's blocks
_ROWS = 2048  # computed together

Pair = tuple[Tensor | None, Tensor]
"""A layer's input: what is still to be added, and what to."""


class _Texts:
    """Windows of one length, side by side in batches, with a KV cache for one layer."""

    def __init__(self, windows: Tensor, config: DecoderConfig, dtype: torch.dtype) -> None:
        self._length = windows.shape[1]
        each = max(1, _ROWS // self._length)
        self.batches = [self._flat(windows[i : i + each]) for i in range(0, len(windows), each)]
        self._arena = KVCache(
            num_layers=1,
            num_blocks=each * -(-self._length // _BLOCK),
            block_size=_BLOCK,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=torch.device("cpu"),
        )

    def attention(self, batch: FlatBatch) -> Attention:
        return OneLayer(create_attention("auto", self._arena, batch))

    def _flat(self, ids: Tensor) -> FlatBatch:
        count, length = ids.shape
        blocks = -(-length // _BLOCK)
        table = torch.arange(count * blocks, dtype=torch.int32).view(count, blocks)
        at = torch.arange(length)
        slots = table.long()[:, at // _BLOCK] * _BLOCK + at % _BLOCK
        return FlatBatch(
            token_ids=ids.flatten(),
            positions=at.repeat(count),
            query_start=torch.arange(0, (count + 1) * length, length, dtype=torch.int32),
            seq_len=torch.full((count,), length, dtype=torch.int32),
            block_table=table,
            slots=slots.flatten(),
            num_sequences=count,
        )


def observed_layers(
    open_weights: Callable[[], Weights], config: DecoderConfig, family: Family, windows: Tensor
) -> Iterator[list[Observed]]:
    """The products of each layer in turn, with the moments of their inputs over ``windows`` [N, length] of token ids.

    The caller may ``replace`` each product before it takes the next layer's.
    """
    weights = open_weights()
    tables = tables_of(config, windows.shape[1], weights.device)
    texts = _Texts(windows, config, weights.dtype)
    with torch.inference_mode():
        embedding = embedding_of(config, weights)
        scale = embedding_scale(config, family, weights.dtype)
        states: list[Pair] = [(None, embedding.rows(batch.token_ids) * scale) for batch in texts.batches]
        del embedding
        for index in range(config.num_layers):
            products: list[Observed] = []

            def around(
                parts: list[tuple[str, int]],
                biases: list[Tensor] | None,
                linear: ops.Linear,
                into: list[Observed] = products,
            ) -> ops.Linear:
                into.append(Observed.around(parts, biases, linear))
                return into[-1]

            weights.around = around
            layer = Layer(config, family, weights, index, tables[index])
            for batch, (branch, residual) in zip(texts.batches, states, strict=True):
                layer(branch, residual, batch, texts.attention(batch))
            yield products
            for at, batch in enumerate(texts.batches):
                branch, residual = states[at]
                states[at] = layer(branch, residual, batch, texts.attention(batch))
