"""Reads safetensors checkpoints: one file or many, by mmap, headers checked before use.

The header is validated here rather than trusted: a truncated file, a lying length, an offset out of
range or a shape that does not fit its bytes is an error that names the file. Nothing is unpickled.
Format: https://huggingface.co/docs/safetensors (8-byte little-endian header length, JSON, data).
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inferd.errors import ModelLoadError

_MAX_HEADER_BYTES = 100 * 1024 * 1024
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
        size = path.stat().st_size
        if size < 8:
            raise _broken(path, f"it has {size} bytes, too few for a header")
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise _broken(path, f"its header claims {length} bytes, but the file has {size}")
            try:
                header = json.loads(file.read(length))
            except (ValueError, RecursionError) as error:
                raise _broken(path, "its header is not valid JSON") from error
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if not isinstance(header, dict):
            raise _broken(path, "its header is not a JSON object")
        header.pop("__metadata__", None)
        self._data_at = 8 + length
        self.table: dict[str, tuple[torch.dtype, list[int], int]] = {}
        ends: list[tuple[int, int]] = []
        for name, entry in header.items():
            self.table[name], end = self._check(name, entry, size - self._data_at)
            ends.append((self.table[name][2], end))
        ends.sort()
        for (_, end), (begin, _) in pairwise(ends):
            if begin < end:
                raise _broken(path, "its tensors overlap")

    def _check(self, name: str, entry: object, data_bytes: int) -> tuple[tuple[torch.dtype, list[int], int], int]:
        match entry:
            case {"dtype": str(kind), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if all(
                isinstance(n, int) and n >= 0 for n in shape
            ):
                pass
            case _:
                raise _broken(self.path, f"the entry of tensor {name!r} is malformed")
        dtype = _DTYPES.get(kind)
        if dtype is None:
            raise ModelLoadError(
                f"{self.path}: tensor {name!r} has dtype {kind!r}; supported are {', '.join(_DTYPES)}."
            )
        if not 0 <= begin <= end:
            raise _broken(self.path, f"tensor {name!r} has offsets {begin} to {end}")
        if end > data_bytes:
            raise _broken(
                self.path, f"tensor {name!r} ends at byte {end}, but there are {data_bytes}: the file is truncated"
            )
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise _broken(self.path, f"tensor {name!r} has shape {shape} of {kind}, but {end - begin} bytes")
        return (dtype, shape, begin), end

    def tensor(self, name: str) -> Tensor:
        dtype, shape, begin = self.table[name]
        if math.prod(shape) == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape), offset=self._data_at + begin).view(
            shape
        )


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
        for path in _files(folder):
            try:
                file = _File(path)
            except OSError as error:
                raise ModelLoadError(f"{path} cannot be read: {error.strerror}. Check its permissions.") from error
            for name in file.table:
                self._where[name] = file
        self._taken: set[str] = set()
        self.total_bytes = sum(f.table[n][0].itemsize * math.prod(f.table[n][1]) for n, f in self._where.items())
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


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            shards: Any = json.loads(index.read_text())["weight_map"]
            names = sorted(set(shards.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(
                f"{index} is not a safetensors index: it needs a 'weight_map' object. Download it again."
            ) from error
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise ModelLoadError(f"{index} names the shard {name!r}; a shard must be a file of the same folder.")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelLoadError(
                f"{folder}: {len(missing)} of {len(names)} shards are missing: {', '.join(missing)}. Download the checkpoint again."
            )
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return others
    pickles = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if pickles:
        raise ModelLoadError(
            f"{folder} has weights only as {pickles[0].name}, a pickle, which can run code and is never loaded. Convert it to safetensors, or take a revision that has them."
        )
    raise ModelLoadError(
        f"{folder} has no model.safetensors. Give the folder of a Hugging Face checkpoint with safetensors weights."
    )


def _broken(path: Path, why: str) -> ModelLoadError:
    return ModelLoadError(f"{path} is not a sound safetensors file: {why}. Download it again.")
