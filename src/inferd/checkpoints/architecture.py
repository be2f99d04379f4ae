"""Architectures that are served, and how config.json describes them. Knows no tensor.

One table for the loader, the planner and ``inferd models``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from inferd.checkpoints.decoder_config import FAMILIES, DecoderConfig, Source, read_llama
from inferd.checkpoints.gpt_config import read_gpt
from inferd.errors import ModelLoadError

GPT = ("GPT2LMHeadModel", "GPTNeoForCausalLM", "GPTNeoXForCausalLM")

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def supported_architectures() -> list[str]:
    """Names as they appear in a config.json's ``architectures``."""
    return sorted([*FAMILIES, *GPT])


def read_config(source: Source) -> DecoderConfig:
    """What config.json says. Raises ModelLoadError naming the field at fault."""
    architecture = _architecture(source)
    if architecture == "GPT2LMHeadModel" and source.quantization is not None:
        raise ModelLoadError(
            f"{source.path}: quantised GPT-2 checkpoints ({source.quantization.label}) are not read, "
            "as their weights are stored "
            "transposed. Take the unquantised checkpoint.",
            param="quantization_config",
        )
    return read_gpt(source, architecture) if architecture in GPT else read_llama(source, architecture)


def dtype_name(asked: DTypeName, stored: str, *, on_cpu: bool, source: Source) -> str:
    """The number format of weights and KV cache: a key of ``ITEM_BYTES``. Raises ModelLoadError."""
    if asked != "auto":
        return asked
    if stored not in ("float32", "bfloat16", "float16", "float64"):
        raise ModelLoadError(
            f"{source.path}: dtype is {stored!r}; supported are float32, bfloat16 and float16.", param="dtype"
        )
    if stored in ("float32", "float64"):
        return "float32"
    if not on_cpu:
        return stored
    return "bfloat16" if has_fast_bfloat16() else "float32"


def has_fast_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 itself (AVX-512 BF16, AMX or Arm BF16)."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return False
    words = set(re.findall(r"\w+", cpuinfo.read_text()))
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16", "avx_ne_convert"})


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


def is_ignorable(config: DecoderConfig) -> Callable[[str], bool]:
    """Which tensors of old checkpoints no model needs: masks, rotary buffers, a tied head, vision."""
    pattern = (
        r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)"
        r"|attn(ention)?\.(attention\.)?(masked_)?bias|position_ids)$"
    )
    if config.tie_word_embeddings:
        pattern += r"|^(lm_head|embed_out)\.weight$"
    if config.architecture == "Gemma3ForConditionalGeneration":
        pattern += r"|vision_tower|multi_modal_projector"
    compiled = re.compile(pattern)
    return lambda name: compiled.search(name) is not None
