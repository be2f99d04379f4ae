"""Loading a text model from a folder: a tokenizer, an encoder, and the head of its task."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, Protocol

import torch
from torch import Tensor

from inferd.checkpoints.architecture import DTypeName, has_fast_bfloat16
from inferd.checkpoints.decoder_config import DecoderConfig, Source
from inferd.checkpoints.longrope import Asked
from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.checkpoints.weights import Weights
from inferd.errors import ModelLoadError
from inferd.native import compiled
from inferd.predict.encoder.bert import Bert
from inferd.predict.encoder.checkpoint import EncoderOptions, Task, read_checkpoint
from inferd.predict.encoder.config import EncoderConfig, Kind, is_raw_score
from inferd.predict.encoder.decoder import CausalEncoder
from inferd.predict.encoder.heads import Embedder, Head, decoder_head, sequence_head, token_head
from inferd.predict.encoder.modernbert import ModernBert
from inferd.predict.encoder.ragged import Ragged
from inferd.predict.encoder.sentence import Sentence
from inferd.predict.encoder.texts import Texts

Progress = Callable[[str, int, int], None]

_log = logging.getLogger("inferd.predict")

# Tensors that a checkpoint carries for other tasks than the one it is served for.
_OTHER: Final = re.compile(
    r"(^|\.)(pooler\.|position_ids$|rotary_emb\.)|^(cls|lm_head|vocab_\w+|head|decoder|classifier|pre_classifier|score|qa_outputs)\."
)


class Body(Protocol):
    hidden_size: int

    @property
    def keeps_rows(self) -> bool:
        """Whether a row has the same bits beside any other texts, on the CPU."""
        ...

    def forward(self, batch: Ragged) -> Tensor:
        """Rows [T, hidden] of the batch's tokens, float32."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """What a runtime drives. Call ``compute`` under ``torch.inference_mode``."""

    task: Task
    kind: Kind
    texts: Texts
    sentence: Sentence
    body: Body
    head: Head
    size: int  # of a vector, or the number of classes
    labels: tuple[str, ...]
    problem_type: str
    raw_score: bool
    normalize: bool
    dtype: torch.dtype  # of the products
    device: torch.device
    num_parameters: int

    @property
    def keeps_rows(self) -> bool:
        """Whether a text's values have the same bits in any batch. The body decides: a head's products are float32,
        and the kernels take any width of that."""
        return self.device.type == "cpu" and self.body.keeps_rows

    def compute(self, batch: Ragged) -> Tensor:
        """[S, size]; [T, size] for token classification. Vectors are not normalised, logits are logits."""
        return self.head(self.body.forward(batch), batch)


def load_text_model(
    folder: Path,
    *,
    task: Task | Literal["auto", "predict"] = "auto",
    dtype: DTypeName = "auto",
    device: torch.device,
    max_tokens: int | None = None,
    rope_factors: Asked = "auto",
    options: EncoderOptions = EncoderOptions(),
    progress: Progress | None = None,
) -> TextModel:
    """Raises ModelLoadError naming the file, the field or the tensor at fault."""
    checkpoint = read_checkpoint(folder, task=task, max_tokens=max_tokens, rope_factors=rope_factors, options=options)
    sentence, source, kind = checkpoint.sentence, checkpoint.source, checkpoint.kind
    labels, chosen, config, limit = checkpoint.labels, checkpoint.task, checkpoint.config, checkpoint.max_tokens
    products = _format(source, dtype, device) if options.quantize is None else _bytes(source, kind, dtype, device)
    tokens_at = sentence.folder if (sentence.folder / "tokenizer.json").is_file() else folder
    has_types = isinstance(config, EncoderConfig) and config.type_vocab_size > 1
    texts = Texts(
        Tokenizer.load(tokens_at),
        max_tokens=limit,
        lower_case=sentence.lower_case,
        has_types=has_types,
        vocab_size=config.vocab_size,
    )
    # The decoder is in one format as a whole; of an encoder, products alone are in another than float32.
    held = products if isinstance(config, DecoderConfig) else torch.float32
    weights = Weights(sentence.folder, dtype=held, device=device, progress=progress)
    prefix = kind.prefix if any(name.startswith(kind.prefix) for name in weights) else ""
    weights.rename("model.", prefix)
    body: Body
    if isinstance(config, DecoderConfig):
        body = CausalEncoder(replace(config, tie_word_embeddings=True), weights, limit)
    elif kind.family == "modernbert":
        body = ModernBert(config, weights, products, limit)
    else:
        body = Bert(config, weights, products)
    head, size = _head(source, chosen, kind, config, weights, sentence, body, len(labels))
    weights.check_all_read(lambda name: _OTHER.search(name) is not None)
    if checkpoint.rope_factors:
        _log.info("%s", checkpoint.rope_factors)
    return TextModel(
        task=chosen,
        kind=kind,
        texts=texts,
        sentence=sentence,
        body=body,
        head=head,
        size=size,
        labels=labels if chosen in ("classify", "token_classify") else (),
        problem_type=source.get(str, "problem_type", default=""),
        raw_score=is_raw_score(source),
        normalize=sentence.normalize is not False,
        dtype=products,
        device=device,
        num_parameters=weights.num_parameters,
    )


def _format(source: Source, requested: DTypeName, device: torch.device) -> torch.dtype:
    """The format of the products. auto: float32, or a faster one if the checkpoint has no more precision."""
    if requested == "float16" and device.type == "cpu":
        raise ModelLoadError(
            "float16 is not computed on the CPU; use dtype: float32, or bfloat16 where the processor has it.",
            param="dtype",
        )
    if requested != "auto":
        found: torch.dtype = getattr(torch, requested)
        return found
    stored = source.dtype()
    if device.type == "cpu":
        return torch.bfloat16 if stored == "bfloat16" and has_fast_bfloat16() else torch.float32
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(stored, torch.float32)


def _bytes(source: Source, kind: Kind, requested: DTypeName, device: torch.device) -> torch.dtype:
    if kind.family == "decoder" or device.type != "cpu" or requested not in ("auto", "float32"):
        raise ModelLoadError(
            f"{source.path}: quantize: int8 is for encoders on the CPU, beside dtype: float32; leave it out here.",
            param="options.quantize",
        )
    if not compiled.has_int8():
        raise ModelLoadError(
            "quantize: int8 needs a processor that multiplies bytes itself (AVX-512 VNNI) and inferd's kernels; leave "
            "it out, or use dtype: bfloat16 where the processor has that.",
            param="options.quantize",
        )
    return torch.int8


def _head(
    source: Source,
    task: Task,
    kind: Kind,
    config: EncoderConfig | DecoderConfig,
    weights: Weights,
    sentence: Sentence,
    body: Body,
    num_labels: int,
) -> tuple[Head, int]:
    if task == "embed":
        pooling = sentence.pooling or (("lasttoken",) if kind.family == "decoder" else ("mean",))
        made = Embedder(pooling, sentence.dense, body.hidden_size, weights.device)
        return made, made.size
    if isinstance(config, DecoderConfig):
        return decoder_head(weights, num_labels, body.hidden_size), num_labels
    return (token_head if task == "token_classify" else sequence_head)(config, weights), num_labels
