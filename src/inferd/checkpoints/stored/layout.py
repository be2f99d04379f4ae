"""How each product's weight is stored, by the files' headers alone. Knows no tensor.

A quantised product ``x @ W.T`` with W [out, in] is stored as several tensors, whose names show the kind. Their shapes
must agree. Otherwise an error names the tensor, before a byte of weights is read. The planner counts by the same
layouts as the loader, so they agree.

| kind | tensors |
| --- | --- |
| gptq | qweight int32 [in * bits / 32, out], qzeros int32 [groups, out * bits / 32], scales [groups, out], g_idx [in] |
| awq | qweight int32 [in, out * bits / 32], qzeros int32 [groups, out * bits / 32], scales [groups, out] |
| packed | weight_packed int32 [out, in * bits / 32], weight_scale [out, groups], weight_shape [2], |
| | weight_zero_point int32 [out * bits / 32, groups], weight_g_idx int32 [in] |
| int8 | weight int8 [out, in], weight_scale [out, groups] or of the whole, weight_zero_point int8 like the scale |
| eetq | weight int8 [in, out] as kernels read it, weight_scales [out] |
| fp8 | weight float8_e4m3 [out, in], weight_scale or weight_scale_inv: of the whole, of rows, or of blocks |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from inferd.checkpoints.safetensors import Entry
from inferd.checkpoints.stored.declared import Quantization
from inferd.errors import ModelLoadError

Kind = Literal["gptq", "awq", "packed", "int8", "fp8", "eetq"]

EETQ_TILE = 64  # inputs that lie together
_FLOATS = ("F16", "BF16", "F32", "F8_E8M0")
_PARTS: dict[Kind, tuple[str, ...]] = {
    "gptq": ("qweight", "qzeros", "scales"),
    "awq": ("qweight", "qzeros", "scales"),
    "packed": ("weight_packed", "weight_scale"),
    "int8": ("weight", "weight_scale"),
    "fp8": ("weight",),
    "eetq": ("weight", "weight_scales"),
}
_MAY: dict[Kind, tuple[str, ...]] = {
    "gptq": ("g_idx",),
    "awq": (),
    "packed": ("weight_shape", "weight_zero_point", "weight_g_idx"),
    "int8": ("weight_zero_point",),
    "fp8": ("weight_scale", "weight_scale_inv"),
    "eetq": (),
}
# Scales that other programs store for activations and 8-bit caches. They are not used: here each row of activations
# gets a scale of its own, which is never coarser.
UNUSED = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "kv_scale", "input_scale_ub")


@dataclass(frozen=True, slots=True)
class Layout:
    """How one product's weight [out, in] is stored."""

    kind: Kind
    name: str  # the product's, without a dot at its end
    out_features: int
    in_features: int
    bits: int
    scale_shape: tuple[int, int]  # of the scales as [rows, columns] over W; (1, 1): one for the whole
    block: tuple[int, int]  # of W's elements that share a scale; the last of a row or column may be cut off
    has_zeros: bool
    has_order: bool  # groups named input by input (act-order)
    parts: tuple[str, ...]  # suffixes of the tensors it consists of

    @property
    def is_integer(self) -> bool:
        """Whether products use the stored integers; otherwise the weight is converted to the model's number format."""
        return self.kind != "fp8"

    @property
    def num_groups(self) -> int:
        """Scales of a row as the products take it."""
        return self.scale_shape[1]

    @property
    def held_bytes(self) -> int:
        """Memory of integers, scales (float32) and zero points (int8) in a loaded model."""
        scales = self.out_features * self.num_groups
        return self.out_features * self.in_features * self.bits // 8 + scales * (5 if self.has_zeros else 4)

    def tensor(self, part: str) -> str:
        return f"{self.name}.{part}"


def layouts(quantization: Quantization, table: Mapping[str, Entry], where: str) -> dict[str, Layout]:
    """The quantised products of a checkpoint by name. ``where``: for messages. Raises ModelLoadError."""
    found: dict[str, Layout] = {}
    for tensor in table:
        name, _, part = tensor.rpartition(".")
        kind = _kind(quantization, table, tensor, part)
        if kind is not None:
            found[name] = _Reader(quantization, table, where, name, kind).layout()
    if not found and quantization.method != "eetq":  # eetq may also be a request to quantise at load
        raise ModelLoadError(
            f"{where}: config.json says the checkpoint is quantised ({quantization.label}), but no tensor is. "
            "Its configuration and its weights do not belong together."
        )
    return found


def _kind(quantization: Quantization, table: Mapping[str, Entry], tensor: str, part: str) -> Kind | None:
    if part == "qweight":
        return "awq" if quantization.method == "awq" else "gptq"
    if part == "weight_packed":
        return "packed"
    if part == "weight":
        if quantization.method == "eetq":
            return "eetq" if table[tensor].dtype == "I8" else None
        return {"I8": "int8", "F8_E4M3": "fp8"}.get(table[tensor].dtype)  # type: ignore[return-value]
    return None


def served_bytes(
    table: Mapping[str, Entry],
    stored: Mapping[str, Layout],
    itemsize: int,
    keeps: Callable[[Layout], bool] = lambda layout: layout.is_integer,
) -> int:
    """Memory of the tensors ``table`` in a loaded model: integers as stored, numbers in ``itemsize`` bytes each."""
    parts = {layout.tensor(part) for layout in stored.values() for part in layout.parts}
    plain = sum(
        entry.count for name, entry in table.items() if name not in parts and name.rpartition(".")[2] not in UNUSED
    )
    products = sum(
        layout.held_bytes if keeps(layout) else layout.out_features * layout.in_features * itemsize
        for layout in stored.values()
    )
    return plain * itemsize + products


class _Reader:
    """The parts of one product, checked against each other."""

    def __init__(
        self, quantization: Quantization, table: Mapping[str, Entry], where: str, name: str, kind: Kind
    ) -> None:
        self._quantization, self._table, self._where = quantization, table, where
        self._name, self._kind = name, kind

    def layout(self) -> Layout:
        match self._kind:
            case "gptq":
                return self._gptq()
            case "awq":
                return self._awq()
            case "packed":
                return self._packed()
            case "eetq":
                return self._eetq()
        return self._plain()

    def _gptq(self) -> Layout:
        rows, out = self._matrix("qweight", ("I32",))
        groups, words = self._matrix("qzeros", ("I32",))
        bits = self._bits("qzeros", words, out)
        inputs = rows * 32 // bits
        self._same("scales", _FLOATS, (groups, out))
        ordered = self._has("g_idx")
        if ordered:
            self._same("g_idx", ("I32", "I64"), (inputs,))
        else:
            self._divides("qzeros", groups, inputs)
        return self._made(out, inputs, bits, (out, groups), zeros=True, order=ordered)

    def _awq(self) -> Layout:
        inputs, words = self._matrix("qweight", ("I32",))
        groups, out = self._matrix("scales", _FLOATS)
        bits = self._bits("qweight", words, out)
        self._same("qzeros", ("I32",), (groups, words))
        self._divides("scales", groups, inputs)
        return self._made(out, inputs, bits, (out, groups), zeros=True)

    def _packed(self) -> Layout:
        out, words = self._matrix("weight_packed", ("I32",))
        bits = self._quantization.bits(self._name)
        if bits not in (4, 8):
            raise self._wrong("weight_packed", "no group of config_groups says of how many bits it is")
        inputs = words * 32 // bits
        rows, groups = self._scale("weight_scale", out)
        self._divides("weight_scale", groups, inputs)
        if self._has("weight_shape"):
            self._same("weight_shape", ("I64", "I32"), (2,))
        zeros, ordered = self._has("weight_zero_point"), self._has("weight_g_idx")
        if zeros:
            self._same("weight_zero_point", ("I32",), (math.ceil(out * bits / 32), groups))
        if ordered:
            self._same("weight_g_idx", ("I32", "I64"), (inputs,))
        return self._made(out, inputs, bits, (rows, groups), zeros=zeros, order=ordered)

    def _eetq(self) -> Layout:
        inputs, out = self._matrix("weight", ("I8",))
        if inputs % EETQ_TILE or out % 2:
            raise self._wrong("weight", f"must have a multiple of {EETQ_TILE} inputs and an even number of outputs")
        self._same("weight_scales", _FLOATS, (out,))
        return self._made(out, inputs, 8, (out, 1), zeros=False)

    def _plain(self) -> Layout:
        out, inputs = self._matrix("weight", ("I8", "F8_E4M3"))
        scale = "weight_scale_inv" if self._kind == "fp8" and not self._has("weight_scale") else "weight_scale"
        rows, groups = self._scale(scale, out)
        if self._kind == "int8":
            self._divides(scale, groups, inputs)
        zeros = self._kind == "int8" and self._has("weight_zero_point")
        if zeros and (self._entry("weight_zero_point").dtype, self._entry("weight_zero_point").count) != (
            "I8",
            rows * groups,
        ):
            raise self._wrong("weight_zero_point", f"must be I8, one for each of the {rows * groups} scales")
        return self._made(out, inputs, 8, (rows, groups), zeros=zeros, scale_part=scale)

    def _made(
        self,
        out: int,
        inputs: int,
        bits: int,
        scale: tuple[int, int],
        *,
        zeros: bool,
        order: bool = False,
        scale_part: str = "",
    ) -> Layout:
        parts = _PARTS[self._kind] + tuple(part for part in _MAY[self._kind] if self._has(part))
        if not out or not inputs:
            raise self._wrong(parts[0], "is empty")
        block = (out // scale[0] or 1, inputs // scale[1] or 1)
        if out % scale[0] or inputs % scale[1]:
            # Only a declared size tells blocks that the weight cuts off.
            block = self._quantization.block or block
            if (math.ceil(out / block[0]), math.ceil(inputs / block[1])) != scale:
                raise self._wrong(scale_part, f"does not lie over a weight of {[out, inputs]} in blocks")
        elif self._quantization.block is not None and self._kind == "fp8" and scale not in ((1, 1), (out, 1)):
            block = self._quantization.block
            if (math.ceil(out / block[0]), math.ceil(inputs / block[1])) != scale:
                raise self._wrong(
                    scale_part, f"does not lie over a weight of {[out, inputs]} in blocks of {list(block)}"
                )
        return Layout(self._kind, self._name, out, inputs, bits, scale, block, zeros, order, parts)

    def _has(self, part: str) -> bool:
        return f"{self._name}.{part}" in self._table

    def _entry(self, part: str) -> Entry:
        entry = self._table.get(f"{self._name}.{part}")
        if entry is None:
            raise ModelLoadError(
                f"{self._where}: the checkpoint has no tensor '{self._name}.{part}', which the quantised weight "
                f"'{self._name}' ({self._quantization.label}) needs. A shard or a conversion step may be missing."
            )
        return entry

    def _matrix(self, part: str, kinds: tuple[str, ...]) -> tuple[int, int]:
        entry = self._entry(part)
        if entry.dtype not in kinds or len(entry.shape) != 2:
            raise self._wrong(part, f"must be a matrix of {' or '.join(kinds)}")
        return entry.shape[0], entry.shape[1]

    def _same(self, part: str, kinds: tuple[str, ...], shape: tuple[int, ...]) -> None:
        entry = self._entry(part)
        if entry.dtype not in kinds or entry.shape != shape:
            raise self._wrong(part, f"must be {list(shape)} of {' or '.join(kinds)} to fit the other tensors")

    def _scale(self, part: str, out: int) -> tuple[int, int]:
        """[out, groups], [out] or [1] as rows and columns over the weight."""
        entry = self._entry(part)
        if entry.dtype not in _FLOATS or len(entry.shape) > 2 or entry.count == 0:
            raise self._wrong(part, f"must be a number, a row of them or a matrix of {' or '.join(_FLOATS)}")
        if entry.count == 1:
            return 1, 1
        if len(entry.shape) == 1:
            if entry.shape[0] != out:
                raise self._wrong(part, f"has {entry.shape[0]} elements, but the weight has {out} rows")
            return out, 1
        rows, columns = entry.shape
        if self._kind != "fp8" and rows != out:
            raise self._wrong(part, f"has {rows} rows, but the weight has {out}")
        return rows, columns

    def _bits(self, part: str, words: int, out: int) -> int:
        if out == 0 or words * 32 % out or (bits := words * 32 // out) not in (4, 8):
            raise self._wrong(part, f"does not hold 4 or 8 bits for each of {out} outputs")
        return bits

    def _divides(self, part: str, groups: int, inputs: int) -> None:
        if groups < 1 or inputs % groups:
            raise self._wrong(part, f"has {groups} groups, which do not divide {inputs} inputs")

    def _wrong(self, part: str, why: str) -> ModelLoadError:
        entry = self._entry(part)
        return ModelLoadError(
            f"{self._where}: tensor '{self._name}.{part}' ({entry.dtype} {list(entry.shape)}) {why}. "
            "The file and config.json do not belong together; download the checkpoint again."
        )
