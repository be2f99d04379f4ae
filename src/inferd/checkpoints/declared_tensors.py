"""The tensors of a checkpoint by its config.json alone, for plans without its weights. Knows no tensor.

Names and shapes are those that ``transformers`` writes for each family. A checkpoint whose files are here is counted by
their headers instead (``footprint.weight_bytes``); both counts agree to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator

from inferd.checkpoints.decoder_config import FAMILIES, DecoderConfig
from inferd.checkpoints.safetensors import Entry

_Tensor = tuple[str, tuple[int, ...]]


def declared_tensors(dims: DecoderConfig) -> dict[str, Entry]:
    """Every tensor that the model uses, by name; a tied output layer is not listed twice. The position in a file is 0
    for all of them, and the number format a placeholder: the model's own decides."""
    found = _gpt(dims) if dims.architecture not in FAMILIES else _llama(dims)
    return {name: Entry("F32", shape, 0) for name, shape in found}


def _product(name: str, out: int, size: int, *, bias: bool = False) -> Iterator[_Tensor]:
    yield f"{name}.weight", (out, size)
    if bias:
        yield f"{name}.bias", (out,)


def _llama(dims: DecoderConfig) -> Iterator[_Tensor]:
    hidden = dims.hidden_size
    yield from _product("model.embed_tokens", dims.vocab_size, hidden)
    for index in range(dims.num_layers):
        yield from _llama_layer(dims, f"model.layers.{index}", index)
    yield "model.norm.weight", (hidden,)
    if not dims.tie_word_embeddings:
        yield from _product("lm_head", dims.vocab_size, hidden)


def _llama_layer(dims: DecoderConfig, layer: str, index: int) -> Iterator[_Tensor]:
    family, hidden, inner = FAMILIES[dims.architecture], dims.hidden_size, dims.intermediate_size
    queries, keys = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    attention = f"{layer}.self_attn"
    if family.fused:
        yield from _product(f"{attention}.qkv_proj", queries + 2 * keys, hidden, bias=dims.qkv_bias)
    else:
        for part, out in (("q", queries), ("k", keys), ("v", keys)):
            yield from _product(f"{attention}.{part}_proj", out, hidden, bias=dims.qkv_bias)
    yield from _product(f"{attention}.o_proj", hidden, queries, bias=dims.output_bias)
    if family.qk_norm:
        whole = family.qk_norm == "full"
        yield f"{attention}.q_norm.weight", (queries if whole else dims.head_dim,)
        yield f"{attention}.k_norm.weight", (keys if whole else dims.head_dim,)
    norms = ["post_attention_layernorm"]
    norms += ["input_layernorm"] if family.pre_norm else []
    norms += ["post_feedforward_layernorm"] if family.post_norm or not family.pre_norm else []
    norms += ["pre_feedforward_layernorm"] if family.post_norm and family.pre_norm else []
    for norm in norms:
        yield f"{layer}.{norm}.weight", (hidden,)
    moe = dims.moe[index]
    if moe is not None:
        mixtral = dims.architecture == "MixtralForCausalLM"
        place, names = (
            (f"{layer}.block_sparse_moe", ("w1", "w3", "w2"))
            if mixtral
            else (f"{layer}.mlp", ("gate_proj", "up_proj", "down_proj"))
        )
        yield from _product(f"{place}.gate", moe.num_experts, hidden)
        for expert in range(moe.num_experts):
            for name in names[:2]:
                yield from _product(f"{place}.experts.{expert}.{name}", moe.intermediate_size, hidden)
            yield from _product(f"{place}.experts.{expert}.{names[2]}", hidden, moe.intermediate_size)
        return
    if family.fused:
        yield from _product(f"{layer}.mlp.gate_up_proj", 2 * inner, hidden, bias=dims.mlp_bias)
    else:
        for part in ("gate", "up"):
            yield from _product(f"{layer}.mlp.{part}_proj", inner, hidden, bias=dims.mlp_bias)
    yield from _product(f"{layer}.mlp.down_proj", hidden, inner, bias=dims.mlp_bias)


def _gpt(dims: DecoderConfig) -> Iterator[_Tensor]:
    hidden, inner = dims.hidden_size, dims.intermediate_size
    is_neox, is_gpt2 = dims.architecture == "GPTNeoXForCausalLM", dims.architecture == "GPT2LMHeadModel"
    yield from _product("gpt_neox.embed_in" if is_neox else "transformer.wte", dims.vocab_size, hidden)
    if not is_neox:
        yield "transformer.wpe.weight", (dims.max_position_embeddings, hidden)
    for index in range(dims.num_layers):
        layer = f"gpt_neox.layers.{index}" if is_neox else f"transformer.h.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm") if is_neox else ("ln_1", "ln_2"):
            yield f"{layer}.{norm}.weight", (hidden,)
            yield f"{layer}.{norm}.bias", (hidden,)
        if is_neox:
            yield from _product(f"{layer}.attention.query_key_value", 3 * hidden, hidden, bias=dims.qkv_bias)
            yield from _product(f"{layer}.attention.dense", hidden, hidden, bias=dims.qkv_bias)
            yield from _product(f"{layer}.mlp.dense_h_to_4h", inner, hidden, bias=True)
            yield from _product(f"{layer}.mlp.dense_4h_to_h", hidden, inner, bias=True)
        elif is_gpt2:
            for name, out, size in (
                ("attn.c_attn", 3 * hidden, hidden),
                ("attn.c_proj", hidden, hidden),
                ("mlp.c_fc", inner, hidden),
                ("mlp.c_proj", hidden, inner),
            ):
                yield f"{layer}.{name}.weight", (size, out)  # GPT-2 stores its products transposed
                yield f"{layer}.{name}.bias", (out,)
        else:
            for part in ("q_proj", "k_proj", "v_proj"):
                yield from _product(f"{layer}.attn.attention.{part}", hidden, hidden)
            yield from _product(f"{layer}.attn.attention.out_proj", hidden, hidden, bias=True)
            yield from _product(f"{layer}.mlp.c_fc", inner, hidden, bias=True)
            yield from _product(f"{layer}.mlp.c_proj", hidden, inner, bias=True)
    last = "gpt_neox.final_layer_norm" if is_neox else "transformer.ln_f"
    yield f"{last}.weight", (hidden,)
    yield f"{last}.bias", (hidden,)
    if not dims.tie_word_embeddings:
        yield from _product("embed_out" if is_neox else "lm_head", dims.vocab_size, hidden)
