"""The decoder of most families: RMS norm, rotary attention, gated feed-forward.

Llama, Mistral, Qwen2, Qwen3, Gemma 2 and 3, Phi-3, SmolLM3, OLMo 2, Granite, Mixtral and Qwen3-MoE differ by switches
(``DecoderConfig``, ``Family``). Projections of the same rows are merged at load, and the addition of a branch is fused
with the norm that follows it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from inferd.checkpoints.adapter import DOWN, GATE_UP, OUT, QKV
from inferd.checkpoints.decoder_config import DecoderConfig, Family, MoE
from inferd.checkpoints.rope_tables import tables
from inferd.checkpoints.weights import Weights
from inferd.engine.model.cuts import Peers
from inferd.engine.model.divided import DividedDecoder, Joined, WholeNorm
from inferd.engine.model.products import merge, product
from inferd.engine.model.share import ALONE, Share
from inferd.native import ops
from inferd.native.attention import Attention, FlatBatch, HeadTransform, ProjectedAttention, Scoring
from inferd.native.low_rank import AdapterRows

Table = tuple[Tensor, Tensor]

GATES = {"silu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


class Adapted:
    """The products of one layer, with what the rows' adapters add to them: the one place where adapters apply."""

    __slots__ = ("_layer", "_rows")

    def __init__(self, layer: int, rows: AdapterRows | None) -> None:
        self._layer, self._rows = layer, rows

    def __call__(self, product: int, linear: ops.Linear, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        y = linear(x, out_dtype)
        return y if self._rows is None else self._rows.add(self._layer, product, x, y)


class FeedForward:
    """gate_up [2I, H], down [H, I]."""

    __slots__ = ("_joined", "down", "gate", "gate_up")

    def __init__(self, config: DecoderConfig, family: Family, weights: Weights, at: str, joined: Joined) -> None:
        self._joined = joined
        hidden, wide = config.hidden_size, config.intermediate_size
        if family.fused:
            self.gate_up = merge(weights, [(f"{at}.gate_up_proj", 2 * wide)], hidden, bias=False)
        else:
            self.gate_up = merge(
                weights, [(f"{at}.{n}_proj", wide) for n in ("gate", "up")], hidden, bias=config.mlp_bias
            )
        outputs, inputs = joined.shape(hidden, wide)
        biased = config.mlp_bias and joined.is_biased
        self.down = merge(weights, [(f"{at}.down_proj", outputs)], inputs, bias=biased)
        self.gate = GATES[config.activation]

    def products(self) -> Iterator[ops.Linear]:
        yield from (self.gate_up, self.down)

    def __call__(self, x: Tensor, adapted: Adapted) -> Tensor:
        inner = self._joined.inputs(ops.gate_and_mul(adapted(GATE_UP, self.gate_up, x), self.gate))
        return self._joined.outputs(adapted(DOWN, self.down, inner, self._joined.format), x.dtype)


class Experts:
    """A mixture of feed-forward experts; only experts that some row chose are computed."""

    __slots__ = ("_joined", "_outputs", "down", "gate", "gate_up", "moe", "router")

    def __init__(self, config: DecoderConfig, moe: MoE, weights: Weights, at: str, joined: Joined) -> None:
        self._joined = joined
        hidden, wide = config.hidden_size, moe.intermediate_size
        self.moe = moe
        self.gate = GATES[config.activation]
        if config.architecture == "MixtralForCausalLM":
            at, names = at.removesuffix("mlp") + "block_sparse_moe", ("w1", "w3", "w2")
        else:
            names = ("gate_proj", "up_proj", "down_proj")
        self._outputs, inputs = joined.shape(hidden, wide)  # of this rank's part of ``down``
        self.router = product(weights, [(f"{at}.gate.weight", (moe.num_experts, hidden))], hidden)
        self.gate_up: list[ops.Linear] = []
        self.down: list[ops.Linear] = []
        for i in range(moe.num_experts):
            gate, up, down = (f"{at}.experts.{i}.{name}" for name in names)
            self.gate_up.append(merge(weights, [(gate, wide), (up, wide)], hidden, bias=False))
            self.down.append(merge(weights, [(down, self._outputs)], inputs, bias=False))

    def products(self) -> Iterator[ops.Linear]:
        yield from (self.router, *self.gate_up, *self.down)

    def __call__(self, x: Tensor, adapted: Adapted) -> Tensor:
        """Adapters change no expert: they are refused at load (``checkpoints.adapter``)."""
        # A product of the kernels, which do not round it: the same experts are chosen in any batch.
        shares = self.router(x, torch.float32).softmax(-1)
        share, chosen = shares.topk(self.moe.top_k, dim=-1)  # [T, k]
        if self.moe.renormalise:
            share = share / share.sum(-1, keepdim=True)
        # The choices sorted by expert: each expert's rows lie together, and the others are not looked at.
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        rows = order // self.moe.top_k
        runs: list[tuple[int, slice]] = []  # each expert that was chosen, and its rows' places in the order
        for expert, count in enumerate(torch.bincount(flat).tolist()):
            if count:
                first = runs[-1][1].stop if runs else 0
                runs.append((expert, slice(first, first + count)))
        inner = x.new_empty((len(rows), self.moe.intermediate_size))
        for expert, run in runs:
            inner[run] = ops.gate_and_mul(self.gate_up[expert](x.index_select(0, rows[run])), self.gate)
        inner = self._joined.inputs(inner)
        out = x.new_zeros((len(x), self._outputs), dtype=self._joined.format or x.dtype)
        weight = share.flatten()[order].to(out.dtype).unsqueeze(1)
        for expert, run in runs:
            out.index_add_(0, rows[run], self.down[expert](inner[run], out.dtype) * weight[run])
        return self._joined.outputs(out, x.dtype)


class Layer:
    """Attention and feed-forward of one layer, with its norms."""

    def __init__(
        self,
        config: DecoderConfig,
        family: Family,
        weights: Weights,
        index: int,
        table: Table | None,
        share: Share = ALONE,
        peers: Peers | None = None,
        first: int = 0,
        whole_norm: WholeNorm | None = None,
    ) -> None:
        """``config``: of this rank's part; ``index``: in it; ``first``: the model's layer that is its first.
        ``whole_norm``: norms queries and keys whose heads are divided among ranks."""
        self.config, self.family, self.index, self.table = config, family, index, table
        self._joined = joined = Joined(share, peers)
        self._whole_norm = whole_norm
        at = f"model.layers.{first + index}"
        hidden, dim = config.hidden_size, config.head_dim
        widths = [config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim]
        self.norms: dict[str, Tensor] = {}
        self.q_norm: Tensor | None = None
        self.k_norm: Tensor | None = None

        def norm(name: str, size: int) -> Tensor:
            weight = weights.read(f"{at}.{name}.weight", size)
            # w + 1 in float32, as Gemma computes it.
            return weight.float() + family.norm_offset if family.norm_offset else weight

        if family.pre_norm:
            self.norms["attention"] = norm("input_layernorm", hidden)
            self.norms["feed_forward"] = norm(
                "pre_feedforward_layernorm" if family.post_norm else "post_attention_layernorm", hidden
            )
        if family.post_norm:
            self.norms["after_attention"] = norm("post_attention_layernorm", hidden)
            self.norms["after_feed_forward"] = norm("post_feedforward_layernorm", hidden)
        if family.fused:
            self.qkv = merge(weights, [(f"{at}.self_attn.qkv_proj", sum(widths))], hidden, bias=False)
        else:
            parts = [(f"{at}.self_attn.{n}_proj", width) for n, width in zip("qkv", widths, strict=True)]
            self.qkv = merge(weights, parts, hidden, bias=config.qkv_bias)
        outputs, inputs = joined.shape(hidden, widths[0])
        biased = config.output_bias and joined.is_biased
        self.out = merge(weights, [(f"{at}.self_attn.o_proj", outputs)], inputs, bias=biased)
        if family.qk_norm:
            normed = (dim, dim)
            if family.qk_norm == "full":
                normed = (widths[0], widths[1]) if whole_norm is None else whole_norm.widths
            self.q_norm, self.k_norm = norm("self_attn.q_norm", normed[0]), norm("self_attn.k_norm", normed[1])
        head_norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        self.head_transform = HeadTransform(head_norms, config.norm_eps, table)
        self.scoring = Scoring(config.attention_scale, config.windows[index], config.attention_softcap)
        moe = config.moe[index]
        self.feed_forward: FeedForward | Experts = (
            FeedForward(config, family, weights, f"{at}.mlp", joined)
            if moe is None
            else Experts(config, moe, weights, f"{at}.mlp", joined)
        )

    def products(self) -> Iterator[ops.Linear]:
        yield from (self.qkv, self.out, *self.feed_forward.products())

    def __call__(
        self, branch: Tensor | None, residual: Tensor, batch: FlatBatch, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """``branch``: still to be added to ``residual``. Returns the same pair for the next layer."""
        h, residual = self._enter(branch, residual, "attention")
        adapted = Adapted(self.index, batch.adapters)
        branch = self._leave(self._attend(h, batch, attention, adapted), "after_attention")
        h, residual = self._enter(branch, residual, "feed_forward")
        return self._leave(self.feed_forward(h, adapted), "after_feed_forward"), residual

    def _enter(self, branch: Tensor | None, residual: Tensor, norm: str) -> tuple[Tensor, Tensor]:
        weight = self.norms.get(norm)
        if weight is None:
            residual = residual if branch is None else branch + residual
            return residual, residual
        if branch is None:
            return ops.rms_norm(residual, weight, self.config.norm_eps), residual
        return ops.add_rms_norm(branch, residual, weight, self.config.norm_eps)

    def _leave(self, branch: Tensor, norm: str) -> Tensor:
        if self.family.post_norm:
            branch = ops.rms_norm(branch, self.norms[norm], self.config.norm_eps)
        if self.config.residual_multiplier != 1.0:
            branch = branch * self.config.residual_multiplier
        return branch

    def _attend(self, h: Tensor, batch: FlatBatch, attention: Attention, adapted: Adapted) -> Tensor:
        config = self.config
        rows, heads, kv_heads, dim = h.shape[0], config.num_heads, config.num_kv_heads, config.head_dim
        qkv = adapted(QKV, self.qkv, h)
        if isinstance(attention, ProjectedAttention) and self.family.qk_norm != "full":
            out = attention.projected(self.index, qkv, heads, self.head_transform, self.scoring)
            return self._out(out, adapted)
        q, k, v = torch.split(qkv, [heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
        if self.family.qk_norm == "full":
            q, k = self._norm_qk(q, k)
        q, k, v = q.view(rows, heads, dim), k.view(rows, kv_heads, dim), v.view(rows, kv_heads, dim)
        if self.family.qk_norm == "head":
            q, k = self._norm_qk(q, k)
        if self.table is not None:
            q, k = ops.rotary(q, k, batch.positions, *self.table)
        out = attention(self.index, q, k, v, self.scoring)
        return self._out(out, adapted)

    def _out(self, attended: Tensor, adapted: Adapted) -> Tensor:
        """attended [T, heads, D] -> [T, H]"""
        x = self._joined.inputs(attended.reshape(attended.shape[0], -1))
        return self._joined.outputs(adapted(OUT, self.out, x, self._joined.format), x.dtype)

    def _norm_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None
        assert self.k_norm is not None
        if self._whole_norm is not None:
            return self._whole_norm(q, k, self.q_norm, self.k_norm)
        return ops.rms_norm(q, self.q_norm, self.config.norm_eps), ops.rms_norm(k, self.k_norm, self.config.norm_eps)


def tables_of(config: DecoderConfig, num_positions: int, device: torch.device) -> list[Table | None]:
    """Each layer's rotary table; layers with the same parameters share one."""
    made: dict[int, Table] = {}
    found: list[Table | None] = []
    for rope in config.ropes:
        if rope is not None and id(rope) not in made:
            made[id(rope)] = tables(rope, num_positions, device)
        found.append(None if rope is None else made[id(rope)])
    return found


def embedding_of(config: DecoderConfig, weights: Weights) -> ops.Linear:
    name = "model.embed_tokens.weight"
    if config.tie_word_embeddings and name not in weights:
        name = "lm_head.weight"  # some writers keep the other name of the one tensor
    return product(weights, [(name, (config.vocab_size, config.hidden_size))], config.hidden_size)


def embedding_scale(config: DecoderConfig, family: Family, dtype: torch.dtype) -> float:
    """Gemma scales by the square root of the hidden size, rounded to the model's number format."""
    return float(torch.tensor(config.hidden_size**0.5, dtype=dtype)) if family.gemma else config.embedding_multiplier


class LlamaDecoder(DividedDecoder):
    """Implements ``Decoder`` for the Llama-like families."""

    # Branch and residual: their sum would be rounded, and a pipeline's answers have the bits of one process.
    num_passed = 2

    def __init__(
        self,
        config: DecoderConfig,
        family: Family,
        weights: Weights,
        num_positions: int,
        share: Share = ALONE,
        peers: Peers | None = None,
    ) -> None:
        super().__init__(config, weights, share, peers)
        self.family, part = family, self.part
        layer_tables = tables_of(part, num_positions, weights.device)
        self._embedding = embedding_of(part, weights) if share.is_first else None
        self.embedding_scale = embedding_scale(config, family, self.dtype)
        first = share.layers(config.num_layers).start
        among = self.peers if family.qk_norm == "full" else None
        whole_norm = None if among is None else WholeNorm(config, share, among)
        self.layers = [
            Layer(part, family, weights, i, layer_tables[i], share, peers, first, whole_norm)
            for i in range(part.num_layers)
        ]
        if share.is_last:
            norm = weights.read("model.norm.weight", config.hidden_size)
            self.norm = norm.float() + family.norm_offset if family.norm_offset else norm
        tied = config.tie_word_embeddings or "lm_head.weight" not in weights
        head = [("lm_head", part.vocab_size)]
        self._head = (
            self._embedding if tied or not share.is_first else merge(weights, head, config.hidden_size, bias=False)
        )
        self._count(weights)

    def forward(self, batch: FlatBatch, attention: Attention, entering: Tensor | None = None) -> Tensor:
        """``entering``, and the result of a stage that is not the last: [2, T, H], the branch and the residual."""
        branch: Tensor | None = None
        if entering is None:
            residual = self.embedded(batch.token_ids)
            residual = residual if self.embedding_scale == 1.0 else residual * self.embedding_scale
        else:
            branch, residual = entering
        for layer in self.layers:
            branch, residual = layer(branch, residual, batch, attention)
        assert branch is not None
        if self.share.is_last:
            return ops.add_rms_norm(branch, residual, self.norm, self.config.norm_eps)[0]
        return torch.stack((branch, residual))

    def products(self) -> Iterator[ops.Linear]:
        for layer in self.layers:
            yield from layer.products()

    @property
    def norm_dtype(self) -> torch.dtype:
        """Number format of the weights of norms."""
        return torch.float32 if self.family.norm_offset else self.dtype
