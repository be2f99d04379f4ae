"""A reference: the counts of each stream of a model, taken from its first requests, and its file.

The file is JSON: counts, edges and names of labels, the sums of embeddings' features, and no values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from inferd.config import Config, DriftStream
from inferd.config.versions import base_of
from inferd.drift.cells import Cells, Value, chosen_cells
from inferd.drift.mean import MIN_VECTORS, SPREAD_VECTORS, Mean, Spreading, Vector, add_vectors
from inferd.drift.windows import Averaged, Baseline, Counted
from inferd.errors import ConfigError
from inferd.types import NUM_FEATURES

PILOT_PART: Final = 20  # of a reference: its first 5 % choose the cells
MAX_FILE_BYTES: Final = 1 << 20


class StreamReference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either ``counts``, the values in each cell, with ``edges`` or ``names``; or the ``mean`` of vectors."""

    edges: tuple[float, ...] | None = None
    names: tuple[str, ...] | None = None
    counts: tuple[int, ...] = ()
    mean: Mean | None = None

    @property
    def baseline(self) -> Baseline[Any]:
        if self.mean is not None:
            return Averaged(self.mean)
        return Counted(Cells(edges=self.edges, names=self.names), self.counts)


class Reference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a model's requests and answers were like."""

    model: str
    version: str
    requests: int
    taken_at: float  # seconds since the epoch
    streams: dict[DriftStream, StreamReference]


_decoder: Final = msgspec.json.Decoder(Reference)


def decode_reference(encoded: bytes) -> Reference:
    """A reference that was written here. Raises msgspec.ValidationError, and ValueError for what is none."""
    reference = _decoder.decode(encoded)
    for name, stream in reference.streams.items():
        problem = _problem(name, stream)
        if problem:
            raise ValueError(f"streams.{name}: {problem}")
    if not reference.streams:
        raise ValueError("streams: there are none")
    return reference


def _problem(name: DriftStream, stream: StreamReference) -> str | None:
    if (stream.mean is not None) != (name == "embedding"):
        return "mean is for the stream embedding, and for no other"
    if stream.mean is not None:
        return stream.mean.problem
    if (stream.edges is None) == (stream.names is None):
        return "it needs either edges or names"
    edges = stream.edges or ()
    if list(edges) != sorted(set(edges)) or not all(math.isfinite(edge) for edge in edges):
        return "edges must be finite numbers that grow"
    if len(set(stream.names or ())) != len(stream.names or ()):
        return "names has a name twice"
    cells = len(edges or stream.names or ()) + 1
    if len(stream.counts) != cells or cells < 2:
        return f"counts has {len(stream.counts)} numbers; there must be one more than edges or names, and at least 2"
    if min(stream.counts) < 0 or not sum(stream.counts):
        return "counts must be 0 or more, and not all of them 0"
    return None


def read_references(config: Config) -> dict[str, Reference]:
    """The references that files have, by model. Reads files. Raises ConfigError, with every problem."""
    found, problems = {}, []
    for name, model in config.models.items():
        path = model.drift.reference
        if not model.drift.enabled or path is None or base_of(name) in found:
            continue
        try:
            found[base_of(name)] = _read(Path(path).expanduser())
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            said = error.strerror if isinstance(error, OSError) else str(error)
            problems.append(
                f"models.{name}.drift.reference: {path} is no reference ({said}); write one with `inferd drift save`."
            )
    if problems:
        raise ConfigError("\n".join(problems), param="models")
    return found


def _read(path: Path) -> Reference:
    with path.open("rb") as file:
        encoded = file.read(MAX_FILE_BYTES + 1)
    if len(encoded) > MAX_FILE_BYTES:
        raise ValueError("it is too large")
    return decode_reference(encoded)


class _Cells:
    """The reference of numbers or names on its way: the first values choose the cells, and are dropped."""

    def __init__(self, pilot: int) -> None:
        self._pilot = pilot
        self._values: list[Value] = []
        self._cells: Cells | None = None
        self._counts: list[float] = []

    def add(self, values: Sequence[Value]) -> None:
        if self._cells is not None:
            self._cells.count(values, self._counts)
            return
        self._values += values
        if len(self._values) >= self._pilot:
            self._cells = chosen_cells(self._values)
            self._counts = [0] * len(self._cells)
            self._values = []

    def reference(self, least: int) -> StreamReference | None:
        cells = self._cells
        if cells is None or sum(self._counts) < least:
            return None
        return StreamReference(edges=cells.edges, names=cells.names, counts=tuple(int(count) for count in self._counts))


class _Vectors:
    """The reference of vectors on its way: all are added up, and the first ones tell their spread."""

    def __init__(self) -> None:
        self._spreading = Spreading()
        self._sums = [0.0] * NUM_FEATURES
        self._num = 0

    def add(self, values: Sequence[Vector]) -> None:
        add_vectors(values, self._sums)
        self._num += len(values)
        if self._spreading.num < SPREAD_VECTORS:
            self._spreading.add(values)

    def reference(self, least: int) -> StreamReference | None:
        if self._num < max(least, MIN_VECTORS):
            return None
        return StreamReference(mean=Mean(num=self._num, sums=tuple(self._sums), spread=self._spreading.spread()))


class Collection:
    """Takes a reference from requests, one after the other."""

    def __init__(self, requests: int) -> None:
        self.wanted = requests
        self.seen = 0
        self._pilot = requests // PILOT_PART
        self._streams: dict[DriftStream, _Cells | _Vectors] = {}

    def add(self, requests: int, values: Mapping[DriftStream, Sequence[Any]]) -> bool:
        """Count the values of so many requests, by stream; whether these were the last that are wanted. Of the stream
        ``embedding`` they are vectors, of the others numbers or names."""
        for name, of_stream in values.items():
            if not of_stream:
                continue
            stream = self._streams.get(name)
            if stream is None:
                stream = _Vectors() if name == "embedding" else _Cells(self._pilot)
                self._streams[name] = stream
            stream.add(of_stream)
        self.seen += requests
        return self.seen >= self.wanted

    def streams(self, least: int) -> dict[DriftStream, StreamReference]:
        """The streams with at least ``least`` counted values."""
        found = {name: stream.reference(least) for name, stream in self._streams.items()}
        return {name: reference for name, reference in found.items() if reference is not None}
