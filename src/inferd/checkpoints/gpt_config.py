"""config.json of the older decoders: GPT-2, GPT-Neo and GPT-NeoX. Knows no tensor."""

from __future__ import annotations

from typing import NamedTuple

from inferd.checkpoints.decoder_config import DecoderConfig, Source, rope_of
from inferd.errors import ModelLoadError

PLAIN_ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu", "relu", "silu")


class _Keys(NamedTuple):
    """The keys of an architecture's sizes in config.json, and its default activation."""

    heads: str = "num_attention_heads"
    layers: str = "num_hidden_layers"
    hidden: str = "hidden_size"
    inner: str = "intermediate_size"
    positions: str = "max_position_embeddings"
    eps: str = "layer_norm_epsilon"
    activation: str = "activation_function"
    default_activation: str = "gelu_new"


_GPT2 = _Keys("n_head", "n_layer", "n_embd", "n_inner", "n_positions")  # n_inner may be null: the default
_GPT_NEO = _Keys(heads="num_heads", layers="num_layers")
_GPT_NEOX = _Keys(eps="layer_norm_eps", activation="hidden_act", default_activation="gelu")


def read_gpt(source: Source, architecture: str) -> DecoderConfig:
    """config.json of GPT-2, GPT-Neo or GPT-NeoX."""
    is_gpt2, is_neo = architecture == "GPT2LMHeadModel", architecture == "GPTNeoForCausalLM"
    is_neox = not is_gpt2 and not is_neo
    keys = _GPT2 if is_gpt2 else _GPT_NEO if is_neo else _GPT_NEOX
    if is_gpt2 and source.data.get("scale_attn_by_inverse_layer_idx"):
        raise ModelLoadError(
            f"{source.path}: scale_attn_by_inverse_layer_idx is not supported.",
            param="scale_attn_by_inverse_layer_idx",
        )
    num_heads, num_layers = source.size(keys.heads), source.size(keys.layers, most=10_000)
    width = source.size(keys.hidden)
    if width % num_heads:
        raise ModelLoadError(
            f"{source.path}: {keys.hidden} is {width}, no multiple of {keys.heads} {num_heads}.", param=keys.hidden
        )
    dim = width // num_heads
    # GPT-Neo does not scale its scores.
    is_scaled = not is_neo and not (is_gpt2 and not source.get(bool, "scale_attn_weights", default=True))
    return DecoderConfig(
        architecture=architecture,
        vocab_size=source.size("vocab_size"),
        hidden_size=width,
        intermediate_size=source.size(keys.inner, default=4 * width),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=dim,
        max_position_embeddings=source.size(keys.positions),
        norm_eps=source.get(float, keys.eps, default=1e-5),
        tie_word_embeddings=source.get(bool, "tie_word_embeddings", default=not is_neox),
        dtype=source.dtype(),
        eos_token_ids=source.eos_token_ids(),
        activation=source.activation(keys.activation, default=keys.default_activation, known=PLAIN_ACTIVATIONS),
        windows=_windows(source, num_layers) if is_neo else (None,) * num_layers,
        attention_scale=dim**-0.5 if is_scaled else 1.0,
        parallel_residual=is_neox and source.get(bool, "use_parallel_residual", default=True),
        ropes=(rope_of(source, dim, fraction=0.25) if is_neox else None,) * num_layers,
        qkv_bias=not is_neox or source.get(bool, "attention_bias", default=True),
    )


def _windows(source: Source, num_layers: int) -> tuple[int | None, ...]:
    """GPT-Neo's, layer by layer."""
    window = source.size("window_size", default=256)
    kinds = source.strings("attention_layers") or []
    if not kinds:
        if not isinstance(source.data.get("attention_types") or [], list):
            raise ModelLoadError(
                f"{source.path}: attention_types is {source.data['attention_types']!r}, but must be a list.",
                param="attention_types",
            )
        for entry in source.data.get("attention_types") or [[["global", "local"], num_layers // 2]]:
            match entry:
                case [list(pattern), int(times)] if 0 <= times <= num_layers:
                    kinds += [str(kind) for kind in pattern] * times
                case _:
                    raise ModelLoadError(
                        f"{source.path}: attention_types has {entry!r}, but must be a list of [kinds, times].",
                        param="attention_types",
                    )
    if len(kinds) != num_layers or set(kinds) - {"global", "local"}:
        raise ModelLoadError(
            f"{source.path}: attention_types names {len(kinds)} layers for {num_layers}; each must be global or local.",
            param="attention_types",
        )
    return tuple(window if kind == "local" else None for kind in kinds)
