"""The adapters of a loaded model: which there are by name, how one is loaded, and how long it stays in memory.

Adapters are loaded in a thread of the worker, beside the step loop. A request holds its adapter from the time when it
is prepared to its end, so unloading takes the name at once and the memory with the last request that uses it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from inferd.checkpoints.adapter import CONFIG, WEIGHTS, AdapterFiles, Pair, read_adapter
from inferd.checkpoints.weights import MappedFile
from inferd.config.units import bytes_text
from inferd.engine.model.cuts import adapter_pieces
from inferd.engine.model.load import Decoder
from inferd.errors import InferdError, ModelLoadError, ModelNotFound
from inferd.machine.memory import available_bytes
from inferd.native.low_rank import LoadedAdapter, LowRank, low_rank
from inferd.registry.source import Progress, resolve, silent
from inferd.types import AdapterState

if TYPE_CHECKING:
    from inferd.engine.ranks.lead import Lead

_log = logging.getLogger("inferd.engine")


class Adapters:
    """The adapters of one decoder by name. All methods may be called from any thread."""

    def __init__(
        self,
        decoder: Decoder,
        device: torch.device,
        base_digest: bytes,
        limit_bytes: int | None = None,
        ranks: Lead | None = None,
    ) -> None:
        """``base_digest``: of the base's files. ``limit_bytes``: memory for all of them; None: what is free.
        ``ranks``: the processes with the other shares of the decoder."""
        self._decoder, self._device, self._limit_bytes = decoder, device, limit_bytes
        self._base_digest, self._ranks = base_digest, ranks
        self._loaded: dict[str, LoadedAdapter] = {}
        self._stamps: dict[str, tuple[object, ...]] = {}  # of the files of each, which show that they are the same
        self._states: dict[str, AdapterState] = {}
        self._lock = threading.Lock()  # one change at a time

    @property
    def states(self) -> dict[str, AdapterState]:
        """Every adapter that was asked for, by name: what is loaded, and why the last load failed."""
        return dict(self._states)

    @property
    def num_loaded(self) -> int:
        return len(self._loaded)

    def find(self, name: str) -> LoadedAdapter:
        """Raises ModelNotFound."""
        adapter = self._loaded.get(name)
        if adapter is None:
            raise ModelNotFound(f"The adapter {name!r} is not loaded.", param="model")
        return adapter

    def apply(self, wanted: Mapping[str, str], progress: Progress = silent) -> dict[str, AdapterState]:
        """Load and unload adapters until they are those of ``wanted`` (name -> source); their states.

        One whose files are the same stays as it is. Where other files cannot be loaded, the state has the failure, and
        an adapter that was loaded under this name before stays.
        """
        with self._lock:
            for name in [name for name in self._states if name not in wanted]:
                self._forget(name)
            for name, source in wanted.items():
                try:
                    self._states[name] = self._load(name, source, progress)
                except (InferdError, OSError, RuntimeError, MemoryError) as error:
                    self._states[name] = self._failed(name, source, error)
            return self.states

    def _forget(self, name: str) -> None:
        for table in (self._loaded, self._stamps, self._states):
            table.pop(name, None)

    def _failed(self, name: str, source: str, error: Exception) -> AdapterState:
        if not isinstance(error, InferdError):
            _log.error("the adapter %s could not be loaded", name, exc_info=error)
            error = ModelLoadError(f"The adapter could not be loaded: {type(error).__name__}: {error}.")
        before = self._states.get(name) or AdapterState(source=source)
        return msgspec.structs.replace(before, failure=error.to_failure())

    def _load(self, name: str, source: str, progress: Progress) -> AdapterState:
        """Raises ModelLoadError."""
        folder = resolve(source, progress)
        if not folder.is_dir():
            raise ModelLoadError(f"{source} is a file; give the folder that peft's save_pretrained wrote.")
        stamp = _stamp(folder)
        if self._stamps.get(name) == stamp:
            return msgspec.structs.replace(self._states[name], source=source, failure=None)
        files = read_adapter(folder, self._decoder.config)
        identity = identity_of_adapter(files, self._base_digest)
        self._check_room(name, files)
        adapter = load_adapter(name, files, self._decoder, self._device, identity, self._ranks)
        if _stamp(folder) != stamp:
            raise ModelLoadError(f"The files of {folder} changed while they were read; load the adapter again.")
        self._loaded[name], self._stamps[name] = adapter, stamp
        return AdapterState(source=source, identity=identity.hex(), num_bytes=adapter.nbytes)

    def _check_room(self, name: str, files: AdapterFiles) -> None:
        needed = files.num_bytes(self._decoder.dtype.itemsize)
        left = available_bytes() if self._device.type == "cpu" else needed
        if self._limit_bytes is not None:
            others = sum(adapter.nbytes for other, adapter in self._loaded.items() if other != name)
            left = min(left, self._limit_bytes - others)
        if needed > left:
            raise ModelLoadError(
                f"The adapter takes {bytes_text(needed)}, but {bytes_text(max(left, 0))} are left for it. Unload "
                "another adapter, or raise adapter_memory_bytes of the model.",
                param="adapter_memory_bytes",
            )


def _stamp(folder: Path) -> tuple[object, ...]:
    """Equal stamps are of the same files. Raises ModelLoadError."""
    try:
        found = [(folder / name).stat() for name in (CONFIG, WEIGHTS)]
    except OSError:
        return (folder, None)  # what is missing is said by the reader
    return (folder.resolve(), *((one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in found))


def identity_of_adapter(files: AdapterFiles, base_digest: bytes) -> bytes:
    """A digest of all bytes of the adapter's files, and of the base that they change."""
    digest = hashlib.blake2b(base_digest, digest_size=16)
    for path in (files.folder / CONFIG, files.weights):
        try:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror}.") from error
        digest.update(b"\0")
    return digest.digest()


def load_adapter(
    name: str,
    files: AdapterFiles,
    decoder: Decoder,
    device: torch.device,
    identity: bytes,
    ranks: Lead | None = None,
) -> LoadedAdapter:
    """The adapter's matrices in the decoder's number format, on its device; ``ranks`` get theirs. Raises
    ModelLoadError."""
    try:
        file = MappedFile(files.weights)
    except OSError as error:
        raise ModelLoadError(f"{files.weights} cannot be read: {error.strerror}.") from error
    matrices: list[tuple[Pair, Tensor, Tensor]] = []
    for pair in files.pairs:
        a, b = (file.tensor(each).to(device=device, dtype=decoder.dtype) for each in (pair.a, pair.b))
        for tensor, label in ((a, pair.a), (b, pair.b)):
            if not torch.isfinite(tensor).all():
                raise ModelLoadError(
                    f"{files.weights}: {label} has numbers that are not finite in {decoder.dtype}. Train the adapter "
                    "again, or take an earlier one."
                )
        matrices.append((pair, a, b))
    parts: dict[tuple[int, int], list[LowRank]] = {}
    share = decoder.share
    for piece in adapter_pieces(share, decoder.config, matrices):
        made = low_rank(piece.a, piece.b, piece.first, piece.scale)
        parts.setdefault((piece.layer, piece.product), []).append(made)
    adapter = LoadedAdapter(name, identity, len(share.layers(decoder.config.num_layers)), parts)
    if ranks is not None:
        ranks.give(adapter, lambda other: adapter_pieces(replace(share, rank=other.rank), decoder.config, matrices))
    return adapter
