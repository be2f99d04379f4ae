"""The record of one call: a fixed number of bytes, made when the call is over, and the parts of its time.

A record holds numbers in one packed string. Python objects for thirty numbers would take four times the memory and
slow the collector of unused objects. The numbers are read with the record, which is rare.
"""

from __future__ import annotations

import struct
from math import isnan
from typing import Final, NamedTuple

import msgspec

STREAM: Final = 1
ENGINE: Final = 2
REMOTE: Final = 4
HEDGED: Final = 8
TEXT: Final = 16


class Numbers(NamedTuple):
    """The numbers of a record. Times are seconds after the call's start; nan: not reached. The order is that of the
    packed form."""

    arrived_at: float  # seconds since the epoch
    started_at: float  # on the monotonic clock
    total: float
    received: float
    submitted: float
    dispatched: float
    begun: float
    tokenized: float
    scheduled: float
    first_token: float
    finished: float
    blocked: float
    behind: float
    load: float
    restart: float
    lost: float
    handed: float
    schedule_wait: float
    prefill: float
    prefill_shared: float
    decode: float
    crowding: float
    others_prefill: float
    preempted: float
    recomputed: float
    masks: float
    speculation: float
    slowed: float
    rest: float
    num_steps: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    request_bytes: int
    response_bytes: int
    ahead: int
    ahead_of_class: int
    ahead_of_tenant: int
    attempts: int
    preemptions: int
    worker_deaths: int
    status: int
    replica: int  # -1: none
    priority: int
    flags: int

    @property
    def stream(self) -> bool:
        return bool(self.flags & STREAM)

    @property
    def has_engine(self) -> bool:
        """Whether an engine of this server generated the answer."""
        return bool(self.flags & ENGINE)

    @property
    def was_remote(self) -> bool:
        return bool(self.flags & REMOTE)

    @property
    def was_hedged(self) -> bool:
        return bool(self.flags & HEDGED)

    @property
    def computed_tokens(self) -> int:
        """The tokens of the prompt that were not in the prefix cache."""
        return max(self.prompt_tokens - self.cached_tokens, 0)


ENGINE_FORM: Final = struct.Struct("<12fI")
"""The fields of ``EngineTimes``, from ``schedule_wait`` to ``num_steps``."""

FORM: Final = struct.Struct(f"<2d15f{ENGINE_FORM.size}s8I4Hh2b")
"""All numbers. Those of the engine are one field: the packed ``ENGINE_FORM``, all zeros where there was none."""

_NUMBERS: Final = struct.Struct("<2d15f12fI8I4Hh2b")  # the same bytes, every number a field
_SPAN: Final = struct.Struct("<df")  # behind ``arrived_at``: ``started_at`` and ``total``


class Part(msgspec.Struct, frozen=True):
    """A part of a call's time. ``speculation`` is negative: seconds that were saved."""

    name: str
    begin_s: float
    seconds: float


class RequestRecord(msgspec.Struct, frozen=True, gc=False):
    """What is kept of one call: its names, and ``packed`` numbers. ``numbers`` reads them."""

    id: str
    model: str
    tenant: str
    key_id: str
    route: str
    outcome: str
    error_code: str
    trace: str  # the W3C traceparent; empty: the call had none
    ahead_tenant: str  # the tenant with most of the requests that were queued before it
    packed: bytes
    hand_over: str = ""  # why another replica computed the prompt; empty: none did

    @property
    def numbers(self) -> Numbers:
        return Numbers._make(_NUMBERS.unpack(self.packed))

    @property
    def span(self) -> tuple[float, float]:
        """When the call began, on the monotonic clock, and its seconds."""
        began, total = _SPAN.unpack_from(self.packed, 8)
        return began, total

    @property
    def trace_id(self) -> str:
        return self.trace[3:35]

    def parts(self) -> list[Part]:
        """The parts of its time in their order, without those of no time. They add up to the total."""
        numbers, at, found = self.numbers, 0.0, []
        for name, seconds in self.seconds(numbers).items():
            if seconds:
                found.append(Part(name, at, seconds))
                at += seconds
        return found

    def seconds(self, numbers: Numbers) -> dict[str, float]:
        """The seconds of every part, in their order. ``rest`` is what remains of the total."""
        found = _gateway_parts(numbers)
        known = found.pop("known")
        if not isnan(numbers.dispatched):
            if numbers.has_engine:
                known += _engine_parts(numbers, found)
            elif numbers.was_remote:
                found["remote"] = max(numbers.finished - known, 0.0) if not isnan(numbers.finished) else 0.0
                known += found["remote"]
            else:
                known += _stage_parts(numbers, found, known, is_text=self.is_text)
            found["send"] = max(numbers.total - known, 0.0)
        found["rest"] = numbers.total - sum(found.values())
        return found

    @property
    def is_text(self) -> bool:
        """Whether the call asked for a generated text."""
        return bool(self.packed[-1] & TEXT)


def _gateway_parts(numbers: Numbers) -> dict[str, float]:
    """The parts before the replica, and ``known``: the time at which they end."""
    total = numbers.total
    received = min(total if isnan(numbers.received) else numbers.received, total)
    if isnan(numbers.submitted):  # it reached no queue: refused, or answered by a stored answer
        return {"receive": received, "admission": total - received, "known": total}
    submitted = min(max(numbers.submitted, received), total)
    dispatched = min(max(total if isnan(numbers.dispatched) else numbers.dispatched, submitted), total)
    load_wait = min(numbers.load + numbers.restart, dispatched - submitted)
    return {
        "receive": received,
        "admission": submitted - received,
        "load_wait": load_wait,
        "queue": dispatched - submitted - load_wait,
        "lost_attempts": (lost := min(numbers.lost, total - dispatched)),
        "hand_over": (handed := min(numbers.handed, total - dispatched - lost)),
        "known": dispatched + lost + handed,
    }


def _engine_parts(numbers: Numbers, found: dict[str, float]) -> float:
    """Adds the parts of a generated text; returns their sum, with the remainder inside the engine."""
    dispatched = numbers.dispatched + found["lost_attempts"] + found["hand_over"]
    found["tokenize"] = 0.0 if isnan(numbers.tokenized) else max(numbers.tokenized - dispatched, 0.0)
    found.update(
        schedule_wait=numbers.schedule_wait,
        prefill=numbers.prefill,
        prefill_shared=numbers.prefill_shared,
        decode=numbers.decode,
        crowding=numbers.crowding,
        others_prefill=numbers.others_prefill,
        preempted=numbers.preempted,
        recomputed=numbers.recomputed,
        masks=numbers.masks,
        speculation=numbers.speculation,
        slowed=numbers.slowed,
    )
    return 0.0 if isnan(numbers.finished) else max(numbers.finished - dispatched, 0.0)


def _stage_parts(numbers: Numbers, found: dict[str, float], known: float, *, is_text: bool) -> float:
    """Adds the parts of a prediction, and of a text that its replica did not finish; returns their sum.

    A stage lasts until the next stamp. The last stage that was reached lasts until the request ended.
    """
    end = numbers.total if isnan(numbers.finished) else numbers.finished
    first, waits, works = ("tokenize", "schedule_wait", "prefill") if is_text else _PREDICTION
    stamps = (numbers.tokenized, numbers.scheduled, numbers.first_token, end)
    at, begun = known, known
    for name, stamp in zip((first, waits, works, "decode" if is_text else "encode"), stamps, strict=True):
        reached = max(min(end if isnan(stamp) else stamp, end), at)
        found[name] = reached - at
        at = reached
        if isnan(stamp):
            break
    return at - begun


_PREDICTION: Final = ("decode_inputs", "batch_wait", "compute")
