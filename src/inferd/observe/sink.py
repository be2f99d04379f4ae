"""The sink of all events: it turns them into metrics and log lines.

Only this file knows what an event means for the metrics. ``emit`` never raises and never blocks: a defect in it is
counted and loses a number, and no request.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf, nan
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from inferd import __version__, clock
from inferd.config import AliasDialect, ObjectivesConfig
from inferd.config.versions import base_of
from inferd.errors import InferdError
from inferd.events import (
    AdminActed,
    BatchEnded,
    BreakerChanged,
    CacheLooked,
    ClientTurnedAway,
    ConfigReloaded,
    CopyEnded,
    DriftForgotten,
    DriftRead,
    Event,
    GatewaysCompared,
    HandedOver,
    HintsExchanged,
    HttpServed,
    JobsCounted,
    LinesAnswered,
    LoadProgress,
    ModelUnloaded,
    NodeChanged,
    NodeSeen,
    QueueChanged,
    ReplicaChanged,
    RequestEnded,
    RequestRefused,
    Retried,
    RolloutChanged,
    RolloutRemoved,
    Scaled,
    ScalingRemoved,
    StateChanged,
    StepDone,
    StoredCounted,
    StoredDropped,
    WebhookCame,
)
from inferd.machine.memory import available_bytes, limit_bytes
from inferd.observe import metrics as m
from inferd.observe.accept import wants_openmetrics
from inferd.observe.aliases import Derived, Renamed, aliases_of
from inferd.observe.decisions import DecisionLog
from inferd.observe.derived import DerivedLines, derived_texts
from inferd.observe.devices import Devices
from inferd.observe.devices.series import DeviceSeries
from inferd.observe.kept import KeptRow, kept_rows, restore
from inferd.observe.live.feed import NEWS
from inferd.observe.live.live import Live
from inferd.observe.live.machine import MachineReader
from inferd.observe.live.series import Reader
from inferd.observe.logs import (
    SEVERITY,
    audit_line,
    drift_level,
    drift_line,
    http_level,
    http_line,
    node_level,
    node_line,
    replica_level,
    replica_line,
    rollout_level,
    rollout_line,
    scale_line,
    webhook_level,
    webhook_line,
)
from inferd.observe.objectives import ObjectiveSeries
from inferd.observe.plain import plain as plain_line
from inferd.observe.process import process_age_s, process_metrics
from inferd.observe.python_logging import LogHandler
from inferd.observe.requests import RequestSeries
from inferd.observe.series import OPENMETRICS_END, OPENMETRICS_TYPE, TEXT_TYPE, Name, Store
from inferd.observe.startup import Startup
from inferd.observe.statistics import ModelTally, Statistics
from inferd.observe.why import Explainer
from inferd.types import CLASSES, STEP_PARTS, AdapterUse, StepStats
from inferd.window import Window
from inferd.worker.line_writer import FileTarget, LineWriter, LogStream, StreamTarget, Target
from inferd.worker.log_lines import encoded
from inferd.worker.timestamp import timestamp

if TYPE_CHECKING:
    from inferd.observe.traces.settings import Settings
    from inferd.observe.traces.tracer import Tracer

_NO_REPLICA = "none"
_OTHER = "other"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"})
_Labels = tuple[str, str]  # model and replica
_MAX_ROUTES = 256
"""Routes that get series of their own. The gateway sends patterns, so this is never met; if it were
to send raw paths, a client could otherwise fill the memory."""


_SLICE_S = 0.003
"""Time that a page takes of the event loop at once. Requests and streams go on between two slices."""


class MetricsPage(NamedTuple):
    """The body of ``GET /metrics``, and its media type."""

    body: bytes
    media: str


class Observer:
    """Owns every number and the log. Used from one thread, the gateway's loop.

    ``models``: the configured models, or a mapping from them to their numbers of replicas. Labels are
    a closed set: a model that is not among them is counted as ``other``. ``aliases``: the servers whose names are shown
    too. ``versions``: the version of a model in KServe v2, where it is not 1. ``tracing``: where traces go.
    """

    def __init__(
        self,
        *,
        models: Sequence[str] | Mapping[str, int] = (),
        objectives: Mapping[str, ObjectivesConfig] = {},
        devices: Devices | None = None,
        aliases: Sequence[AliasDialect] = (),
        versions: Mapping[str, str] = {},
        access_log: bool = True,
        stream: LogStream | FileTarget | None = None,
        plain: bool = False,
        level: str = "info",
        log_speed: bool = False,
        tracing: Settings | None = None,
        now: Callable[[], float] = clock.now,
        wall: Callable[[], float] = clock.wall,
        explainer: Explainer | None = None,
    ) -> None:
        self.explainer = explainer if explainer is not None else Explainer()
        self._recorder = self.explainer.recorder
        self._models = dict(models) if isinstance(models, Mapping) else dict.fromkeys(models, 1)
        self._access_log = access_log
        self._log_speed = log_speed
        self._severity = SEVERITY[level]
        self._now = now
        self._wall = wall
        self._kinds = frozenset(_kinds(InferdError))
        self._store = Store(m.TABLE)
        self._derived: list[DerivedLines] = []
        self._versions: Mapping[str, str] = {}
        self._show(aliases, versions)
        self._statistics = Statistics()
        self._objectives = ObjectiveSeries(self._store)
        self._energy = None if devices is None else devices.energy
        self._devices = None if devices is None else DeviceSeries(self._store, devices)
        self._requests = RequestSeries(
            self._store,
            self._kinds,
            self._model,
            self._defect,
            self._statistics,
            self._wall,
            self._objectives,
            self._energy,
        )
        self._routes: set[str] = set()
        self._states: dict[tuple[str, str], str] = {}
        self._nodes: set[str] = set()  # that have joined
        self._restarts: dict[tuple[str, str], int] = {}  # of each replica, as last told
        self._stats: dict[tuple[str, str], StepStats] = {}  # of each replica's present life
        self._queued: dict[str, int] = {}
        self._dropped = self._store.value(m.LINES_DROPPED)
        self.payload_dropped: Callable[[], None] = self._store.value(m.PAYLOADS_DROPPED).add
        self._failures = self._store.value(m.OBSERVER_FAILURES)
        self._store.value(m.BUILD, __version__, platform.python_version()).set(1)
        for model, replicas in self._models.items():
            self._open_model(model, replicas)
        self._objectives.configure(objectives)
        for result in m.RELOADS:
            self._store.value(m.CONFIG_RELOADS, result)
        self._store.value(m.CONFIG_OK).set(1)
        self._store.value(m.STATE_AVAILABLE).set(1)
        self._store.value(m.STATE_OUTAGES)
        self._store.value(m.GATEWAYS_DIFFERING)
        for result in m.HINT_RESULTS:
            self._store.value(m.HINTS, result)
        self._store.value(m.TURNED_AWAY)
        for metric in (m.STORED_BYTES, m.STORED_TENANTS, m.STORED_MOST_USED):
            self._store.value(metric)
        for word in m.STORED_KINDS:
            self._store.value(m.STORED_ENTRIES, word)
        for word in m.STORED_BOUNDS:
            self._store.value(m.STORED_DROPPED, word)
        for metric in (m.FILES, m.FILES_BYTES):
            self._store.value(metric)
        for word in m.OPEN_BATCHES:
            self._store.value(m.BATCHES, word)
        for word in ("done", "failed"):
            self._store.value(m.BATCH_LINES, word)
        for word in m.ENDS_OF_BATCHES:
            self._store.value(m.BATCHES_ENDED, word)
        reader = Reader(self._store, self._requests.window, self._requests.enter)
        machine = MachineReader() if devices is None else MachineReader(devices.current)
        self.live = Live(self._store, reader, machine, self._models, now=now, wall=wall)
        """The recent numbers and events, which ``keep_live`` keeps current."""
        for reason in m.TRACE_LOSSES:
            self._store.value(m.TRACES_DROPPED, reason)
        self._store.value(m.TRACES_EXPORTED)
        self._store.value(m.SPANS_REJECTED)
        self._tracer = tracer = None if tracing is None else self._open_tracer(tracing, devices)
        self.startup = Startup(
            self._now() - process_age_s(),
            now=now,
            wall=wall,
            on_load=None if tracer is None else tracer.loaded,
            on_start=None if tracer is None else tracer.started,
        )
        form = plain_line if plain else None
        self._log = LineWriter(_target(sys.stderr if stream is None else stream), self._dropped.add, form=form)
        self._decisions = DecisionLog(self._write, now, wall)
        # For logging.getLogger(...).addHandler: Python's logging goes into the same log.
        self.log_handler: logging.Handler = LogHandler(self._log.write)
        self.log_handler.setLevel(level.upper())

    def _open_tracer(self, settings: Settings, devices: Devices | None) -> Tracer:
        from inferd.observe.traces.exporter import Counts  # most servers have no collector
        from inferd.observe.traces.tracer import Tracer

        exported, rejected = self._store.value(m.TRACES_EXPORTED), self._store.value(m.SPANS_REJECTED)
        dropped = {reason: self._store.value(m.TRACES_DROPPED, reason) for reason in m.TRACE_LOSSES}
        counts = Counts(exported.add, lambda reason, count: dropped[reason].add(count), rejected.add)
        if devices is None:
            return Tracer(settings, counts)
        from inferd.observe.devices.span_attributes import device_attributes

        return Tracer(settings, counts, lambda model: device_attributes(devices.of_model(model)))

    # -- the border -------------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        try:
            # The two events of every request come first, because a long match costs more than handling them.
            kind = type(event)
            if kind is HttpServed:
                self._http_served(event)  # type: ignore[arg-type]
            elif kind is RequestEnded:
                self._requests.ended(event, self._now())  # type: ignore[arg-type]
            else:
                self._handle(event)
                if kind in NEWS:
                    self.live.handle(event)
        except Exception as error:  # the sink: a defect here must not reach the room that emits the event
            self._defect(event, error)

    def configure(
        self,
        models: Mapping[str, int],
        *,
        access_log: bool,
        log_speed: bool = False,
        objectives: Mapping[str, ObjectivesConfig] = {},
        aliases: Sequence[AliasDialect] = (),
        versions: Mapping[str, str] = {},
    ) -> None:
        """Use another set of models. Counters of a removed model stay; its gauges are removed."""
        self._access_log, self._log_speed = access_log, log_speed
        for model in self._models.keys() - models.keys():
            for metric in m.TABLE:
                if metric.kind == "gauge" and metric.labels[:1] == ("model",):
                    self._store.clear(metric, model)
        for model, replicas in models.items():
            if model not in self._models:
                self._open_model(model, replicas)
        self._models = dict(models)
        self._requests.enter()  # by the objectives that held when they ended
        self._objectives.configure(objectives)
        self._statistics.keep(tuple(models))
        self.live.configure(models)
        self._show(aliases, versions)

    def render_metrics(self) -> bytes:
        """The page in the text format, at once."""
        self._refresh()
        return b"".join([piece for part in self._parts(is_open=False) for piece in part])

    async def page(self, accept: str = "") -> MetricsPage:
        """The body of ``GET /metrics`` in the format that the header ``Accept`` prefers, made in slices: between two of
        them other tasks of the event loop run. Names that stand in different slices may differ by what happened between
        them."""
        is_open = wants_openmetrics(accept)
        pieces: list[bytes] = []
        since = clock.now()
        self._refresh()
        for part in self._parts(is_open):
            pieces += part
            if clock.now() - since >= _SLICE_S:
                await asyncio.sleep(0)
                since = clock.now()
        return MetricsPage(b"".join(pieces), OPENMETRICS_TYPE if is_open else TEXT_TYPE)

    async def kept(self) -> list[KeptRow]:
        """The counters that the next server continues from, copied in slices."""
        self._requests.enter()
        rows, since = [], clock.now()
        for row in kept_rows(self._store):
            rows.append(row)
            if clock.now() - since >= _SLICE_S:
                await asyncio.sleep(0)
                since = clock.now()
        return rows

    def restore(self, rows: Sequence[KeptRow]) -> int:
        """Continue from the counters of the server before this one; the number of series that have no place."""
        return restore(self._store, rows, self._is_known)

    def _is_known(self, metric: m.Metric, labels: tuple[str, ...]) -> bool:
        """Whether a series is of the closed set of labels that this configuration has."""
        named = dict(zip(metric.labels, labels, strict=True))
        model = named.get("model", "")
        if model and model != _OTHER and model not in self._models:
            return False
        replica = named.get("replica", _NO_REPLICA)
        if replica != _NO_REPLICA and replica not in map(str, range(self._models.get(model, 0))):
            return False
        route = named.get("route", _OTHER)
        return route == _OTHER or self._route(route) == route

    def _refresh(self) -> None:
        """Read what is known only when it is asked for."""
        self._requests.enter()
        if self._devices is not None:
            self._devices.show()
        self._store.value(m.MEMORY_LIMIT).set(limit_bytes())
        self._store.value(m.MEMORY_AVAILABLE).set(available_bytes())
        for metric, value in process_metrics().items():
            self._store.value(metric).set(value)

    def _parts(self, is_open: bool) -> Iterator[list[bytes]]:
        yield from self._store.parts(is_open)
        for text in derived_texts(self._derived, is_open):
            yield [text]
        if is_open:
            yield [OPENMETRICS_END]

    def _show(self, dialects: Sequence[AliasDialect], versions: Mapping[str, str]) -> None:
        """Show the names of these servers too."""
        chosen = list(aliases_of(dialects))
        self._versions = dict(versions)
        self._derived = [
            DerivedLines(self._store, alias, self._version_of) for alias in chosen if isinstance(alias, Derived)
        ]
        renamed = [alias for alias in chosen if isinstance(alias, Renamed)]
        self._store.show([(alias.of, Name(alias.name, alias.labels, alias.scale)) for alias in renamed])

    def _version_of(self, model: str) -> tuple[str, str]:
        return base_of(model), self._versions.get(model, "1")

    async def keep_live(self) -> None:
        """Enter the numbers of every second into ``live``, until this is cancelled. A defect loses a second."""
        while True:
            await asyncio.sleep(self.live.until_tick_s())
            try:
                self.live.tick()
            except Exception as error:  # the sink, as in ``emit``
                self._report_defect("a tick of the live numbers", error)

    def tally_of(self, model: str) -> ModelTally:
        """What a model has done since the server started."""
        self._requests.enter()
        return self._statistics.of(model)

    def close(self) -> None:
        """Write the log lines that wait, for a moment, and stop. Idempotent."""
        self.close_traces()
        self._decisions.close()
        self._log.close()

    def close_traces(self) -> None:
        """Send the spans that wait, for a moment, and stop. Idempotent."""
        if self._tracer is not None:
            self._tracer.close()

    # -- events -----------------------------------------------------------------------------

    def _http_served(self, event: HttpServed) -> None:
        route = event.route
        self._requests.served(
            event,
            route if route in self._routes else self._route(route),
            event.method if event.method in _METHODS else _OTHER,
        )
        self._recorder.served(event)
        if self._tracer is not None and event.trace:
            self._tracer.served(event)
        if self._access_log and self._severity <= SEVERITY[http_level(event.status)]:
            self._log.write(http_line(event, self._wall(), with_speed=self._log_speed))
        if self._decisions.due != inf:
            self._flush_decisions()

    def _flush_decisions(self) -> None:
        now = self._now()
        if now >= self._decisions.due:
            self._decisions.flush(now)

    def _write(self, level: str, line: str) -> None:
        """Write a line, unless ``server.log_level`` leaves its level out."""
        if self._severity <= SEVERITY[level]:
            self._log.write(line)

    def _handle(self, event: Event) -> None:
        match event:
            case QueueChanged():
                self._queue_changed(event)
                self._recorder.sample()
            case StepDone():
                self._step_done(event)
                self._statistics.stepped(event)
            case RequestRefused():
                self._store.value(m.REFUSED, self._model(event.model), event.reason).add()
                self._objectives.refused(event)
                self._decisions.write(event)
            case ReplicaChanged():
                self.startup.changed(event)
                self._replica_changed(event)
            case BreakerChanged():
                labels = (self._model(event.model), _replica(event.replica))
                for state in m.BREAKER_STATES:
                    self._store.value(m.BREAKER_STATE, *labels, state).set(state == event.state)
                self._store.value(m.BREAKER_CHANGES, *labels, event.state).add()
                self._decisions.write(event)
            case Retried():
                result = m.RETRY_RESULTS[0 if event.granted else 1]
                self._store.value(m.RETRIES, self._model(event.model), event.kind, result).add()
                self._decisions.write(event)
            case HandedOver():
                model = self._model(event.model)
                self._store.value(m.HAND_OVERS, model, m.HAND_OVER_RESULTS[1 if event.failure else 0]).add()
                self._store.value(m.HAND_OVER_BLOCKS, model).add(event.num_blocks)
                self._store.value(m.HAND_OVER_BYTES, model).add(event.num_bytes)
                self._store.distribution(m.HAND_OVER_S, model).observe(event.seconds)
                if event.failure:
                    self._decisions.write(event)
            case CacheLooked():
                self._statistics.looked(event)
                model = self._model(event.model) if event.model else ""
                self._store.value(m.CACHE_LOOKUPS, model, event.result).add()
                if event.bytes:
                    self._store.value(m.CACHE_BYTES, model, event.result).add(event.bytes)
            case ModelUnloaded():
                self._store.value(m.MODEL_UNLOADS, self._model(event.model), event.reason).add()
                self._decisions.write(event)
            case ConfigReloaded():
                self._store.value(m.CONFIG_RELOADS, m.RELOADS[0 if event.accepted else 1]).add()
                self._store.value(m.CONFIG_OK).set(int(event.is_whole))
            case StateChanged():
                self._store.value(m.STATE_AVAILABLE).set(int(event.available))
                self._store.value(m.STATE_OUTAGES).add(int(not event.available))
            case GatewaysCompared():
                self._store.clear(m.CONFIG_DIGEST)
                self._store.value(m.CONFIG_DIGEST, event.digest).set(1)
                self._store.value(m.GATEWAYS).set(event.num_gateways)
                self._store.value(m.GATEWAYS_DIFFERING).set(event.num_differing)
            case HintsExchanged():
                for result in m.HINT_RESULTS:
                    if event.counts.get(result):
                        self._store.value(m.HINTS, result).add(event.counts[result])
            case StoredCounted():
                self._store.value(m.STORED_BYTES).set(event.num_bytes)
                self._store.value(m.STORED_TENANTS).set(event.num_tenants)
                self._store.value(m.STORED_MOST_USED).set(event.most_used)
                for word, count in zip(m.STORED_KINDS, (event.num_responses, event.num_conversations), strict=True):
                    self._store.value(m.STORED_ENTRIES, word).set(count)
            case StoredDropped():
                self._store.value(m.STORED_DROPPED, event.reason).add(event.count)
            case JobsCounted():
                self._store.value(m.FILES).set(event.num_files)
                self._store.value(m.FILES_BYTES).set(event.num_bytes)
                for status in m.OPEN_BATCHES:
                    self._store.value(m.BATCHES, status).set(event.by_status.get(status, 0))
            case LinesAnswered():
                self._store.value(m.BATCH_LINES, "done").add(event.num_done)
                self._store.value(m.BATCH_LINES, "failed").add(event.num_failed)
            case BatchEnded():
                self._store.value(m.BATCHES_ENDED, event.status).add()
            case AdminActed():
                self._write("info", audit_line(event, self._wall()))
            case RolloutChanged():
                self._rollout_changed(event)
            case CopyEnded():
                self._store.value(m.ROLLOUT_COPIES, self._model(event.model), event.result).add()
            case RolloutRemoved():
                for metric in (m.ROLLOUT_WEIGHT, m.ROLLOUT_STATE, m.ROLLOUT_EVIDENCE):
                    self._store.clear(metric, self._model(event.model))
            case DriftRead():
                self._drift_read(event)
            case DriftForgotten():
                for metric in (m.DRIFT_PSI, m.DRIFT_MMD, m.DRIFT_DETECTED):
                    self._store.clear(metric, self._model(event.model))
            case WebhookCame():
                self._store.value(m.WEBHOOKS, event.result).add()
                self._write(webhook_level(event.result), webhook_line(event, self._wall()))
            case Scaled():
                self._scaled(event)
            case ScalingRemoved():
                for metric in (m.SCALE_DESIRED, m.SCALE_REPLICAS, m.SCALE_NEEDED):
                    self._store.clear(metric, self._model(event.model))
            case NodeChanged():
                self._node_changed(event)
            case NodeSeen():
                self._node_seen(event)
            case ClientTurnedAway():
                self._store.value(m.TURNED_AWAY).add()
            case LoadProgress():
                self.startup.progressed(event)

    def _rollout_changed(self, event: RolloutChanged) -> None:
        model, value = self._model(event.model), self._store.value
        for metric in (m.ROLLOUT_WEIGHT, m.ROLLOUT_EVIDENCE):
            self._store.clear(metric, model)
        value(m.ROLLOUT_WEIGHT, model, event.stable).set(1.0 - event.share)
        value(m.ROLLOUT_WEIGHT, model, event.new).set(event.share)
        for state in m.ROLLOUT_STATES:
            value(m.ROLLOUT_STATE, model, state).set(state == event.state)
        for guard in event.guards:
            value(m.ROLLOUT_EVIDENCE, model, guard.guard, "against").set(guard.against)
            value(m.ROLLOUT_EVIDENCE, model, guard.guard, "in_favour").set(guard.in_favour)
        if event.is_news:
            value(m.ROLLOUT_CHANGES, model, event.state).add()
            self._write(rollout_level(event.state), rollout_line(event, self._wall()))

    def _drift_read(self, event: DriftRead) -> None:
        labels, value = (self._model(event.model), event.stream), self._store.value
        if event.is_smallest:
            value(m.DRIFT_PSI if event.measure == "psi" else m.DRIFT_MMD, *labels).set(event.distance)
        value(m.DRIFT_DETECTED, *labels).set(int(event.is_drifting))
        value(m.DRIFT_WINDOWS, *labels).add()
        value(m.DRIFT_ALARMS, *labels).add(int(event.is_alarm))
        if event.is_news:
            self._write(drift_level(event), drift_line(event, self._wall()))

    def _scaled(self, event: Scaled) -> None:
        model, value = self._model(event.model), self._store.value
        value(m.SCALE_DESIRED, model).set(event.desired)
        for state, count in zip(m.SCALE_STATES, (event.ready, event.starting, event.leaving), strict=True):
            value(m.SCALE_REPLICAS, model, state).set(count)
        self._store.clear(m.SCALE_NEEDED, model)
        for name, count in event.needs.items():
            value(m.SCALE_NEEDED, model, name).set(count)
        for direction in m.SCALE_DIRECTIONS:
            value(m.SCALE_CHANGES, model, direction)
        if event.is_news:
            if event.desired != event.before:
                value(m.SCALE_CHANGES, model, "up" if event.desired > event.before else "down").add()
            self._write("info", scale_line(event, self._wall()))

    def _node_changed(self, event: NodeChanged) -> None:
        if event.state in ("left", "gone"):
            self._nodes.discard(event.node)
            for metric in (m.NODE_BEAT_AGE, m.NODE_TRAFFIC):
                self._store.clear(metric, event.node)
        elif event.state != "refused":
            self._nodes.add(event.node)
        self._store.value(m.NODES_UP).set(len(self._nodes))
        self._store.value(m.NODE_CHANGES, event.state).add()
        self._write(node_level(event.state), node_line(event, self._wall()))

    def _node_seen(self, event: NodeSeen) -> None:
        if event.node in self._nodes:
            self._store.value(m.NODE_BEAT_AGE, event.node).set(event.heartbeat_age_s)
            for direction, count in zip(m.NODE_DIRECTIONS, (event.sent_bytes, event.received_bytes), strict=True):
                self._store.value(m.NODE_TRAFFIC, event.node, direction).set(count)

    def _queue_changed(self, event: QueueChanged) -> None:
        model = self._model(event.model)
        self._queued[model] = event.waiting
        if self._energy is not None:
            self._energy.set_in_flight(model, event.in_flight)
        self._store.value(m.QUEUE_WAITING, model).set(event.waiting)
        self._store.value(m.IN_FLIGHT, model).set(event.in_flight)
        for word, waiting in zip(CLASSES, event.waiting_by_class, strict=True):
            self._store.value(m.QUEUE_WAITING_BY_CLASS, model, word).set(waiting)
        self._store.value(m.QUEUE_TOKENS, model).set(event.waiting_tokens)
        self._store.value(m.QUEUE_BYTES, model).set(event.waiting_bytes)
        self._set_waiting(model, "0")

    def _step_done(self, event: StepDone) -> None:
        labels = (self._model(event.model), _replica(event.replica))
        if self._energy is not None:
            self._energy.stepped(labels[0], event.stats.step_s, event.stats.step_tokens)
        if event.stats.audited_rows:
            self._store.value(m.AUDITED_ROWS, *labels).add(event.stats.audited_rows)
            self._store.value(m.AUDIT_DIFFERENCES, *labels).add(bool(event.stats.not_batched))
            return
        if event.stats.batch_rows:
            self._batch_done(labels, event.stats)
            return
        value, stats, before = self._store.value, event.stats, self._stats.get(labels) or StepStats()
        self._set_engine(labels, stats)
        if stats.step_sequences:  # a turn that only ended requests computed nothing
            self._store.distribution(m.STEP_TOKENS, *labels).observe(stats.step_tokens)
            self._store.distribution(m.STEP_SEQUENCES, *labels).observe(stats.step_sequences)
            self._store.distribution(m.STEP_S, *labels).observe(stats.step_s)
            for part, seconds in zip(STEP_PARTS, msgspec.structs.astuple(stats.parts), strict=True):
                if seconds:
                    value(m.STEP_PART_S, *labels, part).add(seconds)
        if stats.num_invalid:
            value(m.INVALID_ANSWERS, *labels).add(stats.num_invalid)
        if stats.num_unmatched:
            value(m.UNMATCHED_CALLS, *labels).add(stats.num_unmatched)
        value(m.PREEMPTIONS, *labels).add(stats.num_preempted)
        value(m.PREFIX_QUERIES, *labels).add(stats.prefix_query_tokens)
        value(m.PREFIX_HITS, *labels).add(stats.prefix_hit_tokens)
        if stats.num_drafts:
            value(m.DRAFTS, *labels).add(stats.num_drafts)
            value(m.DRAFTED_TOKENS, *labels).add(stats.drafted_tokens)
            value(m.ACCEPTED_TOKENS, *labels).add(stats.accepted_tokens)
        # These three are cumulative in the worker. A new worker begins at nothing; the counter goes on.
        value(m.TOKENIZER_QUERIES, *labels).add(_gained(before.tokenizer_cache_queries, stats.tokenizer_cache_queries))
        value(m.TOKENIZER_HITS, *labels).add(_gained(before.tokenizer_cache_hits, stats.tokenizer_cache_hits))
        value(m.TOKENIZE_S, *labels).add(_gained(before.tokenize_s, stats.tokenize_s))

    def _batch_done(self, labels: _Labels, stats: StepStats) -> None:
        """A batch of predictions: there may be thousands in a second."""
        store = self._store
        before, self._stats[labels] = self._stats.get(labels), stats
        self._requests.predicting.add(labels[0])
        store.value(m.RUNNING, *labels).set(stats.num_running)
        store.value(m.REPLICA_WAITING, *labels).set(stats.num_waiting)
        self._set_waiting(*labels)
        store.distribution(m.BATCH_ROWS, *labels).observe(stats.batch_rows)
        store.distribution(m.BATCH_S, *labels).observe(stats.step_s)
        if stats.padded_rows:
            store.value(m.PADDED_ROWS, *labels).add(stats.padded_rows)
        decoded_s = _gained(before.tokenize_s if before is not None else 0.0, stats.tokenize_s)
        store.value(m.TOKENIZE_S, *labels).add(decoded_s)

    def _replica_changed(self, event: ReplicaChanged) -> None:
        labels = (self._model(event.model), _replica(event.replica))
        value, before = self._store.value, self._states.get(labels)
        for state in m.STATES:
            value(m.REPLICA_STATE, *labels, state).set(state == event.state)
        value(m.REPLICA_RESTARTS, *labels).add(_gained(self._restarts.get(labels, 0), event.restarts))
        self._restarts[labels] = event.restarts
        if event.rss_bytes or event.state != "ready":
            value(m.REPLICA_RSS, *labels).set(event.rss_bytes)
        if event.state == "ready":
            self._describe(event, labels)
        else:  # without a ready worker no request runs and no block is held
            self._set_engine(labels, StepStats())
        if event.state == before:
            return
        self._states[labels] = event.state
        if event.state in m.FAULTS:
            value(m.REPLICA_FAULTS, *labels, event.state).add()
        self._write(replica_level(event.state), replica_line(event, self._wall()))

    def _describe(self, event: ReplicaChanged, labels: tuple[str, str]) -> None:
        if event.load_s:
            self._store.clear(m.REPLICA_LOAD_S, *labels)
        for phase, seconds in event.load_s.items():
            self._store.value(m.REPLICA_LOAD_S, *labels, phase).set(seconds)
        if event.verified:
            self._store.clear(m.REPLICA_VERIFICATION, *labels)
            result = "failed" if "FAILED" in event.verified else "verified"
            self._store.value(m.REPLICA_VERIFICATION, *labels, result).set(1)
        if event.max_model_len:
            self._store.value(m.MODEL_MAX_TOKENS, *labels).set(event.max_model_len)
        if event.kv_blocks:
            self._store.clear(m.CACHE_CONFIG, *labels)
            self._store.value(m.CACHE_CONFIG, *labels, str(event.block_size), str(event.kv_blocks)).set(1)

    # -- parts ------------------------------------------------------------------------------

    def _set_engine(self, labels: tuple[str, str], stats: StepStats) -> None:
        before, self._stats[labels] = self._stats.get(labels), stats
        if stats.adapters != (AdapterUse() if before is None else before.adapters):
            self._set_adapters(labels, stats.adapters)
        value, total = self._store.value, stats.blocks_total
        value(m.RUNNING, *labels).set(stats.num_running)
        value(m.REPLICA_WAITING, *labels).set(stats.num_waiting)
        value(m.KV_USAGE, *labels).set(stats.blocks_used / total if total else 0.0)
        value(m.KV_BLOCKS, *labels, "used").set(stats.blocks_used)
        value(m.KV_BLOCKS, *labels, "cached").set(stats.blocks_cached)
        value(m.KV_BLOCKS, *labels, "free").set(total - stats.blocks_used - stats.blocks_cached)
        self._set_waiting(*labels)

    def _set_adapters(self, labels: tuple[str, str], used: AdapterUse) -> None:
        self._store.clear(m.ADAPTERS_INFO, *labels)
        if used.num_loaded:
            named = (str(used.num_loaded), ",".join(used.running), ",".join(used.waiting))
            self._store.value(m.ADAPTERS_INFO, *labels, *named).set(self._wall())

    def _set_waiting(self, model: str, replica: str) -> None:
        """The model's queue belongs to no replica; it shows with the first, so that sums are right."""
        stats = self._stats.get((model, replica))
        waiting = (stats.num_waiting if stats else 0) + (self._queued.get(model, 0) if replica == "0" else 0)
        self._store.value(m.WAITING, model, replica).set(waiting)
        self._store.value(m.WAITING_BY_REASON, model, replica, "capacity").set(waiting)

    def _open_stage(self, model: str, stage: str) -> None:
        recent = _RecentQuantiles(self._requests.window(model, stage), self._now)
        self._store.distribution(m.LATENCY_S, model, stage).quantiles = recent.read

    def _model(self, model: str) -> str:
        return model if model in self._models else _OTHER

    def _route(self, route: str) -> str:
        if route not in self._routes:
            if len(self._routes) == _MAX_ROUTES:
                return _OTHER
            self._routes.add(route)
        return route

    def _open_model(self, model: str, replicas: int) -> None:
        """Make every series of a model, at zero, so that rates are right from the first request on."""
        value = self._store.value
        for outcome in m.OUTCOMES:
            value(m.REQUESTS, model, _NO_REPLICA, outcome)
        for kind in sorted(self._kinds):
            value(m.ERRORS, model, kind)
        for reason in m.REFUSALS:
            value(m.REFUSED, model, reason)
        for kind in m.RETRY_KINDS:
            for result in m.RETRY_RESULTS:
                value(m.RETRIES, model, kind, result)
        for result in m.HAND_OVER_RESULTS:
            value(m.HAND_OVERS, model, result)
        value(m.HAND_OVER_BLOCKS, model)
        value(m.HAND_OVER_BYTES, model)
        self._store.distribution(m.HAND_OVER_S, model)
        for result in m.CACHE_RESULTS:
            value(m.CACHE_LOOKUPS, model, result)
        for word in m.UNLOADS:
            value(m.MODEL_UNLOADS, model, word)
        for word in CLASSES:
            value(m.QUEUE_WAITING_BY_CLASS, model, word)
        value(m.QUEUE_TOKENS, model)
        value(m.QUEUE_BYTES, model)
        for stage in m.STAGES:
            self._open_stage(model, stage)
        value(m.QUEUE_WAITING, model)
        value(m.IN_FLIGHT, model)
        for replica in map(str, range(replicas)):
            self._open_replica(model, replica)

    def _open_replica(self, model: str, replica: str) -> None:
        labels, value = (model, replica), self._store.value
        choices: dict[m.Metric, tuple[str, ...]] = {
            m.REQUESTS: m.OUTCOMES,
            m.FINISHED: m.FINISHED_REASONS,
            m.KV_BLOCKS: m.BLOCK_STATES,
            m.WAITING_BY_REASON: ("capacity",),
            m.REPLICA_STATE: m.STATES,
            m.REPLICA_FAULTS: m.FAULTS,
            m.BREAKER_STATE: m.BREAKER_STATES,
            m.BREAKER_CHANGES: m.BREAKER_STATES,
            m.STEP_PART_S: STEP_PARTS,
        }
        for metric in m.TABLE:
            if metric.labels == ("model", "replica"):
                if metric.buckets:
                    self._store.distribution(metric, *labels)
                else:
                    value(metric, *labels)
            for word in choices.get(metric, ()):
                value(metric, *labels, word)
        value(m.BREAKER_STATE, *labels, m.BREAKER_STATES[0]).set(1)

    def _defect(self, event: Event, error: Exception) -> None:
        """Count the defect and name the defect without the event's contents."""
        self._report_defect(type(event).__name__, error)

    def _report_defect(self, of: str, error: Exception) -> None:
        """``write`` cannot raise: the line is plain."""
        self._failures.add()
        names = {"of": of, "error": type(error).__name__}
        self._log.write(
            encoded({"ts": timestamp(self._wall()), "level": "error", "event": "observer_failure", **names})
        )


class _RecentQuantiles:
    """The quantiles of a window, which are computed again when its values have changed."""

    def __init__(self, window: Window, now: Callable[[], float]) -> None:
        self._window = window
        self._now = now
        self._state = (-1, -1)
        self._found: list[tuple[float, float]] = []

    def read(self) -> list[tuple[float, float]]:
        now = self._now()
        state = self._window.state(now)
        if state != self._state:
            values = self._window.quantiles(m.QUANTILES, now)
            self._found = [(q, nan if v is None else v) for q, v in zip(m.QUANTILES, values, strict=True)]
            self._state = state
        return self._found


def _gained(before: float, after: float) -> float:
    """How much a cumulative number grew; one that went down began again at zero."""
    return after - before if after >= before else after


def _target(stream: LogStream | FileTarget) -> Target:
    return stream if isinstance(stream, FileTarget) else StreamTarget(stream)


def _replica(replica: int | None) -> str:
    return _NO_REPLICA if replica is None else str(replica)


def _kinds(cls: type[InferdError]) -> list[str]:
    return [cls.kind, *(kind for sub in cls.__subclasses__() for kind in _kinds(sub))]
