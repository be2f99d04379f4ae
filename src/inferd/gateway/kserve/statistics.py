"""KServe v2's statistics extension: counts and times of each version of each model, in the protocol's form."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from inferd.gateway.context import Context
from inferd.gateway.kserve.served import Served
from inferd.observe.statistics import Span


class Duration(msgspec.Struct, frozen=True):
    count: int
    ns: int


class InferenceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Of requests: those that were answered, and their parts. ``cache_*`` has no time of its own."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration


class BatchStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Of batches of one size. Answers are written one by one, so ``compute_output`` is the requests' alone."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration = Duration(0, 0)


class MemoryUsage(msgspec.Struct, frozen=True):
    type: str
    id: int
    byte_size: int


class ModelStatistics(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    version: str
    last_inference: int  # milliseconds since the epoch; 0: never
    inference_count: int
    execution_count: int
    inference_stats: InferenceStatistics
    response_stats: dict[str, Duration]  # of models with several responses to a request; none is counted by response
    batch_stats: tuple[BatchStatistics, ...]
    memory_usage: tuple[MemoryUsage, ...]


class StatisticsAnswer(msgspec.Struct, frozen=True):
    """GET /v2/models/stats"""

    model_stats: tuple[ModelStatistics, ...]


def statistics_of(context: Context, models: Sequence[Served]) -> StatisticsAnswer:
    """The statistics of some versions."""
    return StatisticsAnswer(tuple(_model(context, served) for served in models))


def _model(context: Context, served: Served) -> ModelStatistics:
    tally = context.tally_of(served.status.name)
    memory = served.status.memory_bytes
    return ModelStatistics(
        name=served.name,
        version=served.version,
        last_inference=tally.last_inference_ms,
        inference_count=tally.inference_count,
        execution_count=tally.execution_count,
        inference_stats=InferenceStatistics(
            success=_duration(tally.success),
            fail=_duration(tally.fail),
            queue=_duration(tally.queue),
            compute_input=_duration(tally.compute_input),
            compute_infer=_duration(tally.compute_infer),
            compute_output=_duration(tally.compute_output),
            cache_hit=_duration(tally.cache_hit),
            cache_miss=_duration(tally.cache_miss),
        ),
        response_stats={},
        batch_stats=tuple(
            BatchStatistics(
                batch_size=size,
                compute_input=_duration(batch.compute_input),
                compute_infer=_duration(batch.compute_infer),
            )
            for size, batch in sorted(tally.batches.items())
        ),
        memory_usage=(MemoryUsage("CPU", 0, memory),) if memory else (),
    )


def _duration(span: Span) -> Duration:
    return Duration(span.count, span.ns)
