"""Builds a ``Decoder`` from a checkpoint folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from inferd.checkpoints.architecture import GPT, DTypeName, dtype_name, is_ignorable, read_config
from inferd.checkpoints.decoder_config import FAMILIES, DecoderConfig, Source
from inferd.checkpoints.longrope import Asked, with_factors
from inferd.checkpoints.safetensors import weight_files
from inferd.checkpoints.weight_cache import WeightCache
from inferd.checkpoints.weight_cache import folder as cache_folder
from inferd.checkpoints.weights import Weights
from inferd.engine.model.cuts import Peers, cuts
from inferd.engine.model.gpt import GPTDecoder
from inferd.engine.model.llama import LlamaDecoder
from inferd.engine.model.pipe import Pipe
from inferd.engine.model.share import ALONE, Share
from inferd.errors import ModelLoadError
from inferd.native import compiled, packed, rounding
from inferd.native.attention import Attention, FlatBatch
from inferd.native.forms import Rule
from inferd.registry.identity import identity_of_files

Progress = Callable[[str, int, int], None]


class Decoder(Protocol):
    """A decoder-only language model over a ragged batch. Call it under ``torch.inference_mode``."""

    config: DecoderConfig
    share: Share  # the part of the model that this is
    dtype: torch.dtype
    device: torch.device
    num_parameters: int
    weights_bytes: int  # as they are held
    quantization: str  # what products are computed with: none, int8, int4/64+int8
    pipe: Pipe | None  # between the stages of a divided model
    num_passed: ClassVar[int]  # tensors [T, hidden] that a stage passes to the next one

    @property
    def keeps_rows(self) -> bool:
        """Whether a row has the same bits in any batch, where the attention gives it the same bits."""
        ...

    def forward(self, batch: FlatBatch, attention: Attention, entering: Tensor | None = None) -> Tensor:
        """Hidden states [T, hidden] of the batch's rows, after the final norm. ``entering``: see DividedDecoder."""
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
    rope_factors: Asked = "auto",
    quantization: Literal["auto", "none", "int8", "int4", "fp8"] = "auto",
    weight_cache: WeightCache | None = None,
    share: Share = ALONE,
    peers: Peers | None = None,
) -> Decoder:
    """Read a checkpoint.

    ``num_positions``: length of the rotary tables; None: the checkpoint's maximum. ``rope_factors``: of LongRoPE
    (``longrope``). ``quantization``: the form of the weights in memory. auto: a quantised checkpoint's integers are
    used unchanged. none: these integers are converted to numbers. int8, int4: integers of this width are used, and all
    other weights are quantised here (``forms``). fp8: all weights are 8-bit floats, on CUDA. ``weight_cache``: weights
    that were quantised at an earlier load; the caller finishes it. ``share``: the part of the decoder that is read;
    ``peers``: the ranks with the other parts.

    Raises ModelLoadError naming the file, the field or the tensor at fault.
    """
    source = Source(folder / "config.json")
    config = with_factors(read_config(source), rope_factors, num_positions)
    architecture = config.architecture
    name = dtype_name(dtype, config.dtype, on_cpu=device.type == "cpu", source=source)
    _check_quantization(quantization, device)
    weights = Weights(
        folder,
        dtype=getattr(torch, name),
        device=device,
        progress=progress,
        quantization=source.quantization,
        keep_integers=None if quantization == "auto" else lambda layout: f"int{layout.bits}" == quantization,
        rule=Rule(quantization, config.hidden_size),
        weight_cache=weight_cache,
    )
    share = share.dividing(quantization, weights.quantised)
    weights.cut_by(cuts(share, config))
    _find_prefix(weights, architecture)
    longest = min(num_positions or config.max_position_embeddings, config.max_position_embeddings)
    decoder: Decoder
    if architecture in GPT:
        decoder = GPTDecoder(config, weights, longest, share, peers)
    else:
        decoder = LlamaDecoder(config, FAMILIES[architecture], weights, longest, share, peers)
    is_spare = is_ignorable(config)
    weights.check_all_read(lambda name: is_spare(name) or (share.count > 1 and share.leaves(name, config.num_layers)))
    return decoder


def _check_quantization(asked: str, device: torch.device) -> None:
    """Raises ModelLoadError where the device does not support the requested quantisation."""
    if asked == "int4" and device.type != "cpu":
        problem = (
            f"which is computed on the CPU only, but the device is {device}. Set device to cpu, or take int8 or fp8."
        )
    elif asked == "fp8" and device.type != "cuda":
        problem = f"which is computed on CUDA only, but the device is {device}. Set device to cuda, or take int8."
    elif asked == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        problem = f"which needs compute capability 8.9 or higher, but {device} has {capability}. Take int8."
    else:
        return
    raise ModelLoadError(f"quantization is {asked!r}, {problem}", param="quantization")


def open_weight_cache(folder: Path, asked: str, limit_bytes: int) -> WeightCache | None:
    """The stored quantised weights of this checkpoint.

    None where nothing is quantised or stored, and where there are no kernels, whose layout the weights have.
    """
    if not compiled.BUILT or asked not in ("int8", "int4") or not limit_bytes:
        return None
    key = f"{identity_of_files(weight_files(folder))} {asked} {rounding.VERSION} {packed.ints_layout()}"
    return WeightCache(cache_folder(), key, limit_bytes)


def digest_of_files(folder: Path) -> bytes:
    """A digest of the small files, and of headers and sizes of the weights."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob("*.json")):
        digest.update(path.name.encode() + path.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(f"{path.name}:{path.stat().st_size}".encode() + file.read(65536))
    return digest.digest()


def _find_prefix(weights: Weights, architecture: str) -> None:
    """Find the prefix of the text decoder's tensors.

    Multimodal models store them under a prefix of their own, and the first GPT-2 checkpoints have no prefix.
    """
    if architecture == "Gemma3ForConditionalGeneration":
        for prefix in ("model.language_model.", "language_model.model."):
            if any(name.startswith(prefix) for name in weights):
                weights.rename("model.", prefix)
                return
    if architecture == "GPT2LMHeadModel" and "transformer.wte.weight" not in weights:
        weights.rename("transformer.", "")
