"""The older decoders: layer norm with bias, plain feed-forward. GPT-2, GPT-Neo and GPT-NeoX (Pythia).

Sources: Radford et al. 2019, Black et al. 2021 and 2022.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch.nn.functional as F
from torch import Tensor

from inferd.checkpoints.decoder_config import DecoderConfig
from inferd.checkpoints.rope_tables import tables
from inferd.checkpoints.weights import Weights
from inferd.engine.model.cuts import Peers
from inferd.engine.model.divided import DividedDecoder, Joined
from inferd.engine.model.products import product
from inferd.engine.model.share import ALONE, Share
from inferd.native import ops
from inferd.native.attention import Attention, FlatBatch, Scoring


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of a family's tensors, after the layer's prefix."""

    layers: str
    embedding: str
    positions: str | None
    final_norm: str
    head: str
    norm_1: str
    norm_2: str
    out: str
    up: str
    down: str


_NAMES = {
    "GPT2LMHeadModel": _Names(
        "transformer.h",
        "transformer.wte",
        "transformer.wpe",
        "transformer.ln_f",
        "lm_head",
        "ln_1",
        "ln_2",
        "attn.c_proj",
        "mlp.c_fc",
        "mlp.c_proj",
    ),
    "GPTNeoForCausalLM": _Names(
        "transformer.h",
        "transformer.wte",
        "transformer.wpe",
        "transformer.ln_f",
        "lm_head",
        "ln_1",
        "ln_2",
        "attn.attention.out_proj",
        "mlp.c_fc",
        "mlp.c_proj",
    ),
    "GPTNeoXForCausalLM": _Names(
        "gpt_neox.layers",
        "gpt_neox.embed_in",
        None,
        "gpt_neox.final_layer_norm",
        "embed_out",
        "input_layernorm",
        "post_attention_layernorm",
        "attention.dense",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    ),
}


_FUSED: Final = {
    "gelu": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh"),
    "silu": "silu",
}
"""Activations that the kernels apply to the sums of a product."""


class _Norm:
    __slots__ = ("bias", "eps", "weight")

    def __init__(self, weights: Weights, at: str, size: int, eps: float) -> None:
        self.weight, self.bias, self.eps = weights.read(f"{at}.weight", size), weights.read(f"{at}.bias", size), eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


class _Layer:
    __slots__ = ("_joined", "config", "down", "index", "norm_1", "norm_2", "out", "qkv", "scoring", "table", "up")

    def __init__(
        self,
        config: DecoderConfig,
        names: _Names,
        weights: Weights,
        index: int,
        table: tuple[Tensor, Tensor] | None,
        joined: Joined,
        first: int,
    ) -> None:
        """``config``: of this rank's part; ``index``: in it; ``first``: the model's layer that is its first."""
        self.config, self.index, self.table, self._joined = config, index, table, joined
        self.scoring = Scoring(config.attention_scale, config.windows[index])
        at = f"{names.layers}.{first + index}"
        width, inner = config.hidden_size, config.intermediate_size
        heads = config.num_heads * config.head_dim
        transposed = config.architecture == "GPT2LMHeadModel"  # GPT-2 stores [in, out]

        def linear(name: str, out: int, into: int, *, bias: bool = True) -> ops.Linear:
            shape = (into, out) if transposed else (out, into)
            held = weights.read(f"{at}.{name}.bias", out) if bias else None
            return product(
                weights, [(f"{at}.{name}.weight", shape)], into, held, _turned if transposed else Tensor.contiguous
            )

        self.norm_1 = _Norm(weights, f"{at}.{names.norm_1}", width, config.norm_eps)
        self.norm_2 = _Norm(weights, f"{at}.{names.norm_2}", width, config.norm_eps)
        match config.architecture:
            case "GPT2LMHeadModel":
                self.qkv = linear("attn.c_attn", 3 * heads, width)
            case "GPTNeoForCausalLM":
                parts = [(f"{at}.attn.attention.{n}_proj.weight", (heads, width)) for n in "qkv"]
                self.qkv = product(weights, parts, width)
            case _:
                self.qkv = _deinterleave(config, weights, f"{at}.attention.query_key_value")
        self.out = linear(names.out, *joined.shape(width, heads), bias=config.qkv_bias and joined.is_biased)
        self.up = linear(names.up, inner, width)
        self.down = linear(names.down, *joined.shape(width, inner), bias=joined.is_biased)

    def __call__(self, x: Tensor, batch: FlatBatch, attention: Attention) -> Tensor:
        attended = self._attend(self.norm_1(x), batch, attention)
        if self.config.parallel_residual:
            return x + attended + self._feed_forward(self.norm_2(x))
        x = x + attended
        return x + self._feed_forward(self.norm_2(x))

    def _feed_forward(self, h: Tensor) -> Tensor:
        kind = self.config.activation
        h = self.up(h, activation=_FUSED.get(kind, ""))
        if kind not in _FUSED:
            h = F.relu(h)
        return self._joined.outputs(self.down(self._joined.inputs(h), self._joined.format), h.dtype)

    def _attend(self, h: Tensor, batch: FlatBatch, attention: Attention) -> Tensor:
        config = self.config
        shape = (h.shape[0], config.num_heads, config.head_dim)
        q, k, v = (part.view(shape) for part in self.qkv(h).chunk(3, dim=-1))
        if self.table is not None:
            q, k = ops.rotary(q, k, batch.positions, *self.table)
        out = self._joined.inputs(attention(self.index, q, k, v, self.scoring).reshape(h.shape[0], -1))
        return self._joined.outputs(self.out(out, self._joined.format), h.dtype)


def _turned(weight: Tensor) -> Tensor:
    return weight.t().contiguous()


def _deinterleave(config: DecoderConfig, weights: Weights, at: str) -> ops.Linear:
    """GPT-NeoX stores q, k, v head by head: [heads, 3, dim]. The result has all q, then all k, then all v."""
    heads, dim, width = config.num_heads, config.head_dim, config.hidden_size
    rows = 3 * heads * dim

    def in_order(weight: Tensor) -> Tensor:
        return weight.view(heads, 3, dim, width).transpose(0, 1).reshape(rows, width)

    bias = (
        weights.read(f"{at}.bias", rows).view(heads, 3, dim).transpose(0, 1).reshape(rows) if config.qkv_bias else None
    )
    return product(weights, [(f"{at}.weight", (rows, width))], width, bias, in_order)


class GPTDecoder(DividedDecoder):
    """Implements ``Decoder`` for GPT-2, GPT-Neo and GPT-NeoX."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        num_positions: int,
        share: Share = ALONE,
        peers: Peers | None = None,
    ) -> None:
        super().__init__(config, weights, share, peers)
        names, part, width = _NAMES[config.architecture], self.part, config.hidden_size
        rope = config.ropes[0]
        table = tables(rope, num_positions, weights.device) if rope is not None else None
        self._positions: Tensor | None = None
        if share.is_first:
            shape, head = (part.vocab_size, width), f"{names.head}.weight"
            self._embedding = product(weights, [(f"{names.embedding}.weight", shape)], width)
            if names.positions:
                self._positions = weights.read(f"{names.positions}.weight", config.max_position_embeddings, width)
            tied = config.tie_word_embeddings or head not in weights
            self._head = self._embedding if tied else product(weights, [(head, shape)], width)
        joined, first = Joined(share, peers), share.layers(config.num_layers).start
        self._layers = [_Layer(part, names, weights, i, table, joined, first) for i in range(part.num_layers)]
        self._norm = _Norm(weights, names.final_norm, width, config.norm_eps) if share.is_last else None
        self._count(weights)

    def products(self) -> Iterator[ops.Linear]:
        for layer in self._layers:
            yield from (layer.qkv, layer.out, layer.up, layer.down)

    def forward(self, batch: FlatBatch, attention: Attention, entering: Tensor | None = None) -> Tensor:
        """``entering``, and the result of a stage that is not the last: [1, T, H]."""
        if entering is None:
            x = self.embedded(batch.token_ids)
            if self._positions is not None:
                x = x + F.embedding(batch.positions, self._positions)
        else:
            (x,) = entering
        for layer in self._layers:
            x = layer(x, batch, attention)
        return x.unsqueeze(0) if self._norm is None else self._norm(x)
