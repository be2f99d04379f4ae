"""ModernBERT (Warner et al. 2024): rotary positions, norms before the branches, gated feed-forward, and layers with
local attention between those with full attention."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.checkpoints.rope_tables import tables
from inferd.checkpoints.weights import Weights
from inferd.native import ops
from inferd.predict.encoder.config import EncoderConfig
from inferd.predict.encoder.layers import Norm, Product, between, gated
from inferd.predict.encoder.ragged import Ragged, attend, attends_by_kernel

Table = tuple[Tensor, Tensor]


class _Layer:
    __slots__ = ("activation", "down", "dtype", "heads", "mlp_norm", "norm", "out", "qkv", "table", "up", "window")

    def __init__(self, config: EncoderConfig, weights: Weights, dtype: torch.dtype, index: int, table: Table) -> None:
        at, hidden, wide = f"model.layers.{index}.", config.hidden_size, config.intermediate_size
        self.heads, self.table, self.window = config.num_heads, table, config.windows[index]
        self.dtype = between(dtype)
        self.norm: Norm | None = None  # the first layer's is that of the embeddings
        if index:
            self.norm = Norm(weights, at + "attn_norm", hidden, config.norm_eps, dtype, bias=config.norm_bias)
        self.qkv = Product(weights, [(at + "attn.Wqkv", 3 * hidden)], hidden, dtype, bias=config.attention_bias)
        self.out = Product(weights, [(at + "attn.Wo", hidden)], hidden, dtype, bias=config.attention_bias)
        self.mlp_norm = Norm(weights, at + "mlp_norm", hidden, config.norm_eps, dtype, bias=config.norm_bias)
        self.up = Product(weights, [(at + "mlp.Wi", 2 * wide)], hidden, dtype, bias=config.mlp_bias)
        self.activation = config.activation
        self.down = Product(weights, [(at + "mlp.Wo", hidden)], wide, dtype, bias=config.mlp_bias)

    def __call__(self, x: Tensor, batch: Ragged) -> Tensor:
        qkv = self.qkv(x if self.norm is None else self.norm(x)[1]).view(x.shape[0], 3, self.heads, -1)
        q, k = ops.rotary(qkv[:, 0], qkv[:, 1], batch.positions, *self.table)
        if q.data_ptr() != qkv.data_ptr():  # a copy, so that the original is not rotated
            qkv[:, 0], qkv[:, 1] = q, k
        x = x + self.out(attend(qkv, batch, self.dtype, window=self.window))
        return x + self.down(gated(self.up(self.mlp_norm(x)[1]), self.activation))

    @property
    def products(self) -> tuple[Product, ...]:
        return self.qkv, self.out, self.up, self.down


class ModernBert:
    """[T] tokens -> [T, hidden]."""

    def __init__(self, config: EncoderConfig, weights: Weights, dtype: torch.dtype, num_positions: int) -> None:
        self.hidden_size = config.hidden_size
        self._attends = attends_by_kernel(config.head_dim, between(dtype))
        self._words = weights.read("model.embeddings.tok_embeddings.weight", config.vocab_size, config.hidden_size)
        bias = config.norm_bias
        self._norm = Norm(weights, "model.embeddings.norm", config.hidden_size, config.norm_eps, dtype, bias=bias)
        made: dict[int, Table] = {}
        self._layers = []
        for index, rope in enumerate(config.ropes):
            assert rope is not None
            if id(rope) not in made:
                made[id(rope)] = tables(rope, num_positions, weights.device)
            self._layers.append(_Layer(config, weights, dtype, index, made[id(rope)]))
        self._final_norm = Norm(weights, "model.final_norm", config.hidden_size, config.norm_eps, dtype, bias=bias)

    @property
    def keeps_rows(self) -> bool:
        layers = self._layers
        return self._attends and all(product.keeps_rows for layer in layers for product in layer.products)

    def forward(self, batch: Ragged) -> Tensor:
        x = self._norm(self._words[batch.token_ids].float())[0]
        for layer in self._layers:
            x = layer(x, batch)
        return self._final_norm(x)[0]
