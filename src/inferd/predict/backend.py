"""A predictive model in a worker: decode, check, batch, compute, encode, in one thread.

Every request that ``add`` accepted ends exactly once. The backend knows codecs, the batcher and one runtime, and no
socket. ``inferd.worker.direct`` drives it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from inferd import clock, ends
from inferd.errors import InferdError, InternalError, InvalidRequest, Unavailable
from inferd.predict.audit import Audit
from inferd.predict.batcher import Batcher
from inferd.predict.bounds import bounded, most_in_json
from inferd.predict.check import Checker
from inferd.predict.codecs.port import Codec
from inferd.predict.codecs.registry import codec_for
from inferd.predict.contract import Contract
from inferd.predict.estimate import BatchCost
from inferd.predict.facts import FactsReader
from inferd.predict.parts import PendingRequest, RequestItem, request_of
from inferd.predict.runtime import Item, Result, Runtime, Staged, Streaming
from inferd.types import End, ModelInfo, Output, Prediction, PredictRequest, StepStats

MAX_HELD_BYTES: Final = 64 * 1024 * 1024
"""Bytes of requests' bodies beyond which nothing more is read while there is something to compute."""

REQUEST_S: Final = 100e-6  # of gateway and worker for one request, beside the model's own time
FRAME_S: Final = 50e-6  # of gateway and worker for one batch
SPLIT_SHARE: Final = 0.03  # of the requests' time: what one more batch may cost

_NO_TOKEN = re.compile(r"[^A-Za-z0-9_.-]")
_log = logging.getLogger("inferd.predict")

_Answer = Result | InferdError


class _StagedBatch:
    """A batch of a runtime that takes several steps."""

    __slots__ = ("began", "items", "steps")

    def __init__(self, items: list[Item], steps: Generator[None, None, Sequence[_Answer]], began: float) -> None:
        self.items = items
        self.steps = steps
        self.began = began


class PredictBackend:
    """Implements ``inferd.backend.PredictiveBackend``. All methods belong to one thread."""

    def __init__(
        self,
        runtime: Runtime,
        batcher: Batcher,
        info: ModelInfo,
        *,
        max_rows: int | None = None,
        codecs: Callable[[str], Codec] = codec_for,
        audit: float = 0.0,
        facts: bool = False,
    ) -> None:
        """``max_rows``: of one request; None: the default. ``audit``: the share of the requests that are audited.
        ``facts``: the ends of requests have their facts."""
        contract = bounded(runtime.contract, max_rows, batcher.limits.max_rows)
        self.info = msgspec.structs.replace(info, max_rows=contract.max_rows, max_json=most_in_json(contract))
        self._runtime = runtime
        self._staged = runtime if isinstance(runtime, Staged) else None
        self._contract: Contract = contract
        self._checker = Checker(contract)
        self._batcher = batcher
        can_audit = contract.max_batch_size > 1 and not contract.is_stateful and not contract.is_decoupled
        self._audit = Audit(runtime, audit) if audit and can_audit and batcher.limits.mode != "off" else None
        self._facts = FactsReader(contract) if facts else None
        self._codecs = codecs
        self._pending: dict[str, PendingRequest] = {}
        self._streams: dict[str, PendingRequest] = {}  # have begun, with answers to come
        self._paused: dict[str, PendingRequest] = {}  # begun streams whose readers are slow
        self._running: _StagedBatch | None = None  # a batch between two of its steps
        self._cancelled: list[PendingRequest] = []  # their ends come with the next step
        self._outputs: list[Output] = []  # sent with the next step
        self._enough = _enough(batcher.cost)
        self._held_bytes = 0  # bodies of requests that have not ended
        self._decode_s = 0.0
        self._computed_s = 0.0  # of all steps

    @property
    def is_full(self) -> bool:
        return self._held_bytes > MAX_HELD_BYTES

    @property
    def has_enough(self) -> bool:
        return len(self._batcher) >= self._enough

    @property
    def num_waiting(self) -> int:
        return len(self._batcher)

    # -- in ---------------------------------------------------------------------------------

    def add(self, work: PredictRequest, now: float) -> None:
        """Take ownership of a request: decode it, check it, and put its items into the batcher."""
        request = work
        if request.id in self._pending:
            raise ends.duplicate(request.id)
        if ends.is_late(request, now):
            raise ends.too_late(request, has_begun=False)
        if request.version and request.version != self.info.version:
            raise _replaced(request, self.info)
        codec = self._codecs(request.dialect)
        decoded = codec.decode(request, self._contract)
        pending = PendingRequest(request, codec, decoded)
        items = self._items(pending)
        done = clock.now()
        self._decode_s += done - now
        pending.begun_s, pending.tokenized_s = now - request.arrived_at, done - request.arrived_at
        pending.computed_before_s = self._computed_s
        self._pending[request.id] = pending
        self._held_bytes += len(request.body)
        for item in items:
            self._batcher.add(item, done)

    def _items(self, pending: PendingRequest) -> Sequence[RequestItem]:
        """The checked and prepared items of a request: one, or several for more rows than a batch may have."""
        request, decoded = pending.request, pending.decoded
        inputs, rows = self._checker.check(decoded)
        deadline_s = request.deadline_s
        item = RequestItem(
            request_id=request.id,
            inputs=inputs,
            wanted=decoded.wanted,
            parameters=decoded.parameters,
            rows=rows,
            size=rows,
            priority=request.priority,
            expires_at=None if deadline_s is None else request.arrived_at + deadline_s,
            may_wait=request.may_wait,
            pending=pending,
        )
        if request.sequence:
            item.tenant, item.sequence = request.tenant, request.sequence
            item.sequence_start, item.sequence_end = request.sequence_start, request.sequence_end
        limits = self._batcher.limits
        max_rows = limits.max_rows
        has_rows = self._contract.max_batch_size > 0 and not self._contract.is_stateful
        if has_rows and rows > max_rows and not limits.cuts:
            raise InvalidRequest(
                f"The request has {rows} rows, and at most {max_rows} are computed together; this model computes a "
                "request in one piece. Send fewer rows, or raise batching.max_batch_size.",
                param="inputs",
            )
        parts = (item,) if rows <= max_rows or not has_rows else pending.split(item, max_rows)
        for part in parts:
            self._runtime.prepare(part)
        return parts

    def cancel(self, request_id: str) -> None:
        """Idempotent. What has not begun is never computed; the end comes with the next step."""
        pending = self._pending.get(request_id)
        if pending is not None:
            self._forget(pending)
            self._cancelled.append(pending)

    def pause(self, request_id: str, *, is_paused: bool) -> None:
        """Stop or resume making answers to a request. Nothing happens for one that has no more to come."""
        source, target = (self._streams, self._paused) if is_paused else (self._paused, self._streams)
        pending = source.pop(request_id, None)
        if pending is not None:
            target[request_id] = pending

    def halt(self, now: float) -> list[Output]:
        """The ends of all open requests."""
        for request_id in tuple(self._pending):
            self.cancel(request_id)
        self._end_cancelled(now)
        outputs, self._outputs = self._outputs, []
        return outputs

    # -- out --------------------------------------------------------------------------------

    def due(self, now: float) -> float | None:
        """When to step: ``now`` or later; None: when something arrives."""
        if self._outputs or self._cancelled or self._streams or self._running is not None:
            return now
        if self._audit is not None and self._audit.is_due(now, is_idle=not len(self._batcher)):
            return now
        return self._batcher.due(now)

    def step(self, now: float) -> tuple[list[Output], StepStats | None]:
        """Compute one batch, if one is ready. The ends of expired and cancelled requests come with it."""
        began = clock.now()
        for item in self._batcher.expire(now):
            pending = request_of(item)
            self._fail(pending, ends.too_late(pending.request, has_begun=False))
        self._end_cancelled(now)
        for pending in tuple(self._streams.values()):
            self._next_answer(pending)
        if self._running is not None:
            stats = self._continue_batch(self._running)
        elif self._audit is not None and self._audit.is_due(now, is_idle=not len(self._batcher)):
            stats = self._run_audit(self._audit)
        else:
            items = self._batcher.next_batch(now)
            stats = self._run(items, now) if items else None
        outputs, self._outputs = self._outputs, []
        self._computed_s += clock.now() - began
        return outputs, stats

    def close(self) -> None:
        for pending in (*self._streams.values(), *self._paused.values()):
            _close(pending.stream)
        self._runtime.close()

    # -- computing --------------------------------------------------------------------------

    def _run(self, items: list[Item], now: float) -> StepStats | None:
        for item in items:
            pending = request_of(item)
            if pending.scheduled_s is None:
                pending.scheduled_s = now - pending.request.arrived_at
                pending.behind_s = self._computed_s - pending.computed_before_s
        if self._staged is not None:
            self._running = _StagedBatch(items, self._staged.stages(items), now)
            return self._continue_batch(self._running)
        if self._contract.is_decoupled:
            self._open_streams(items)
            return self._stats(items, now, clock.now())
        results = self._compute(items)
        computed = clock.now()
        for item, result in zip(items, results, strict=True):
            self._handle_result(item, result, computed)
        if self._audit is not None:
            self._audit.sample(items, results, computed)
        return self._stats(items, now, computed)

    def _continue_batch(self, running: _StagedBatch) -> StepStats | None:
        """One more step of a batch; None: the batch is not done."""
        results: Sequence[_Answer]
        try:
            next(running.steps)
            return None
        except StopIteration as end:
            results = end.value
        except Exception as error:
            results = self._each_alone(running.items, error)
        self._running = None
        computed = clock.now()
        for item, result in zip(running.items, results, strict=True):
            self._handle_result(item, result, computed)
        if self._audit is not None:
            self._audit.sample(running.items, results, computed)
        return self._stats(running.items, running.began, computed)

    def _run_audit(self, audit: Audit) -> StepStats:
        """Compute one row again. If its answer differs, requests are computed one by one from now on."""
        reason = audit.run()
        if reason:
            self._audit = None
            limits = self._batcher.limits
            most = self._contract.max_batch_size
            self._batcher.limits = msgspec.structs.replace(limits, mode="off", cuts=False, max_rows=most)
            self.info = msgspec.structs.replace(self.info, not_batched=reason)
            _log.error("%s: its requests are computed one by one from now on: %s", self.info.name, reason)
        return StepStats(num_waiting=len(self._batcher), audited_rows=1, not_batched=reason)

    def _stats(self, items: Sequence[Item], now: float, computed: float) -> StepStats:
        rows = size = other_rows = other_size = 0  # others: without batch work
        for item in items:
            rows += item.rows
            size += item.size
            if item.priority <= 0:
                other_rows += item.rows
                other_size += item.size
        cost, limits = self._batcher.cost, self._batcher.limits
        measure, other_measure = (size, other_size) if limits.max_size else (rows, other_rows)
        cost.observe(measure, computed - now)
        self._enough = _enough(cost)
        # What waits is what no batch of now takes: a full one, another shape, or the budget of latency. Batch work may
        # wait, and fills every batch as far as there is any.
        is_whole = limits.mode == "off" or self._contract.is_decoupled
        is_full = self._batcher.has_others or (is_whole and other_rows > 0)
        of_size = other_size / limits.max_size if limits.max_size else 0.0
        fullness = 1.0 if is_full else min(1.0, max(other_rows / limits.max_rows, of_size))
        others = other_measure / measure if measure else 1.0
        fixed_share = cost.fixed_share(measure)
        return StepStats(
            num_waiting=len(self._batcher),
            num_running=len(self._streams) + len(self._paused),
            step_tokens=size if limits.max_size else 0,
            step_sequences=len(items),
            step_s=computed - now,
            tokenize_s=self._decode_s,
            batch_rows=rows,
            padded_rows=_padding_of(self._runtime),
            # Only the part that does not depend on the rows is shared with what a fuller batch would compute.
            utilization=(1.0 - fixed_share) * others + fixed_share * fullness,
        )

    def _compute(self, items: Sequence[Item]) -> Sequence[_Answer]:
        """One answer for each item. When the batch fails, each item is computed alone, so that one bad item fails
        alone."""
        try:
            results = self._runtime.predict(items)
            if len(results) == len(items):
                return results
            raise InternalError(f"The runtime gave {len(results)} results for {len(items)} items.")
        except Exception as error:
            failure = error
        return self._each_alone(items, failure)

    def _each_alone(self, items: Sequence[Item], error: Exception) -> Sequence[_Answer]:
        """The answers to a batch that has failed, each item computed alone."""
        if len(items) == 1:
            return [ends.public_error(items[0].request_id, error)]
        _log.warning("a batch of %d failed (%s); each is computed alone", len(items), type(error).__name__)
        return [self._compute([item])[0] for item in items]

    def _handle_result(self, item: Item, result: _Answer, computed: float) -> None:
        pending = request_of(item)
        if pending.is_over:
            return  # another part failed, or the request was cancelled meanwhile
        if isinstance(result, InferdError):
            self._fail(pending, result)
            return
        assert isinstance(item, RequestItem)
        try:
            whole = pending.add_result(item, result)
        except Exception as error:  # a model's parts that do not fit together are no end of the worker
            self._fail(pending, error)
            return
        if whole is None:
            return
        pending.computed_s = computed - pending.request.arrived_at
        prediction = self._encode(pending, whole)
        if prediction is not None:
            self._end(pending, prediction, whole)

    def _encode(self, pending: PendingRequest, result: Result) -> Prediction | None:
        """The answer in its dialect; None: encoding it failed, which ended the request."""
        if pending.decoded.wants_times and result.stages_s:
            times = {f"step_ms.{stage}": round(1000 * seconds, 3) for stage, seconds in result.stages_s.items()}
            result.parameters = {**result.parameters, **times}
        try:
            prediction = pending.codec.encode(pending.request, pending.decoded, result, self.info)
        except Exception as error:
            self._fail(pending, error)
            return None
        return _with_server_timing(prediction, result.stages_s) if result.stages_s else prediction

    # -- several answers --------------------------------------------------------------------

    def _open_streams(self, items: list[Item]) -> None:
        runtime = self._runtime
        assert isinstance(runtime, Streaming), "a decoupled contract needs a runtime that streams"
        for item in items:
            pending = request_of(item)
            try:
                pending.stream = runtime.stream(item)
            except Exception as error:
                self._fail(pending, error)
                continue
            self._streams[pending.request.id] = pending
            self._next_answer(pending)

    def _next_answer(self, pending: PendingRequest) -> None:
        """One more answer of one stream. The other streams get theirs in between."""
        request = pending.request
        assert pending.stream is not None
        try:
            if ends.is_late(request, clock.now()):
                raise ends.too_late(request, has_begun=True)
            result = next(pending.stream, None)
        except Exception as error:
            self._fail(pending, error)
            return
        if result is None:
            self._end(pending)
            return
        pending.num_tokens += result.num_tokens
        if pending.computed_s is None:
            pending.computed_s = clock.now() - request.arrived_at
        prediction = self._encode(pending, result)
        if prediction is not None:
            self._outputs.append(Output(request.id, prediction=prediction))

    # -- ends -------------------------------------------------------------------------------

    def _end(self, pending: PendingRequest, prediction: Prediction | None = None, result: Result | None = None) -> None:
        """End a request as done: with its answer, or after the last of several."""
        steps_s = dict(result.stages_s) if result is not None and result.stages_s else None
        timings = pending.timings(clock.now(), steps_s)
        end = End("done", pending.usage, timings)
        if self._facts is not None and result is not None:
            facts = self._facts.read(pending.decoded.inputs, result.outputs)
            end = End("done", pending.usage, timings, facts=facts)
        self._forget(pending)
        self._outputs.append(Output(pending.request.id, (), None, end, prediction))

    def _end_cancelled(self, now: float) -> None:
        cancelled, self._cancelled = self._cancelled, []
        for pending in cancelled:
            end = End("cancelled", pending.usage, pending.timings(now))
            self._outputs.append(Output.ended(pending.request.id, end))

    def _fail(self, pending: PendingRequest, error: Exception) -> None:
        if not pending.is_over:
            self._forget(pending)
            request, timings = pending.request, pending.timings(clock.now())
            self._outputs.append(ends.failed(request.id, request.arrived_at, error, pending.usage, timings))

    def _forget(self, pending: PendingRequest) -> None:
        request_id = pending.request.id
        pending.is_over = True
        del self._pending[request_id]
        self._held_bytes -= len(pending.request.body)
        if pending.stream is not None:
            self._streams.pop(request_id, None)
            self._paused.pop(request_id, None)
            _close(pending.stream)
        if pending.num_open:
            for item_id in pending.item_ids:
                self._batcher.remove(item_id)
            for item in self._running.items if self._running is not None else ():
                item.is_cancelled |= request_of(item) is pending


def _enough(cost: BatchCost) -> int:
    """How many requests make a batch worth computing although more have arrived. The gateway writes the answers of one
    batch while the next is read. That pays when a batch's own cost is a small share of what its requests cost."""
    return 1 + int((cost.fixed_s + FRAME_S) / (SPLIT_SHARE * REQUEST_S))


def _with_server_timing(prediction: Prediction, stages_s: Mapping[str, float]) -> Prediction:
    """The answer with the times of a pipeline's steps in the Server-Timing header."""
    timing = ", ".join(f"{_NO_TOKEN.sub('_', stage)};dur={1000 * seconds:.3f}" for stage, seconds in stages_s.items())
    return Prediction(prediction.body, prediction.content_type, (*prediction.headers, ("server-timing", timing)))


def _padding_of(runtime: Runtime) -> int:
    """The rows of padding in the last batch; 0 for a runtime that does not count them."""
    padded = getattr(runtime, "padded_rows", 0)
    return padded if isinstance(padded, int) else 0


def _close(stream: Iterator[Result] | None) -> None:
    close = getattr(stream, "close", None)
    if close is not None:
        try:
            close()
        except Exception:
            _log.exception("a stream of answers could not be closed")


def _replaced(request: PredictRequest, info: ModelInfo) -> Unavailable:
    return Unavailable(
        f"Version {request.version} of {request.model!r} is being replaced by version {info.version}; ask again in a "
        "moment, or without a version.",
        param="version",
        retry_after_s=1.0,
    )
