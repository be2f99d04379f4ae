"""A predictive model in a worker: decode, check, batch, compute, encode, in one thread.

Sees to it that every request it was given ends exactly once. Knows codecs, the batcher and one runtime; knows no
socket. ``inferd.worker.direct`` drives it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from inferd import clock
from inferd.errors import DeadlineExceeded, InferdError, InternalError, InvalidRequest, Overloaded, Unavailable
from inferd.predict.audit import Audit
from inferd.predict.batcher import Batcher
from inferd.predict.bounds import bounded
from inferd.predict.check import Checker
from inferd.predict.codecs.port import Codec, Question
from inferd.predict.codecs.registry import codec_for
from inferd.predict.contract import Array, Contract
from inferd.predict.estimate import BatchCost
from inferd.predict.runtime import Item, Result, Runtime, Staged, Streaming
from inferd.types import End, ModelInfo, Output, Prediction, PredictRequest, StepStats, Timings, Usage

MAX_HELD_BYTES: Final = 64 * 1024 * 1024
"""Bodies of requests beyond which nothing more is read while there is something to compute."""

REQUEST_S: Final = 100e-6  # what a request costs gateway and worker beside the model's own time
FRAME_S: Final = 50e-6  # what a batch costs them
SPLIT_SHARE: Final = 0.03  # of the requests' time: what a batch more may cost

_NO_USAGE = Usage()
_NO_TOKEN = re.compile(r"[^A-Za-z0-9_.-]")
_log = logging.getLogger("inferd.predict")

_Answer = Result | InferdError


class Asked:
    """One request between its arrival and its end. A large one is computed in several parts, each an item."""

    __slots__ = (
        "answers",
        "codec",
        "computed_s",
        "is_over",
        "item_ids",
        "num_open",
        "num_tokens",
        "question",
        "request",
        "scheduled_s",
        "stream",
        "tokenized_s",
    )

    def __init__(self, request: PredictRequest, codec: Codec, question: Question) -> None:
        self.request = request
        self.codec = codec
        self.question = question
        self.is_over = False
        self.tokenized_s: float | None = None
        self.scheduled_s: float | None = None
        self.computed_s: float | None = None
        self.item_ids: tuple[str, ...] = ()  # of the parts, where there are several
        self.answers: list[Result | None] = []  # likewise
        self.num_open = 1
        self.num_tokens = 0  # of what was computed, whether or not there will be an answer
        self.stream: Iterator[Result] | None = None

    @property
    def usage(self) -> Usage:
        return Usage(self.num_tokens) if self.num_tokens else _NO_USAGE


class _Part(Item, kw_only=True, eq=False):
    """An item that knows whose it is, and which of its parts."""

    asked: Asked
    place: int = 0


class _Running:
    """A batch of a runtime that takes several steps."""

    __slots__ = ("began", "items", "steps")

    def __init__(self, items: list[Item], steps: Generator[None, None, Sequence[_Answer]], began: float) -> None:
        self.items = items
        self.steps = steps
        self.began = began


class PredictBackend:
    """All methods belong to one thread. Times are of ``clock.now()``. ``max_rows``: of one request; None: the default."""

    def __init__(
        self,
        runtime: Runtime,
        batcher: Batcher,
        info: ModelInfo,
        *,
        max_rows: int | None = None,
        codecs: Callable[[str], Codec] = codec_for,
        audit: float = 0.0,
    ) -> None:
        """``audit``: the share of the requests that are audited."""
        contract = bounded(runtime.contract, max_rows, batcher.limits.max_rows)
        self.info = msgspec.structs.replace(info, max_rows=contract.max_rows)
        self._runtime = runtime
        self._staged = runtime if isinstance(runtime, Staged) else None
        self._contract: Contract = contract
        self._checker = Checker(contract)
        self._batcher = batcher
        can_audit = contract.max_batch_size > 1 and not contract.is_stateful and not contract.is_decoupled
        self._audit = Audit(runtime, audit) if audit and can_audit and batcher.limits.mode != "off" else None
        self._codecs = codecs
        self._asked: dict[str, Asked] = {}
        self._streams: dict[str, Asked] = {}  # begun, with answers to come
        self._paused: dict[str, Asked] = {}  # likewise, and nobody takes more of them for now
        self._running: _Running | None = None  # a batch between two of its steps
        self._news: list[Output] = []  # to be told with the next step
        self._enough = _enough(batcher.cost)
        self._held_bytes = 0  # bodies of requests that have not ended
        self._decode_s = 0.0

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

    def submit(self, request: PredictRequest, now: float) -> None:
        """Take ownership: decode, check, and put it into the batcher. Whatever is wrong with it ends it, by an
        output of the next step."""
        if request.id in self._asked:
            _log.error("request %s was submitted twice; the second is ignored", request.id)
            return
        try:
            if request.deadline_s is not None and now >= request.arrived_at + request.deadline_s:
                raise _too_late(request)
            if request.version and request.version != self.info.version:
                raise _replaced(request, self.info)
            codec = self._codecs(request.dialect)
            question = codec.decode(request, self._contract)
            asked = Asked(request, codec, question)
            items = self._items(asked)
        except Exception as error:
            self._news.append(_failed(request, error))
            return
        done = clock.now()
        self._decode_s += done - now
        asked.tokenized_s = done - request.arrived_at
        self._asked[request.id] = asked
        self._held_bytes += len(request.body)
        for item in items:
            self._batcher.add(item, done)

    def _items(self, asked: Asked) -> Sequence[_Part]:
        """The checked and prepared items of a request: one, or several for more rows than a batch may have."""
        request, question = asked.request, asked.question
        inputs, rows = self._checker.check(question)
        deadline_s = request.deadline_s
        item = _Part(
            request_id=request.id,
            inputs=inputs,
            wanted=question.wanted,
            parameters=question.parameters,
            rows=rows,
            size=rows,
            priority=request.priority,
            expires_at=None if deadline_s is None else request.arrived_at + deadline_s,
            may_wait=request.may_wait,
            asked=asked,
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
        if rows <= max_rows or not has_rows:
            self._runtime.prepare(item)
            return (item,)
        parts = _parts(item, max_rows)
        for part in parts:
            self._runtime.prepare(part)
        asked.item_ids = tuple([part.request_id for part in parts])
        asked.answers = [None] * len(parts)
        asked.num_open = len(parts)
        return parts

    def cancel(self, request_id: str, now: float) -> None:
        """Idempotent. What has not begun never runs; the end is told with the next step."""
        asked = self._asked.get(request_id)
        if asked is not None:
            self._forget(asked)
            end = End("cancelled", asked.usage, Timings(finished=now - asked.request.arrived_at))
            self._news.append(Output(request_id, (), None, end))

    def fail(self, request_id: str, error: InferdError) -> None:
        """End it by an error that came up outside. Nothing happens for one that has ended."""
        asked = self._asked.get(request_id)
        if asked is not None:
            self._fail(asked, error)

    def pause(self, request_id: str, *, is_paused: bool) -> None:
        """Whether more of its answers are taken. Nothing happens for one that has no others to come."""
        source, target = (self._streams, self._paused) if is_paused else (self._paused, self._streams)
        asked = source.pop(request_id, None)
        if asked is not None:
            target[request_id] = asked

    def halt(self, now: float) -> list[Output]:
        """The ends of all that is left."""
        for request_id in tuple(self._asked):
            self.cancel(request_id, now)
        news, self._news = self._news, []
        return news

    # -- out --------------------------------------------------------------------------------

    def due(self, now: float) -> float | None:
        """When to step: ``now`` or later; None: when something arrives."""
        if self._news or self._streams or self._running is not None:
            return now
        if self._audit is not None and self._audit.is_due(now, is_idle=not len(self._batcher)):
            return now
        return self._batcher.due(now)

    def step(self, now: float) -> tuple[list[Output], StepStats | None]:
        """Compute one batch, if one is ready. What has expired or was refused is told as well."""
        for item in self._batcher.expire(now):
            asked = _whose(item)
            self._fail(asked, _too_late(asked.request))
        for asked in tuple(self._streams.values()):
            self._next_answer(asked)
        if self._running is not None:
            stats = self._go_on(self._running)
        elif self._audit is not None and self._audit.is_due(now, is_idle=not len(self._batcher)):
            stats = self._audited(self._audit)
        else:
            items = self._batcher.take(now)
            stats = self._run(items, now) if items else None
        news, self._news = self._news, []
        return news, stats

    def close(self) -> None:
        for asked in (*self._streams.values(), *self._paused.values()):
            _close(asked.stream)
        self._runtime.close()

    # -- computing --------------------------------------------------------------------------

    def _run(self, items: list[Item], now: float) -> StepStats | None:
        for item in items:
            asked = _whose(item)
            if asked.scheduled_s is None:
                asked.scheduled_s = now - asked.request.arrived_at
        if self._staged is not None:
            self._running = _Running(items, self._staged.stages(items), now)
            return self._go_on(self._running)
        if self._contract.is_decoupled:
            self._begin_streams(items)
            return self._stats(items, now, clock.now())
        results = self._compute(items)
        computed = clock.now()
        for item, result in zip(items, results, strict=True):
            self._take_result(item, result, computed)
        if self._audit is not None:
            self._audit.note(items, results, computed)
        return self._stats(items, now, computed)

    def _go_on(self, running: _Running) -> StepStats | None:
        """One more step of a batch; None: it is not done."""
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
            self._take_result(item, result, computed)
        if self._audit is not None:
            self._audit.note(running.items, results, computed)
        return self._stats(running.items, running.began, computed)

    def _audited(self, audit: Audit) -> StepStats:
        """One row computed again. Where it differs, requests are computed one by one from now on."""
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
        rows = size = 0
        for item in items:
            rows += item.rows
            size += item.size
        cost = self._batcher.cost
        cost.note(size if self._batcher.limits.max_size else rows, computed - now)
        self._enough = _enough(cost)
        return StepStats(
            num_waiting=len(self._batcher),
            num_running=len(self._streams) + len(self._paused),
            step_tokens=size if self._batcher.limits.max_size else 0,
            step_sequences=len(items),
            step_s=computed - now,
            tokenize_s=self._decode_s,
            batch_rows=rows,
            padded_rows=_padding_of(self._runtime),
        )

    def _compute(self, items: Sequence[Item]) -> Sequence[_Answer]:
        """One answer each. When the whole batch fails, each is computed alone: one bad item fails alone."""
        try:
            results = self._runtime.predict(items)
            if len(results) == len(items):
                return results
            raise InternalError(f"The runtime gave {len(results)} results for {len(items)} items.")
        except Exception as error:
            failure = error
        return self._each_alone(items, failure)

    def _each_alone(self, items: Sequence[Item], error: Exception) -> Sequence[_Answer]:
        """The answers after a batch has failed."""
        if len(items) == 1:
            return [_known(items[0].request_id, error)]
        _log.warning("a batch of %d failed (%s); each is computed alone", len(items), type(error).__name__)
        return [self._compute([item])[0] for item in items]

    def _take_result(self, item: Item, result: _Answer, computed: float) -> None:
        asked = _whose(item)
        if asked.is_over:
            return  # another part of it failed, or it was cancelled meanwhile
        if isinstance(result, InferdError):
            self._fail(asked, result)
            return
        asked.num_open -= 1
        asked.num_tokens += result.num_tokens
        if asked.answers:
            assert isinstance(item, _Part)
            asked.answers[item.place] = result
            if asked.num_open:
                return
            try:
                result = _joined(asked.answers)
            except Exception as error:  # a model's parts that do not fit together are no end of the worker
                self._fail(asked, error)
                return
        asked.computed_s = computed - asked.request.arrived_at
        prediction = self._encoded(asked, result)
        if prediction is not None:
            self._end(asked, prediction, result)

    def _encoded(self, asked: Asked, result: Result) -> Prediction | None:
        """The answer in its dialect; None: it could not be written, which ended the request."""
        if asked.question.wants_times and result.stages_s:
            times = {f"step_ms.{stage}": round(1000 * seconds, 3) for stage, seconds in result.stages_s.items()}
            result.parameters = {**result.parameters, **times}
        try:
            prediction = asked.codec.encode(asked.request, asked.question, result, self.info)
        except Exception as error:
            self._fail(asked, error)
            return None
        return _timed(prediction, result.stages_s) if result.stages_s else prediction

    # -- several answers --------------------------------------------------------------------

    def _begin_streams(self, items: list[Item]) -> None:
        runtime = self._runtime
        assert isinstance(runtime, Streaming), "a decoupled contract needs a runtime that streams"
        for item in items:
            asked = _whose(item)
            try:
                asked.stream = runtime.stream(item)
            except Exception as error:
                self._fail(asked, error)
                continue
            self._streams[asked.request.id] = asked
            self._next_answer(asked)

    def _next_answer(self, asked: Asked) -> None:
        """One more answer of one stream: the others get their turn in between."""
        request = asked.request
        assert asked.stream is not None
        try:
            now = clock.now()
            if request.deadline_s is not None and now >= request.arrived_at + request.deadline_s:
                raise _too_late(request)
            result = next(asked.stream, None)
        except Exception as error:
            self._fail(asked, error)
            return
        if result is None:
            self._end(asked)
            return
        asked.num_tokens += result.num_tokens
        if asked.computed_s is None:
            asked.computed_s = clock.now() - request.arrived_at
        prediction = self._encoded(asked, result)
        if prediction is not None:
            self._news.append(Output(request.id, prediction=prediction))

    # -- ends -------------------------------------------------------------------------------

    def _end(self, asked: Asked, prediction: Prediction | None = None, result: Result | None = None) -> None:
        """Done: with its answer, or after the last of several."""
        request = asked.request
        timings = Timings(
            None,
            asked.tokenized_s,
            asked.scheduled_s,
            asked.computed_s,
            clock.now() - request.arrived_at,
            dict(result.stages_s) if result is not None and result.stages_s else None,
        )
        self._forget(asked)
        self._news.append(Output(request.id, (), None, End("done", asked.usage, timings), prediction))

    def _fail(self, asked: Asked, error: Exception) -> None:
        if not asked.is_over:
            self._forget(asked)
            self._news.append(_failed(asked.request, error, asked.usage))

    def _forget(self, asked: Asked) -> None:
        request_id = asked.request.id
        asked.is_over = True
        del self._asked[request_id]
        self._held_bytes -= len(asked.request.body)
        if asked.stream is not None:
            self._streams.pop(request_id, None)
            self._paused.pop(request_id, None)
            _close(asked.stream)
        if asked.num_open:
            for item_id in asked.item_ids or (request_id,):
                self._batcher.remove(item_id)
            for item in self._running.items if self._running is not None else ():
                item.is_cancelled |= _whose(item) is asked


def _enough(cost: BatchCost) -> int:
    """Requests that are worth a batch of their own although more have arrived: while the next are read, the gateway
    already writes these ones' answers. They are, when what a batch costs is a small part of what they cost."""
    return 1 + int((cost.fixed_s + FRAME_S) / (SPLIT_SHARE * REQUEST_S))


def _whose(item: Item) -> Asked:
    assert isinstance(item, _Part), "the batcher gives back what it was given"
    return item.asked


def _parts(item: _Part, max_rows: int) -> list[_Part]:
    """The item as several of at most ``max_rows`` rows each."""
    parts = []
    for place, begin in enumerate(range(0, item.rows, max_rows)):
        end = min(begin + max_rows, item.rows)
        inputs = {name: array[begin:end] for name, array in item.inputs.items()}
        name = f"{item.request_id}/{place}"
        rows = end - begin
        parts.append(
            msgspec.structs.replace(
                item,
                request_id=name,
                inputs=inputs,
                rows=rows,
                first_row=begin,
                total_rows=item.rows,
                size=rows,
                place=place,
            )
        )
    return parts


def _joined(answers: Sequence[Result | None]) -> Result:
    """The parts' results as one."""
    results = [answer for answer in answers if answer is not None]
    outputs: dict[str, Array] = {
        name: _stacked([np.asarray(result.outputs[name]) for result in results]) for name in results[0].outputs
    }
    stages: dict[str, float] = {}
    for result in results:
        for stage, seconds in result.stages_s.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    num_tokens = sum(result.num_tokens for result in results)
    return Result(outputs=outputs, num_tokens=num_tokens, parameters=results[0].parameters, stages_s=stages)


def _stacked(arrays: Sequence[Array]) -> Array:
    """The arrays behind each other; where rows are of different lengths (detections, tokens) the shorter are filled
    with -1 for signed integers, nothing for texts and 0 for all else."""
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1 and len({len(shape) for shape in shapes}) == 1:
        sizes = tuple(map(max, zip(*shapes, strict=True)))
        filling = {"O": b"", "i": -1}.get(arrays[0].dtype.kind, 0)
        filled = np.full((sum(map(len, arrays)), *sizes), filling, dtype=arrays[0].dtype)
        begin = 0
        for array in arrays:
            filled[(slice(begin, begin + len(array)), *map(slice, array.shape[1:]))] = array
            begin += len(array)
        return filled
    return np.concatenate(arrays)


def _timed(prediction: Prediction, stages_s: Mapping[str, float]) -> Prediction:
    """The answer with the steps' times in the header that browsers' tools show."""
    timing = ", ".join(f"{_NO_TOKEN.sub('_', stage)};dur={1000 * seconds:.3f}" for stage, seconds in stages_s.items())
    return Prediction(prediction.body, prediction.content_type, (*prediction.headers, ("server-timing", timing)))


def _padding_of(runtime: Runtime) -> int:
    """What the last batch computed for nothing, where the runtime says."""
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


def _too_late(request: PredictRequest) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"The request's deadline of {request.deadline_s} s passed before it could begin. "
        "Allow more time, or try when the server is less busy."
    )


def _known(request_id: str, error: Exception) -> InferdError:
    if isinstance(error, InferdError):
        return error
    _log.error("request %s failed: %s", request_id, type(error).__name__, exc_info=error)
    return InternalError("The model failed while working on this request; the server's log has the details.")


def _failed(request: PredictRequest, error: Exception, usage: Usage = _NO_USAGE) -> Output:
    known = _known(request.id, error)
    timings = Timings(finished=clock.now() - request.arrived_at)
    is_refused = isinstance(known, InvalidRequest | Overloaded)
    end = End("refused" if is_refused else "failed", usage, timings, known.to_failure())
    return Output(request.id, (), None, end)
