"""A reference: the counts of each stream of a model, taken from its first requests, and its file.

The file is JSON: counts, edges and names of labels, and no values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from inferd.config import Config, DriftStream
from inferd.config.versions import base_of
from inferd.drift.cells import Cells, Value, chosen_cells
from inferd.drift.windows import Counted
from inferd.errors import ConfigError

PILOT_PART: Final = 20  # of a reference: its first 5 % choose the cells
MAX_FILE_BYTES: Final = 1 << 20


class StreamReference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``counts``: values in each cell."""

    edges: tuple[float, ...] | None = None
    names: tuple[str, ...] | None = None
    counts: tuple[int, ...]

    @property
    def counted(self) -> Counted:
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
        problem = _problem(stream)
        if problem:
            raise ValueError(f"streams.{name}: {problem}")
    if not reference.streams:
        raise ValueError("streams: there are none")
    return reference


def _problem(stream: StreamReference) -> str | None:
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


class _Collected:
    """The values of one stream, and their counts once the cells are chosen."""

    __slots__ = ("cells", "counts", "values")

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.cells: Cells | None = None
        self.counts: list[int] = []


class Collection:
    """Takes a reference from requests, one after the other."""

    def __init__(self, requests: int) -> None:
        self.wanted = requests
        self.seen = 0
        self._pilot = requests // PILOT_PART
        self._streams: dict[DriftStream, _Collected] = {}

    def add(self, requests: int, values: Mapping[DriftStream, Sequence[Value]]) -> bool:
        """Count the values of so many requests, by stream; whether these were the last that are wanted."""
        for name, of_stream in values.items():
            if not of_stream:
                continue
            stream = self._streams.get(name)
            if stream is None:
                stream = self._streams[name] = _Collected()
            if stream.cells is not None:
                stream.cells.count(of_stream, stream.counts)
                continue
            stream.values += of_stream
            if len(stream.values) >= self._pilot:
                stream.cells = chosen_cells(stream.values)
                stream.counts = [0] * len(stream.cells)
                stream.values = []
        self.seen += requests
        return self.seen >= self.wanted

    def streams(self, least: int) -> dict[DriftStream, StreamReference]:
        """The streams with at least ``least`` counted values."""
        return {
            name: StreamReference(edges=one.cells.edges, names=one.cells.names, counts=tuple(one.counts))
            for name, one in self._streams.items()
            if one.cells is not None and sum(one.counts) >= least
        }
