"""The content of a checkpoint's config.json, in one structure for every family.

Reads both the older keys (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and the newer ones (``rope_parameters``,
``dtype``). A field that is missing or has the wrong type raises an error that names it. ``auto_map`` and every other
field that would run code from the folder is ignored.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from inferd.checkpoints.rope import Rope
from inferd.checkpoints.stored.declared import read_quantization
from inferd.errors import ModelLoadError

T = TypeVar("T", int, float, bool, str)

GATED_ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh")
_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """A mixture-of-experts feed-forward (Shazeer et al. 2017): ``top_k`` of ``num_experts`` per token."""

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalise: bool  # whether the chosen experts' weights are made to sum to one


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of a decoder. Lengths are in elements, windows in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...] = ()
    activation: str = "silu"
    windows: tuple[int | None, ...] = ()  # per layer; None: the whole text
    ropes: tuple[Rope | None, ...] = ()  # per layer; None: no rotary embedding
    attention_scale: float = 1.0
    attention_softcap: float | None = None
    final_softcap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    moe: tuple[MoE | None, ...] = ()  # per layer
    parallel_residual: bool = False


class Source:
    """config.json with typed access; every error names the file and the field."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data: Any = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelLoadError(f"{path} does not exist. Give the folder of a Hugging Face checkpoint.") from None
        except OSError as error:
            raise ModelLoadError(
                f"{path} cannot be read: {error.strerror}. Give the folder of a Hugging Face checkpoint."
            ) from error
        except (ValueError, RecursionError) as error:
            raise ModelLoadError(f"{path} is not valid JSON: {error}. Download it again.") from error
        if not isinstance(data, dict):
            raise ModelLoadError(f"{path} must be a JSON object.")
        named = data.get("architectures")
        self.architectures: list[Any] = named if isinstance(named, list) else [] if named is None else [named]
        self.quantization = read_quantization(path, data)  # None: the checkpoint's weights are plain numbers
        if isinstance(data.get("text_config"), dict):  # a multimodal wrapper around a text decoder
            data = {**data, **data["text_config"]}
        self.data = data

    def get(self, kind: type[T], *names: str, default: T | None = None) -> T:
        """The first of ``names`` that is set. Raises ModelLoadError where none is and there is no default."""
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
                return float(value)  # type: ignore[return-value]
            if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
                raise ModelLoadError(
                    f"{self.path}: {name} is {value!r}, but must be of type {kind.__name__}.", param=name
                )
            if isinstance(value, float) and not math.isfinite(value):
                raise ModelLoadError(f"{self.path}: {name} is {value!r}, but must be finite.", param=name)
            return value
        if default is None:
            raise ModelLoadError(f"{self.path} has no {names[0]!r}, which this architecture needs.", param=names[0])
        return default

    def size(self, *names: str, default: int | None = None, most: int = _MOST) -> int:
        """An integer from 1 to ``most``, a bound far above every real checkpoint."""
        value = self.get(int, *names, default=default)
        if not 1 <= value <= most:
            raise ModelLoadError(f"{self.path}: {names[0]} is {value}, but must be from 1 to {most}.", param=names[0])
        return value

    def positive(self, name: str, default: float) -> float:
        """A positive number."""
        value = self.get(float, name, default=default)
        if value <= 0:
            raise ModelLoadError(f"{self.path}: {name} is {value}, but must be positive.", param=name)
        return value

    def activation(self, *names: str, default: str, known: tuple[str, ...]) -> str:
        value = self.get(str, *names, default=default)
        if value not in known:
            raise ModelLoadError(
                f"{self.path}: activation {value!r} is not supported; supported are {', '.join(known)}.", param=names[0]
            )
        return value

    def integers(self, name: str) -> list[int] | None:
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(v, int) for v in value):
            raise ModelLoadError(f"{self.path}: {name} is {value!r}, but must be a list of integers.", param=name)
        return value

    def optional(self, kind: type[T], name: str) -> T | None:
        return None if self.data.get(name) is None else self.get(kind, name)

    def strings(self, name: str) -> list[str] | None:
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise ModelLoadError(f"{self.path}: {name} is {value!r}, but must be a list.", param=name)
        return [str(v) for v in value]

    def eos_token_ids(self) -> tuple[int, ...]:
        value = self.data.get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool))

    def dtype(self) -> str:
        return str(self.data.get("dtype") or self.data.get("torch_dtype") or "float32").removeprefix("torch.")


def rope_of(
    source: Source, head_dim: int, *, kind: str | None = None, theta: float = 10000.0, fraction: float = 1.0
) -> Rope:
    """The rotary parameters; those of layer type ``kind`` where the checkpoint distinguishes layers."""
    options: Any = source.data.get("rope_parameters") or source.data.get("rope_scaling") or {}
    if kind is not None and isinstance(options, dict) and isinstance(options.get(kind), dict):
        options = options[kind]
    if not isinstance(options, dict):
        raise ModelLoadError(
            f"{source.path}: rope parameters are {options!r}, but must be an object.", param="rope_parameters"
        )
    options = {k: v for k, v in options.items() if v is not None}
    variant = str(options.get("rope_type") or options.get("type") or "default")
    variant = {"su": "longrope", "mrope": "default"}.get(variant, variant)
    given = {**{k: v for k, v in source.data.items() if v is not None}, **options}
    base = given.get("rope_theta", given.get("rotary_emb_base", theta))
    share = given.get("partial_rotary_factor", given.get("rotary_pct", fraction))
    for name, value, most in (("rope_theta", base, 1e15), ("partial_rotary_factor", share, 1.0)):
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= most:
            raise ModelLoadError(
                f"{source.path}: {name} is {value!r}, but must be a positive number up to {most:g}.", param=name
            )
    # Where both are set, transformers uses the one beside the rope parameters (Phi-3 writes it there).
    original = source.data.get("original_max_position_embeddings") or options.get("original_max_position_embeddings")
    if original is not None and (
        not isinstance(original, int) or isinstance(original, bool) or not 1 <= original <= _MOST
    ):
        raise ModelLoadError(
            f"{source.path}: original_max_position_embeddings is {original!r}, but must be a positive integer.",
            param="original_max_position_embeddings",
        )
    dim = int(head_dim * share) // 2 * 2
    if dim < 2:
        raise ModelLoadError(
            f"{source.path}: partial_rotary_factor {share} of head_dim {head_dim} leaves nothing to rotate.",
            param="partial_rotary_factor",
        )
    rope = Rope(
        dim=dim,
        theta=float(base),
        variant=variant,
        options=options,
        max_position_embeddings=source.size("max_position_embeddings", "n_positions", default=2048),
        original_max_position_embeddings=original,
    )
    rope.check()
    return rope


@dataclass(frozen=True, slots=True)
class Family:
    """How a Llama-like family's config.json and layers differ from Llama's."""

    norm_offset: float = 0.0  # Gemma's weights are stored as w - 1
    qk_norm: str = ""  # "", "head" or "full"
    pre_norm: bool = True
    post_norm: bool = False  # the branch's output is normed before it is added
    fused: bool = False  # the checkpoint stores merged projections (Phi-3)
    qkv_bias: bool = False  # always, whatever config.json says
    gemma: bool = False
    # Layers that look at ``sliding_window``: "all", or "some", by layer_types. None: the field has no effect.
    window: Literal["all", "some"] | None = None
    window_switched: bool = False  # by use_sliding_window


_GEMMA3 = Family(norm_offset=1.0, qk_norm="head", post_norm=True, gemma=True, window="some")
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(window="all"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window="some", window_switched=True),
    "Qwen3ForCausalLM": Family(qk_norm="head", window="some", window_switched=True),
    "Qwen3MoeForCausalLM": Family(qk_norm="head", window="all", window_switched=True),
    "MixtralForCausalLM": Family(window="all"),
    "Gemma2ForCausalLM": Family(norm_offset=1.0, post_norm=True, gemma=True, window="some"),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Phi3ForCausalLM": Family(fused=True, window="all"),
    "SmolLM3ForCausalLM": Family(window="some", window_switched=True),
    "Olmo2ForCausalLM": Family(qk_norm="full", pre_norm=False, post_norm=True),
    "GraniteForCausalLM": Family(),
}


def read_llama(source: Source, architecture: str) -> DecoderConfig:
    """config.json of the families that are Llama with variations."""
    family = FAMILIES[architecture]
    granite = architecture == "GraniteForCausalLM"
    num_layers, num_heads = source.size("num_hidden_layers", most=10_000), source.size("num_attention_heads")
    hidden = source.size("hidden_size")
    num_kv_heads = source.size("num_key_value_heads", default=num_heads)
    head_dim = source.size("head_dim", default=hidden // num_heads)
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"{source.path}: num_attention_heads is {num_heads}, no multiple of num_key_value_heads {num_kv_heads}.",
            param="num_key_value_heads",
        )
    kinds = _layer_kinds(source, architecture, num_layers)
    window = source.size("sliding_window") if "sliding_attention" in kinds else None
    if source.data.get("use_bidirectional_attention"):
        raise ModelLoadError(
            f"{source.path}: use_bidirectional_attention is set: this is an encoder, which does not generate text.",
            param="use_bidirectional_attention",
        )
    ropes = _ropes(source, architecture, kinds, head_dim)
    scale = head_dim**-0.5
    if family.gemma:
        scale = source.positive("query_pre_attn_scalar", float(head_dim)) ** -0.5
    elif granite:
        scale = source.get(float, "attention_multiplier", default=1.0)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=source.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=source.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_longest(source, ropes),
        norm_eps=source.get(float, "rms_norm_eps", default=1e-6),
        tie_word_embeddings=source.get(bool, "tie_word_embeddings", default=family.gemma),
        dtype=source.dtype(),
        eos_token_ids=source.eos_token_ids(),
        activation=source.activation(
            "hidden_activation",
            "hidden_act",
            default="gelu_pytorch_tanh" if family.gemma else "silu",
            known=GATED_ACTIVATIONS,
        ),
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        ropes=ropes,
        attention_scale=scale,
        attention_softcap=source.optional(float, "attn_logit_softcapping") if family.gemma else None,
        final_softcap=source.optional(float, "final_logit_softcapping") if family.gemma else None,
        qkv_bias=family.qkv_bias or source.get(bool, "attention_bias", default=False),
        output_bias=not family.qkv_bias and source.get(bool, "attention_bias", default=False),
        mlp_bias=source.get(bool, "mlp_bias", default=False),
        embedding_multiplier=source.get(float, "embedding_multiplier", default=1.0) if granite else 1.0,
        residual_multiplier=source.get(float, "residual_multiplier", default=1.0) if granite else 1.0,
        logits_divisor=source.positive("logits_scaling", 1.0) if granite else 1.0,
        moe=_experts(source, architecture, num_layers),
    )


def _layer_kinds(source: Source, architecture: str, num_layers: int) -> list[str]:
    """ "sliding_attention" or "full_attention" per layer."""
    family = FAMILIES[architecture]
    on = not family.window_switched or source.get(bool, "use_sliding_window", default=False)
    if family.window == "all":
        # Some checkpoints write 0 for no window.
        return ["sliding_attention" if on and source.data.get("sliding_window") else "full_attention"] * num_layers
    if family.window is None or not on:
        return ["full_attention"] * num_layers
    kinds = source.strings("layer_types")
    if kinds is None:
        if architecture == "Gemma2ForCausalLM":
            kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
        elif architecture.startswith("Gemma3"):
            every = source.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
            kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
        elif architecture == "SmolLM3ForCausalLM":
            every = source.size("no_rope_layer_interval", default=4)
            switches = source.integers("no_rope_layers") or [int((i + 1) % every != 0) for i in range(num_layers)]
            kinds = ["full_attention" if on else "sliding_attention" for on in switches[:num_layers]]
        else:
            first = source.get(int, "max_window_layers", default=28)
            kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    if len(kinds) != num_layers:
        raise ModelLoadError(
            f"{source.path}: layer_types has {len(kinds)} entries for {num_layers} layers.", param="layer_types"
        )
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown:
        raise ModelLoadError(
            f"{source.path}: layer_types has {unknown[0]!r}; supported are full_attention and sliding_attention.",
            param="layer_types",
        )
    return kinds


def _longest(source: Source, ropes: tuple[Rope | None, ...]) -> int:
    """Positions that the model serves.

    YaRN extends the trained positions by its factor: Qwen's model cards ask for long texts that way, without changing
    max_position_embeddings.
    """
    longest = source.size("max_position_embeddings")
    for rope in ropes:
        if rope is not None and rope.variant == "yarn" and rope.original_max_position_embeddings:
            longest = max(longest, int(rope.number("factor", 1.0) * rope.original_max_position_embeddings))
    return longest


def _ropes(source: Source, architecture: str, kinds: list[str], head_dim: int) -> tuple[Rope | None, ...]:
    if architecture == "SmolLM3ForCausalLM":
        every = source.size("no_rope_layer_interval", default=4)
        switches = source.integers("no_rope_layers") or [int((i + 1) % every != 0) for i in range(len(kinds))]
        if len(switches) < len(kinds):
            raise ModelLoadError(
                f"{source.path}: no_rope_layers has {len(switches)} entries for {len(kinds)} layers.",
                param="no_rope_layers",
            )
        rope = rope_of(source, head_dim, theta=2000000.0)
        return tuple(rope if on else None for on in switches[: len(kinds)])
    if architecture.startswith("Gemma3"):
        whole = rope_of(source, head_dim, kind="full_attention", theta=1000000.0)
        local = rope_of(
            source, head_dim, kind="sliding_attention", theta=source.get(float, "rope_local_base_freq", default=10000.0)
        )
        if not isinstance((source.data.get("rope_parameters") or {}).get("sliding_attention"), dict):
            base = source.get(float, "rope_local_base_freq", default=10000.0)
            local = Rope(dim=local.dim, theta=base, max_position_embeddings=local.max_position_embeddings)
        return tuple(whole if kind == "full_attention" else local for kind in kinds)
    return (rope_of(source, head_dim),) * len(kinds)


def _experts(source: Source, architecture: str, num_layers: int) -> tuple[MoE | None, ...]:
    if architecture == "MixtralForCausalLM":
        moe = MoE(
            num_experts=source.size("num_local_experts"),
            top_k=source.size("num_experts_per_tok"),
            intermediate_size=source.size("intermediate_size"),
            renormalise=True,
        )
        return (moe,) * num_layers
    if architecture == "Qwen3MoeForCausalLM":
        moe = MoE(
            num_experts=source.size("num_experts", "num_local_experts"),
            top_k=source.size("num_experts_per_tok"),
            intermediate_size=source.size("moe_intermediate_size"),
            renormalise=source.get(bool, "norm_topk_prob", default=False),
        )
        every = source.size("decoder_sparse_step", default=1)
        dense = source.integers("mlp_only_layers") or []
        return tuple(moe if i not in dense and (i + 1) % every == 0 else None for i in range(num_layers))
    return (None,) * num_layers
