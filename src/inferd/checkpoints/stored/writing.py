"""Writes a quantised checkpoint in the compressed-tensors format, which inferd, vLLM and transformers read.

Knows the format and safetensors files. Does not know how integers are chosen.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inferd.checkpoints.stored.packing import pack
from inferd.native.quantized import QuantizedWeight

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
SHARD_BYTES = 1 << 30


def stored_parts(
    name: str, weight: QuantizedWeight, scale_dtype: torch.dtype, *, packed: bool = False
) -> dict[str, Tensor]:
    """The tensors of one product by their full names.

    int8 with a scale per output is written as int-quantized unless ``packed``; every other form as pack-quantized.
    """
    scale = weight.scale.to(scale_dtype)
    if weight.bits == 8 and not weight.group_size and not packed:
        return {f"{name}.weight": weight.values, f"{name}.weight_scale": scale}
    half = 1 << (weight.bits - 1)
    parts = {
        f"{name}.weight_packed": pack(weight.values.to(torch.int16) + half, weight.bits, 1),
        f"{name}.weight_scale": scale,
        f"{name}.weight_shape": torch.tensor(weight.values.shape),
    }
    if weight.zero is not None:
        parts[f"{name}.weight_zero_point"] = pack(weight.zero + half, weight.bits, 0)
    return parts


def description(bits: int, group_size: int, *, symmetric: bool, wide: Sequence[str] = ()) -> dict[str, Any]:
    """``quantization_config`` of config.json for such parts; the head is not quantised.

    ``group_size`` 0: a scale per output. ``wide``: products that have packed 8 bits where the others have 4.
    """
    activations = None
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False}
    if not group_size:
        weights |= {"strategy": "channel", "group_size": None}
    else:
        weights |= {"strategy": "group", "group_size": group_size}
    if bits == 8 and not group_size:
        activations = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}}
    if wide:
        whole = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": "channel"}
        groups["group_1"] = {"targets": list(wide), "weights": whole, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if activations is None else "int-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head", "re:.*\\.gate$"],  # the head, and what chooses experts
        "kv_cache_scheme": None,
    }


class Shards:
    """safetensors files of a folder, written as tensors arrive; at most one file's tensors are in memory."""

    def __init__(self, folder: Path, most_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._most = folder, most_bytes
        self._held: dict[str, Tensor] = {}
        self._held_bytes = 0
        self._files: list[list[str]] = []
        self.num_bytes = 0  # of tensors written

    def add(self, name: str, tensor: Tensor) -> None:
        """Keeps a copy: the tensor may be a mapped file."""
        self._held[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._held_bytes += tensor.nbytes
        self.num_bytes += tensor.nbytes
        if self._held_bytes >= self._most:
            self._flush()

    def close(self) -> None:
        """Writes the rest, and the index where there is more than one file."""
        if self._held or not self._files:
            self._flush()
        total = len(self._files)
        if total == 1:
            self._part(0).rename(self._folder / "model.safetensors")
            return
        where: dict[str, str] = {}
        for at, names in enumerate(self._files):
            name = f"model-{at + 1:05d}-of-{total:05d}.safetensors"
            self._part(at).rename(self._folder / name)
            where |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": where}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _part(self, at: int) -> Path:
        return self._folder / f"part-{at}.tmp"

    def _flush(self) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, tensor in self._held.items():
            header[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [at, at + tensor.nbytes],
            }
            at += tensor.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with self._part(len(self._files)).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for tensor in self._held.values():
                file.write(_bytes(tensor))
        self._files.append(list(self._held))
        self._held, self._held_bytes = {}, 0


def _bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
