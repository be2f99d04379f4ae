"""KServe v2's statistics: the counts and times of each model since the server started.

Cumulative; times are in nanoseconds. Knows events, and not how the numbers are shown.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from inferd.events import CacheLooked, RequestEnded, StepDone


class Span(msgspec.Struct):
    """A number of events and their total duration."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float, count: int = 1) -> None:
        self.count += count
        self.ns += round(max(0.0, seconds) * 1e9)


class BatchTally(msgspec.Struct):
    """Batches of one size."""

    compute_input: Span
    compute_infer: Span


class ModelTally(msgspec.Struct):
    """One model's numbers. Durations are those of completed requests. ``queue`` lasts until their batch began,
    ``compute_input`` is reading and checking them, ``compute_infer`` is the model's own time, and ``compute_output`` is
    writing the answer.
    """

    last_inference_ms: int = 0  # since the epoch; 0: never
    inference_count: int = 0  # rows computed; for texts requests
    execution_count: int = 0  # batches, or steps of an engine
    success: Span = msgspec.field(default_factory=Span)
    fail: Span = msgspec.field(default_factory=Span)
    queue: Span = msgspec.field(default_factory=Span)
    compute_input: Span = msgspec.field(default_factory=Span)
    compute_infer: Span = msgspec.field(default_factory=Span)
    compute_output: Span = msgspec.field(default_factory=Span)
    cache_hit: Span = msgspec.field(default_factory=Span)
    cache_miss: Span = msgspec.field(default_factory=Span)
    batches: dict[int, BatchTally] = msgspec.field(default_factory=dict)


class Statistics:
    """The tallies by model."""

    def __init__(self) -> None:
        self._models: dict[str, ModelTally] = {}
        self._decoded_s: dict[tuple[str, int], float] = {}  # a worker's seconds of decoding, as last reported

    def of(self, model: str) -> ModelTally:
        tally = self._models.get(model)
        if tally is None:
            tally = self._models[model] = ModelTally()
        return tally

    def keep(self, models: Sequence[str]) -> None:
        """Forget all other models, which were removed."""
        for name in self._models.keys() - set(models):
            del self._models[name]

    def ended(self, model: str, events: Sequence[RequestEnded], wall: float) -> None:
        """Requests of one model that ended by now, seconds since the epoch."""
        if not events:
            return
        tally = self.of(model)
        failed = [event.timings.finished or 0.0 for event in events if event.outcome != "done"]
        if failed:
            tally.fail.add(sum(failed), len(failed))
        done = [event for event in events if event.outcome == "done"]
        tally.success.add(sum([event.timings.finished or 0.0 for event in done]), len(done))
        staged: list[tuple[float, float | None, float, float, float]] = []
        num_texts = 0
        for event in done:
            came, read, began, computed, over = msgspec.structs.astuple(event.timings)[:5]
            if event.usage.completion_tokens:
                # Text: every token of it was computed, and an engine's batches have no rows.
                num_texts += 1
                computed = over
            if began is not None and computed is not None and over is not None:
                staged.append((came or 0.0, read, began, computed, over))
        tally.inference_count += num_texts
        self._enter(tally, staged)
        tally.last_inference_ms = round(wall * 1000)

    @staticmethod
    def _enter(tally: ModelTally, staged: list[tuple[float, float | None, float, float, float]]) -> None:
        """``staged``: when each request was dispatched, read, begun, computed and over."""
        count = len(staged)
        if not count:
            return
        read = sum([max(0.0, read - came) for came, read, _, _, _ in staged if read is not None])
        tally.compute_input.add(read, count)
        tally.queue.add(sum([began for _, _, began, _, _ in staged]) - read, count)
        tally.compute_infer.add(sum([computed - began for _, _, began, computed, _ in staged]), count)
        tally.compute_output.add(sum([over - computed for _, _, _, computed, over in staged]), count)

    def stepped(self, event: StepDone) -> None:
        stats = event.stats
        key = (event.model, event.replica)
        before = self._decoded_s.get(key, 0.0)
        self._decoded_s[key] = stats.tokenize_s
        if not stats.step_sequences and not stats.batch_rows:
            return
        tally = self.of(event.model)
        tally.execution_count += 1
        if stats.batch_rows:
            tally.inference_count += stats.batch_rows
            batch = tally.batches.get(stats.batch_rows)
            if batch is None:
                batch = tally.batches[stats.batch_rows] = BatchTally(Span(), Span())
            # A worker that was restarted counts from nothing again.
            decoded = stats.tokenize_s - before if stats.tokenize_s >= before else stats.tokenize_s
            batch.compute_input.add(decoded)
            batch.compute_infer.add(stats.step_s)

    def looked(self, event: CacheLooked) -> None:
        if event.model and event.result in ("hit", "miss"):
            tally = self.of(event.model)
            (tally.cache_hit if event.result == "hit" else tally.cache_miss).add(0.0)
