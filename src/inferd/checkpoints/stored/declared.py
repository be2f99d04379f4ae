"""What a checkpoint's configuration says of its quantisation. Knows no tensor and no file of weights.

Formats that are read, with the name that config.json gives them under ``quantization_config.quant_method``:

| method | what | source |
| --- | --- | --- |
| gptq | AutoGPTQ's and GPTQModel's layout, 4 and 8 bits, with or without act-order, zero points v1, v2 | Frantar 2022 |
| awq | AutoAWQ's GEMM layout, 4 bits | Lin et al. 2023 |
| compressed-tensors | pack-quantized, int-quantized, float-quantized, naive-quantized | vLLM's llm-compressor |
| fp8, fbgemm_fp8, modelopt (FP8) | float8_e4m3 with scales per tensor, row or block | DeepSeek-AI 2024 |
| auto-round | in GPTQ's or AWQ's layout, as packing_format says | Cheng et al. 2023 |
| eetq | int8 with a scale per output, in the order of FasterTransformer's kernels | NetEase Fuxi |

Every other method is refused here, before anything is read. The error names the method and the remedy.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from inferd.errors import ModelLoadError

Method = Literal["gptq", "awq", "compressed-tensors", "fp8", "eetq"]

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
_BESIDE = (("quantize_config.json", "gptq"), ("quant_config.json", "awq"), ("hf_quant_config.json", "modelopt"))
_AUTO_ROUND = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
}
_REMEDY = (
    "inferd reads gptq (4 and 8 bits), awq (GEMM), auto-round in these, compressed-tensors (pack-, int-, float- and "
    "naive-quantized), eetq and fp8 checkpoints. Take the model's unquantised checkpoint: quantization: "
    "int8 or int4 quantises it when it is loaded, and "
    "'inferd quantize' writes a checkpoint."
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """The weights of the products that ``targets`` name (compressed-tensors' config groups)."""

    targets: tuple[str, ...]  # names, "re:" and a pattern, or a class ("Linear")
    bits: int
    is_float: bool

    def rank(self, name: str) -> int | None:
        """How specifically the scheme names a product: 0 by name, 1 by pattern, 2 by class; None: not at all."""
        ranks = [
            0 if target == name else 1 if re.match(target[3:], name) else 3
            for target in self.targets
            if target == name or target.startswith("re:")
        ]
        best = min(ranks, default=3)
        if best == 3 and any(target == "Linear" for target in self.targets):
            best = 2
        return None if best == 3 else best


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantisation that a checkpoint declares; headers say what each tensor is (``layout``)."""

    method: Method
    label: str  # for messages: "gptq, int4, groups of 128"
    zero_offset: int = 0  # what is added to stored zero points: 1 in GPTQ's first format
    block: tuple[int, int] | None = None  # rows and columns that share a scale, where that is said
    schemes: tuple[Scheme, ...] = ()

    def bits(self, name: str) -> int | None:
        """Bits of a packed product's integers; None: not declared."""
        ranked = [(rank, scheme.bits) for scheme in self.schemes if (rank := scheme.rank(name)) is not None]
        if ranked:
            return min(ranked)[1]
        return self.schemes[0].bits if len(self.schemes) == 1 else None


def read_quantization(path: Path, config: dict[str, Any]) -> Quantization | None:
    """The quantisation in config.json's content, or in the separate file of the first GPTQ and AWQ checkpoints.

    ``path``: of config.json. None: the checkpoint is not quantised. Raises ModelLoadError.
    """
    text = config.get("text_config")
    found = config.get("quantization_config") or config.get("compression_config")
    if not found and isinstance(text, dict):
        found = text.get("quantization_config")
    if not found:
        for name, method in _BESIDE:
            path_beside = path.with_name(name)
            if path_beside.is_file():
                beside = _object(path_beside)
                inner = beside.get("quantization")
                return _read(path_beside, {"quant_method": method, **(inner if isinstance(inner, dict) else beside)})
        return None
    if not isinstance(found, dict):
        raise ModelLoadError(
            f"{path}: quantization_config is {found!r}, but must be an object. {_REMEDY}", param="quantization_config"
        )
    return _read(path, found)


def _object(path: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}. Download it again.") from error
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path} must be a JSON object. Download it again.")
    return found


def _read(path: Path, found: dict[str, Any]) -> Quantization:
    method = found.get("quant_method") or ("fp8" if found.get("fmt") == "e4m3" else None)
    match method:
        case "gptq":
            return _gptq(path, found)
        case "awq":
            return _awq(path, found)
        case "compressed-tensors":
            return _compressed(path, found)
        case "fp8" | "fbgemm_fp8":
            return _fp8(path, found)
        case "modelopt" if found.get("quant_algo") == "FP8":
            return _fp8(path, found)
        case "auto-round" | "intel/auto-round":
            return _auto_round(path, found)
        case "eetq":
            if found.get("weights", "int8") != "int8":
                raise _refused(
                    path, f"the checkpoint is quantised by eetq in {found['weights']!r}, but only int8 is read"
                )
            return Quantization("eetq", "eetq, int8, whole rows")
        case "modelopt":
            raise _refused(path, f"the checkpoint is quantised by modelopt in {found.get('quant_algo')!r} (quant_algo)")
    raise _refused(path, f"the checkpoint is quantised by {method or 'a method it does not name'}, which is not read")


def _gptq(path: Path, found: dict[str, Any]) -> Quantization:
    bits = _bits(path, found, "bits", (4, 8))
    form = found.get("checkpoint_format") or found.get("format") or "gptq"
    if found.get("is_marlin_format"):
        form = "marlin"
    if form not in ("gptq", "gptq_v2"):
        raise _refused(
            path, f"the checkpoint is in GPTQ's {form!r} layout (checkpoint_format), made for one GPU kernel"
        )
    group = _group(path, found)
    label = _label("gptq", bits, group) + (", act-order" if found.get("desc_act") else "")
    return Quantization("gptq", label, zero_offset=1 if form == "gptq" else 0)


def _awq(path: Path, found: dict[str, Any]) -> Quantization:
    bits = _bits(path, found, "bits" if "bits" in found else "w_bit", (4,))
    named = (found.get(key) for key in ("version", "checkpoint_format", "format"))
    version = str(next((name for name in named if name), "gemm")).lower()
    if version != "gemm":
        raise _refused(path, f"the checkpoint is in AWQ's {version!r} layout (version)")
    group = _group(path, found, "group_size" if "group_size" in found else "q_group_size")
    return Quantization("awq", _label("awq", bits, group))


def _auto_round(path: Path, found: dict[str, Any]) -> Quantization:
    packing = found.get("packing_format", "auto_round:auto_gptq")
    method = _AUTO_ROUND.get(packing) if isinstance(packing, str) else None
    if method is None or found.get("data_type", "int") != "int":
        kind = f"packing_format {packing!r}, data_type {found.get('data_type', 'int')!r}"
        raise _refused(path, f"the checkpoint is quantised by auto-round with {kind}")
    return _gptq(path, found) if method == "gptq" else _awq(path, found)


def _fp8(path: Path, found: dict[str, Any]) -> Quantization:
    block = _block(path, found, "weight_block_size")
    return Quantization("fp8", "fp8" + (f", blocks of {block[0]} x {block[1]}" if block else ""), block=block)


def _compressed(path: Path, found: dict[str, Any]) -> Quantization:
    form = found.get("format")
    groups = found.get("config_groups")
    if isinstance(found.get("quantization_config"), dict):  # older writers nest it beside a sparsity_config
        return _compressed(path, {**found["quantization_config"], "sparsity_config": found.get("sparsity_config")})
    sparse = found.get("sparsity_config") or {}
    if isinstance(sparse, dict) and sparse.get("format", "dense") != "dense":
        raise _refused(path, f"the checkpoint is stored sparse ({sparse['format']}, compressed-tensors)")
    if found.get("transform_config"):
        raise _refused(path, "the checkpoint's activations are rotated (transform_config, compressed-tensors)")
    if form not in _FORMATS:
        raise _refused(path, f"the checkpoint is compressed-tensors in the format {form!r}")
    if not isinstance(groups, dict) or not groups:
        raise ModelLoadError(
            f"{path}: quantization_config has no config_groups, which say what is quantised. Download it again.",
            param="quantization_config",
        )
    schemes: list[Scheme] = []
    labels: list[str] = []
    block: tuple[int, int] | None = None
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        targets = group.get("targets") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or not isinstance(targets, list):
            raise _refused(path, f"the group {name!r} of config_groups (compressed-tensors) has no weights or targets")
        is_float = str(weights.get("type", "int")) == "float"
        bits = _bits(path, weights, "num_bits", (8,) if is_float else (4, 8))
        schemes.append(Scheme(tuple(str(t) for t in targets), bits, is_float))
        block = _block(path, weights, "block_structure") or block
        size = weights.get("group_size") if weights.get("strategy") in ("group", None) else None
        labels.append(f"fp{bits}" if is_float else _label("", bits, size if isinstance(size, int) else None))
    unique = list(dict.fromkeys(labels))
    return Quantization(
        "compressed-tensors", "compressed-tensors, " + " and ".join(unique), block=block, schemes=tuple(schemes)
    )


def _bits(path: Path, found: dict[str, Any], name: str, known: tuple[int, ...]) -> int:
    bits = found.get(name)
    if type(bits) is not int or bits not in known:
        method = found.get("quant_method") or "the checkpoint"
        allowed = " or ".join(map(str, known))
        raise _refused(path, f"{name} is {bits!r} in quantization_config ({method}), but only {allowed} bits are read")
    return bits


def _block(path: Path, found: dict[str, Any], name: str) -> tuple[int, int] | None:
    block = found.get(name)
    if block is None:
        return None
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise ModelLoadError(
            f"{path}: {name} is {block!r} in quantization_config, but must be two positive integers.",
            param="quantization_config",
        )
    return block[0], block[1]


def _group(path: Path, found: dict[str, Any], name: str = "group_size") -> int | None:
    size = found.get(name, 128)
    if type(size) is not int or (size < 1 and size != -1):
        raise ModelLoadError(
            f"{path}: {name} is {size!r} in quantization_config, but must be a positive integer, or -1 for whole rows.",
            param="quantization_config",
        )
    return None if size == -1 else size


def _label(method: str, bits: int, group: int | None) -> str:
    words = [method] if method else []
    return ", ".join([*words, f"int{bits}", "whole rows" if group in (None, -1) else f"groups of {group}"])


def _refused(path: Path, what: str) -> ModelLoadError:
    return ModelLoadError(f"{path}: {what}. {_REMEDY}", param="quantization_config")
