"""The monitors of all models of this server: counts each request that ends, and keeps references in the database.

A reference belongs to a model, and all versions of it are compared with it: whether a new version answers like the one
before is what an operator wants to know. The version with the model's own name takes it. Each version has windows of
its own. An incomplete reference is lost when the server ends, a complete one is in the database.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from inferd import clock
from inferd.config import Config, DriftConfig, DriftStream
from inferd.config.versions import base_of
from inferd.drift import rows
from inferd.drift.cells import Value, cell_words
from inferd.drift.mean import Vector, vector_of
from inferd.drift.reference import Collection, Reference
from inferd.drift.windows import Counted, Measure, Past, Reading, Windows
from inferd.errors import InvalidRequest, StateUnavailable
from inferd.events import DriftForgotten, DriftRead, Emit, RequestEnded
from inferd.state.thread import StateThread

POLL_S: Final = 10.0
BATCH: Final = 64
"""Requests that are counted together, which takes a third of the time of counting each by itself."""

DAY_S: Final = 86_400.0

READERS: Final[Mapping[DriftStream, Callable[[Sequence[RequestEnded]], Sequence[Value | Vector]]]] = {
    "input_tokens": lambda events: [event.usage.prompt_tokens for event in events if event.usage.prompt_tokens],
    "output_tokens": lambda events: [event.usage.completion_tokens for event in events if event.finish_reasons],
    "finish_reason": lambda events: [event.finish_reasons[0] for event in events if event.finish_reasons],
    "refusal": lambda events: [
        "yes" if facts.is_refusal else "no"
        for event in events
        if (facts := event.facts) is not None and facts.is_refusal is not None
    ],
    "calls": lambda events: [facts.calls for event in events if (facts := event.facts) is not None and facts.calls],
    "rows": lambda events: [facts.rows for event in events if (facts := event.facts) is not None and facts.rows],
    "input": lambda events: [
        facts.input for event in events if (facts := event.facts) is not None and facts.input is not None
    ],
    "missing": lambda events: [
        "yes" if facts.is_missing else "no"
        for event in events
        if (facts := event.facts) is not None and facts.is_missing is not None
    ],
    "label": lambda events: [facts.label for event in events if (facts := event.facts) is not None and facts.label],
    "score": lambda events: [
        facts.score for event in events if (facts := event.facts) is not None and facts.score is not None
    ],
    "output": lambda events: [
        facts.output for event in events if (facts := event.facts) is not None and facts.output is not None
    ],
    "embedding": lambda events: [
        vector_of(facts.embedding) for event in events if (facts := event.facts) is not None and facts.embedding
    ],
}
"""The values of requests for each stream; a request without one is left out."""

_log = logging.getLogger("inferd.drift")


class DriftPast(msgspec.Struct, frozen=True, kw_only=True):
    """Windows of one size in the order of time, as columns of one length. Where there are many, a window stands for
    its neighbours, the one that speaks most for a change."""

    at: list[float]  # when each was full, in seconds since the epoch
    distance: list[float]
    by_chance: list[float]
    p: list[float]
    level: list[float]
    is_alarm: list[bool]


class DriftReading(msgspec.Struct, frozen=True, kw_only=True):
    """The last window of one size, compared with the reference."""

    size: int  # its values
    distance: float  # from the reference, in the stream's measure
    by_chance: float  # what it is below in 95 of 100 windows without a change
    p: float  # of such a difference without a change; an alarm at ``level`` or below
    level: float
    is_alarm: bool
    sentence: str  # what differs most; empty: nothing does
    shares: list[float] = []  # of each of the stream's cells; empty for embeddings
    past: DriftPast | None = None  # the windows up to this one; None in the list of all models


class DriftCell(msgspec.Struct, frozen=True, kw_only=True):
    """Values of a stream that are counted together."""

    words: str  # a name, or bounds of numbers
    share: float  # of the reference


class StreamReport(msgspec.Struct, frozen=True, kw_only=True):
    """One stream of a version of a model."""

    stream: str
    measure: Measure  # psi: of counts; mmd: of embeddings
    is_drifting: bool  # the last window of any size was an alarm
    since: float | None  # when it began or ceased to drift, in seconds since the epoch; None: no window is full yet
    alarms: int  # windows, since the server started or the reference changed
    cells: list[DriftCell]  # empty for embeddings
    readings: list[DriftReading]  # the smallest window first


class DriftReport(msgspec.Struct, frozen=True, kw_only=True):
    """The drift of one version of a model."""

    model: str  # as requests name the version
    version: str
    state: str  # collecting: the reference is taken; waiting: another version takes it; watching
    requests: int  # of the reference so far
    wanted: int  # of the reference
    false_alarm_days: float
    reference_version: str  # that the reference was taken from; empty: there is none yet
    reference_at: float | None  # seconds since the epoch
    streams: list[StreamReport]


class _Model:
    """What is known of a model's reference here, whichever version is served."""

    def __init__(self, name: str, config: DriftConfig, from_file: Reference | None) -> None:
        self.name = name
        self.config = config
        self.from_file = from_file
        self.reference = from_file
        self.collection = Collection(config.first)
        self.is_stored = False  # the database has ``reference``


class _Version:
    """One entry of the configuration."""

    def __init__(self, entry: str, version: str, model: _Model) -> None:
        self.entry = entry
        self.version = version
        self.model = model
        self.takes_reference = entry == model.name
        self.windows: dict[DriftStream, Windows[Any]] = {}
        self.was_drifting: set[str] = set()
        self.pending: list[RequestEnded] = []  # not counted yet

    def watch(self, now: float) -> None:
        """Begin anew, with the model's present reference."""
        reference, config = self.model.reference, self.model.config
        self.windows, self.was_drifting, self.pending = {}, set(), []
        if reference is None:
            return
        streams = [name for name in reference.streams if not config.watch or name in config.watch]
        for name in streams:
            rate = 1.0 / (config.false_alarm_days * DAY_S * len(streams))
            self.windows[name] = Windows(reference.streams[name].baseline, config.window, rate, config.min_psi, now)


class Monitors:
    """Used in the event loop alone."""

    def __init__(
        self,
        state: StateThread,
        emit: Emit,
        now: Callable[[], float] = clock.now,
        wall: Callable[[], float] = clock.wall,
    ) -> None:
        self._state = state
        self._emit = emit
        self._now = now
        self._wall = wall
        self._models: dict[str, _Model] = {}
        self._versions: dict[str, _Version] = {}
        self._wake = asyncio.Event()

    def configure(self, config: Config, references: Mapping[str, Reference]) -> None:
        """Watch what another configuration says. What has not changed keeps its counts. ``references``: of files."""
        models: dict[str, _Model] = {}
        versions: dict[str, _Version] = {}
        for entry, wanted in config.models.items():
            if not wanted.drift.enabled:
                continue
            name = base_of(entry)
            if name not in config.models or not config.models[name].drift.enabled:
                name = entry
            if name not in models:
                models[name] = self._followed(name, config.models[name].drift, references.get(name))
            version, before = wanted.version, self._versions.get(entry)
            if before is not None and before.model is models[name] and before.version == version:
                versions[entry] = before
            else:
                versions[entry] = _Version(entry, version, models[name])
                versions[entry].watch(self._now())
        for entry in self._versions.keys() - versions.keys():
            self._emit(DriftForgotten(model=entry))
        for entry, found in versions.items():
            if entry in self._versions and self._versions[entry] is not found:
                self._emit(DriftForgotten(model=entry))
        self._models, self._versions = models, versions
        self._wake.set()

    def _followed(self, name: str, config: DriftConfig, from_file: Reference | None) -> _Model:
        before = self._models.get(name)
        if before is not None and before.config == config and before.from_file == from_file:
            return before
        model = _Model(name, config, from_file)
        if before is not None and from_file is None and before.from_file is None:
            model.reference, model.is_stored = before.reference, before.is_stored
        return model

    # -- what happens ----------------------------------------------------------------------------

    def ended(self, event: RequestEnded) -> None:
        """Count a request that has ended with an answer."""
        version = self._versions.get(event.model)
        if version is not None and event.outcome == "done":
            version.pending.append(event)
            if len(version.pending) >= BATCH:
                self._count(version)

    def _count(self, version: _Version) -> None:
        """Count what is pending."""
        events, version.pending = version.pending, []
        if version.model.reference is None:
            if version.takes_reference:
                self._collect(version, events)
            return
        now = self._now()
        for name, windows in version.windows.items():
            for readings in windows.add(READERS[name](events), now):
                self._tell(version, name, windows, readings)

    def _collect(self, version: _Version, events: Sequence[RequestEnded]) -> None:
        model = version.model
        if not model.collection.add(len(events), {name: values(events) for name, values in READERS.items()}):
            return
        collection, model.collection = model.collection, Collection(model.config.first)
        streams = collection.streams(least=min(model.config.window, model.config.first // 2))
        if streams:
            model.reference = Reference(
                model=model.name,
                version=version.version,
                requests=collection.seen,
                taken_at=self._wall(),
                streams=streams,
            )
            self._watch(model)
            self._wake.set()

    def _watch(self, model: _Model) -> None:
        """Let all versions of a model begin anew."""
        for version in self._versions.values():
            if version.model is model:
                version.watch(self._now())
                self._emit(DriftForgotten(model=version.entry))

    def _tell(self, version: _Version, stream: str, windows: Windows[Any], readings: Sequence[Reading]) -> None:
        was, is_drifting = stream in version.was_drifting, windows.is_drifting
        if is_drifting:
            version.was_drifting.add(stream)
        else:
            version.was_drifting.discard(stream)
        told = next((reading for reading in reversed(readings) if reading.is_alarm), readings[0])
        for reading in readings:
            self._emit(
                DriftRead(
                    model=version.entry,
                    stream=stream,
                    size=reading.size,
                    is_smallest=reading is readings[0],
                    measure=windows.reference.measure,
                    distance=reading.distance,
                    is_alarm=reading.is_alarm,
                    is_drifting=is_drifting,
                    is_news=reading is told and was != is_drifting,
                    sentence=f"{stream} {reading.sentence}" if reading.sentence else "",
                )
            )

    # -- references in the database --------------------------------------------------------------

    async def keep(self) -> None:
        """Exchange references again and again, until this is cancelled."""
        while True:
            self._wake.clear()
            try:
                await self.look()
            except StateUnavailable as error:
                _log.debug("references of drift stay as they are: %s", error.message)
            try:
                async with asyncio.timeout(POLL_S if self._models else None):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def look(self) -> None:
        """Store the references that were taken here, and adopt those of the database. Raises StateUnavailable."""
        models = {name: model for name, model in self._models.items() if model.from_file is None}
        if not models:
            return
        known = {name: model.reference for name, model in models.items()}
        taken = {name: found for name, found in known.items() if found is not None and not models[name].is_stored}
        found = await self._state.call(lambda database: rows.exchange(database, list(models), taken))
        for name, model in models.items():
            if self._models.get(name) is not model or model.reference is not known[name]:
                continue  # it has changed meanwhile
            reference = found.get(name)
            model.is_stored = reference is not None
            if reference != model.reference:
                model.reference = reference
                model.collection = Collection(model.config.first)
                self._watch(model)

    # -- the operator ----------------------------------------------------------------------------

    def reports(self) -> list[DriftReport]:
        """All versions that are watched."""
        return [self._reported(entry, with_past=False) for entry in self._versions]

    def report(self, entry: str) -> DriftReport:
        """One version, with its earlier windows. Raises InvalidRequest."""
        return self._reported(entry, with_past=True)

    def _reported(self, entry: str, *, with_past: bool) -> DriftReport:
        version = self._version(entry)
        self._count(version)
        return _report(version, self._wall() - self._now(), with_past=with_past)

    def reference(self, entry: str) -> Reference:
        """The reference that a version is compared with. Raises InvalidRequest."""
        version = self._version(entry)
        self._count(version)
        model = version.model
        if model.reference is None:
            raise InvalidRequest(
                f"The model {model.name!r} has no reference yet: {model.collection.seen:,} of {model.config.first:,} "
                "requests were seen. Ask again later.",
                param="model",
                code="no_reference",
            )
        return model.reference

    async def reset(self, entry: str) -> DriftReport:
        """Take another reference from the next requests. Raises InvalidRequest, StateUnavailable."""
        version = self._version(entry)
        model = version.model
        if model.from_file is not None:
            raise InvalidRequest(
                f"The reference of {model.name!r} is the file {model.config.reference}; write another one, or leave "
                "models.NAME.drift.reference out.",
                param="model",
                code="reference_from_file",
            )
        await self._state.call(lambda database: rows.forget(database, model.name))
        model.reference, model.is_stored = None, False
        model.collection = Collection(model.config.first)
        self._watch(model)
        return self.report(entry)

    def _version(self, entry: str) -> _Version:
        version = self._versions.get(entry)
        if version is None:
            have = ", ".join(self._versions) or "no model"
            raise InvalidRequest(
                f"The drift of {entry[:64]!r} is not watched; that of {have} is. Set models.NAME.drift.enabled.",
                param="model",
                code="not_watched",
            )
        return version


def _report(version: _Version, epoch: float, *, with_past: bool) -> DriftReport:
    """``epoch``: seconds since the epoch when the clock of windows was at 0."""
    model = version.model
    reference = model.reference
    state = "watching" if reference is not None else "collecting" if version.takes_reference else "waiting"
    return DriftReport(
        model=version.entry,
        version=version.version,
        state=state,
        requests=model.collection.seen if reference is None else reference.requests,
        wanted=model.config.first,
        false_alarm_days=model.config.false_alarm_days,
        reference_version="" if reference is None else reference.version,
        reference_at=None if reference is None else reference.taken_at,
        streams=[_stream(name, windows, epoch, with_past=with_past) for name, windows in version.windows.items()],
    )


def _stream(name: str, windows: Windows[Any], epoch: float, *, with_past: bool) -> StreamReport:
    counted = windows.reference if isinstance(windows.reference, Counted) else None
    cells = []
    if counted is not None:
        parts = zip(cell_words(counted.cells), _shares(counted.counts), strict=True)
        cells = [DriftCell(words=words, share=share) for words, share in parts]
    return StreamReport(
        stream=name,
        measure=windows.reference.measure,
        is_drifting=windows.is_drifting,
        since=None if windows.since is None else epoch + windows.since,
        alarms=windows.num_alarms,
        cells=cells,
        readings=[
            DriftReading(
                **closed.reading._asdict(),
                shares=[] if counted is None else _shares(closed.sums),
                past=_past(closed.past, epoch) if with_past else None,
            )
            for closed in windows.last
        ],
    )


def _shares(counts: Sequence[float]) -> list[float]:
    total = sum(counts, 0.0)
    return [count / total for count in counts]


def _past(past: Sequence[Past], epoch: float) -> DriftPast:
    return DriftPast(
        at=[epoch + one.at for one in past],
        distance=[one.reading.distance for one in past],
        by_chance=[one.reading.by_chance for one in past],
        p=[one.reading.p for one in past],
        level=[one.reading.level for one in past],
        is_alarm=[one.reading.is_alarm for one in past],
    )
