"""A Llama decoder in plain torch, small enough to read, with the parameter names Hugging Face uses.

Knows the arithmetic and the names of the weights; knows nothing of text, training or files.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of a decoder; the field names are those of a Hugging Face ``config.json``."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 5
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def as_config(self) -> dict[str, object]:
        """Return the ``config.json`` of a checkpoint of this shape."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(self),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "initializer_range": 0.02,
            "use_cache": True,
        }


SHAPES = {
    "demo": LlamaShape(),
    "demo-draft": LlamaShape(
        hidden_size=128, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    ),
}


def rope_tables(shape: LlamaShape, length: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, each [length, head_dim], in the half-split layout of Hugging Face."""
    inverse = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angles = torch.outer(torch.arange(length).float(), inverse)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        q_size, kv_size = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        heads = (rows, length, -1, self.shape.head_dim)
        q = _rotate(self.q_proj(x).view(heads).transpose(1, 2), cos, sin)
        k = _rotate(self.k_proj(x).view(heads).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        # Plain products: on a CPU their gradient is far cheaper than that of the fused attention at these lengths.
        scores = (q @ k.transpose(-1, -2)).float() * self.shape.head_dim**-0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        out = scores.masked_fill(future, float("-inf")).softmax(-1).to(v.dtype) @ v
        result: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))
        return result


class Mlp(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = SelfAttention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Decoder(nn.Module):
    """The stack of layers between the embedding and the last norm."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)


class Llama(nn.Module):
    """A causal language model with tied embeddings."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = (2 * shape.num_hidden_layers) ** -0.5 if deep else 1.0
                nn.init.normal_(parameter, std=0.04 * scale)
        cos, sin = rope_tables(shape, shape.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the last hidden states, [rows, length, hidden_size], of token ids [rows, length]."""
        length = ids.shape[1]
        cos, sin = self.get_buffer("cos")[:length], self.get_buffer("sin")[:length]
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        result: Tensor = self.model.norm(x)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the vocabulary for hidden states of any leading shape."""
        return F.linear(hidden, self.model.embed_tokens.weight)
