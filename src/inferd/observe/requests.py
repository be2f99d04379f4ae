"""The series of requests: their events are collected one by one and counted many at a time.

A request touches some thirty series, and finding a series costs more than adding to it. So events are collected by what
they have in common, and counted together: when several hundred are waiting, when the first of them is a second old, and
before the series are read.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from inferd.errors import InferdError
from inferd.events import HttpServed, RequestEnded
from inferd.observe import metrics as m
from inferd.observe.series import Store
from inferd.observe.statistics import Statistics
from inferd.types import Timings
from inferd.window import Window

MAX_NEW = 512
"""Events counted at a time. Counting blocks the event loop; counting more would delay requests noticeably."""

GAPS_PER_EVENT = 64
"""Gaps between tokens that cost as much as one event."""

MAX_AGE_S = 1.0
"""Age of the first waiting event at which all are counted: windows of time use the last one's time for all."""

_NO_REPLICA = "none"
_Labels = tuple[str, str]  # model and replica
Todo = list[tuple[Callable[[Any], None], object]]
"""Which values are to be added to which series. Nothing is added before all of them are known."""

E = TypeVar("E", RequestEnded, HttpServed)


class RequestSeries:
    """The series of requests. ``model_of`` turns an event's model into a label of the closed set."""

    def __init__(
        self,
        store: Store,
        kinds: frozenset[str],
        model_of: Callable[[str], str],
        on_defect: Callable[[RequestEnded | HttpServed, Exception], None],
        statistics: Statistics,
        wall: Callable[[], float],
    ) -> None:
        self._statistics = statistics
        self._wall = wall
        self._on_defect = on_defect
        self._store = store
        self._kinds = kinds
        self._model_of = model_of
        self.predicting: set[str] = set()  # models whose batches have rows
        self._windows: dict[tuple[str, str], Window] = {}
        self._ended: dict[tuple[str, int | None], list[RequestEnded]] = {}
        self._served: dict[tuple[str, str, int], list[HttpServed]] = {}
        self._num_new = 0
        self._first_at = 0.0
        self._last_at = 0.0

    def ended(self, event: RequestEnded, now: float) -> None:
        if not self._num_new or now - self._first_at > MAX_AGE_S or self._num_new >= MAX_NEW:
            self.enter()
            self._first_at = now
        self._last_at = now
        self._num_new += 1 + len(event.inter_token_s) // GAPS_PER_EVENT
        key = (event.model, event.replica)
        group = self._ended.get(key)
        if group is None:
            group = self._ended[key] = []
        group.append(event)

    def served(self, event: HttpServed, route: str, method: str) -> None:
        if self._num_new >= MAX_NEW:
            self.enter()
        self._num_new += 1
        key = (route, method, event.status)
        group = self._served.get(key)
        if group is None:
            group = self._served[key] = []
        group.append(event)

    def enter(self) -> None:
        """Count the waiting events. Idempotent, and never raises: a defect loses the numbers of the events that caused
        it."""
        self._num_new = 0
        for (model, replica), ended in self._ended.items():
            if ended:
                events, self._ended[model, replica] = ended, []
                labels = (self._model_of(model), _NO_REPLICA if replica is None else str(replica))
                self._enter(functools.partial(self._enter_ended, labels), events)
        for key, served in self._served.items():
            if served:
                http, self._served[key] = served, []
                self._enter(functools.partial(self._enter_served, *key), http)

    def _enter(self, extract: Callable[[list[E], Todo], None], events: list[E]) -> None:
        """Read all events, then add. When one of them cannot be read, nothing was added yet, and each is counted
        alone."""
        todo: Todo = []
        try:
            extract(events, todo)
        except Exception as error:  # the sink, as in Observer.emit
            if len(events) == 1:
                self._on_defect(events[0], error)
            else:
                for event in events:
                    self._enter(extract, [event])
            return
        for add, what in todo:
            add(what)

    def window(self, model: str, stage: str) -> Window:
        """A stage's values of the last minute."""
        window = self._windows.get((model, stage))
        if window is None:
            window = self._windows[model, stage] = Window(m.QUANTILE_WINDOW_S)
        return window

    # -- many at a time ---------------------------------------------------------------------

    def _enter_ended(self, labels: _Labels, events: list[RequestEnded], todo: Todo) -> None:
        value = self._store.value
        todo.append((lambda ended: self._statistics.ended(ended, self._wall()), events))
        for outcome, count in Counter([event.outcome for event in events]).items():
            todo.append((value(m.REQUESTS, *labels, outcome).add, count))
        usages = [event.usage for event in events]
        todo.append((value(m.PROMPT_TOKENS, *labels).add, sum([usage.prompt_tokens for usage in usages])))
        todo.append((value(m.GENERATION_TOKENS, *labels).add, sum([usage.completion_tokens for usage in usages])))
        todo.append((value(m.CACHED_TOKENS, *labels).add, sum([usage.cached_tokens for usage in usages])))
        telling = [event for event in events if event.finish_reasons or event.outcome != "done"]
        for reason, count in Counter([reason for event in telling for reason in finished_reasons(event)]).items():
            todo.append((value(m.FINISHED, *labels, reason).add, count))
        for kind, count in Counter([e.error_kind for e in events if e.error_kind is not None]).items():
            todo.append((value(m.ERRORS, labels[0], kind if kind in self._kinds else InferdError.kind).add, count))
        firsts = [at for event in events if (at := event.timings.first_token) is not None]
        self._time(m.FIRST_TOKEN_S, "first_token", labels, firsts, todo)
        gaps = [event.inter_token_s for event in events if event.inter_token_s]
        if gaps:
            self._time(m.INTER_TOKEN_S, "inter_token", labels, [gap for some in gaps for gap in some], todo)
        done = [event for event in events if event.outcome == "done"]
        if done:
            self._enter_done(labels, done, todo)

    def _enter_done(self, labels: _Labels, events: list[RequestEnded], todo: Todo) -> None:
        """The distributions of requests that were served to their end, so that failures do not improve them."""
        timings = [event.timings for event in events]
        self._time(m.REQUEST_S, "total", labels, [t.finished for t in timings if t.finished is not None], todo)
        scheduled = [t for t in timings if t.scheduled is not None]
        if scheduled:
            self._enter_scheduled(labels, scheduled, todo)
        self._enter_pipeline_steps(labels, timings, todo)
        if labels[0] in self.predicting:
            self._enter_stages(labels, timings, todo)
        self._enter_decoding(labels, events, todo)
        self._enter_sizes(labels, events, todo)

    def _enter_pipeline_steps(self, labels: _Labels, timings: list[Timings], todo: Todo) -> None:
        steps: dict[str, list[float]] = {}
        for t in timings:
            for step, seconds in t.steps_s.items() if t.steps_s is not None else ():
                steps.setdefault(step, []).append(seconds)
        for step, times in steps.items():
            todo.append((self._store.distribution(m.PIPELINE_STEP_S, *labels, step).add_all, times))

    def _enter_decoding(self, labels: _Labels, events: list[RequestEnded], todo: Todo) -> None:
        """From the first token to the last, and per token for requests with one answer."""
        decodes = [(event, span) for event in events if (span := _decode_s(event.timings)) is not None]
        todo.append((self._store.distribution(m.DECODE_S, *labels).add_all, [span for _, span in decodes]))
        per_token = [
            span / (event.usage.completion_tokens - 1)
            for event, span in decodes
            if event.n == 1 and event.usage.completion_tokens > 1
        ]
        self._time(m.PER_OUTPUT_TOKEN_S, "per_output_token", labels, per_token, todo)

    def _enter_sizes(self, labels: _Labels, events: list[RequestEnded], todo: Todo) -> None:
        usages = [event.usage for event in events]
        sizes: dict[m.Metric, list[int]] = {
            m.REQUEST_PROMPT_TOKENS: [usage.prompt_tokens for usage in usages],
            m.REQUEST_GENERATION_TOKENS: [usage.completion_tokens for usage in usages],
            m.REQUEST_COMPUTED_TOKENS: [usage.prompt_tokens - usage.cached_tokens for usage in usages],
            m.REQUEST_N: [event.n for event in events],
            m.REQUEST_PREEMPTIONS: [event.num_preemptions for event in events],
            m.REQUEST_LONGEST_TOKENS: [event.usage.completion_tokens for event in events if event.n == 1],
            m.REQUEST_MAX_TOKENS: [event.max_tokens for event in events if event.max_tokens is not None],
        }
        for metric, values in sizes.items():
            todo.append((self._store.distribution(metric, *labels).add_all, values))

    def _enter_stages(self, labels: _Labels, timings: list[Timings], todo: Todo) -> None:
        """The stages of predictions: each lasts from the end of the one before it."""
        staged = [
            (t.dispatched or 0.0, t.tokenized, t.scheduled, t.first_token, t.finished)
            for t in timings
            if t.tokenized is not None
            and t.scheduled is not None
            and t.first_token is not None
            and t.finished is not None
        ]
        for place, stage in enumerate(m.PREDICTION_STAGES):
            spans = [max(0.0, at[place + 1] - at[place]) for at in staged]
            todo.append((self._store.distribution(m.PREDICTION_STAGE_S, *labels, stage).add_all, spans))

    def _enter_scheduled(self, labels: _Labels, timings: list[Timings], todo: Todo) -> None:
        waits = [t.scheduled for t in timings if t.scheduled is not None]
        self._time(m.QUEUE_S, "queue", labels, waits, todo)
        works = [t.finished - t.scheduled for t in timings if t.finished is not None and t.scheduled is not None]
        self._time(m.INFERENCE_S, "inference", labels, works, todo)
        prefills = [
            t.first_token - t.scheduled for t in timings if t.first_token is not None and t.scheduled is not None
        ]
        todo.append((self._store.distribution(m.PREFILL_S, *labels).add_all, prefills))

    def _enter_served(self, route: str, method: str, status: int, events: list[HttpServed], todo: Todo) -> None:
        value, distribution = self._store.value, self._store.distribution
        todo.append((value(m.HTTP_REQUESTS, route, method, str(status)).add, len(events)))
        todo.append((value(m.HTTP_REQUESTS_BY_CLASS, route, method, f"{status // 100}xx").add, len(events)))
        todo.append((distribution(m.HTTP_S, route, method).add_all, [event.duration_s for event in events]))
        todo.append((distribution(m.HTTP_REQUEST_BYTES, route).add_all, [event.request_bytes for event in events]))
        todo.append((distribution(m.HTTP_RESPONSE_BYTES, route).add_all, [event.response_bytes for event in events]))

    def _time(self, metric: m.Metric, stage: str, labels: _Labels, durations: list[float], todo: Todo) -> None:
        """Durations in seconds go to their histogram and to the model's recent quantiles."""
        if durations:
            todo.append((self._store.distribution(metric, *labels).add_all, durations))
            todo.append((self._store.distribution(m.LATENCY_S, labels[0], stage).add_all, durations))
            window, now = self.window(labels[0], stage), self._last_at
            todo.append((lambda values: window.add_many(values, now), durations))


def _decode_s(timings: Timings) -> float | None:
    """Seconds from the first token to the last; None: one of them was not reached."""
    if timings.finished is None or timings.first_token is None:
        return None
    return timings.finished - timings.first_token


def finished_reasons(event: RequestEnded) -> tuple[str, ...]:
    """vLLM's word for each answer. An answer that was cut off has none, so the outcome of its request counts."""
    words = tuple("abort" if reason == "cancelled" else reason for reason in event.finish_reasons)
    missing = max(0, event.n - len(words))
    match event.outcome:
        case "cancelled":
            return words + ("abort",) * missing
        case "failed":
            return words + ("error",) * missing
        case _:
            return tuple(word for word in words if word in m.FINISHED_REASONS)
