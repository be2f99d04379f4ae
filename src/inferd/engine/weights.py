"""Reads safetensors checkpoints: one file or many, by mmap, headers checked before use. Nothing is unpickled."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from inferd.engine.safetensors import read_table, weight_files
from inferd.errors import ModelLoadError

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
}

Progress = Callable[[str, int, int], None]


class _File:
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
    """The tensors of a checkpoint folder by name. ``take`` hands each out once, checked and cast."""

    def __init__(
        self, folder: Path, *, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
    ) -> None:
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self._progress = progress
        self._where: dict[str, _File] = {}
        for path in weight_files(folder):
            try:
                file = _File(path)
            except OSError as error:
                raise ModelLoadError(f"{path} cannot be read: {error.strerror}. Check its permissions.") from error
            for name in file.table:
                self._where[name] = file
        self._taken: set[str] = set()
        self.total_bytes = sum(f.table[n].nbytes for n, f in self._where.items())
        self._done_bytes = 0
        self._asked = self._prefix = ""
        self.num_taken = 0  # parameters
        self.taken_bytes = 0  # in the model's dtype

    def rename(self, asked: str, stored: str) -> None:
        """From here on, the name ``asked`` + x stands for the stored tensor ``stored`` + x."""
        self._asked, self._prefix = asked, stored

    def __contains__(self, name: str) -> bool:
        return self._stored(name) in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def take(self, name: str, *shape: int) -> Tensor:
        """Tensor ``name`` of exactly ``shape``, in the model's dtype. Raises ModelLoadError."""
        return self._cast(self._raw(name, shape))

    def lend(self, name: str, *shape: int) -> Tensor:
        """Like ``take``, but possibly the mapped file itself: for callers that copy what they keep."""
        return self._raw(name, shape).to(device=self.device, dtype=self.dtype)

    def _cast(self, tensor: Tensor) -> Tensor:
        # A copy even where the type fits: the kernels want memory of their own, aligned and unmapped.
        return tensor.to(device=self.device, dtype=self.dtype, copy=True)

    def _stored(self, name: str) -> str:
        return self._prefix + name.removeprefix(self._asked) if self._asked and name.startswith(self._asked) else name

    def _raw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        name = self._stored(name)
        file = self._where.get(name)
        if file is None:
            raise ModelLoadError(
                f"{self.folder}: the checkpoint has no tensor {name!r}, which config.json's architecture needs. A shard or a conversion step may be missing."
            )
        tensor = file.tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"{file.path}: tensor {name!r} has shape {list(tensor.shape)}, but config.json asks for {list(shape)}."
            )
        self._taken.add(name)
        self.num_taken += tensor.numel()
        self.taken_bytes += tensor.numel() * self.dtype.itemsize
        self._done_bytes += tensor.numel() * tensor.element_size()
        if self._progress is not None:
            self._progress("weights", self._done_bytes, self.total_bytes)
        return tensor

    def check_all_taken(self, ignored: Callable[[str], bool]) -> None:
        """Raises ModelLoadError for tensors that the model did not use: it would compute something else."""
        left = sorted(n for n in self._where if n not in self._taken and not ignored(n))
        if left:
            raise ModelLoadError(
                f"{self.folder}: the checkpoint has {len(left)} tensors that config.json's architecture does not know, for example {', '.join(left[:3])}. "
                "Its configuration and its weights do not belong together."
            )
