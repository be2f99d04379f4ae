"""The live numbers of a running server, as ``inferd top`` shows them: read from its stream in a thread of its own.

Knows the events of ``GET /console/live`` and two routes of the admin API. Does not know how they are drawn.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

import msgspec

from inferd.cli.running.control import ANSWER_S, Server
from inferd.errors import InferdError, Unauthenticated, Unavailable
from inferd.gateway.control import ServerReport
from inferd.types import JSON

STREAM: Final = "/console/live"
SLOWEST: Final = "/admin/requests?order=slowest&limit=5"
RETRY_S: Final = 2.0
STATUS_S: Final = 2.0
MAX_EVENTS: Final = 100


class SeriesInfo(msgspec.Struct, frozen=True):
    id: str
    model: str
    title: str = ""
    unit: str = ""


class Line(msgspec.Struct, frozen=True):
    """One line of the feed of events."""

    at: float
    level: str
    text: str
    model: str = ""
    detail: str = ""


class Slow(msgspec.Struct, frozen=True):
    """One of the slowest requests."""

    id: str
    model: str | None = None
    total_s: float = 0.0
    status: int = 0
    tenant: str = ""
    cause: str | None = None
    sentence: str = ""


class _Snapshot(msgspec.Struct, frozen=True):
    at: float
    series: list[SeriesInfo]
    values: dict[str, list[list[float | None]]]
    events: list[Line] = []


class _Tick(msgspec.Struct, frozen=True):
    at: float
    values: list[float | None]


class _Requests(msgspec.Struct, frozen=True):
    data: list[Slow]


class _End(msgspec.Struct, frozen=True):
    reason: str = ""


class Figures:
    """What is known of a server now. One thread changes it, another reads it under the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Event()
        self.at: float | None = None  # of the last numbers, in seconds since the epoch
        self.problem = ""  # why there are no newer ones
        self.values: dict[str, dict[str, float | None]] = {}  # by model and id; empty model: the machine
        self.titles: dict[str, str] = {}  # of the machine's series
        self.events: deque[Line] = deque(maxlen=MAX_EVENTS)
        self.report: ServerReport | None = None
        self.slowest: list[Slow] = []
        self._series: list[SeriesInfo] = []

    @property
    def models(self) -> list[str]:
        return [model for model in self.values if model]

    def take(self, name: str, data: bytes) -> None:
        """An event of the stream. Raises msgspec.DecodeError, and Unavailable at its end."""
        with self.lock:
            match name:
                case "snapshot":
                    found = msgspec.json.decode(data, type=_Snapshot)
                    self._series = found.series
                    self.titles = {series.id: series.title for series in found.series if not series.model}
                    rings = [found.values.get(f"{series.id}|{series.model}", []) for series in found.series]
                    self._set(found.at, [ring[0][-1] if ring and ring[0] else None for ring in rings])
                    self.events.clear()
                    self.events.extend(found.events)
                case "tick":
                    tick = msgspec.json.decode(data, type=_Tick)
                    self._set(tick.at, tick.values)
                case "event":
                    self.events.append(msgspec.json.decode(data, type=Line))
                case "end":
                    raise Unavailable(msgspec.json.decode(data, type=_End).reason)
        self.changed.set()

    def _set(self, at: float, values: list[float | None]) -> None:
        self.at, self.problem = at, ""
        self.values = {}
        for series, value in zip(self._series, values, strict=True):
            self.values.setdefault(series.model, {})[series.id] = value

    def lost(self, problem: str) -> None:
        """The server does not answer; the last numbers stay."""
        with self.lock:
            self.problem = problem
        self.changed.set()

    def as_json(self) -> str:
        """One line for programs."""
        with self.lock:
            states = {model.name: model for model in self.report.models} if self.report is not None else {}
            models: dict[str, JSON] = {}
            for name in self.models:
                models[name] = {**self.values[name]}
                if name in states:
                    models[name] |= {
                        "state": states[name].state,
                        "replicas_ready": states[name].replicas_ready,
                        "replicas": len(states[name].replicas),
                    }
            shown: JSON = {
                "at": self.at,
                "models": models,
                "machine": self.values.get("", {}),
                "events": [msgspec.to_builtins(line) for line in self.events],
                "slowest": [msgspec.to_builtins(slow) for slow in self.slowest],
            }
        return json.dumps(shown)


def events_of(server: Server) -> Iterator[tuple[str, bytes]]:
    """The events of the stream, with their data. Raises InferdError when the server does not answer."""
    name, data = "", b""
    for line in server.lines(STREAM, ANSWER_S):
        key, _, value = line.rstrip(b"\r\n").partition(b": ")
        if key == b"event":
            name = value.decode("ascii", "replace")
        elif key == b"data":
            data = value
        elif not line.strip():
            if data:
                yield name, data
            name, data = "", b""


def look_around(server: Server, figures: Figures) -> None:
    """Read what is not in the stream. A key without the scope admin does without."""
    try:
        report = server.get("/admin/status", ServerReport)
        slowest = server.get(SLOWEST, _Requests).data
    except Unauthenticated:
        return
    with figures.lock:
        figures.report, figures.slowest = report, slowest


def read_once(server: Server, figures: Figures) -> None:
    """The numbers of a whole second. Raises InferdError."""
    for name, data in events_of(server):
        figures.take(name, data)
        if name == "tick":
            break
    look_around(server, figures)


class Follower:
    """Keeps figures current in two threads, and connects again when the server went away."""

    def __init__(self, server: Server, figures: Figures) -> None:
        self._server = server
        self._figures = figures
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._follow, self._look)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Does not wait: a thread may be in a read."""
        self._stopping.set()

    def _follow(self) -> None:
        while not self._stopping.is_set():
            try:
                for name, data in events_of(self._server):
                    self._figures.take(name, data)
                    if self._stopping.is_set():
                        return
                problem = "the server ended the stream"
            except InferdError as error:
                problem = error.message
            except msgspec.DecodeError as error:
                problem = f"the server's numbers have another form than expected ({error})"
            self._figures.lost(problem)
            self._stopping.wait(RETRY_S)

    def _look(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            with contextlib.suppress(InferdError):  # of which the stream tells
                look_around(self._server, self._figures)
            self._stopping.wait(max(0.1, began + STATUS_S - time.monotonic()))
