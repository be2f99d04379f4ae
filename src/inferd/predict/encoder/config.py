"""A text encoder's config.json, as one struct for every family. Knows no tensor.

``auto_map`` and everything else that would run code from the folder is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from inferd.checkpoints.decoder_config import FAMILIES, Source, rope_of
from inferd.checkpoints.rope import Rope
from inferd.errors import ModelLoadError

Family = Literal["bert", "distilbert", "mpnet", "modernbert", "decoder"]
HeadKind = Literal["none", "sequence", "token"]

ACTIVATIONS: Final = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu", "silu", "swish", "tanh")
_NAMES: Final[dict[str, tuple[Family, str]]] = {  # the class's stem -> family, prefix of its tensors under a head
    "Bert": ("bert", "bert."),
    "Roberta": ("bert", "roberta."),
    "XLMRoberta": ("bert", "roberta."),
    "Camembert": ("bert", "roberta."),
    "MPNet": ("mpnet", "mpnet."),
    "DistilBert": ("distilbert", "distilbert."),
    "ModernBert": ("modernbert", "model."),
}
_HEADS: Final[dict[str, HeadKind]] = {
    "Model": "none",
    "ForMaskedLM": "none",
    "ForPreTraining": "none",
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
}
# Decoders: the language model's name with these endings.
_DECODER_HEADS: Final[dict[str, HeadKind]] = {
    "Model": "none",
    "ForCausalLM": "none",
    "ForSequenceClassification": "sequence",
}
_TEXT_CLASSES: Final = {"Gemma3": "Gemma3Text"}  # decoders whose plain names also occur in models for images
_WITHOUT_CLASSES: Final = ("Granite",)  # decoders of which transformers has no ForSequenceClassification


class Kind(NamedTuple):
    """The properties that an architecture's name gives."""

    architecture: str
    stem: str
    family: Family
    prefix: str  # of the encoder's tensors, where there is a head beside it
    head: HeadKind


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Sizes and switches. Lengths are in elements, windows in tokens."""

    kind: Kind
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_positions: int  # tokens of a text, special ones included
    first_position: int = 0  # of the first token in the table of positions
    norm_eps: float
    activation: str
    type_vocab_size: int = 0  # 0: no token types
    dtype: str
    windows: tuple[int | None, ...]  # per layer: how far a token sees to either side; None: everywhere
    ropes: tuple[Rope | None, ...]  # per layer
    num_buckets: int = 0  # of MPNet's relative positions; 0: none
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    labels: tuple[str, ...]
    classifier_pooling: str = "cls"
    classifier_activation: str
    classifier_bias: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def _kinds() -> Iterator[Kind]:
    """The kinds of all served architectures, by their names in transformers."""
    for stem, (family, prefix) in _NAMES.items():
        for ending, head in _HEADS.items():
            if ending != "ForPreTraining" or stem == "Bert":
                yield Kind(stem + ending, stem, family, prefix, head)
    for name in FAMILIES:
        stem = name.removesuffix("ForCausalLM")
        for ending, head in _DECODER_HEADS.items():
            if stem != name and (head == "none" or stem not in _WITHOUT_CLASSES):
                named = stem if ending == "ForCausalLM" else _TEXT_CLASSES.get(stem, stem)
                yield Kind(named + ending, stem, "decoder", "model.", head)


_KINDS: Final = {kind.architecture: kind for kind in _kinds()}


def supported_architectures() -> list[Kind]:
    """The names that a config.json may have in ``architectures``, encoders before decoders."""
    return list(_KINDS.values())


def kind_of(source: Source) -> Kind:
    """The architecture that config.json names. Raises ModelLoadError."""
    for name in map(str, source.architectures):
        if name in _KINDS:
            return _KINDS[name]
    listed = ", ".join(map(str, source.architectures)) or "none named"
    stems = dict.fromkeys(kind.stem for kind in _KINDS.values())
    raise ModelLoadError(
        f"{source.path}: the architecture ({listed}) is no text encoder that inferd knows. Supported are the families "
        f"{', '.join(stems)}; inferd models lists every architecture.",
        param="architectures",
    )


def read_config(source: Source) -> EncoderConfig:
    """config.json of the encoders that are no decoders. Raises ModelLoadError naming the field at fault."""
    kind = kind_of(source)
    if kind.family == "modernbert":
        return _modernbert(source, kind)
    positional = source.get(str, "position_embedding_type", default="absolute")
    if positional != "absolute":
        raise ModelLoadError(
            f"{source.path}: position_embedding_type is {positional!r}; supported is 'absolute'.",
            param="position_embedding_type",
        )
    pad = source.get(int, "pad_token_id", default=1 if kind.prefix in ("roberta.", "mpnet.") else 0)
    table = source.size("max_position_embeddings", default=512)
    # RoBERTa's positions begin behind the padding token's id (MPNet's is always 1).
    first = {"roberta.": pad + 1, "mpnet.": 2}.get(kind.prefix, 0)
    if not 0 <= first < table:
        raise ModelLoadError(
            f"{source.path}: max_position_embeddings is {table}, but the first position is {first}.",
            param="max_position_embeddings",
        )
    num_layers = source.size("num_hidden_layers", "n_layers", most=10_000)
    hidden = source.size("hidden_size", "dim")
    return _checked(
        source,
        EncoderConfig(
            kind=kind,
            vocab_size=source.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=source.size("intermediate_size", "hidden_dim"),
            num_layers=num_layers,
            num_heads=source.size("num_attention_heads", "n_heads"),
            max_positions=table - first,
            first_position=first,
            norm_eps=1e-12 if kind.family == "distilbert" else source.positive("layer_norm_eps", 1e-12),
            activation=source.activation("hidden_act", "activation", default="gelu", known=ACTIVATIONS),
            type_vocab_size=source.size("type_vocab_size", default=2) if kind.family == "bert" else 0,
            dtype=source.dtype(),
            windows=(None,) * num_layers,
            ropes=(None,) * num_layers,
            num_buckets=source.size("relative_attention_num_buckets", default=32) if kind.family == "mpnet" else 0,
            labels=labels_of(source),
            classifier_activation="relu" if kind.family == "distilbert" else "tanh",
        ),
    )


def _modernbert(source: Source, kind: Kind) -> EncoderConfig:
    num_layers = source.size("num_hidden_layers", most=10_000)
    hidden, heads = source.size("hidden_size"), source.size("num_attention_heads")
    every = source.size("global_attn_every_n_layers", default=3)
    types = source.strings("layer_types") or [
        "sliding_attention" if i % every else "full_attention" for i in range(num_layers)
    ]
    if len(types) != num_layers:
        raise ModelLoadError(
            f"{source.path}: layer_types has {len(types)} entries for {num_layers} layers.", param="layer_types"
        )
    half = source.size("local_attention", default=128) // 2
    thetas = {
        "full_attention": source.positive("global_rope_theta", 160_000.0),
        "sliding_attention": source.positive("local_rope_theta", 10_000.0),
    }
    head_dim = hidden // heads
    ropes = {name: rope_of(source, head_dim, kind=name, theta=theta) for name, theta in thetas.items()}
    for name in types:
        if name not in ropes:
            raise ModelLoadError(
                f"{source.path}: layer_types names {name!r}; supported are {', '.join(ropes)}.", param="layer_types"
            )
    return _checked(
        source,
        EncoderConfig(
            kind=kind,
            vocab_size=source.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=source.size("intermediate_size"),
            num_layers=num_layers,
            num_heads=heads,
            max_positions=source.size("max_position_embeddings", default=8192),
            norm_eps=source.positive("norm_eps", 1e-5),
            activation=source.activation("hidden_activation", default="gelu", known=ACTIVATIONS),
            dtype=source.dtype(),
            windows=tuple(half if name == "sliding_attention" else None for name in types),
            ropes=tuple(ropes[name] for name in types),
            attention_bias=source.get(bool, "attention_bias", default=False),
            mlp_bias=source.get(bool, "mlp_bias", default=False),
            norm_bias=source.get(bool, "norm_bias", default=False),
            labels=labels_of(source),
            classifier_pooling=source.get(str, "classifier_pooling", default="cls"),
            classifier_activation=source.activation("classifier_activation", default="gelu", known=ACTIVATIONS),
            classifier_bias=source.get(bool, "classifier_bias", default=False),
        ),
    )


def _checked(source: Source, config: EncoderConfig) -> EncoderConfig:
    if config.hidden_size % config.num_heads:
        raise ModelLoadError(
            f"{source.path}: hidden_size is {config.hidden_size}, no multiple of num_attention_heads "
            f"{config.num_heads}.",
            param="hidden_size",
        )
    return config


def labels_of(source: Source) -> tuple[str, ...]:
    """Names of the classes, in the order of the logits. Two where config.json names none, as in transformers."""
    named: Any = source.data.get("id2label")
    if named is None:
        count = source.size("num_labels", default=2, most=1_000_000)
        return tuple(f"LABEL_{i}" for i in range(count))
    if not isinstance(named, dict) or sorted(map(str, named)) != sorted(map(str, range(len(named)))):
        raise ModelLoadError(
            f"{source.path}: id2label must be an object whose keys are the numbers from 0 on.", param="id2label"
        )
    by_number = {str(key): str(value) for key, value in named.items()}
    return tuple(by_number[str(i)] for i in range(len(by_number)))


def is_raw_score(source: Source) -> bool:
    """Whether sentence-transformers' settings leave the cross encoder's logit unchanged."""
    nested: Any = source.data.get("sentence_transformers")
    named = nested.get("activation_fn") if isinstance(nested, dict) else None
    named = named or source.data.get("sbert_ce_default_activation_function")
    return isinstance(named, str) and named.endswith("Identity")
