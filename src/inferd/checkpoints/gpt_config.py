"""config.json of the older decoders: GPT-2, GPT-Neo and GPT-NeoX. Knows no tensor."""

from __future__ import annotations

from inferd.checkpoints.decoder_config import DecoderConfig, Source, rope_of
from inferd.errors import ModelLoadError

PLAIN_ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu", "relu", "silu")


def _read(
    source: Source,
    architecture: str,
    *,
    heads: str,
    layers: str,
    hidden: str,
    positions: str,
    eps: str,
    activation: str,
    default_activation: str,
) -> DecoderConfig:
    num_heads, num_layers, width = source.size(heads), source.size(layers, most=10_000), source.size(hidden)
    if width % num_heads:
        raise ModelLoadError(f"{source.path}: {hidden} is {width}, no multiple of {heads} {num_heads}.", param=hidden)
    # GPT-2 calls it n_inner; there, null means four times the hidden size.
    inner = source.size("n_inner" if architecture == "GPT2LMHeadModel" else "intermediate_size", default=4 * width)
    dim = width // num_heads
    unscaled = architecture == "GPT2LMHeadModel" and not source.get(bool, "scale_attn_weights", default=True)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=source.size("vocab_size"),
        hidden_size=width,
        intermediate_size=inner,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=dim,
        max_position_embeddings=source.size(positions),
        norm_eps=source.get(float, eps, default=1e-5),
        tie_word_embeddings=source.get(bool, "tie_word_embeddings", default=architecture != "GPTNeoXForCausalLM"),
        dtype=source.dtype(),
        eos_token_ids=source.eos_token_ids(),
        activation=source.activation(activation, default=default_activation, known=PLAIN_ACTIVATIONS),
        windows=_windows(source, architecture, num_layers),
        # GPT-Neo does not scale its scores.
        attention_scale=1.0 if architecture == "GPTNeoForCausalLM" or unscaled else dim**-0.5,
        parallel_residual=architecture == "GPTNeoXForCausalLM"
        and source.get(bool, "use_parallel_residual", default=True),
        ropes=(rope_of(source, dim, fraction=0.25) if architecture == "GPTNeoXForCausalLM" else None,) * num_layers,
        qkv_bias=source.get(bool, "attention_bias", default=True) if architecture == "GPTNeoXForCausalLM" else True,
    )


def read_gpt(source: Source, architecture: str) -> DecoderConfig:
    """config.json of GPT-2, GPT-Neo or GPT-NeoX."""
    if architecture == "GPT2LMHeadModel":
        if source.data.get("scale_attn_by_inverse_layer_idx"):
            raise ModelLoadError(
                f"{source.path}: scale_attn_by_inverse_layer_idx is not supported.",
                param="scale_attn_by_inverse_layer_idx",
            )
        return _read(
            source,
            architecture,
            heads="n_head",
            layers="n_layer",
            hidden="n_embd",
            positions="n_positions",
            eps="layer_norm_epsilon",
            activation="activation_function",
            default_activation="gelu_new",
        )
    if architecture == "GPTNeoForCausalLM":
        return _read(
            source,
            architecture,
            heads="num_heads",
            layers="num_layers",
            hidden="hidden_size",
            positions="max_position_embeddings",
            eps="layer_norm_epsilon",
            activation="activation_function",
            default_activation="gelu_new",
        )
    return _read(
        source,
        architecture,
        heads="num_attention_heads",
        layers="num_hidden_layers",
        hidden="hidden_size",
        positions="max_position_embeddings",
        eps="layer_norm_eps",
        activation="hidden_act",
        default_activation="gelu",
    )


def _windows(source: Source, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    if architecture != "GPTNeoForCausalLM":
        return (None,) * num_layers
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
