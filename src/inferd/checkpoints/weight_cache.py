"""Quantised weights stored on disk, so that a model is not quantised again at its next load.

There is one safetensors file for each checkpoint and method. A digest of both names it: the identity of the weight
files, the requested form, and the versions of the method and of the layout in memory. A file is written under a
temporary name and renamed, so it is complete or absent. Later damage is found by its header and by a checksum of each
tensor; nothing of a damaged file is used, and it is written again. The folder's size is bounded: the least recently
used files are removed first. The model loads whatever the disk does; failures are logged.

Knows names and tensors. Does not know matrices or models.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import struct
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import Tensor

from inferd.checkpoints.safetensors import ITEM_BYTES, Entry, read_table
from inferd.errors import ModelLoadError

_log = logging.getLogger("inferd.engine")

_KINDS = {torch.uint8: "U8", torch.float32: "F32", torch.int32: "I32", torch.int64: "I64"}
_DTYPES = {kind: dtype for dtype, kind in _KINDS.items()}
_SUM = ".sum"
_UNFINISHED_S = 3600.0  # a file that was being written this long ago was never finished


def folder() -> Path:
    """Where quantised weights are kept: ``inferd/quantized`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "inferd" / "quantized"


class WeightCache:
    """The tensors of one quantised model by name: read from its file, or made and then stored."""

    def __init__(self, at: Path, key: str, limit_bytes: int) -> None:
        """``key``: everything that decides the tensors' bytes. ``limit_bytes``: of all files in ``at`` together."""
        self.path = at / f"{hashlib.blake2b(key.encode(), digest_size=20).hexdigest()}.safetensors"
        self._limit = limit_bytes
        self._held: dict[str, Tensor] = {}
        self._is_stale = False
        self._table: dict[str, Entry] = {}
        self._map: mmap.mmap | None = None
        self._writing: threading.Thread | None = None
        self._open()

    def find(self, name: str) -> Tensor | None:
        """The tensor, as a view of the file's bytes to be copied; None: it is absent or damaged."""
        entry, total = self._table.get(name), self._table.get(name + _SUM)
        if self._map is None or entry is None or total is None:
            self._is_stale = True
            return None
        is_known = entry.dtype in _DTYPES and (total.dtype, total.count) == ("I64", 1)
        found = _view(self._map, entry) if is_known else None
        if found is None or _checksum(found) != int(_view(self._map, total)):
            _log.warning("%s is damaged (%s): weights are quantised again and it is replaced.", self.path, name)
            self._forget()
            return None
        return found

    def hold(self, name: str, tensor: Tensor) -> None:
        """Add a tensor of the model, found or made; it must not change any more."""
        self._held[name] = tensor

    def finish(self) -> None:
        """Write the tensors in the background, unless the file had all that was looked for."""
        self._map = None  # what was found has been copied
        held, self._held = self._held, {}
        if self._is_stale and held:
            self._writing = threading.Thread(target=self._write, args=(held,), name="inferd-kept", daemon=True)
            self._writing.start()

    def join(self) -> None:
        """Wait until the file is written."""
        if self._writing is not None:
            self._writing.join()

    def _open(self) -> None:
        try:
            self._table = read_table(self.path)
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            os.utime(self.path)  # used now
        except FileNotFoundError:
            pass
        except (ModelLoadError, OSError) as error:
            _log.warning("Stored quantised weights cannot be used, so the weights are quantised again: %s", error)
            self._forget()

    def _forget(self) -> None:
        self._is_stale = True
        self._table, self._map = {}, None
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _write(self, tensors: dict[str, Tensor]) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            sums = {name + _SUM: torch.tensor(_checksum(tensor)) for name, tensor in tensors.items()}
            size = sum(tensor.nbytes for tensor in tensors.values())
            if size > self._limit:
                return
            _make_room(self.path.parent, self._limit - size)
            with tempfile.NamedTemporaryFile(dir=self.path.parent, suffix=".part", delete=False) as file:
                try:
                    # Wide elements first, so that each begins where a view of it may.
                    wide_first = sorted((tensors | sums).items(), key=lambda one: -one[1].itemsize)
                    _write_safetensors(file.fileno(), dict(wide_first))
                    os.replace(file.name, self.path)
                except OSError:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            _log.warning(
                "Quantised weights are not kept (%s): %s. They are made again at the next start.", self.path, error
            )


def _view(memory: mmap.mmap, entry: Entry) -> Tensor:
    flat = torch.frombuffer(memory, dtype=_DTYPES[entry.dtype], count=entry.count, offset=entry.begin)
    return flat.view(entry.shape)


def _checksum(tensor: Tensor) -> int:
    """A checksum from the sum of 64-bit numbers, modulo 2^64: computed at the speed of memory."""
    flat = tensor.reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    total = int(flat[:whole].view(torch.int64).sum()) * 31 + int(flat[whole:].sum())
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def _write_safetensors(file: int, tensors: dict[str, Tensor]) -> None:
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        kind = _KINDS[tensor.dtype]
        begin, end = end, end + tensor.numel() * ITEM_BYTES[kind]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    os.write(file, struct.pack("<Q", len(text)) + text)
    for tensor in tensors.values():
        left = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        while left:
            left = left[os.write(file, left[: 1 << 26]) :]


def _make_room(at: Path, limit: int) -> None:
    """Remove the least recently used files until the rest take at most ``limit`` bytes."""
    now = time.time()
    for part in at.glob("*.part"):
        with contextlib.suppress(FileNotFoundError):
            if now - part.stat().st_mtime > _UNFINISHED_S:
                part.unlink()
    known = []
    for path in at.glob("*.safetensors"):
        with contextlib.suppress(FileNotFoundError):  # another worker made room as well
            known.append((path.stat(), path))
    total = sum(stat.st_size for stat, _ in known)
    for stat, path in sorted(known, key=lambda one: one[0].st_mtime):
        if total <= limit:
            break
        path.unlink(missing_ok=True)
        total -= stat.st_size
