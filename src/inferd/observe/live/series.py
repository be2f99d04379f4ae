"""The series that are kept live, and how each is read from the store of metrics once a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Final, Literal, NamedTuple

import msgspec

from inferd.observe import metrics as m
from inferd.observe.series import Distribution, Store
from inferd.window import Window

Kind = Literal["rate", "gauge", "quantile"]
Sums = dict[str, float]  # by model
Read = Callable[[str, str], Window]


class Series(msgspec.Struct, frozen=True):
    """One line of a chart."""

    id: str
    model: str  # empty: of the machine
    title: str
    unit: str
    kind: Kind

    @property
    def key(self) -> str:
        return f"{self.id}|{self.model}"

    @property
    def is_peak(self) -> bool:
        """Whether a longer step has the highest value of its seconds, instead of their mean."""
        return self.kind == "quantile"


class Kept(NamedTuple):
    """What every series of one id has in common."""

    title: str
    unit: str
    kind: Kind


_OF_MODEL: Final[Mapping[str, Kept]] = {
    "requests_s": Kept("Requests", "requests/s", "rate"),
    "errors_s": Kept("Failed and refused requests", "requests/s", "rate"),
    "tokens_s": Kept("Generated tokens", "tokens/s", "rate"),
    "prompt_tokens_s": Kept("Prompt tokens", "tokens/s", "rate"),
    **{
        f"{id_}_p{share}": Kept(f"{title}, p{share}", "s", "quantile")
        for id_, title in (
            ("ttft", "Time to first token"),
            ("tpot", "Time per output token"),
            ("total", "Time of a request"),
        )
        for share in (50, 95, 99)
    },
    "queue": Kept("Waiting requests", "requests", "gauge"),
    "running": Kept("Running requests", "requests", "gauge"),
    "batch_rows": Kept("Batch size", "rows", "gauge"),
    "kv_use": Kept("KV cache in use", "ratio", "gauge"),
    "prefix_hits": Kept("Prompt tokens from the prefix cache", "ratio", "gauge"),
    "speculation_accepted": Kept("Accepted draft tokens", "ratio", "gauge"),
}

OF_MACHINE: Final[Mapping[str, Kept]] = {
    "cpu": Kept("Processor time in use", "ratio", "gauge"),
    "memory_used": Kept("Memory in use", "bytes", "gauge"),
    "memory_limit": Kept("Memory limit", "bytes", "gauge"),
}

_STAGES: Final = {"ttft": "first_token", "tpot": "per_output_token", "total": "total"}


def series_of(models: Sequence[str]) -> list[Series]:
    """All series of these models, in the order in which ``Reader.read`` yields them."""
    return [Series(id_, model, *kept) for model in models for id_, kept in _OF_MODEL.items()]


class Totals(NamedTuple):
    """Counters by model at one time, whose differences are rates."""

    requests: Sums
    errors: Sums
    tokens: Sums
    prompt_tokens: Sums
    rows: Sums
    batches: Sums
    prefix_queries: Sums
    prefix_hits: Sums
    drafted: Sums
    accepted: Sums


class Reader:
    """Reads the numbers of all models. Rates are differences to the reading before."""

    def __init__(self, store: Store, window: Read, enter: Callable[[], None]) -> None:
        """``window``: the recent values of a model's stage. ``enter`` counts the events that wait."""
        self._store = store
        self._window = window
        self._enter = enter
        self._before: tuple[float, Totals] | None = None

    def read(self, models: Sequence[str], now: float) -> Iterator[tuple[str, float | None]]:
        """The value of every series of these models, by its key, at ``now`` on the monotonic clock."""
        self._enter()
        totals = self._totals()
        before, self._before = self._before, (now, totals)
        elapsed_s = 0.0 if before is None else now - before[0]
        queue, running, kv_use = self._gauges()
        for model in models:
            values: dict[str, float | None] = {}
            if before is not None and elapsed_s > 0:
                values = _rates(before[1], totals, model, elapsed_s)
            values["queue"] = queue.get(model)
            values["running"] = running.get(model)
            values["kv_use"] = kv_use.get(model)
            for id_, stage in _STAGES.items():
                found = self._window(model, stage).quantiles(m.QUANTILES, now)
                for share, value in zip((50, 95, 99), found, strict=True):
                    values[f"{id_}_p{share}"] = value
            for id_ in _OF_MODEL:
                value = values.get(id_)
                yield f"{id_}|{model}", value if value is not None and isfinite(value) else None

    def _totals(self) -> Totals:
        values = self._store.values_of
        # A sequence of an engine's step gets one token, and with speculation those that were accepted. A chunk of a
        # prompt counts as one, too. Requests of remote replicas, and of predictions, are counted at their end.
        sequences = self._distributions(m.STEP_SEQUENCES)
        computed = self._distributions(m.STEP_TOKENS)
        batches = self._distributions(m.BATCH_ROWS)
        tokens, prompt_tokens = Sums(), Sums()
        rows, num_batches = Sums(), Sums()
        for labels, (_, total) in sequences.items():
            _add(tokens, labels[0], total)
            _add(prompt_tokens, labels[0], computed.get(labels, (0, 0.0))[1] - total)
        for metric, into in ((m.GENERATION_TOKENS, tokens), (m.PROMPT_TOKENS, prompt_tokens)):
            for labels, value in values(metric):
                if labels not in sequences:
                    _add(into, labels[0], value.value)
        drafted, accepted = self._sums(m.DRAFTED_TOKENS), self._sums(m.ACCEPTED_TOKENS)
        for model, count in accepted.items():
            _add(tokens, model, count)
        for model, count in drafted.items():
            _add(prompt_tokens, model, -count)
        for distributions in (sequences, batches):
            for labels, (count, total) in distributions.items():
                _add(num_batches, labels[0], count)
                _add(rows, labels[0], total)
        errors = Sums()
        for labels, value in values(m.REQUESTS):
            if labels[-1] == "failed":
                _add(errors, labels[0], value.value)
        for labels, value in values(m.REFUSED):
            if not labels[-1].startswith("quota_"):
                _add(errors, labels[0], value.value)
        return Totals(
            self._sums(m.REQUESTS),
            errors,
            tokens,
            prompt_tokens,
            rows,
            num_batches,
            self._sums(m.PREFIX_QUERIES),
            self._sums(m.PREFIX_HITS),
            drafted,
            accepted,
        )

    def _sums(self, metric: m.Metric) -> Sums:
        found = Sums()
        for labels, value in self._store.values_of(metric):
            _add(found, labels[0], value.value)
        return found

    def _distributions(self, metric: m.Metric) -> dict[tuple[str, ...], tuple[int, float]]:
        """Count and sum by labels, of the distributions that have values."""
        found = {}
        for labels, distribution in self._store.distributions_of(metric):
            count = _count(distribution)
            if count:
                found[labels] = (count, distribution.total)
        return found

    def _gauges(self) -> tuple[Sums, Sums, Sums]:
        queue, running, kv_use = Sums(), Sums(), Sums()
        for labels, value in self._store.values_of(m.QUEUE_WAITING):
            _add(queue, labels[0], value.value)
        for labels, value in self._store.values_of(m.RUNNING):
            _add(running, labels[0], value.value)
        total, used = Sums(), Sums()
        for labels, value in self._store.values_of(m.KV_BLOCKS):
            _add(total, labels[0], value.value)
            if labels[-1] == "used":
                _add(used, labels[0], value.value)
        for model, blocks in total.items():
            if blocks:  # a model without a KV cache has no use of it
                kv_use[model] = used.get(model, 0.0) / blocks
        return queue, running, kv_use


def _rates(before: Totals, now: Totals, model: str, elapsed_s: float) -> dict[str, float | None]:
    def gained(name: str) -> float:
        """What a counter gained. One that was lost with its model begins again."""
        after: Sums = getattr(now, name)
        earlier: Sums = getattr(before, name)
        return max(0.0, after.get(model, 0.0) - earlier.get(model, 0.0))

    def ratio(part: str, whole: str) -> float | None:
        amount = gained(whole)
        return gained(part) / amount if amount else None

    return {
        "requests_s": gained("requests") / elapsed_s,
        "errors_s": gained("errors") / elapsed_s,
        # A model that never had a token has no rate of tokens.
        "tokens_s": gained("tokens") / elapsed_s if now.tokens.get(model) else None,
        "prompt_tokens_s": gained("prompt_tokens") / elapsed_s if now.prompt_tokens.get(model) else None,
        "batch_rows": ratio("rows", "batches"),
        "prefix_hits": ratio("prefix_hits", "prefix_queries"),
        "speculation_accepted": ratio("accepted", "drafted"),
    }


def _add(sums: Sums, model: str, value: float) -> None:
    sums[model] = sums.get(model, 0.0) + value


def _count(distribution: Distribution) -> int:
    return sum(distribution.counts)
