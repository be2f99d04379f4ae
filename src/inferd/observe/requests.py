"""The series of requests: their events are collected one by one and counted many at a time.

A request touches some thirty series, and finding a series costs more than adding to it. So events are collected by what
they have in common, and counted together: when several hundred are waiting, when the first of them is a second old, and
before the series are read.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from msgspec.structs import astuple

from inferd.errors import InferdError
from inferd.events import HttpServed, RequestEnded
from inferd.observe import metrics as m
from inferd.observe.devices.energy import Energy
from inferd.observe.objectives import ObjectiveSeries
from inferd.observe.series import Store, Todo
from inferd.observe.statistics import Statistics
from inferd.types import Timings
from inferd.window import Window

MAX_NEW = 512
"""Events counted at a time. Counting blocks the event loop; counting more would delay requests noticeably."""

GAPS_PER_EVENT = 64
"""Gaps between tokens that cost as much as one event."""

MAX_EXAMPLES = 8
"""Requests with the same route, method and status that are named at a time, besides the slowest one."""

MAX_AGE_S = 1.0
"""Age of the first waiting event at which all are counted: windows of time use the last one's time for all."""

_NO_REPLICA = "none"
_Labels = tuple[str, str]  # model and replica

E = TypeVar("E", RequestEnded, HttpServed)

_fields: Final = astuple
"""Reads the fields of a structure with one call: reading them one by one takes most of the time here."""

_Row = tuple[Any, ...]
_SCHEDULED: Final = 2  # the place of a field of ``Timings``; likewise the next ones
_FIRST_TOKEN: Final = 3
_FINISHED: Final = 4
_STEPS_S: Final = 5
assert Timings.__struct_fields__[_SCHEDULED : _STEPS_S + 1] == ("scheduled", "first_token", "finished", "steps_s")


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
        objectives: ObjectiveSeries,
        energy: Energy | None = None,
    ) -> None:
        self._energy = energy
        self._statistics = statistics
        self._objectives = objectives
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
        all_ended, self._ended = self._ended, {}
        for (model, replica), ended in all_ended.items():
            labels = (self._model_of(model), _NO_REPLICA if replica is None else str(replica))
            self._enter(functools.partial(self._enter_ended, labels), ended)
        all_served, self._served = self._served, {}
        for key, served in all_served.items():
            self._enter(functools.partial(self._enter_served, *key), served)

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
        todo.append((lambda ended: self._statistics.ended(labels[0], ended, self._wall()), events))
        for outcome, count in Counter([event.outcome for event in events]).items():
            todo.append((value(m.REQUESTS, *labels, outcome).add, count))
        usages = [_fields(event.usage) for event in events]
        for place, metric in enumerate((m.PROMPT_TOKENS, m.GENERATION_TOKENS, m.CACHED_TOKENS)):
            todo.append((value(metric, *labels).add, sum([usage[place] for usage in usages], 0)))
        todo += self._objectives.ended(labels[0], events)
        if self._energy is not None:
            todo.append((functools.partial(self._energy.ended, labels[0], _tokens_of_tenants(events)), len(events)))
        ends = Counter([(event.finish_reasons, event.n, event.outcome) for event in events])
        for (reasons, n, outcome), count in ends.items():
            for reason in finished_reasons(reasons, n, outcome):
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
        usages = [event.usage for event in events]
        completions = [usage.completion_tokens for usage in usages]
        numbers = [event.n for event in events]
        stamps = [_fields(event.timings) for event in events]
        self._enter_stamps(labels, stamps, todo)
        per_token = [
            max(0.0, row[_FINISHED] - row[_FIRST_TOKEN]) / (tokens - 1)
            for row, tokens, n in zip(stamps, completions, numbers, strict=True)
            if n == 1 and tokens > 1 and row[_FIRST_TOKEN] is not None and row[_FINISHED] is not None
        ]
        self._time(m.PER_OUTPUT_TOKEN_S, "per_output_token", labels, per_token, todo)
        sizes: dict[m.Metric, list[int]] = {
            m.REQUEST_PROMPT_TOKENS: [usage.prompt_tokens for usage in usages],
            m.REQUEST_GENERATION_TOKENS: completions,
            m.REQUEST_COMPUTED_TOKENS: [usage.prompt_tokens - usage.cached_tokens for usage in usages],
            m.REQUEST_N: numbers,
            m.REQUEST_PREEMPTIONS: [event.num_preemptions for event in events],
            m.REQUEST_LONGEST_TOKENS: [tokens for tokens, n in zip(completions, numbers, strict=True) if n == 1],
            m.REQUEST_MAX_TOKENS: [event.max_tokens for event in events if event.max_tokens is not None],
        }
        for metric, values in sizes.items():
            todo.append((self._store.distribution(metric, *labels).add_all, values))

    def _enter_stamps(self, labels: _Labels, stamps: list[_Row], todo: Todo) -> None:
        """The times of done requests. ``stamps``: the fields of each one's ``Timings``."""
        distribution = self._store.distribution
        totals = [row[_FINISHED] for row in stamps if row[_FINISHED] is not None]
        self._time(m.REQUEST_S, "total", labels, totals, todo)
        waits = [row[_SCHEDULED] for row in stamps if row[_SCHEDULED] is not None]
        if waits:
            self._time(m.QUEUE_S, "queue", labels, waits, todo)
            works = _spans(stamps, _SCHEDULED, _FINISHED)
            self._time(m.INFERENCE_S, "inference", labels, works, todo)
            todo.append((distribution(m.PREFILL_S, *labels).add_all, _spans(stamps, _SCHEDULED, _FIRST_TOKEN)))
        todo.append((distribution(m.DECODE_S, *labels).add_all, _spans(stamps, _FIRST_TOKEN, _FINISHED)))
        if labels[0] in self.predicting:
            self._enter_stages(labels, stamps, todo)
        steps: dict[str, list[float]] = {}
        for row in stamps:
            if row[_STEPS_S] is not None:
                for step, seconds in row[_STEPS_S].items():
                    steps.setdefault(step, []).append(seconds)
        for step, times in steps.items():
            todo.append((distribution(m.PIPELINE_STEP_S, *labels, step).add_all, times))

    def _enter_stages(self, labels: _Labels, stamps: list[_Row], todo: Todo) -> None:
        """The stages of predictions: each lasts from the end of the one before it."""
        staged = [(row[0] or 0.0, *row[1:_STEPS_S]) for row in stamps if None not in row[1:_STEPS_S]]
        for place, stage in enumerate(m.PREDICTION_STAGES):
            spans = [max(0.0, at[place + 1] - at[place]) for at in staged]
            todo.append((self._store.distribution(m.PREDICTION_STAGE_S, *labels, stage).add_all, spans))

    def _enter_served(self, route: str, method: str, status: int, events: list[HttpServed], todo: Todo) -> None:
        value, distribution = self._store.value, self._store.distribution
        todo.append((value(m.HTTP_REQUESTS, route, method, str(status)).add, len(events)))
        todo.append((distribution(m.HTTP_S, route, method).add_all, [event.duration_s for event in events]))
        todo.append((distribution(m.HTTP_REQUEST_BYTES, route).add_all, [event.request_bytes for event in events]))
        todo.append((distribution(m.HTTP_RESPONSE_BYTES, route).add_all, [event.response_bytes for event in events]))

        self._enter_examples(events, todo)

    def _enter_examples(self, events: list[HttpServed], todo: Todo) -> None:
        """Name requests for the buckets that they are counted in: by their trace where it is sampled.

        Of many requests the slowest one and the last ones are named. The others would mostly be replaced by them.
        """
        answered = [event for event in events if event.timings is not None]
        if len(answered) > MAX_EXAMPLES:
            answered = [max(answered, key=_duration_of), *answered[-MAX_EXAMPLES:]]
        examples: dict[tuple[m.Metric, _Labels], list[tuple[float, str, str]]] = {}
        for event in answered:
            labels = (self._model_of(event.model or ""), _NO_REPLICA if event.replica is None else str(event.replica))
            label, name = _name_of(event)
            for metric, seconds in _durations(event):
                examples.setdefault((metric, labels), []).append((seconds, label, name))
        wall = self._wall()
        for (metric, labels), found in examples.items():
            todo.append((functools.partial(self._store.distribution(metric, *labels).exemplify, at=wall), found))

    def _time(self, metric: m.Metric, stage: str, labels: _Labels, durations: list[float], todo: Todo) -> None:
        """Durations in seconds go to their histogram and to the model's recent quantiles."""
        if durations:
            todo.append((self._store.distribution(metric, *labels).add_all, durations))
            todo.append((self._store.distribution(m.LATENCY_S, labels[0], stage).add_all, durations))
            window, now = self.window(labels[0], stage), self._last_at
            todo.append((lambda values: window.add_many(values, now), durations))


def _spans(stamps: list[_Row], first: int, last: int) -> list[float]:
    """The seconds between two stamps, of the requests that have both. Never negative, though the two may be of two
    processes: the sum of a histogram does not go back."""
    return [max(0.0, row[last] - row[first]) for row in stamps if row[last] is not None and row[first] is not None]


def _tokens_of_tenants(events: list[RequestEnded]) -> dict[str, int]:
    """The tokens that were computed for each tenant; a request without tokens counts as one."""
    found: dict[str, int] = {}
    for event in events:
        usage = event.usage
        tokens = usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens
        found[event.tenant] = found.get(event.tenant, 0) + max(tokens, 1)
    return found


def _name_of(event: HttpServed) -> tuple[str, str]:
    """The label of a request's exemplar, and its value."""
    version, _, rest = event.trace.partition("-")
    trace_id, _, flags = rest.partition("-")
    if version and int(flags[-2:], 16) & 1:
        return "trace_id", trace_id
    return "request_id", event.request_id


def _duration_of(event: HttpServed) -> float:
    return event.duration_s


def _durations(event: HttpServed) -> Iterator[tuple[m.Metric, float]]:
    """What a request is counted with in the histograms that have exemplars."""
    timings = event.timings
    if timings is None:
        return
    if timings.first_token is not None:
        yield m.FIRST_TOKEN_S, timings.first_token
    if event.outcome != "done":
        return
    if timings.finished is not None:
        yield m.REQUEST_S, timings.finished
    if timings.scheduled is not None:
        yield m.QUEUE_S, timings.scheduled
    decode_s = _decode_s(timings)
    num_tokens = 0 if event.usage is None else event.usage.completion_tokens
    if decode_s is not None and num_tokens > 1 and len(event.finish_reasons) == 1:
        yield m.PER_OUTPUT_TOKEN_S, decode_s / (num_tokens - 1)


def _decode_s(timings: Timings) -> float | None:
    """Seconds from the first token to the last; None: one of them was not reached.

    Never negative, though the two stamps may be of two processes: the sum of a histogram does not go back.
    """
    if timings.finished is None or timings.first_token is None:
        return None
    return max(0.0, timings.finished - timings.first_token)


def finished_reasons(reasons: tuple[str, ...], n: int, outcome: str) -> tuple[str, ...]:
    """vLLM's word for each of ``n`` answers. An answer that was cut off has none, so the outcome of its request
    counts."""
    words = tuple(["abort" if reason == "cancelled" else reason for reason in reasons])
    missing = max(0, n - len(words))
    if outcome == "cancelled":
        return words + ("abort",) * missing
    if outcome == "failed":
        return words + ("error",) * missing
    return tuple([word for word in words if word in m.FINISHED_REASONS])
