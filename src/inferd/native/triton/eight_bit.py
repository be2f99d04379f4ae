"""Products with 8-bit weights on CUDA: integers, or floats (e4m3) with one scale for each output.

For few rows, reading the weights takes most of the time: Triton's kernel reads 8 bits of each weight and multiplies in
the activations' format. For many rows of floats the device's own 8-bit products are used where it has them; activations
are then rounded too, each row by a scale of its own. ``plain_product`` is the oracle of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from inferd.native import ops
from inferd.native.forms import Form
from inferd.native.quantized import by_output
from inferd.native.triton import switch
from inferd.native.triton.attention import num_processors, pad

FLOAT8 = torch.float8_e4m3fn
HIGHEST = 448.0  # of e4m3
_FEW_ROWS = 32  # up to here the weights are all that is read; not yet tuned on a device
_ALIGNED = 16  # what the device's products want widths to be a multiple of
_LEAST_CAPABILITY = (8, 9)  # of a device that knows e4m3


@dataclass(frozen=True, slots=True, eq=False)
class EightBits:
    """A matrix [out, in] of ``values * scale``."""

    values: Tensor  # int8 or float8_e4m3fn [out, in]
    scale: Tensor  # float32 [out, groups]
    group_size: int = 0  # inputs that share a scale; 0: all of an output

    def dense(self) -> Tensor:
        """[out, in] float32."""
        size = self.values.shape[1]
        width = self.group_size or size
        return self.values.float() * self.scale.repeat_interleave(width, 1)[:, :size]


def rounded_to(form: Form, weight: Tensor) -> EightBits:
    """[out, in] floats in ``form``: the largest of each output or group becomes the format's largest number."""
    weight = weight.float()
    if form.is_float:
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / HIGHEST
        return EightBits((weight / scale).to(FLOAT8), scale)
    if not form.group_size:
        ints = by_output(weight)
        return EightBits(ints.values, ints.scale)
    out, size = weight.shape
    groups = torch.nn.functional.pad(weight, (0, -size % form.group_size)).view(out, -1, form.group_size)
    ints = by_output(groups.flatten(0, 1))
    values = ints.values.view(out, -1)[:, :size].contiguous()
    return EightBits(values, ints.scale.view(out, -1), form.group_size)


def plain_product(x: Tensor, weight: EightBits, bias: Tensor | None, *, rounds: bool = False) -> Tensor:
    """[T, in] -> [T, out] float32. ``rounds``: activations are rounded to 8 bits too, as in ``device_product``."""
    seen = x.float()
    if rounds:
        values, scale = activations(x)
        seen = values.float() * scale
    y = seen @ weight.dense().T
    return y if bias is None else y + bias.float()


def activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, n] as e4m3, and each row's scale [T, 1] float32."""
    scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / HIGHEST
    return (x.float() / scale).to(FLOAT8), scale


def device_product(x: Tensor, weight: EightBits, bias: Tensor | None) -> Tensor:
    """[T, in] -> [T, out] in x's format, by the device's products of e4m3."""
    values, scale = activations(x)
    y = torch._scaled_mm(
        values, weight.values.T, scale_a=scale, scale_b=weight.scale.T, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    y = y.to(x.dtype)
    return y if bias is None else y + bias


def triton_product(x: Tensor, weight: EightBits, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """[T, in] -> [T, out] in ``out_dtype``."""
    from inferd.native.triton.kernels.products import product

    if x.stride(1) != 1:
        x = x.contiguous()
    rows, size = x.shape
    out = weight.values.shape[0]
    y = torch.empty((rows, out), dtype=out_dtype, device=x.device)
    tall, outputs, depth = min(pad(rows), 64), 16, 32
    if x.dtype == torch.float32:  # exact products are sums in registers: small tiles
        tall = min(tall, 16)
    else:
        outputs = outputs_at_once(out, tall, num_processors(x.device))
        depth = min(128 if tall <= _FEW_ROWS else 64, pad(size))
    if weight.group_size:
        depth = min(depth, weight.group_size)
    product[(-(-rows // tall), -(-out // outputs))](
        x,
        weight.values,
        weight.scale,
        bias,
        y,
        rows,
        x.stride(0),
        N=out,
        K=size,
        GROUP=weight.group_size,
        ROWS=tall,
        OUTPUTS=outputs,
        DEPTH=depth,
        HAS_BIAS=bias is not None,
        WIDE=switch.is_interpreted() and x.dtype == torch.bfloat16,
        num_warps=4,
        num_stages=4,
    )
    return y


def outputs_at_once(out: int, tall: int, num_processors: int) -> int:
    """Outputs per program: for few rows 16 to 64, so that every processor has two programs; for many rows 128.

    The number depends only on the matrix and a few row counts, because each combination is compiled.
    """
    if tall > _FEW_ROWS:
        return 128
    outputs = 64
    while outputs > 16 and -(-out // outputs) < 2 * num_processors:
        outputs //= 2
    return outputs


@cache
def has_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


class EightBitLinear(ops.Linear):
    """A product whose weight stays in 8 bits on the device."""

    __slots__ = ("_eight",)
    _eight: EightBits

    @classmethod
    def of(cls, weight: EightBits, bias: Tensor | None, dtype: torch.dtype) -> EightBitLinear:
        """``dtype``: the format of the activations before and after the product, and of ``rows``."""
        assert not weight.group_size or weight.group_size % 16 == 0, weight.group_size
        linear = cls.__new__(cls)
        linear.out_features, linear.in_features = weight.values.shape
        linear.dtype, linear._bias, linear._eight = dtype, bias, weight
        linear._plain = linear._packed = linear._ints = None
        return linear

    @property
    def described(self) -> None:
        """None: the CPU kernels do not support this product."""
        return None

    @property
    def nbytes(self) -> int:
        return self._eight.values.nbytes + self._eight.scale.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def rows(self, ids: Tensor) -> Tensor:
        flat = ids.flatten()
        some = EightBits(
            self._eight.values.view(torch.int8)[flat].view(self._eight.values.dtype),
            self._eight.scale[flat],
            self._eight.group_size,
        )
        return some.dense().to(self.dtype).view(*ids.shape, self.in_features)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, activation: str = "") -> Tensor:
        flat = (x if x.dim() == 2 else x.reshape(-1, self.in_features)).to(self.dtype)
        weight, wanted = self._eight, out_dtype or self.dtype
        # The first of an activation is what comes out of the sum; both are in float32 until then.
        kept = torch.float32 if activation else wanted
        if self._goes_to_device(flat):
            y = device_product(flat, weight, self._bias).to(kept)
        elif switch.takes(flat):
            y = triton_product(flat, weight, self._bias, kept)
        else:
            y = plain_product(flat, weight, self._bias).to(kept)
        if activation:
            y = ops.ACTIVATIONS[activation](y).to(wanted)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)

    def _goes_to_device(self, x: Tensor) -> bool:
        return (
            self._eight.values.dtype == FLOAT8
            and x.shape[0] > _FEW_ROWS
            and has_float8(x.device)
            and self.in_features % _ALIGNED == 0
            and self.out_features % _ALIGNED == 0
        )


def stacked(weights: list[EightBits]) -> EightBits:
    """The matrices, of one form, above each other."""
    values = torch.cat([w.values.view(torch.int8) for w in weights]).view(weights[0].values.dtype)
    return EightBits(values, torch.cat([w.scale for w in weights]), weights[0].group_size)
