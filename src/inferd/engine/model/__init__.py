"""Model definitions: from a checkpoint folder to a ``Decoder``.

One file per kind of decoder; a family is an entry in a table. Each is checked against transformers in
the tests; transformers is never imported here, and nothing from the folder is run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from inferd.engine.attention import Attention, FlatBatch
from inferd.engine.model.config import FAMILIES, DecoderConfig, Source, read_llama
from inferd.engine.model.gpt import GPTDecoder, read_gpt
from inferd.engine.model.llama import LlamaDecoder
from inferd.engine.weights import Weights
from inferd.errors import ModelLoadError

GPT = ("GPT2LMHeadModel", "GPTNeoForCausalLM", "GPTNeoXForCausalLM")

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
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


def supported_architectures() -> list[str]:
    """Names as they stand in a config.json's ``architectures``."""
    return sorted([*FAMILIES, *GPT])


def load_model(
    folder: Path,
    *,
    dtype: DTypeName,
    device: torch.device,
    progress: Progress | None = None,
    num_positions: int | None = None,
) -> Decoder:
    """Read a checkpoint. ``num_positions``: length of the rotary tables; None: the checkpoint's maximum.

    Raises ModelLoadError naming the file, the field or the tensor at fault.
    """
    source = Source(folder / "config.json")
    architecture = _architecture(source)
    config = read_gpt(source, architecture) if architecture in GPT else read_llama(source, architecture)
    weights = Weights(folder, dtype=_dtype(dtype, config.dtype, device, source), device=device, progress=progress)
    _settle_prefix(weights, architecture)
    longest = min(num_positions or config.max_position_embeddings, config.max_position_embeddings)
    decoder: Decoder
    if architecture in GPT:
        decoder = GPTDecoder(config, weights, longest)
    else:
        decoder = LlamaDecoder(config, FAMILIES[architecture], weights, longest)
    weights.check_all_taken(_is_ignorable(config))
    return decoder


def _architecture(source: Source) -> str:
    known = supported_architectures()
    for name in source.architectures:
        if name in known:
            return str(name)
    asked = ", ".join(str(a) for a in source.architectures) or "none named"
    raise ModelLoadError(
        f"{source.path}: the architecture ({asked}) is not supported. Supported are {', '.join(known)}.",
        param="architectures",
    )


def _dtype(asked: DTypeName, stored: str, device: torch.device, source: Source) -> torch.dtype:
    if asked != "auto":
        return getattr(torch, asked)  # type: ignore[no-any-return]
    if stored not in ("float32", "bfloat16", "float16", "float64"):
        raise ModelLoadError(
            f"{source.path}: dtype is {stored!r}; supported are float32, bfloat16 and float16.", param="dtype"
        )
    if stored in ("float32", "float64"):
        return torch.float32
    if device.type != "cpu":
        return getattr(torch, stored)  # type: ignore[no-any-return]
    return torch.bfloat16 if has_fast_bfloat16() else torch.float32


def has_fast_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 itself (AVX-512 BF16, AMX or Arm BF16)."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return False
    words = set(re.findall(r"\w+", cpuinfo.read_text()))
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16", "avx_ne_convert"})


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


def _is_ignorable(config: DecoderConfig) -> Callable[[str], bool]:
    """Tensors that old checkpoints carry and nothing needs: masks, rotary buffers, a tied head, vision."""
    pattern = (
        r"(rotary_emb\.(inv_freq|cos_cached|sin_cached)|attn(ention)?\.(attention\.)?(masked_)?bias|position_ids)$"
    )
    if config.tie_word_embeddings:
        pattern += r"|^(lm_head|embed_out)\.weight$"
    if config.architecture == "Gemma3ForConditionalGeneration":
        pattern += r"|vision_tower|multi_modal_projector"
    compiled = re.compile(pattern)
    return lambda name: compiled.search(name) is not None
