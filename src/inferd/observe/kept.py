"""Counters that continue after a restart of the server: a file that holds them, and what of it fits the next server.

A file and not the database: several servers may share a database, and each has counters of its own. A saving replaces
the whole file at once, so a server that is killed leaves a whole one. Nothing here runs while a request is handled: the
numbers are copied in slices by the event loop, and a thread writes them.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from inferd.observe.metrics import TABLE, Metric
from inferd.observe.series import Labels, Store

_MAGIC: Final = b"inferd metrics 1\n"
_CRC_BYTES: Final = 4


class UnreadableError(Exception):
    """The file is damaged, or of another version; the message says which."""


class KeptRow(msgspec.Struct, frozen=True, array_like=True):
    """The series of one metric that are not zero. Numbers of a counter: its value; of a distribution: the sum of its
    values, and their number in each bucket."""

    name: str
    labels: Labels
    buckets: tuple[float, ...]
    series: list[tuple[Labels, list[float]]]


def kept_rows(store: Store) -> Iterator[KeptRow]:
    """What a server keeps, one metric after the other."""
    for metric in TABLE:
        if not metric.is_kept:
            continue
        if metric.kind == "counter":
            series = [(labels, [one.value]) for labels, one in store.values_of(metric) if one.value]
        else:
            series = [
                (labels, [one.total, *map(float, one.counts)])
                for labels, one in store.distributions_of(metric)
                if one.count
            ]
        if series:
            yield KeptRow(metric.name, metric.labels, metric.buckets, series)


def restore(store: Store, rows: Iterable[KeptRow], is_known: Callable[[Metric, Labels], bool]) -> int:
    """Continue from these numbers. ``is_known``: whether a series still has a place; the number of those that have
    none."""
    table = {metric.name: metric for metric in TABLE if metric.is_kept}
    num_dropped = 0
    for row in rows:
        metric = table.get(row.name)
        if metric is None or metric.labels != row.labels or metric.buckets != row.buckets:
            num_dropped += len(row.series)
            continue
        for labels, numbers in row.series:
            if len(labels) != len(metric.labels) or not _fits(metric, numbers) or not is_known(metric, labels):
                num_dropped += 1
            elif metric.kind == "counter":
                store.value(metric, *labels).add(numbers[0])
            else:
                store.distribution(metric, *labels).continue_from(numbers[0], [int(count) for count in numbers[1:]])
    return num_dropped


def _fits(metric: Metric, numbers: list[float]) -> bool:
    wanted = 1 if metric.kind == "counter" else len(metric.buckets) + 2
    return len(numbers) == wanted and all(math.isfinite(number) and number >= 0 for number in numbers)


class KeptFile:
    """The file of one server."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[KeptRow]:
        """Empty where there is no file yet. Raises OSError and UnreadableError."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        if not data.startswith(_MAGIC):
            raise UnreadableError("it was not written by this version of inferd")
        crc, payload = data[len(_MAGIC) :][:_CRC_BYTES], data[len(_MAGIC) + _CRC_BYTES :]
        if crc != _crc(payload):
            raise UnreadableError("it is damaged")
        try:
            return msgspec.msgpack.decode(payload, type=list[KeptRow])
        except msgspec.MsgspecError as error:
            raise UnreadableError(f"it is damaged: {error}") from None

    def put_aside(self) -> Path:
        """Rename the file, so that it stays to be looked at. Raises OSError."""
        aside = self.path.with_name(f"{self.path.name}.unreadable")
        self.path.replace(aside)
        return aside

    def write(self, rows: list[KeptRow]) -> None:
        """Replace the file. Raises OSError; the file is then the one before."""
        payload = msgspec.msgpack.encode(rows)
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = self.path.with_name(f"{self.path.name}.new")
        with beside.open("wb") as file:
            file.write(_MAGIC + _crc(payload) + payload)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)


def _crc(payload: bytes) -> bytes:
    return zlib.crc32(payload).to_bytes(_CRC_BYTES, "big")
