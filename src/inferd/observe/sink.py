"""The sink of all events: it turns them into metrics and log lines.

Only this file knows what an event means for the metrics. ``emit`` never raises and never blocks: a defect in it is
counted and loses a number, and no request.
"""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import TYPE_CHECKING

import msgspec

from inferd import __version__, clock
from inferd.errors import InferdError
from inferd.events import (
    BreakerChanged,
    CacheLooked,
    ClientTurnedAway,
    ConfigReloaded,
    Event,
    HttpServed,
    LoadProgress,
    ModelUnloaded,
    QueueChanged,
    ReplicaChanged,
    RequestEnded,
    RequestRefused,
    Retried,
    StateChanged,
    StepDone,
)
from inferd.observe import metrics as m
from inferd.observe.logs import LineWriter, LogHandler, LogStream, http_line, replica_line
from inferd.observe.plain import plain as plain_line
from inferd.observe.process import process_metrics
from inferd.observe.requests import RequestSeries
from inferd.observe.series import CONTENT_TYPE, Store
from inferd.observe.statistics import ModelTally, Statistics
from inferd.types import CLASSES, STEP_PARTS, StepStats
from inferd.window import Window

if TYPE_CHECKING:
    from inferd.observe.gpus import Gpus

_NO_REPLICA = "none"
_OTHER = "other"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"})
_Labels = tuple[str, str]  # model and replica
_MAX_ROUTES = 256
"""Routes that get series of their own. The gateway sends patterns, so this is never met; if it were
to send raw paths, a client could otherwise fill the memory."""


class Observer:
    """Owns every number and the log. Used from one thread, the gateway's loop.

    ``models``: the configured models, or a mapping from them to their numbers of replicas. Labels are
    a closed set: a model that is not among them is counted as ``other``.
    """

    content_type: str = CONTENT_TYPE

    def __init__(
        self,
        *,
        models: Sequence[str] | Mapping[str, int] = (),
        access_log: bool = True,
        stream: LogStream | None = None,
        plain: bool = False,
        now: Callable[[], float] = clock.now,
        wall: Callable[[], float] = clock.wall,
    ) -> None:
        self._models = dict(models) if isinstance(models, Mapping) else dict.fromkeys(models, 1)
        self._access_log = access_log
        self._now = now
        self._wall = wall
        self._kinds = frozenset(_kinds(InferdError))
        self._store = Store(m.TABLE)
        self._statistics = Statistics()
        self._requests = RequestSeries(
            self._store, self._kinds, self._model, self._defect, self._statistics, self._wall
        )
        self._routes: set[str] = set()
        self._states: dict[tuple[str, str], str] = {}
        self._stats: dict[tuple[str, str], StepStats] = {}  # of each replica's present life
        self._queued: dict[str, int] = {}
        self._dropped = self._store.value(m.LINES_DROPPED)
        self._failures = self._store.value(m.OBSERVER_FAILURES)
        self._store.value(m.BUILD, __version__, platform.python_version()).set(1)
        for model, replicas in self._models.items():
            self._open_model(model, replicas)
        for result in m.RELOADS:
            self._store.value(m.CONFIG_RELOADS, result)
        self._store.value(m.CONFIG_OK).set(1)
        self._store.value(m.STATE_AVAILABLE).set(1)
        self._store.value(m.STATE_OUTAGES)
        self._gpus: Gpus | None = None
        self._has_looked_for_gpus = False
        self._store.value(m.TURNED_AWAY)
        form = plain_line if plain else None
        self._log = LineWriter(sys.stderr if stream is None else stream, self._dropped.add, form=form)
        # For logging.getLogger(...).addHandler: Python's logging goes into the same log.
        self.log_handler: logging.Handler = LogHandler(self._log.write)

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
        except Exception as error:  # the sink: a defect here must not reach the room that emits the event
            self._defect(event, error)

    def configure(self, models: Mapping[str, int], *, access_log: bool) -> None:
        """Use another set of models. Counters of a removed model stay; its gauges are removed."""
        self._access_log = access_log
        for model in self._models.keys() - models.keys():
            for metric in m.TABLE:
                if metric.kind == "gauge" and metric.labels[:1] == ("model",):
                    self._store.clear(metric, model)
        for model, replicas in models.items():
            if model not in self._models:
                self._open_model(model, replicas)
        self._models = dict(models)
        self._statistics.keep(tuple(models))

    def render_metrics(self) -> bytes:
        """The body of ``GET /metrics``."""
        self._requests.enter()
        self._read_gpus()
        return self._store.render().encode() + process_metrics()

    def _read_gpus(self) -> None:
        if not self._has_looked_for_gpus:  # with the first page, as it may take longer than the start
            from inferd.observe.gpus import find_gpus

            self._gpus, self._has_looked_for_gpus = find_gpus(), True
        for gpu in self._gpus.read() if self._gpus is not None else ():
            for metric, value in (
                (m.GPU_DUTY, gpu.duty),
                (m.GPU_MEMORY_USED, gpu.memory_used_bytes),
                (m.GPU_MEMORY_TOTAL, gpu.memory_total_bytes),
                (m.GPU_TEMPERATURE, gpu.temperature_c),
                (m.GPU_POWER, gpu.power_w),
            ):
                if value is not None:
                    self._store.value(metric, str(gpu.index), gpu.uuid).set(float(value))

    def tally_of(self, model: str) -> ModelTally:
        """What a model has done since the server started."""
        self._requests.enter()
        return self._statistics.of(model)

    def close(self) -> None:
        """Write the log lines that wait, for a moment, and stop. Idempotent."""
        self._log.close()

    # -- events -----------------------------------------------------------------------------

    def _http_served(self, event: HttpServed) -> None:
        route = event.route
        self._requests.served(
            event,
            route if route in self._routes else self._route(route),
            event.method if event.method in _METHODS else _OTHER,
        )
        if self._access_log:
            self._log.write(http_line(event, self._wall()))

    def _handle(self, event: Event) -> None:
        match event:
            case QueueChanged():
                self._queue_changed(event)
            case StepDone():
                self._step_done(event)
                self._statistics.stepped(event)
            case RequestRefused():
                self._store.value(m.REFUSED, self._model(event.model), event.reason).add()
            case ReplicaChanged():
                self._replica_changed(event)
            case BreakerChanged():
                labels = (self._model(event.model), _replica(event.replica))
                for state in m.BREAKER_STATES:
                    self._store.value(m.BREAKER_STATE, *labels, state).set(state == event.state)
                self._store.value(m.BREAKER_CHANGES, *labels, event.state).add()
            case Retried():
                result = m.RETRY_RESULTS[0 if event.granted else 1]
                self._store.value(m.RETRIES, self._model(event.model), event.kind, result).add()
            case CacheLooked():
                self._statistics.looked(event)
                model = self._model(event.model) if event.model else ""
                self._store.value(m.CACHE_LOOKUPS, model, event.result).add()
                if event.bytes:
                    self._store.value(m.CACHE_BYTES, model, event.result).add(event.bytes)
            case ModelUnloaded():
                self._store.value(m.MODEL_UNLOADS, self._model(event.model), event.reason).add()
            case ConfigReloaded():
                self._store.value(m.CONFIG_RELOADS, m.RELOADS[0 if event.accepted else 1]).add()
                self._store.value(m.CONFIG_OK).set(int(event.is_whole))
            case StateChanged():
                self._store.value(m.STATE_AVAILABLE).set(int(event.available))
                self._store.value(m.STATE_OUTAGES).add(int(not event.available))
            case ClientTurnedAway():
                self._store.value(m.TURNED_AWAY).add()
            case LoadProgress():
                pass  # shown during the start; the seconds of the phases come with ReplicaChanged

    def _queue_changed(self, event: QueueChanged) -> None:
        model = self._model(event.model)
        self._queued[model] = event.waiting
        self._store.value(m.QUEUE_WAITING, model).set(event.waiting)
        self._store.value(m.IN_FLIGHT, model).set(event.in_flight)
        for word, waiting in zip(CLASSES, event.waiting_by_class, strict=True):
            self._store.value(m.QUEUE_WAITING_BY_CLASS, model, word).set(waiting)
        self._store.value(m.QUEUE_TOKENS, model).set(event.waiting_tokens)
        self._store.value(m.QUEUE_BYTES, model).set(event.waiting_bytes)
        self._set_waiting(model, "0")

    def _step_done(self, event: StepDone) -> None:
        labels = (self._model(event.model), _replica(event.replica))
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
        restarts = value(m.REPLICA_RESTARTS, *labels)
        restarts.set(max(restarts.value, event.restarts))
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
        self._log.write(replica_line(event, self._wall()))

    def _describe(self, event: ReplicaChanged, labels: tuple[str, str]) -> None:
        if event.load_s:
            self._store.clear(m.REPLICA_LOAD_S, *labels)
        for phase, seconds in event.load_s.items():
            self._store.value(m.REPLICA_LOAD_S, *labels, phase).set(seconds)
        if event.max_model_len:
            self._store.value(m.MODEL_MAX_TOKENS, *labels).set(event.max_model_len)
        if event.kv_blocks:
            self._store.clear(m.CACHE_CONFIG, *labels)
            self._store.value(m.CACHE_CONFIG, *labels, str(event.block_size), str(event.kv_blocks)).set(1)

    # -- parts ------------------------------------------------------------------------------

    def _set_engine(self, labels: tuple[str, str], stats: StepStats) -> None:
        self._stats[labels] = stats
        value, total = self._store.value, stats.blocks_total
        value(m.RUNNING, *labels).set(stats.num_running)
        value(m.REPLICA_WAITING, *labels).set(stats.num_waiting)
        value(m.KV_USAGE, *labels).set(stats.blocks_used / total if total else 0.0)
        value(m.KV_BLOCKS, *labels, "used").set(stats.blocks_used)
        value(m.KV_BLOCKS, *labels, "cached").set(stats.blocks_cached)
        value(m.KV_BLOCKS, *labels, "free").set(total - stats.blocks_used - stats.blocks_cached)
        self._set_waiting(*labels)

    def _set_waiting(self, model: str, replica: str) -> None:
        """The model's queue belongs to no replica; it shows with the first, so that sums are right."""
        stats = self._stats.get((model, replica))
        waiting = (stats.num_waiting if stats else 0) + (self._queued.get(model, 0) if replica == "0" else 0)
        self._store.value(m.WAITING, model, replica).set(waiting)
        self._store.value(m.WAITING_BY_REASON, model, replica, "capacity").set(waiting)

    def _open_stage(self, model: str, stage: str) -> None:
        window = self._requests.window(model, stage)
        self._store.distribution(m.LATENCY_S, model, stage).quantiles = lambda: self._quantiles(window)

    def _quantiles(self, window: Window) -> list[tuple[float, float]]:
        values = window.quantiles(m.QUANTILES, self._now())
        return [(q, nan if v is None else v) for q, v in zip(m.QUANTILES, values, strict=True)]

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
        """Count the defect and name the defect without the event's contents. ``write`` cannot raise: the line is
        plain."""
        self._failures.add()
        self._log.write(
            f'{{"level":"error","event":"observer_failure","of":"{type(event).__name__}","error":"{type(error).__name__}"}}'
        )


def _gained(before: float, after: float) -> float:
    """How much a cumulative number grew; one that went down began again at zero."""
    return after - before if after >= before else after


def _replica(replica: int | None) -> str:
    return _NO_REPLICA if replica is None else str(replica)


def _kinds(cls: type[InferdError]) -> list[str]:
    return [cls.kind, *(kind for sub in cls.__subclasses__() for kind in _kinds(sub))]
