"""Keeps the records of calls, and explains them: what ``GET /admin/requests`` and ``inferd why`` show.

A viewer sees the calls of its tenant alone. Of other tenants it reads classes and counts. The operator sees all.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import Final

import msgspec

from inferd import clock
from inferd.observe.why.causes import Case, Cause, causes_of
from inferd.observe.why.pressure import Pressure
from inferd.observe.why.record import Numbers, Part, RequestRecord
from inferd.observe.why.recorder import Recorder
from inferd.observe.why.sentence import sentence_of
from inferd.observe.why.store import NUM_RECENT, Order
from inferd.types import PriorityClass, class_of

MAX_LISTED: Final = 200


class RecordUsage(msgspec.Struct, frozen=True):
    """The tokens of a call."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class RecordLine(msgspec.Struct, frozen=True, kw_only=True):
    """One call in a list, with the name of its first cause. Times are in seconds."""

    id: str
    arrived_at: float  # seconds since the epoch
    model: str
    replica: int | None
    tenant: str
    key_id: str
    route: str
    stream: bool
    priority_class: PriorityClass = msgspec.field(name="class")
    status: int
    outcome: str | None
    error_code: str | None
    usage: RecordUsage
    attempts: int
    num_preemptions: int
    total_s: float
    usual_s: float | None  # None: too few calls of this size
    ttft_s: float | None
    tpot_s: float | None
    trace_id: str
    sentence: str
    cause: str | None  # None: no cause


class RecordReport(RecordLine, frozen=True, kw_only=True):
    """GET /admin/requests/{id}: a call, the causes of its time and the parts of its time."""

    causes: list[Cause]
    parts: list[Part]


class Explainer:
    """Owns the records. ``size``: how many of the last calls are kept; 0 keeps and explains nothing."""

    def __init__(
        self,
        size: int = NUM_RECENT,
        *,
        pressure: Pressure | None = None,
        now: Callable[[], float] = clock.now,
        wall: Callable[[], float] = clock.wall,
    ) -> None:
        self.recorder = Recorder(size, pressure, now, wall)
        self.store = self.recorder.store
        self.usual = self.recorder.usual
        self.pressure = self.recorder.pressure
        self._now = now

    def configure(self, size: int) -> None:
        """Keep another number of records from now on."""
        self.recorder.configure(size)

    # -- reading ----------------------------------------------------------------------------

    def find(self, request_id: str, viewer: str | None) -> list[RecordReport]:
        """The calls with this id that a viewer may see, newest first. ``viewer``: its tenant; None: the operator."""
        found: list[RequestRecord] = []
        for name in _ids_of(request_id):
            found = found or self.store.find(name)
        return [self.report(record, viewer) for record in found if viewer in (None, record.tenant)]

    def select(
        self,
        viewer: str | None,
        *,
        model: str | None = None,
        tenant: str | None = None,
        order: Order = "recent",
        limit: int = 50,
        before: float | None = None,
    ) -> list[RecordLine]:
        """Calls that a viewer may see. ``viewer``: its tenant; None: the operator. ``before``: only calls that arrived
        before this time, in seconds since the epoch."""

        def keep(record: RequestRecord, numbers: Numbers) -> bool:
            return (
                viewer in (None, record.tenant)
                and (model is None or record.model == model)
                and (tenant is None or record.tenant == tenant)
                and (before is None or numbers.arrived_at < before)
            )

        return [
            _line_of(*self._causes(record, viewer))
            for record, _ in self.store.select(order, keep, min(limit, MAX_LISTED))
        ]

    def report(self, record: RequestRecord, viewer: str | None) -> RecordReport:
        """Everything about one call."""
        case, causes = self._causes(record, viewer)
        line = msgspec.structs.asdict(_line_of(case, causes))
        return RecordReport(**line, causes=causes, parts=record.parts())

    def _causes(self, record: RequestRecord, viewer: str | None) -> tuple[Case, list[Cause]]:
        numbers = record.numbers
        began, total = record.span
        self.recorder.sample()
        strain = self.pressure.between(began, began + total)
        usual = self.usual.of(record, numbers)
        case = Case(record, numbers, usual, strain, lambda: self.store.beside(record), sees_names=viewer is None)
        return case, causes_of(case)


def _line_of(case: Case, causes: list[Cause]) -> RecordLine:
    record, numbers = case.record, case.numbers
    return RecordLine(
        id=record.id,
        arrived_at=numbers.arrived_at,
        model=record.model,
        replica=None if numbers.replica < 0 else numbers.replica,
        tenant=record.tenant,
        key_id=record.key_id,
        route=record.route,
        stream=numbers.stream,
        priority_class=class_of(numbers.priority),
        status=numbers.status,
        outcome=record.outcome or None,
        error_code=record.error_code or None,
        usage=RecordUsage(numbers.prompt_tokens, numbers.completion_tokens, numbers.cached_tokens),
        attempts=numbers.attempts,
        num_preemptions=numbers.preemptions,
        total_s=numbers.total,
        usual_s=case.usual.total_s,
        ttft_s=None if isnan(numbers.first_token) else numbers.first_token,
        tpot_s=_per_token_s(numbers),
        trace_id=record.trace_id,
        sentence=sentence_of(case, causes),
        cause=causes[0].name if causes else None,
    )


def _ids_of(text: str) -> tuple[str, ...]:
    """The request ids that a text may mean: itself, or the one in an answer's id (``chatcmpl-...``)."""
    inner = text.partition("-")[2]
    return tuple(name for name in (text, inner, inner.rpartition("-")[0]) if name)


def _per_token_s(numbers: Numbers) -> float | None:
    """Seconds per token of the answer, after the first one."""
    if numbers.completion_tokens < 2 or isnan(numbers.first_token) or isnan(numbers.finished):
        return None
    return (numbers.finished - numbers.first_token) / (numbers.completion_tokens - 1)
