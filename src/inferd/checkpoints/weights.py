"""Reads safetensors checkpoints: one file or many, memory-mapped, headers checked before use. Nothing is unpickled.

Quantised checkpoints are read under the same names: ``lend("x.weight")`` gives numbers however they are stored, and
``integers("x")`` the integers themselves.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from inferd.checkpoints.safetensors import Entry, read_table, weight_files
from inferd.checkpoints.stored.declared import Quantization
from inferd.checkpoints.stored.layout import UNUSED, Layout, layouts
from inferd.checkpoints.stored.reading import read_fp8, read_integers
from inferd.checkpoints.weight_cache import WeightCache
from inferd.errors import ModelLoadError
from inferd.native.forms import UNTOUCHED, Form, Rule, padding
from inferd.native.quantized import QuantizedWeight

if TYPE_CHECKING:
    from inferd.native import ops

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}

Progress = Callable[[str, int, int], None]


class MappedFile:
    """One safetensors file: its validated table of tensors and its bytes, mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.table = read_table(path)
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, name: str) -> Tensor:
        entry = self.table[name]
        dtype = _DTYPES[entry.dtype]
        if entry.count == 0:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=entry.count, offset=entry.begin).view(entry.shape)


class Weights:
    """The tensors of a checkpoint folder by name. Each is read once, checked and converted."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        quantization: Quantization | None = None,
        keep_integers: Callable[[Layout], bool] | None = None,
        rule: Rule = UNTOUCHED,
        weight_cache: WeightCache | None = None,
    ) -> None:
        """``quantization``: what the checkpoint's configuration declares.

        ``keep_integers``: the weights of which ``integers`` returns the integers (None: all); others become numbers in
        the model's format. ``rule``: the form that products of numbers take. ``weight_cache``: products that were made
        before.
        """
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self._progress = progress
        self._where: dict[str, MappedFile] = {}
        for path in weight_files(folder):
            try:
                file = MappedFile(path)
            except OSError as error:
                raise ModelLoadError(f"{path} cannot be read: {error.strerror}. Check its permissions.") from error
            for name in file.table:
                self._where[name] = file
        self._read: set[str] = set()
        self._layouts: dict[str, Layout] = {}
        self._zero_offset = 0
        self._keep = keep_integers
        self._rule = rule
        self.weight_cache = weight_cache
        self._cut: Callable[[str, Tensor], Tensor] | None = None
        if quantization is not None:
            table: dict[str, Entry] = {name: file.table[name] for name, file in self._where.items()}
            self._layouts = layouts(quantization, table, str(folder))
            self._zero_offset = quantization.zero_offset
        self.total_bytes = sum(f.table[n].nbytes for n, f in self._where.items())
        self.read_bytes = 0  # of the files
        self._asked = self._prefix = ""
        # Wraps each product that is made of these weights (names and rows, biases, product): used by calibration.
        self.around: Callable[[list[tuple[str, int]], list[Tensor] | None, ops.Linear], ops.Linear] | None = None
        self._forms: Counter[str] = Counter()  # of integers: parameters
        self.num_parameters = 0  # parameters
        self.num_bytes = 0  # as the model holds them

    def rename(self, asked: str, stored: str) -> None:
        """From now on the name ``asked`` + x means the stored tensor ``stored`` + x."""
        self._asked, self._prefix = asked, stored

    def cut_by(self, cut: Callable[[str, Tensor], Tensor] | None) -> None:
        """From now on only a part of each tensor is read, which ``cut`` gives of the stored one by the name that it is
        asked for with; None: the whole."""
        self._cut = cut

    def __contains__(self, name: str) -> bool:
        stored = self._stored(name)
        return stored in self._where or stored.removesuffix(".weight") in self._layouts

    def stored(self, name: str) -> Tensor:
        """A tensor as the file has it, mapped. Raises KeyError for an unknown name."""
        return self._part(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def read(self, name: str, *shape: int) -> Tensor:
        """Tensor ``name`` of exactly ``shape``, in the model's dtype. Raises ModelLoadError."""
        return self._cast(self._numbers(name, shape))

    def lend(self, name: str, *shape: int) -> Tensor:
        """Like ``read``, but possibly the mapped file itself: for callers that copy it."""
        if len(shape) == 2:
            self.num_bytes += padding(name, *shape) * self.dtype.itemsize
        return self._numbers(name, shape).to(device=self.device, dtype=self.dtype)

    def form(self, names: Sequence[str]) -> Form | None:
        """The form of the matrices ``names``, which are computed as one product; None: they stay numbers."""
        found = {self._rule.form(name) for name in names}
        return found.pop() if len(found) == 1 else None

    def lend_for(self, form: Form, name: str, shape: tuple[int, int], width: int) -> Tensor:
        """The stored, possibly mapped matrix that becomes integers of ``form``, with ``width`` inputs."""
        before = self.num_bytes
        tensor = self._numbers(name, shape)
        self.num_bytes = before + form.nbytes(tensor.numel() // width, width)
        self._forms[form.name] += tensor.numel()
        return tensor

    @property
    def quantization(self) -> str:
        """The forms of the integers read so far, most parameters first: "int4/64+int8"; "none"."""
        return "+".join(name for name, _ in self._forms.most_common()) or "none"

    def integers(self, parts: Sequence[tuple[str, int]], width: int) -> list[QuantizedWeight] | None:
        """The weights [rows, width] of products (name, rows) with the same inputs, as stored integers of one form and
        order.

        None: some are not integers, or become numbers. Raises ModelLoadError.
        """
        found: list[QuantizedWeight] = []
        held = [self._layouts.get(self._stored(name)) for name, _ in parts]
        known = [layout for layout in held if layout is not None and self._keeps(layout)]
        if len(known) != len(parts) or len({(layout.bits, layout.num_groups) for layout in known}) != 1:
            return None
        for layout, (name, rows) in zip(known, parts, strict=True):
            if self._cut is None:
                self._check_shape(layout, (layout.out_features, layout.in_features), (rows, width))
            one = self._read_layout(layout)
            if isinstance(one, Tensor) or (found and not one.is_ordered_like(found[0])):
                return None
            if self._cut is not None:
                one = one.cut(partial(self._cut, f"{name}.weight"))
                self._check_shape(layout, one.values.shape, (rows, width))
            found.append(one)
        for layout, (_, rows) in zip(known, parts, strict=True):
            self._count(layout, layout.held_bytes * rows * width // (layout.out_features * layout.in_features))
            group = "" if layout.num_groups == 1 else f"/{layout.in_features // layout.num_groups}"
            self._forms[f"int{layout.bits}{group}"] += rows * width
        return found

    def _keeps(self, layout: Layout) -> bool:
        return layout.is_integer and self.device.type == "cpu" and (self._keep is None or self._keep(layout))

    def _cast(self, tensor: Tensor) -> Tensor:
        # A copy even where the type fits: the kernels need aligned memory that is not a mapped file.
        return tensor.to(device=self.device, dtype=self.dtype, copy=True)

    def _stored(self, name: str) -> str:
        return self._prefix + name.removeprefix(self._asked) if self._asked and name.startswith(self._asked) else name

    def _numbers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        layout = self._layouts.get(self._stored(name).removesuffix(".weight")) if name.endswith(".weight") else None
        if layout is None:
            return self._raw(name, shape)
        if self._cut is None:
            self._check_shape(layout, (layout.out_features, layout.in_features), shape)
        found = self._read_layout(layout)
        numbers = found.dense().to(self.dtype) if isinstance(found, QuantizedWeight) else found
        if self._cut is not None:
            numbers = self._cut(name, numbers)
            self._check_shape(layout, numbers.shape, shape)
        self._count(layout, math.prod(shape) * self.dtype.itemsize)
        return numbers

    def _read_layout(self, layout: Layout) -> QuantizedWeight | Tensor:
        """The whole matrix."""
        if layout.is_integer:
            return read_integers(layout, self._zero_offset, self._part, str(self.folder))
        return read_fp8(layout, self._part, str(self.folder))

    def _check_shape(self, layout: Layout, found: Sequence[int], shape: Sequence[int]) -> None:
        if tuple(found) != tuple(shape):
            raise ModelLoadError(
                f"{self.folder}: the quantised weight {layout.name!r} ({layout.kind}) is {list(found)}, but "
                f"config.json asks for {list(shape)}."
            )

    @property
    def quantised(self) -> Iterable[Layout]:
        """The products whose weights are stored quantised."""
        return self._layouts.values()

    def _part(self, name: str) -> Tensor:
        return self._where[name].tensor(name)

    def _count(self, layout: Layout, held_bytes: int) -> None:
        for part in layout.parts:
            name = layout.tensor(part)
            self._read.add(name)
            self.read_bytes += self._where[name].table[name].nbytes
        self.num_parameters += layout.out_features * layout.in_features
        self.num_bytes += held_bytes
        self._report_progress()

    def _report_progress(self) -> None:
        if self._progress is not None:
            self._progress("weights", self.read_bytes, self.total_bytes)

    def _raw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        asked, name = name, self._stored(name)
        file = self._where.get(name)
        if file is None:
            raise ModelLoadError(
                f"{self.folder}: the checkpoint has no tensor {name!r}, which config.json's architecture needs. "
                "A shard or a conversion step may be missing."
            )
        tensor = file.tensor(name)
        self.num_parameters += tensor.numel()
        if self._cut is not None:
            tensor = self._cut(asked, tensor)
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"{file.path}: tensor {name!r} has shape {list(tensor.shape)}, but config.json asks for {list(shape)}."
            )
        self._read.add(name)
        self.num_bytes += tensor.numel() * self.dtype.itemsize
        self.read_bytes += tensor.numel() * tensor.element_size()
        self._report_progress()
        return tensor

    def _is_spare(self, name: str) -> bool:
        """Tensors that quantisers write and no model needs: scales of activations, biases that are all 0."""
        module, _, part = name.rpartition(".")
        if part in UNUSED:
            return True
        return part == "bias" and module in self._layouts and not bool(self._part(name).any())

    def check_all_read(self, ignored: Callable[[str], bool]) -> None:
        """Raises ModelLoadError for tensors that the model did not read, because its results would be wrong."""
        left = sorted(n for n in self._where if n not in self._read and not ignored(n))
        if self._layouts:
            left = [name for name in left if not self._is_spare(name)]
        if left:
            raise ModelLoadError(
                f"{self.folder}: the checkpoint has {len(left)} tensors that config.json's architecture does not "
                f"know, for example {', '.join(left[:3])}. "
                "Its configuration and its weights do not belong together."
            )
