"""Copies requests of shadowed units to the new version of a rollout, and compares the two answers.

A copy begins behind the last byte of the stable version's answer, and where other calls are open it waits for their
answers, for ``PATIENCE_S`` at most (``waiting.py``). It takes the path of every request, ``Router.submit``, in the last
class, and its sink collects the answer here. Pairs of answers are compared together, on a thread. A copy is charged to
no tenant, and nothing of it reaches a client. Where the new version has other work it is dropped, and counted as such.

Knows requests and answers of the router. Knows no weight, no guard and no HTTP; ``CopyEnded`` says what came of a copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from inferd import clock
from inferd.compare.answers import Answer, Comparison, Label, Tolerance, compare
from inferd.compare.reading import ChoiceText, answer_of_body, answer_of_choices
from inferd.compare.tensors import UnreadableAnswer
from inferd.errors import (
    Cancelled,
    DeadlineExceeded,
    InferdError,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from inferd.events import Assigned, CopyEnded, CopyResult, Emit
from inferd.rollout.split import Split
from inferd.rollout.waiting import Waiting
from inferd.router.stream import Handle, Submitting
from inferd.types import (
    RANKS,
    Delta,
    Failure,
    GenerateRequest,
    Item,
    ModelInfo,
    Output,
    Prediction,
    PredictRequest,
    PromptReport,
    Relay,
    Request,
    Sink,
    joined_calls,
)

MAX_IN_FLIGHT: Final = 8
"""Copies of one rollout at this gateway at a time. Further ones are dropped."""

MAX_COMPARED_BYTES: Final = 64 * 1024
"""Of an answer. Larger ones are not compared, because a comparison takes time from the event loop."""

MAX_COPIED_BYTES: Final = 1024 * 1024
"""Of a request, which is held until its copy ends."""

MAX_WAITING: Final = 32
"""Requests at this gateway whose copies have not begun. Further ones are not copied."""

TOGETHER_S: Final = 0.05
"""Pairs of answers wait so long for others to be compared with: a thread is woken for all of them."""

MAX_TOGETHER: Final = 64
"""Pairs that are compared without waiting for others."""

LEAST_S: Final = 30.0
TIMES: Final = 10.0
"""A copy may take ``LEAST_S``, and ``TIMES`` as long as the answer that a client got."""

TENANT: Final = "(copies)"
"""Stands for the tenant of copies where a worker divides its work and its caches among tenants."""

_HEADER_BYTES: Final = "inference-header-content-length"  # of KServe v2's binary form
_DROPPED: Final[Mapping[str, CopyResult]] = {
    Overloaded.kind: "busy",
    Unavailable.kind: "unavailable",
    ModelNotFound.kind: "unavailable",
    DeadlineExceeded.kind: "late",
    Cancelled.kind: "late",
}
"""Kinds of failures that say nothing of the new version's answer."""

Labels = Mapping[str, Sequence[str]]


class Shadow(msgspec.Struct, frozen=True, kw_only=True):
    """Where the requests of a call are copied to, and how the answers are compared."""

    assigned: Assigned
    model: str  # its name in the configuration
    entry: str  # the new version's
    tolerance: Tolerance = Tolerance()
    labels: Labels = {}  # of outputs of the new version that are classes


def shadow_of(split: Split, model: str, assigned: Assigned, info: ModelInfo | None) -> Shadow:
    """Where a rollout copies the requests of a call to. ``info``: of the new version, once it is loaded."""
    outputs = () if info is None else info.outputs
    return Shadow(
        assigned=assigned,
        model=model,
        entry=split.new_entry,
        tolerance=split.tolerance,
        labels={spec.name: spec.labels for spec in outputs if spec.labels},
    )


class _Copied(NamedTuple):
    """A request that the stable version has answered after ``took_s`` seconds."""

    router: Submitting
    shadow: Shadow
    request: Request
    answer: Collected
    took_s: float


class _Pair(NamedTuple):
    """The answers to a request and to its copy."""

    shadow: Shadow
    request_id: str
    mine: Collected
    its: Collected


class Copies:
    """The copies of a gateway's requests. Lives in the event loop."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._waiting = Waiting(self._begin, self._has_room)
        self._in_flight: dict[_CopySink, Handle] = {}
        self._pairs: list[_Pair] = []  # to compare
        self._timer: asyncio.TimerHandle | None = None  # until they are
        self._is_over = False
        self._comparing: ThreadPoolExecutor | None = None

    def copying(self, router: Submitting, shadow: Shadow) -> CopyingRouter:
        """The router for the requests of a call of a shadowed unit: it copies those that are answered, when the call
        has ended."""
        self._waiting.call_began()
        return CopyingRouter(self, router, shadow)

    def cancel(self) -> None:
        """The server leaves: cancel the copies, so that none of them is waited for, and begin no more."""
        self._is_over = True
        self._waiting.clear()
        for handle in self._in_flight.values():
            handle.cancel()

    def close(self) -> None:
        """Compare nothing more, and end the thread. Waits for the comparison that is under way, a few milliseconds."""
        if self._timer is not None:
            self._timer.cancel()
        if self._comparing is not None:
            self._comparing.shutdown(cancel_futures=True)

    def ended(
        self, shadow: Shadow, result: CopyResult, request_id: str, part: str = "", position: int | None = None
    ) -> None:
        """Tell what came of a request."""
        self._emit(
            CopyEnded(
                model=shadow.model,
                assigned=shadow.assigned,
                result=result,
                request_id=request_id,
                part=part,
                position=position,
            )
        )

    def call_ended(self) -> None:
        """A call whose requests are copied is over."""
        self._waiting.call_ended()

    def answered(self, copied: _Copied) -> None:
        """The stable version has answered a request: copy it at a moment without calls."""
        if self._is_over:
            return
        if len(self._waiting) >= MAX_WAITING:
            self.ended(copied.shadow, "busy", copied.request.id)
            return
        self._waiting.add(copied)

    def _has_room(self, copied: _Copied) -> bool:
        rollout = copied.shadow.assigned.rollout
        return sum([other.rollout == rollout for other in self._in_flight]) < MAX_IN_FLIGHT

    def _begin(self, one: _Copied) -> None:
        shadow, request, answer = one.shadow, one.request, one.answer
        copied = answer.problem or _copy_of(request, shadow.entry, answer)
        if not isinstance(copied, Request):
            self.ended(shadow, copied, request.id)
            return
        if not self._has_room(one):
            self.ended(shadow, "busy", request.id)
            return
        sink = _CopySink(self, shadow, request.id, answer)
        try:
            handle = one.router.submit(copied, sink)
        except InferdError as error:
            self.ended(shadow, _DROPPED.get(error.kind, "failed"), request.id)
            return
        self._in_flight[sink] = handle
        sink.limit(handle, max(LEAST_S, TIMES * one.took_s))

    def release(self, sink: _CopySink) -> None:
        """A copy has ended."""
        del self._in_flight[sink]
        self._waiting.look()

    def compare(self, pair: _Pair) -> None:
        """Compare two answers outside of the event loop, together with others that come soon."""
        self._pairs.append(pair)
        if len(self._pairs) >= MAX_TOGETHER:
            self._compare_all()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TOGETHER_S, self._compare_all)

    def _compare_all(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        pairs, self._pairs, self._timer = self._pairs, [], None
        if self._comparing is None:
            self._comparing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inferd-copies")
        future = asyncio.get_running_loop().run_in_executor(self._comparing, _compared, pairs)

        def tell(done: asyncio.Future[list[Comparison | None]]) -> None:
            if done.cancelled():
                return
            for pair, found in zip(pairs, done.result(), strict=True):
                self._compared(pair, found)

        future.add_done_callback(tell)

    def _compared(self, pair: _Pair, found: Comparison | None) -> None:
        if found is None:
            self.ended(pair.shadow, "form", pair.request_id)
        elif found.is_equal:
            self.ended(pair.shadow, "equal", pair.request_id)
        else:
            first = found.differences[0]
            self.ended(pair.shadow, "differs", pair.request_id, first.part, first.position)


class Collected:
    """What one request has produced, up to ``MAX_COMPARED_BYTES``. ``problem``: why it cannot be compared."""

    __slots__ = ("_deltas", "_prompt", "dialect", "num_bytes", "prediction", "problem")

    def __init__(self, dialect: str) -> None:
        self.dialect = dialect  # of a prediction
        self.problem: CopyResult | None = None
        self.prediction: Prediction | None = None
        self.num_bytes = 0
        self._deltas: list[Delta] = []
        self._prompt: PromptReport | None = None

    def add(self, item: Item) -> None:
        """Keep an item of the answer."""
        if self.problem is not None:
            return
        if not isinstance(item, Output) or (item.prediction is not None and self.prediction is not None):
            self._give_up("form")
            return
        if item.prompt is not None:
            self._prompt = item.prompt
        for delta in item.deltas:
            self.num_bytes += (
                len(delta.text) + len(delta.reasoning) + sum([len(call.arguments) for call in delta.calls])
            )
        if item.prediction is not None:
            self.prediction = item.prediction
            self.num_bytes += len(item.prediction.body)
        self._deltas += item.deltas
        if self.num_bytes > MAX_COMPARED_BYTES:
            self._give_up("large")

    def _give_up(self, problem: CopyResult) -> None:
        self.problem, self.prediction, self._prompt = problem, None, None
        self._deltas.clear()

    @property
    def seed(self) -> int | None:
        """The seed by which the answer was drawn; None: it has several choices."""
        return None if self._prompt is None else self._prompt.seed

    def answer(self, labels: Labels) -> Answer:
        """The parts of the answer. Raises UnreadableAnswer, InvalidRequest."""
        if self.prediction is not None:
            headers = dict(self.prediction.headers)
            return answer_of_body(
                self.prediction.body,
                header_bytes=int(headers.get(_HEADER_BYTES, -1)),
                is_grpc=self.dialect == "v2.grpc",
                labels=labels,
            )
        by_choice: dict[int, list[Delta]] = {}
        for delta in self._deltas:
            by_choice.setdefault(delta.index, []).append(delta)
        parts = answer_of_choices([_choice(by_choice[index]) for index in sorted(by_choice)])
        scores = () if self._prompt is None else self._prompt.scores or ()
        return parts + tuple(
            [
                Label(f"scores[{number}].best", str(max(range(len(one)), key=one.__getitem__)))
                for number, one in enumerate(scores)
                if one
            ]
        )


class CopyingRouter:
    """The router of one call, whose answered requests are copied. ``call_ended`` is due when the call is over."""

    def __init__(self, copies: Copies, router: Submitting, shadow: Shadow) -> None:
        self._copies = copies
        self._router = router
        self._shadow = shadow
        self.call_ended = copies.call_ended

    def submit(self, request: Request, sink: Sink, relay: Relay | None = None) -> Handle:
        problem = _not_copied(request)
        if problem is not None:
            self._copies.ended(self._shadow, problem, request.id)
            return self._router.submit(request, sink, relay)
        return self._router.submit(request, _Tap(self, request, sink), relay)

    def answered(self, request: Request, answer: Collected) -> None:
        """A request has its whole answer."""
        took_s = max(0.0, clock.now() - request.arrived_at) if request.arrived_at else 0.0
        self._copies.answered(_Copied(self._router, self._shadow, request, answer, took_s))


class _Tap:
    """Passes a request's items to its sink, and keeps them for the comparison."""

    __slots__ = ("_answer", "_request", "_router", "_sink")

    def __init__(self, router: CopyingRouter, request: Request, sink: Sink) -> None:
        self._router = router
        self._request = request
        self._sink = sink
        self._answer = Collected(request.dialect if isinstance(request, PredictRequest) else "")

    def deliver(self, item: Item) -> None:
        self._sink.deliver(item)  # first: the client waits for it
        self._answer.add(item)
        if item.end is not None and item.end.outcome == "done":
            self._router.answered(self._request, self._answer)


class _CopySink:
    """Collects the answer to a copy."""

    def __init__(self, copies: Copies, shadow: Shadow, request_id: str, mine: Collected) -> None:
        self._copies = copies
        self._shadow = shadow
        self._request_id = request_id
        self._mine = mine
        self._its = Collected(mine.dialect)
        self._timer: asyncio.TimerHandle | None = None
        self.rollout = shadow.assigned.rollout

    def limit(self, handle: Handle, longest_s: float) -> None:
        """Cancel the copy if it takes longer."""
        self._timer = asyncio.get_running_loop().call_later(longest_s, handle.cancel)

    def deliver(self, item: Item) -> None:
        self._its.add(item)
        end = item.end
        if end is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._copies.release(self)
        if end.outcome == "done" and self._its.problem is None:
            self._copies.compare(_Pair(self._shadow, self._request_id, self._mine, self._its))
            return
        self._copies.ended(self._shadow, self._result(end.outcome, end.failure), self._request_id)

    def _result(self, outcome: str, failure: Failure | None) -> CopyResult:
        if outcome == "done":  # an answer that is much larger is another one
            return "differs" if self._its.problem == "large" else "form"
        if failure is None:
            return "late"
        if failure.code == "copy_dropped":
            return "memory"
        return _DROPPED.get(failure.kind, "failed")


def taking_nothing(request: Request) -> Request:
    """The request for a model that serves clients as well: it takes nothing from theirs, and is charged to none."""
    return msgspec.structs.replace(
        request,
        priority=RANKS["batch"],
        tenant=TENANT,
        weight=1.0,
        session="",
        idempotent=False,  # no second attempt
        arrived_at=0.0,
        is_copy=True,
    )


def _not_copied(request: Request) -> CopyResult | None:
    """Why no copy of a request is made; None: one is."""
    if isinstance(request, PredictRequest) and request.sequence:
        return "sequence"
    if request.num_bytes > MAX_COPIED_BYTES:
        return "large"
    return None


def _copy_of(request: Request, entry: str, answer: Collected) -> Request | CopyResult:
    """The copy of a request, for the model ``entry``. An answer that is drawn by chance is drawn with the same seed;
    the reason, where that is not possible."""
    copied = taking_nothing(
        msgspec.structs.replace(request, id=f"copy-{request.id}", model=entry, deadline_s=None, first_byte_s=None)
    )
    if not isinstance(copied, GenerateRequest):
        return copied
    sampling = copied.sampling
    if not sampling.is_greedy and not sampling.use_beam_search and sampling.seed is None:
        if answer.seed is None:
            return "random"
        sampling = msgspec.structs.replace(sampling, seed=answer.seed)
    return msgspec.structs.replace(copied, stream=False, sampling=sampling)


def _choice(deltas: Sequence[Delta]) -> ChoiceText:
    calls = joined_calls([call for delta in deltas for call in delta.calls])
    return ChoiceText(
        text="".join([delta.text for delta in deltas]),
        reasoning="".join([delta.reasoning for delta in deltas]),
        calls=tuple([(call.name or "", call.arguments) for call in calls]),
        finish_reason=next((delta.finish_reason for delta in deltas if delta.finish_reason is not None), ""),
    )


def _compared(pairs: Sequence[_Pair]) -> list[Comparison | None]:
    """The comparisons of pairs of answers; None: one of the two is in no form that can be compared."""
    return [_comparison(pair) for pair in pairs]


def _comparison(pair: _Pair) -> Comparison | None:
    labels = pair.shadow.labels
    try:
        return compare(pair.mine.answer(labels), pair.its.answer(labels), pair.shadow.tolerance)
    except (UnreadableAnswer, InferdError):
        return None


if TYPE_CHECKING:
    _sinks: tuple[type[Sink], type[Sink]] = (_Tap, _CopySink)
    _router: type[Submitting] = CopyingRouter
