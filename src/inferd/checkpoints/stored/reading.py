"""Turns the tensors of a quantised checkpoint into what products use, or into plain numbers. ``layout`` has the forms.

Integers become signed, so that ``w = scale * (value - zero)`` with int8 values and zero points for every format. Zero
points that are all in the middle are left out.

Act-order (GPTQ's desc_act) assigns inputs to groups by ``g_idx`` instead of runs of inputs. The columns are sorted by
group, which is exact, and ``QuantizedWeight.order`` tells the product how to permute its activations. Where groups have
different sizes, which no known writer makes, the weight is converted to plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inferd.checkpoints.stored.layout import Layout
from inferd.checkpoints.stored.packing import straighten_eetq, unpack, unshuffle_awq
from inferd.errors import ModelLoadError
from inferd.native.quantized import QuantizedWeight

Read = Callable[[str], Tensor]
"""A tensor of the checkpoint by its full name, as it is stored."""


def read_integers(layout: Layout, zero_offset: int, read: Read, where: str) -> QuantizedWeight | Tensor:
    """An integer product; float32 [out, in] where its groups have different sizes. Raises ModelLoadError.

    ``zero_offset``: see ``declared.Quantization``. ``where``: the checkpoint, for messages.
    """
    assert layout.is_integer

    def part(name: str) -> Tensor:
        return read(layout.tensor(name))

    half = 1 << (layout.bits - 1)
    zero: Tensor | None = None
    groups: Tensor | None = None
    match layout.kind:
        case "gptq":
            values = unpack(part("qweight"), layout.bits, 0).t()
            zero = unpack(part("qzeros"), layout.bits, 1).t()
            # The first format stores zero points less one, in as many bits: -1 is all ones.
            zero = (zero + zero_offset) & (2 * half - 1)
            scale = part("scales").float().t()
            groups = part("g_idx").long() if layout.has_order else None
        case "awq":
            values = unshuffle_awq(unpack(part("qweight"), layout.bits, 1)).t()
            zero = unshuffle_awq(unpack(part("qzeros"), layout.bits, 1)).t()
            scale = part("scales").float().t()
        case "packed":
            if "weight_shape" in layout.parts:
                _check_shape(layout, part("weight_shape"), where)
            values = unpack(part("weight_packed"), layout.bits, 1)
            zero = (
                unpack(part("weight_zero_point"), layout.bits, 0)[: layout.out_features] if layout.has_zeros else None
            )
            scale = part("weight_scale").float()
            groups = part("weight_g_idx").long() if layout.has_order else None
        case "eetq":
            values = straighten_eetq(part("weight"))
            scale = part("weight_scales").float()
        case _:
            values = part("weight")
            zero = part("weight_zero_point") if layout.has_zeros else None
            scale = part("weight_scale").float()
    scale = scale.reshape(layout.scale_shape).expand(layout.out_features, layout.num_groups)
    if not bool(torch.isfinite(scale).all()):
        raise ModelLoadError(
            f"{where}: the scales of '{layout.name}' have elements that are not finite. Download the checkpoint again."
        )
    if layout.kind in ("int8", "eetq"):
        signed = values
    else:
        signed = (values ^ half).view(torch.int8) if layout.bits == 8 else (values.to(torch.int8) - half)
        if zero is not None:
            zero = (zero ^ half).view(torch.int8) if layout.bits == 8 else (zero.to(torch.int8) - half)
    if zero is not None:
        zero = zero.reshape(layout.scale_shape).expand(layout.out_features, layout.num_groups)
        zero = zero.contiguous() if bool(zero.any()) else None
    order: Tensor | None = None
    if groups is not None:
        _check_groups(layout, groups, where)
        counts = torch.bincount(groups, minlength=layout.num_groups)
        if int(counts.min()) != int(counts.max()):
            shift = 0.0 if zero is None else zero.float()[:, groups]
            return (signed.float() - shift) * scale[:, groups]
        order = groups.argsort(stable=True)
        if torch.equal(order, torch.arange(layout.in_features)):
            order = None
        else:
            signed = signed[:, order]
    size = 0 if layout.num_groups == 1 else layout.in_features // layout.num_groups
    return QuantizedWeight(signed.contiguous(), scale.contiguous(), zero, layout.bits, size, order)


def read_fp8(layout: Layout, read: Read, where: str) -> Tensor:
    """An fp8 product as float32 [out, in]: each number times the scale of its block. Raises ModelLoadError."""
    weight = read(layout.tensor("weight")).float()
    name = "weight_scale" if "weight_scale" in layout.parts else "weight_scale_inv"  # both multiply
    scale = read(layout.tensor(name)).float().reshape(layout.scale_shape)
    rows, columns = layout.block
    spread = scale.repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(columns, 1)[:, : weight.shape[1]]
    spread = spread.expand_as(weight)
    if not bool(torch.isfinite(weight).all() and torch.isfinite(scale).all()):
        raise ModelLoadError(
            f"{where}: '{layout.name}' has elements or scales that are not finite. Download the checkpoint again."
        )
    return weight * spread


def _check_shape(layout: Layout, shape: Tensor, where: str) -> None:
    if shape.tolist() != [layout.out_features, layout.in_features]:
        raise ModelLoadError(
            f"{where}: tensor '{layout.tensor('weight_shape')}' says {shape.tolist()}, "
            f"but '{layout.tensor('weight_packed')}' "
            f"holds {[layout.out_features, layout.in_features]}. Download the checkpoint again."
        )


def _check_groups(layout: Layout, groups: Tensor, where: str) -> None:
    least, most = int(groups.min()), int(groups.max())
    if least < 0 or most >= layout.num_groups:
        part = "g_idx" if layout.kind == "gptq" else "weight_g_idx"
        raise ModelLoadError(
            f"{where}: tensor '{layout.tensor(part)}' names group {least if least < 0 else most}, but there are "
            f"{layout.num_groups}. Download the checkpoint again."
        )
