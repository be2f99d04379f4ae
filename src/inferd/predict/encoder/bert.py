"""The encoder that BERT, RoBERTa, XLM-R, DistilBERT and MPNet are: learned positions, norms behind the branches.

Devlin et al. 2018; Liu et al. 2019; Conneau et al. 2019; Sanh et al. 2019; Song et al. 2020. They differ in the names
of their tensors and in the first position; MPNet also has a bias by distance, which all its layers share.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from inferd.checkpoints.weights import Weights
from inferd.predict.encoder.config import EncoderConfig
from inferd.predict.encoder.layers import Norm, Product, between
from inferd.predict.encoder.ragged import Ragged, attend, attends_by_kernel

_MAX_DISTANCE: Final = 128  # from which on all distances share a bucket


class _Names(NamedTuple):
    """Where a family keeps a layer's tensors."""

    layer: str
    query: str
    key: str
    value: str
    out: str
    out_norm: str
    up: str
    down: str
    down_norm: str


_BERT: Final = _Names(
    "encoder.layer",
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)
_NAMES: Final = {
    "bert": _BERT,
    "mpnet": _BERT._replace(
        query="attention.attn.q",
        key="attention.attn.k",
        value="attention.attn.v",
        out="attention.attn.o",
        out_norm="attention.LayerNorm",
    ),
    "distilbert": _Names(
        "transformer.layer",
        "attention.q_lin",
        "attention.k_lin",
        "attention.v_lin",
        "attention.out_lin",
        "sa_layer_norm",
        "ffn.lin1",
        "ffn.lin2",
        "output_layer_norm",
    ),
}


class _Layer:
    __slots__ = ("activation", "down", "down_norm", "dtype", "heads", "out", "out_norm", "qkv", "up")

    def __init__(self, config: EncoderConfig, weights: Weights, dtype: torch.dtype, index: int) -> None:
        names = _NAMES[config.kind.family]
        at, hidden, wide = f"model.{names.layer}.{index}.", config.hidden_size, config.intermediate_size
        self.heads, self.dtype = config.num_heads, between(dtype)
        self.qkv = Product(
            weights, [(at + name, hidden) for name in (names.query, names.key, names.value)], hidden, dtype
        )
        self.out = Product(weights, [(at + names.out, hidden)], hidden, dtype)
        self.out_norm = Norm(weights, at + names.out_norm, hidden, config.norm_eps, dtype)
        self.up = Product(weights, [(at + names.up, wide)], hidden, dtype)
        self.activation = config.activation
        self.down = Product(weights, [(at + names.down, hidden)], wide, dtype)
        self.down_norm = Norm(weights, at + names.down_norm, hidden, config.norm_eps, dtype)

    def __call__(self, x: Tensor, narrow: Tensor, batch: Ragged, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """``narrow``: x in the products' format. The same pair for the next layer."""
        qkv = self.qkv(narrow).view(x.shape[0], 3, self.heads, -1)
        x, narrow = self.out_norm(self.out(attend(qkv, batch, self.dtype, distance_bias=bias)), x)
        return self.down_norm(self.down(self.up.activated(narrow, self.activation)), x)

    @property
    def products(self) -> tuple[Product, ...]:
        return self.qkv, self.out, self.up, self.down


class Bert:
    """[T] tokens -> [T, hidden]."""

    def __init__(self, config: EncoderConfig, weights: Weights, dtype: torch.dtype) -> None:
        self.hidden_size = config.hidden_size
        self._attends = attends_by_kernel(config.head_dim, between(dtype))
        hidden, at = config.hidden_size, "model.embeddings."
        self._words = weights.read(at + "word_embeddings.weight", config.vocab_size, hidden)
        table = config.max_positions + config.first_position
        self._positions = weights.read(at + "position_embeddings.weight", table, hidden).float()
        self._positions = self._positions[config.first_position :]
        self._types: Tensor | None = None
        if config.type_vocab_size:
            self._types = weights.read(at + "token_type_embeddings.weight", config.type_vocab_size, hidden).float()
        self._norm = Norm(weights, at + "LayerNorm", hidden, config.norm_eps, dtype)
        self._bias: Tensor | None = None
        if config.num_buckets:
            name = "model.encoder.relative_attention_bias.weight"
            table_of_bias = weights.read(name, config.num_buckets, config.num_heads).float()
            self._bias = _by_distance(table_of_bias, config.max_positions)
        self._layers = [_Layer(config, weights, dtype, i) for i in range(config.num_layers)]

    @property
    def keeps_rows(self) -> bool:
        layers = self._layers
        return self._attends and all(product.keeps_rows for layer in layers for product in layer.products)

    def forward(self, batch: Ragged) -> Tensor:
        x = self._words[batch.token_ids].float() + self._positions[batch.positions]
        if self._types is not None:
            x += self._types[0] if batch.type_ids is None else self._types[batch.type_ids]
        x, narrow = self._norm(x)
        for layer in self._layers:
            x, narrow = layer(x, narrow, batch, self._bias)
        return x


def _by_distance(table: Tensor, longest: int) -> Tensor:
    """T5's buckets (Raffel et al. 2019) of every distance: [buckets, heads] -> [heads, 2 * longest - 1]."""
    distance = torch.arange(1 - longest, longest, device=table.device)  # key minus query
    half = table.shape[0] // 2
    exact = half // 2
    far = distance.abs()
    spread = torch.log(far.clamp(min=1).float() / exact) / math.log(_MAX_DISTANCE / exact) * (half - exact)
    bucket = torch.where(far < exact, far, (exact + spread.long()).clamp(max=half - 1))
    return table[bucket + (distance > 0) * half].T.contiguous()
