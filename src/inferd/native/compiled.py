"""The compiled kernels as functions of tensors.

Knows which tensors a kernel accepts (``takes``: device, number format, layout) and how to pass their addresses. The
torch forms in ``ops`` and ``paged_attention`` define what is computed and are the oracles of the tests. Where the
extension module was not built, ``takes`` is never true and the torch forms compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch  # before the kernels, which then share its OpenMP threads
from torch import Tensor

from inferd.machine.weight_memory import WeightMemory
from inferd.native.forms import Form

if TYPE_CHECKING:
    from inferd import _kernels

    kernels, BUILT = _kernels, True
else:
    try:
        from inferd import _kernels

        kernels, BUILT = _kernels, True
    except ImportError:
        kernels, BUILT = None, False

if TYPE_CHECKING:
    from inferd.native.quantized import QuantizedWeight

CODES = {torch.float32: 0, torch.bfloat16: 1}
PANEL_ROWS: int = kernels.PANEL if BUILT else 64  # outputs that lie together
_FORMATS = {8: 2, 4: 3}  # of integers, by their bits
ACTIVATIONS = {"": 0, "gelu": 1, "gelu_tanh": 2, "silu": 3}


class _Switch:
    """Whether the kernels are used (only ``using_level("none")`` turns them off), and the memory that weights are
    packed into."""

    __slots__ = ("on", "weight_memory")

    def __init__(self, on: bool) -> None:
        self.on = on
        self.weight_memory: WeightMemory | None = None


_switch = _Switch(BUILT)


def takes(x: Tensor) -> bool:
    """Whether the kernels accept a tensor like this one: on the CPU, float32 or bfloat16, no gradient needed."""
    return _switch.on and x.is_cpu and x.dtype in CODES and not x.requires_grad


def takes_dtype(dtype: torch.dtype) -> bool:
    return _switch.on and dtype in CODES


def is_on() -> bool:
    return _switch.on


def prefer_large_pages(memory: Tensor) -> None:
    """Ask for large pages before memory of the CPU is first written to."""
    if _switch.on and memory.is_cpu:
        kernels.prefer_large_pages(memory.data_ptr(), memory.nbytes)


def touch_pages(memory: Tensor) -> bool:
    """Have the system find and clear the memory's pages now; written data stays. False where this is not possible."""
    return _switch.on and memory.is_cpu and kernels.touch_pages(memory.data_ptr(), memory.nbytes)


def level() -> str:
    """The instruction set in use (``avx512bf16``, ``avx512``, ``avx2``, ``generic``), or ``none``."""
    return kernels.level() if _switch.on else "none"


@contextmanager
def using_level(name: str) -> Iterator[None]:
    """Compute with one of ``kernels.levels()``, or with torch for ``none``; for tests and measurements."""
    if name == "none":
        was_on, _switch.on = _switch.on, False
        try:
            yield
        finally:
            _switch.on = was_on
        return
    before = kernels.level()
    kernels.use_level(name)
    try:
        yield
    finally:
        kernels.use_level(before)


def levels() -> list[str]:
    return kernels.levels() if BUILT else []


class PackedWeight:
    """[out, in] weights in the kernels' panels, with a bias [out]: every row of a product reads memory in one stream.

    Several matrices of the same ``in`` may be stacked without an unpacked copy of the whole.
    """

    __slots__ = ("_bias", "_code", "data", "described", "dtype", "in_features", "out_features")

    def __init__(self, weights: list[Tensor], bias: Tensor | None = None) -> None:
        first = weights[0]
        self.in_features = first.shape[1]
        self.out_features = sum(w.shape[0] for w in weights)
        self.dtype = first.dtype
        self._code = CODES[first.dtype]
        panels = -(-self.out_features // kernels.PANEL)
        self.data = allocate_packed(panels * kernels.PANEL * self.in_features * self.dtype.itemsize).view(self.dtype)
        row = 0
        for w in weights:
            w = w if w.stride(1) == 1 else w.contiguous()
            kernels.pack(
                self._code,
                w.data_ptr(),
                w.stride(0),
                w.shape[0],
                self.in_features,
                row,
                self.data.data_ptr(),
                torch.get_num_threads(),
            )
            row += w.shape[0]
        self._bias = None if bias is None else bias.float().contiguous()
        self.described = kernels.Weights(
            self._code,
            self.data.data_ptr(),
            0,
            0,
            0,
            False,
            0 if self._bias is None else self._bias.data_ptr(),
            self.in_features,
            self.out_features,
        )

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self._bias is None else self._bias.nbytes)

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether a weight can be packed: a format the kernels take, an even number of bf16 columns."""
        return takes(weight) and weight.numel() > 0 and weight.shape[1] % (4 // weight.itemsize) == 0

    def rows(self, ids: Tensor) -> Tensor:
        """[...] int64 -> [..., in]: these rows of the weight."""
        return _rows(self.described, ids, self.in_features, self.dtype)

    def product(self, x: Tensor, out_dtype: torch.dtype, activation: str = "") -> Tensor:
        """[T, in] of the weight's format -> [T, out] in it or float32. ``activation``: of the sum with the bias."""
        return _linear(self.described, x, self.out_features, out_dtype, activation)


def _rows(weights: kernels.Weights, ids: Tensor, in_features: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty((*ids.shape, in_features), dtype=dtype)
    ids = ids.contiguous()
    kernels.unpack_rows(weights, ids.data_ptr(), ids.numel(), CODES[dtype], out.data_ptr(), torch.get_num_threads())
    return out


def _linear(weights: kernels.Weights, x: Tensor, out_features: int, out_dtype: torch.dtype, activation: str) -> Tensor:
    if x.stride(1) != 1 or (x.stride(0) * x.itemsize) % 4:
        x = x.contiguous()
    out = torch.empty((x.shape[0], out_features), dtype=out_dtype)
    kernels.linear(
        weights,
        CODES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        CODES[out_dtype],
        out.data_ptr(),
        out_features,
        x.shape[0],
        ACTIVATIONS[activation],
        torch.get_num_threads(),
    )
    return out


def has_int8() -> bool:
    """Whether the kernels in use multiply bytes in one instruction (AVX-512 VNNI); all others do it in several."""
    return level() == "avx512bf16"


def round_weights(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values int8 [out, in], scale [out, groups] and zero int8 [out, groups] of a weight that ``takes``."""
    out, size = weight.shape
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    groups = -(-size // group_size) if group_size else 1
    values, scale = torch.empty((out, size), dtype=torch.int8), torch.empty((out, groups))
    zero = torch.empty((out, groups), dtype=torch.int8) if bits == 4 else None
    kernels.round_weights(
        CODES[weight.dtype],
        bits,
        weight.data_ptr(),
        weight.stride(0),
        out,
        size,
        group_size,
        values.data_ptr(),
        scale.data_ptr(),
        0 if zero is None else zero.data_ptr(),
        torch.get_num_threads(),
    )
    return values, scale, zero


class PackedInts:
    """A quantised [out, in] matrix in the kernels' panels, with a bias [out]."""

    __slots__ = ("_bias", "_order", "described", "in_features", "out_features", "parts")

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
        self.out_features, self.in_features = shape
        self.parts = parts
        self._bias = None if bias is None else bias.float().contiguous()
        total = parts.get("total")
        self.described = kernels.Weights(
            _FORMATS[form.bits],
            parts["data"].data_ptr(),
            parts["scale"].data_ptr(),
            0 if total is None else total.data_ptr(),
            form.group_size,
            form.has_zero,
            0 if self._bias is None else self._bias.data_ptr(),
            self.in_features,
            self.out_features,
        )
        self._order = None if order is None else order.to(torch.int32).contiguous()
        if self._order is not None:
            self.described.take_in(self._order.data_ptr())

    @staticmethod
    def sizes(shape: tuple[int, int], form: Form) -> dict[str, tuple[torch.dtype, int]]:
        """Format and elements of each of the ``parts`` of a matrix [out, in]."""
        columns = -(-shape[0] // kernels.PANEL) * kernels.PANEL
        sizes = {"data": (torch.uint8, form.packed_bytes(*shape, kernels.PANEL)), "scale": (torch.float32, columns)}
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
        return _switch.on and weight.values.is_cpu and weight.values.numel() > 0

    @property
    def nbytes(self) -> int:
        beside = (self._bias, self._order)
        return sum(part.nbytes for part in (*self.parts.values(), *beside) if part is not None)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """[...] int64 -> [..., in] float32 or bfloat16: these rows of the weight."""
        return _rows(self.described, ids, self.in_features, dtype)

    def product(self, x: Tensor, out_dtype: torch.dtype, activation: str = "") -> Tensor:
        """[T, in] float32 or bfloat16 -> [T, out] in x's format or float32."""
        return _linear(self.described, x, self.out_features, out_dtype, activation)


@contextmanager
def packing_into(memory: WeightMemory | None) -> Iterator[None]:
    """While the context is open, packed weights are placed in ``memory`` as long as it has space."""
    if memory is None or not _switch.on or level() == "generic":  # whose products are torch's
        if memory is not None:
            memory.close()
        yield
        return
    _switch.weight_memory = memory
    try:
        yield
    finally:
        _switch.weight_memory = None
        memory.close()


def allocate_packed(count: int) -> Tensor:
    """uint8 [count], not cleared, in large pages where the system has them."""
    place = None if _switch.weight_memory is None else _switch.weight_memory.reserve(count)
    if place is not None and count:
        memory, begin = place
        return torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=begin)
    data = torch.empty(count, dtype=torch.uint8)
    prefer_large_pages(data)
    return data


def ints_layout() -> str:
    """A name for the layout of ``PackedInts`` in memory; it changes when the layout does."""
    return f"{kernels.INTS_LAYOUT}x{kernels.PANEL}"


def takes_rms_norm(x: Tensor, weight: Tensor) -> bool:
    """[T, n] or [T, groups, n] with the groups of a row side by side."""
    return (
        takes(x)
        and weight.dtype in (x.dtype, torch.float32)
        and x.stride(-1) == 1
        and weight.is_contiguous()
        and (x.dim() == 2 or (x.dim() == 3 and x.stride(1) == x.shape[2]))
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    groups = x.shape[1] if x.dim() == 3 else 1
    size = x.shape[-1]
    kernels.rms_norm(
        CODES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        0,
        0,
        weight.data_ptr(),
        CODES[weight.dtype],
        out.data_ptr(),
        groups * size,
        x.shape[0],
        groups,
        size,
        eps,
        torch.get_num_threads(),
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, added = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    size = x.shape[-1]
    kernels.rms_norm(
        CODES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        residual.data_ptr(),
        added.data_ptr(),
        weight.data_ptr(),
        CODES[weight.dtype],
        out.data_ptr(),
        size,
        x.shape[0],
        1,
        size,
        eps,
        torch.get_num_threads(),
    )
    return out, added


def takes_layer_norm(x: Tensor, weight: Tensor) -> bool:
    """[T, n] float32, the rows side by side."""
    return takes(x) and x.dtype == weight.dtype == torch.float32 and x.is_contiguous()


def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, *, narrow: bool
) -> tuple[Tensor, Tensor]:
    """Layer norm of ``x + residual``: (float32, bfloat16 where ``narrow``, else the same tensor again)."""
    out = torch.empty_like(x)
    copy = torch.empty(x.shape, dtype=torch.bfloat16) if narrow else None
    kernels.layer_norm(
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        0 if copy is None else copy.data_ptr(),
        x.shape[0],
        x.shape[1],
        eps,
        torch.get_num_threads(),
    )
    return out, out if copy is None else copy


def takes_text_attention(qkv: Tensor) -> bool:
    """[T, 3, heads, D] float32, with D a multiple of the widest level's vectors."""
    return takes(qkv) and qkv.dtype == torch.float32 and qkv.is_contiguous() and qkv.shape[3] % 16 == 0


def text_attention(
    qkv: Tensor, starts: Tensor, out_dtype: torch.dtype, window: int | None, distance_bias: Tensor | None
) -> Tensor:
    """Every row attends to the rows of its text: [T, heads * D]; see ``inferd.predict.encoder.ragged``."""
    rows, _, heads, dim = qkv.shape
    out = torch.empty((rows, heads * dim), dtype=out_dtype)
    kernels.text_attention(
        CODES[out_dtype],
        qkv.data_ptr(),
        out.data_ptr(),
        starts.data_ptr(),
        0 if distance_bias is None else distance_bias.data_ptr(),
        starts.shape[0] - 1,
        heads,
        dim,
        -1 if window is None else window,
        0 if distance_bias is None else (distance_bias.shape[1] + 1) // 2,
        dim**-0.5,
        torch.get_num_threads(),
    )
    return out


def gate_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    rows, width = gate_up.shape
    out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
    kernels.gate_and_mul(
        CODES[gate_up.dtype],
        ACTIVATIONS[activation],
        gate_up.data_ptr(),
        gate_up.stride(0),
        out.data_ptr(),
        rows,
        width // 2,
        torch.get_num_threads(),
    )
    return out


def takes_rotary(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> bool:
    return (
        takes(x)
        and x.dim() == 3
        and x.stride(2) == 1
        and x.stride(1) == x.shape[2]
        and cos.dtype == sin.dtype == torch.float32
        and cos.is_contiguous()
        and sin.is_contiguous()
        and positions.dtype == torch.int64
        and positions.is_contiguous()
    )


def rotary(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates [T, heads, D] where it lies."""
    kernels.rotary(
        CODES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        x.shape[0],
        x.shape[1],
        x.shape[2],
        positions.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[-1],
        torch.get_num_threads(),
    )


def takes_logits(x: Tensor) -> bool:
    """[R, V] float32 with the logits of a row side by side."""
    return takes(x) and x.dtype == torch.float32 and x.stride(1) == 1


def sample(
    x: Tensor,
    temperature: list[float],
    floors: list[float],
    top_k: list[int],
    top_p: list[float],
    draws: list[float],
) -> tuple[list[float], list[int]]:
    """The largest logit of each row x [R, V], and the token drawn from it.

    See ``sampler`` and ``SampleArgs`` in kernels/table.h.
    """
    rows = x.shape[0]
    # One tensor per format, because making a tensor takes as long as some thousand logits.
    narrow = torch.tensor((temperature, floors), dtype=torch.float32)
    wide = torch.tensor((top_p, draws), dtype=torch.float64)
    ks = torch.tensor(top_k, dtype=torch.int64)
    best, tokens = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    kernels.sample(
        x.data_ptr(),
        x.stride(0),
        rows,
        x.shape[1],
        narrow.data_ptr(),
        narrow.data_ptr() + 4 * rows,
        ks.data_ptr(),
        wide.data_ptr(),
        wide.data_ptr() + 8 * rows,
        best.data_ptr(),
        tokens.data_ptr(),
        torch.get_num_threads(),
    )
    return best.tolist(), tokens.tolist()
