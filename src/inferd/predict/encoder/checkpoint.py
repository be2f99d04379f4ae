"""The description of a text encoder's folder, from its small files: architecture, task, sizes, pooling.

The loader, the plan and ``inferd check`` share this one reading. Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from inferd.checkpoints.decoder_config import DecoderConfig, Source, read_llama
from inferd.checkpoints.longrope import Asked, factors_text, with_factors
from inferd.errors import ModelLoadError
from inferd.predict.encoder.config import EncoderConfig, Kind, kind_of, labels_of, read_config
from inferd.predict.encoder.sentence import Pooling, Sentence, check_dense, read_sentence

Task = Literal["embed", "rerank", "classify", "token_classify"]


class EncoderOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``options`` of a text encoder, which replace the settings in its folder."""

    pooling: Pooling | tuple[Pooling, ...] | None = None
    normalize: bool | None = None
    quantize: Literal["int8"] | None = None  # the layers' products; norms, attention and heads stay as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCheckpoint:
    """A checkpoint that can be served. ``max_tokens``: of one text, special tokens included."""

    sentence: Sentence
    source: Source
    kind: Kind
    task: Task
    labels: tuple[str, ...]
    config: EncoderConfig | DecoderConfig
    max_tokens: int

    @property
    def rope_factors(self) -> str:
        """A sentence about LongRoPE's factors; empty where the model has no choice of them."""
        return factors_text(self.config) if isinstance(self.config, DecoderConfig) else ""


def read_checkpoint(
    folder: Path,
    *,
    task: Task | Literal["auto", "predict"] = "auto",
    max_tokens: int | None = None,
    rope_factors: Asked = "auto",
    options: EncoderOptions = EncoderOptions(),
) -> TextCheckpoint:
    """What follows the folder are the operator's settings. Raises ModelLoadError naming the file and the field at
    fault."""
    sentence = _as_asked(read_sentence(folder), options)
    source = Source(sentence.folder / "config.json")
    kind = kind_of(source)
    labels = labels_of(source)
    chosen = _task(source, kind, task, len(labels))
    config: EncoderConfig | DecoderConfig
    if kind.family == "decoder":
        for name, wrong in (("is_causal", False), ("use_bidirectional_attention", True)):
            if source.data.get(name) is wrong:
                raise ModelLoadError(
                    f"{source.path}: {name} is {str(wrong).lower()}; a decoder whose tokens see those behind them is "
                    "not supported.",
                    param=name,
                )
        config = read_llama(source, f"{kind.stem}ForCausalLM")
        config = with_factors(config, rope_factors, max_tokens or sentence.max_tokens)
        positions = config.max_position_embeddings
    else:
        config = read_config(source)
        positions = config.max_positions
    if chosen == "embed":
        num_pooled = len(sentence.pooling or ("mean",))
        misfit = check_dense(sentence.dense, config.hidden_size * num_pooled)
        if misfit is not None:
            raise ModelLoadError(f"{source.path.parent}: {misfit}. Its modules do not belong together.")
    return TextCheckpoint(
        sentence=sentence,
        source=source,
        kind=kind,
        task=chosen,
        labels=labels,
        config=config,
        max_tokens=_limit(source, sentence, positions, max_tokens),
    )


def read_options(options: Mapping[str, object]) -> EncoderOptions:
    """Raises ModelLoadError for one that there is not."""
    try:
        return msgspec.convert(options, EncoderOptions)
    except msgspec.ValidationError as error:
        raise ModelLoadError(f"options of a text encoder: {error}.", param="options") from None


def _as_asked(sentence: Sentence, options: EncoderOptions) -> Sentence:
    pooling = (options.pooling,) if isinstance(options.pooling, str) else options.pooling
    if pooling is not None:
        sentence = replace(sentence, pooling=pooling)
    return sentence if options.normalize is None else replace(sentence, normalize=options.normalize)


def _task(source: Source, kind: Kind, requested: str, num_labels: int) -> Task:
    made_for: Task = "embed"
    if kind.head == "token":
        made_for = "token_classify"
    elif kind.head == "sequence":
        made_for = "rerank" if num_labels == 1 else "classify"
    fits = {
        "auto": True,
        "predict": True,
        "embed": True,
        "rerank": kind.head == "sequence" and num_labels == 1,
        "classify": kind.head == "sequence",
        "token_classify": kind.head == "token",
    }
    if not fits[requested]:
        raise ModelLoadError(
            f"{source.path}: {kind.architecture} with {num_labels} labels cannot {requested.replace('_', ' ')}; it was "
            f"made to {made_for.replace('_', ' ')}. Leave task out, or give a checkpoint with such a head.",
            param="task",
        )
    return made_for if requested in ("auto", "predict") else requested  # type: ignore[return-value]


def _limit(source: Source, sentence: Sentence, positions: int, requested: int | None) -> int:
    if requested is not None:
        if requested > positions:
            raise ModelLoadError(
                f"max_model_len is {requested}, but {source.path} has positions for {positions} tokens; lower it.",
                param="max_model_len",
            )
        return requested
    return min(positions, sentence.max_tokens or positions)
