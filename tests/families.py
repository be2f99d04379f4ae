"""Tiny random checkpoints of every family, written by transformers; and a driver for our decoders."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inferd.engine.model.load import Decoder, load_model
from inferd.native.attention import FlatBatch
from inferd.native.kv_cache import KVCache
from inferd.native.paged_attention import ReferenceAttention

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.5 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 64,
}

# name -> (transformers' configuration class, its model class, what differs from BASE)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama2-mha": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama3-tied": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-biases": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-dynamic": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama-yarn": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": YARN}),
    "mistral-window": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 7}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True, "head_dim": 12}),
    "qwen2-window": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "head_dim": 12},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3-yarn": ("Qwen3Config", "Qwen3ForCausalLM", {"rope_parameters": YARN}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3-linear-rope": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "phi4-partial": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {"hidden_size": 64, "partial_rotary_factor": 0.75, "sliding_window": 9},
    ),
    "phi3-longrope": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {
            "hidden_size": 64,
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 64,
            "rope_parameters": LONG,
        },
    ),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 1]}),
    "smollm3-window": (
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 6},
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {"head_dim": 12}),
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
            "head_dim": 12,
        },
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 128, "head_dim": None, "intermediate_size": None},
    ),
    "gpt2-unscaled": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 128,
            "head_dim": None,
            "intermediate_size": None,
            "scale_attn_weights": False,
        },
    ),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {"hidden_size": 64}),
    "pythia-sequential": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {
            "use_parallel_residual": False,
            "head_dim": 12,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gpt-neo": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 7,
            "head_dim": None,
            "num_hidden_layers": None,
            "num_attention_heads": None,
        },
    ),
}


def write_checkpoint(name: str, folder: Path, **options: Any) -> Any:
    """Save a tiny random model of the family into ``folder`` and return it, in float32."""
    import transformers

    config_class, model_class, changes = FAMILIES[name]
    torch.manual_seed(sum(name.encode()))
    settings = {k: v for k, v in {**BASE, **changes}.items() if v is not None}
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings)).float().eval()
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide mistakes
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, **options)
    return model


class Driver:
    """Runs a decoder over paged blocks in shuffled order."""

    def __init__(self, decoder: Decoder, *, block_size: int = 4, num_blocks: int = 200) -> None:
        self.decoder = decoder
        config = decoder.config
        self.cache = KVCache(
            num_layers=config.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=decoder.dtype,
            device=torch.device("cpu"),
        )
        self._blocks = list(range(num_blocks))
        random.Random(7).shuffle(self._blocks)

    def table(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // self.cache.block_size)
        taken, self._blocks = self._blocks[:count], self._blocks[count:]
        return taken

    def logits(self, parts: list[tuple[list[int], int, list[int]]]) -> list[Tensor]:
        """One step over (all tokens, first position to compute, block table): logits of each part's rows."""
        size = self.cache.block_size
        tokens = [t for known, start, _ in parts for t in known[start:]]
        positions = [p for known, start, _ in parts for p in range(start, len(known))]
        slots = [table[p // size] * size + p % size for known, start, table in parts for p in range(start, len(known))]
        counts = [len(known) - start for known, start, _ in parts]
        widest = max(len(table) for _, _, table in parts)
        batch = FlatBatch(
            token_ids=torch.tensor(tokens),
            positions=torch.tensor(positions),
            query_start=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
            seq_len=torch.tensor([len(known) for known, _, _ in parts], dtype=torch.int32),
            block_table=torch.tensor([table + [0] * (widest - len(table)) for _, _, table in parts], dtype=torch.int32),
            slots=torch.tensor(slots),
            num_sequences=len(parts),
        )
        with torch.inference_mode():
            hidden = self.decoder.forward(batch, ReferenceAttention(self.cache, batch))
            return list(torch.split(self.decoder.logits(hidden), counts))


def expected(model: Any, tokens: list[int]) -> Tensor:
    """transformers' logits [len(tokens), V] without any cache."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    return logits


def largest_error(name: str, folder: Path) -> dict[str, float]:
    """Largest absolute difference of logits to transformers for each way of computing them."""
    model = write_checkpoint(name, folder)
    decoder = load_model(folder, dtype="float32", device=torch.device("cpu"))
    rng = random.Random(1)
    texts = [[rng.randrange(3, 90) for _ in range(n)] for n in (37, 1, 22, 9)]
    wanted = [expected(model, text) for text in texts]

    def error(got: Tensor, want: Tensor) -> float:
        return float((got - want).abs().max())

    checks: dict[str, Callable[[], float]] = {
        "prefill": lambda: error(_prefill(decoder, texts[0]), wanted[0]),
        "decode": lambda: error(_decode(decoder, texts[0]), wanted[0]),
        "ragged": lambda: max(map(error, _ragged(decoder, texts), wanted)),
        "cached prefix": lambda: error(_after_prefix(decoder, texts[0]), wanted[0][12:]),
    }
    return {name: check() for name, check in checks.items()}


def _prefill(decoder: Decoder, text: list[int]) -> Tensor:
    driver = Driver(decoder)
    return driver.logits([(text, 0, driver.table(len(text)))])[0]


def _decode(decoder: Decoder, text: list[int]) -> Tensor:
    driver = Driver(decoder)
    table = driver.table(len(text))
    return torch.cat([driver.logits([(text[: i + 1], i, table)])[0] for i in range(len(text))])


def _ragged(decoder: Decoder, texts: list[list[int]]) -> list[Tensor]:
    """All texts side by side in chunks of different sizes, some decoding while others prefill."""
    driver = Driver(decoder)
    tables = [driver.table(len(text)) for text in texts]
    done = [0] * len(texts)
    found: list[list[Tensor]] = [[] for _ in texts]
    chunk = 1
    while any(d < len(t) for d, t in zip(done, texts, strict=True)):
        chunk = chunk % 11 + 3
        parts = []
        asked = []
        for i, text in enumerate(texts):
            if done[i] < len(text):
                end = min(len(text), done[i] + (1 if i % 2 else chunk))
                parts.append((text[:end], done[i], tables[i]))
                asked.append(i)
        for i, logits in zip(asked, driver.logits(parts), strict=True):
            found[i].append(logits)
            done[i] += logits.shape[0]
    return [torch.cat(rows) for rows in found]


def _after_prefix(decoder: Decoder, text: list[int]) -> Tensor:
    """Another sequence computed the first 12 tokens; this one reads them from the same blocks."""
    driver = Driver(decoder)
    first = driver.table(12)
    driver.logits([(text[:12], 0, first)])
    table = first + driver.table(len(text) - 12)
    return driver.logits([(text, 12, table)])[0]
