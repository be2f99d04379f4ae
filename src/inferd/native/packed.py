"""Weights in the layout of the compiled products: panels of outputs that lie together (kernels/panels.h, ints.h)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from inferd.machine.weight_memory import WeightMemory
from inferd.native import compiled
from inferd.native.compiled import ACTIVATIONS, BUILT, CODES, kernels
from inferd.native.forms import PANEL_ROWS, Form, padded
from inferd.native.quantized import QuantizedWeight

assert not BUILT or kernels.PANEL == PANEL_ROWS, kernels.PANEL
_FORMATS = {8: 2, 4: 3}  # of integers, by their bits
_memories: list[WeightMemory] = []  # that weights are packed into: of ``packing_into``, at most one


class Packed:
    """An [out, in] matrix in panels, with a bias [out], as a product: every row reads memory in one stream."""

    __slots__ = ("_bias", "_order", "described", "in_features", "out_features", "parts")

    def __init__(
        self,
        code: int,
        parts: Mapping[str, Tensor],
        shape: tuple[int, int],
        bias: Tensor | None,
        order: Tensor | None = None,
        *,
        group_size: int = 0,
        has_zero: bool = False,
    ) -> None:
        self.out_features, self.in_features = shape
        self.parts = parts
        self._bias = None if bias is None else bias.float().contiguous()
        self._order = None if order is None else order.to(torch.int32).contiguous()
        # For the kernels, valid as long as this object lives.
        self.described = kernels.Weights(
            code,
            parts["data"].data_ptr(),
            parts["scale"].data_ptr() if "scale" in parts else 0,
            parts["total"].data_ptr() if "total" in parts else 0,
            group_size,
            has_zero,
            0 if self._bias is None else self._bias.data_ptr(),
            self.in_features,
            self.out_features,
        )
        if self._order is not None:
            self.described.take_in(self._order.data_ptr())

    @property
    def nbytes(self) -> int:
        beside = (self._bias, self._order)
        return sum(part.nbytes for part in (*self.parts.values(), *beside) if part is not None)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """[...] int64 -> [..., in]: these rows of the matrix, in its own format or, of integers, float32 or
        bfloat16."""
        out = torch.empty((*ids.shape, self.in_features), dtype=dtype)
        ids = ids.contiguous()
        threads = torch.get_num_threads()
        kernels.unpack_rows(self.described, ids.data_ptr(), ids.numel(), CODES[dtype], out.data_ptr(), threads)
        return out

    def product(self, x: Tensor, out_dtype: torch.dtype, activation: str = "") -> Tensor:
        """[T, in] -> [T, out] in x's format or float32. ``activation``: of the sum with the bias.

        x has the format of the matrix; with integers float32 or bfloat16.
        """
        if x.stride(1) != 1 or (x.stride(0) * x.itemsize) % 4:
            x = x.contiguous()
        out = torch.empty((x.shape[0], self.out_features), dtype=out_dtype)
        kernels.linear(
            self.described,
            CODES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            CODES[out_dtype],
            out.data_ptr(),
            self.out_features,
            x.shape[0],
            ACTIVATIONS[activation],
            torch.get_num_threads(),
        )
        return out


class PackedWeight(Packed):
    """Floats. Several matrices of the same ``in`` may be stacked without an unpacked copy of the whole."""

    __slots__ = ()

    def __init__(self, weights: list[Tensor], bias: Tensor | None = None) -> None:
        out, size, dtype = sum(w.shape[0] for w in weights), weights[0].shape[1], weights[0].dtype
        data = allocate_packed(padded(out) * size * dtype.itemsize)
        row, threads = 0, torch.get_num_threads()
        for w in weights:
            w = w if w.stride(1) == 1 else w.contiguous()
            kernels.pack(CODES[dtype], w.data_ptr(), w.stride(0), w.shape[0], size, row, data.data_ptr(), threads)
            row += w.shape[0]
        super().__init__(CODES[dtype], {"data": data}, (out, size), bias)

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether a weight can be packed: a format the kernels take, an even number of bf16 columns."""
        return compiled.takes(weight) and weight.numel() > 0 and weight.shape[1] % (4 // weight.itemsize) == 0


class PackedInts(Packed):
    """Integers of a quantised matrix."""

    __slots__ = ()

    def __init__(
        self,
        parts: Mapping[str, Tensor],
        shape: tuple[int, int],
        form: Form,
        bias: Tensor | None,
        order: Tensor | None = None,
    ) -> None:
        """``parts``: "data" (uint8, the panels), "scale" (float32) and "total" (int32) of every column of the panels.

        Only integers with neither groups nor zero points have a "total". The object takes ownership of the parts.
        ``order``: see QuantizedWeight.
        """
        code, group_size, has_zero = _FORMATS[form.bits], form.group_size, form.has_zero
        super().__init__(code, parts, shape, bias, order, group_size=group_size, has_zero=has_zero)

    @staticmethod
    def sizes(shape: tuple[int, int], form: Form) -> dict[str, tuple[torch.dtype, int]]:
        """Format and elements of each of the ``parts`` of a matrix [out, in]."""
        columns = padded(shape[0])
        sizes = {"data": (torch.uint8, form.packed_bytes(*shape, PANEL_ROWS)), "scale": (torch.float32, columns)}
        return {**sizes, "total": (torch.int32, columns)} if form.has_total else sizes

    @classmethod
    def of(cls, weight: QuantizedWeight, bias: Tensor | None = None) -> PackedInts:
        """Packs a matrix that ``fits``."""
        out, size = weight.values.shape
        form = Form(weight.bits, weight.group_size, weight.zero is not None)
        return cls.of_rows([weight], (out, size), form, bias, weight.order)

    @classmethod
    def of_rows(
        cls,
        pieces: Iterable[QuantizedWeight],
        shape: tuple[int, int],
        form: Form,
        bias: Tensor | None,
        order: Tensor | None = None,
    ) -> PackedInts:
        """Packs a matrix [out, in] that arrives a few rows at a time; every piece but the last has a multiple of
        ``PANEL_ROWS``."""
        sizes = cls.sizes(shape, form)
        parts = {name: torch.zeros(count, dtype=dtype) for name, (dtype, count) in sizes.items() if name != "data"}
        parts["data"] = allocate_packed(sizes["data"][1])
        panel_bytes = form.packed_bytes(PANEL_ROWS, shape[1], PANEL_ROWS)
        first = 0
        for piece in pieces:
            out = piece.values.shape[0]
            assert first % PANEL_ROWS == 0, first
            own, groups = piece.scale_parts() if form.group_size else (piece.scale.squeeze(1), None)
            values, zero = piece.values.contiguous(), None if piece.zero is None else piece.zero.contiguous()
            kernels.pack_ints(
                form.bits,
                values.data_ptr(),
                0 if groups is None else groups.data_ptr(),
                0 if zero is None else zero.data_ptr(),
                out,
                shape[1],
                form.group_size,
                parts["data"].data_ptr() + first // PANEL_ROWS * panel_bytes,
                torch.get_num_threads(),
            )
            parts["scale"][first : first + out] = own
            if form.has_total:
                parts["total"][first : first + out] = values.sum(1, dtype=torch.int32)
            first += out
        assert first == shape[0], (first, shape)
        return cls(parts, shape, form, bias, order)

    @staticmethod
    def fits(weight: QuantizedWeight) -> bool:
        return compiled.is_on() and weight.values.is_cpu and weight.values.numel() > 0


@contextmanager
def packing_into(memory: WeightMemory | None) -> Iterator[None]:
    """While the context is open, packed weights are placed in ``memory`` as long as it has space."""
    if memory is None or compiled.level() in ("none", "generic"):  # whose products are torch's
        if memory is not None:
            memory.close()
        yield
        return
    _memories.append(memory)
    try:
        yield
    finally:
        _memories.remove(memory)
        memory.close()


def allocate_packed(count: int) -> Tensor:
    """uint8 [count], not cleared, in large pages where the system has them."""
    place = _memories[-1].reserve(count) if _memories else None
    if place is not None and count:
        memory, begin = place
        return torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=begin)
    data = torch.empty(count, dtype=torch.uint8)
    compiled.prefer_large_pages(data)
    return data


def ints_layout() -> str:
    """A name for the layout of ``PackedInts`` in memory; it changes when the layout does."""
    return f"{kernels.INTS_LAYOUT}x{kernels.PANEL}"
