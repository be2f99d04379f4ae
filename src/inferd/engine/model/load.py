"""From a checkpoint folder to a ``Decoder``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from inferd.engine.attention import Attention, FlatBatch
from inferd.engine.model.architecture import GPT, DTypeName, dtype_name, is_ignorable, read_config
from inferd.engine.model.config import FAMILIES, DecoderConfig, Source
from inferd.engine.model.gpt import GPTDecoder
from inferd.engine.model.llama import LlamaDecoder
from inferd.engine.weights import Weights
from inferd.errors import ModelLoadError

Progress = Callable[[str, int, int], None]


class Decoder(Protocol):
    """A decoder-only language model over a ragged batch. Call it under ``torch.inference_mode``."""

    config: DecoderConfig
    dtype: torch.dtype
    num_parameters: int
    weights_bytes: int  # in the model's own number format

    def forward(self, batch: FlatBatch, attention: Attention) -> Tensor:
        """Hidden states [T, hidden] of the batch's rows, after the final norm."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocab] float32."""
        ...


def load_model(
    folder: Path,
    *,
    dtype: DTypeName,
    device: torch.device,
    progress: Progress | None = None,
    num_positions: int | None = None,
    quantization: Literal["auto", "none", "int8", "int4"] = "auto",
) -> Decoder:
    """Read a checkpoint. ``num_positions``: length of the rotary tables; None: the checkpoint's maximum.

    ``quantization``: what becomes of the integers of a quantised checkpoint. auto: they are computed with as they are;
    none: they are made numbers; int8, int4: those of so many bits are kept, the others are made numbers.

    Raises ModelLoadError naming the file, the field or the tensor at fault.
    """
    source = Source(folder / "config.json")
    config = read_config(source)
    architecture = config.architecture
    name = dtype_name(dtype, config.dtype, on_cpu=device.type == "cpu", source=source)
    if architecture == "GPT2LMHeadModel" and source.quantization is not None:
        raise ModelLoadError(
            f"{source.path}: quantised GPT-2 checkpoints ({source.quantization.label}) are not read, as their weights are stored "
            "transposed. Take the unquantised checkpoint.",
            param="quantization_config",
        )
    weights = Weights(
        folder,
        dtype=getattr(torch, name),
        device=device,
        progress=progress,
        quantization=source.quantization,
        keep_integers=None if quantization == "auto" else lambda layout: f"int{layout.bits}" == quantization,
    )
    _settle_prefix(weights, architecture)
    longest = min(num_positions or config.max_position_embeddings, config.max_position_embeddings)
    decoder: Decoder
    if architecture in GPT:
        decoder = GPTDecoder(config, weights, longest)
    else:
        decoder = LlamaDecoder(config, FAMILIES[architecture], weights, longest)
    weights.check_all_taken(is_ignorable(config))
    return decoder


def _settle_prefix(weights: Weights, architecture: str) -> None:
    """Multimodal wrappers keep their text decoder's tensors under a prefix of their own, and the first GPT-2
    checkpoints have none."""
    if architecture == "Gemma3ForConditionalGeneration":
        for prefix in ("model.language_model.", "language_model.model."):
            if any(name.startswith(prefix) for name in weights):
                weights.rename("model.", prefix)
                return
    if architecture == "GPT2LMHeadModel" and "transformer.wte.weight" not in weights:
        weights.rename("transformer.", "")
