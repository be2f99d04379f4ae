"""The spans of an ended call: one for the call, and one for each stage that lasted; and those of loads.

Made from the event of the call's end, or from the record of the load, so no span exists while a request runs. A span is
written as the bytes that are sent, and no object is made for it. Attributes that most calls of a route and a model have
in common are written once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec.structs import astuple

from inferd.events import HttpServed
from inferd.observe.startup import LoadReport, Phase, StartReport
from inferd.observe.traces import conventions as c
from inferd.observe.traces.otlp import (
    ERROR,
    INTERNAL,
    SERVER,
    Attributes,
    Doubles,
    Integers,
    Value,
    attribute,
    context_fields,
    name_field,
    parent_field,
    span_field,
    status_field,
    text_attribute,
)
from inferd.types import EngineTimes, Routing, Timings, class_of

SHORTEST_S: Final = 1e-6
"""A stage that is shorter has no span."""

MAX_CHARS: Final = 256
"""Of a text that a client chose; the rest is cut off."""

_MAX_COMMON: Final = 1024

DeviceOf = Callable[[str], Mapping[str, Value]]
"""The attributes of the device that a model computes on."""

_REQUEST_BYTES: Final = Integers(c.REQUEST_BYTES.key)
_RESPONSE_BYTES: Final = Integers(c.RESPONSE_BYTES.key)
_BLOCKED_S: Final = Doubles(c.BLOCKED_S.key)

_INPUT_TOKENS: Final = Integers(c.INPUT_TOKENS.key)
_PROMPT_TOKENS: Final = Integers(c.PROMPT_TOKENS.key)
_OUTPUT_TOKENS: Final = Integers(c.OUTPUT_TOKENS.key)
_COMPLETION_TOKENS: Final = Integers(c.COMPLETION_TOKENS.key)
_CACHED_TOKENS: Final = Integers(c.CACHED_TOKENS.key)

_QUEUE_S: Final = Doubles(c.QUEUE_S.key)
_FIRST_TOKEN_S: Final = Doubles(c.FIRST_TOKEN_S.key)
_TOTAL_S: Final = Doubles(c.TOTAL_S.key)
_PREFILL_S: Final = Doubles(c.PREFILL_S.key)
_DECODE_S: Final = Doubles(c.DECODE_S.key)
_INFERENCE_S: Final = Doubles(c.INFERENCE_S.key)

_PREEMPTIONS: Final = Integers(c.PREEMPTIONS.key)
_STEPS: Final = Integers(c.STEPS.key)
_ATTEMPTS: Final = Integers(c.ATTEMPTS.key)
_REPLICA: Final = Integers(c.REPLICA.key)
_IS_REMOTE: Final = attribute(c.IS_REMOTE.key, True)
_IS_LOCAL: Final = attribute(c.IS_REMOTE.key, False)
_WORKER_DEATHS: Final = Integers(c.WORKER_DEATHS.key)
_WAS_HEDGED: Final = attribute(c.WAS_HEDGED.key, True)
_LOST_S: Final = Doubles(c.LOST_S.key)

_AHEAD: Final = Integers(c.AHEAD.key)
_AHEAD_OF_CLASS: Final = Integers(c.AHEAD_OF_CLASS.key)
_AHEAD_OF_TENANT: Final = Integers(c.AHEAD_OF_TENANT.key)
_RESTART_S: Final = Doubles(c.RESTART_S.key)

_PARTS: Final = [
    (place, name in ("prefill", "prefill_shared"), Doubles(c.PARTS[name].key))
    for place, name in enumerate(EngineTimes.__struct_fields__)
    if name in c.PARTS and name != "preempted"
]
"""Of each part: its place in ``EngineTimes``, whether it belongs to the prefill, and its attribute. The time out of the
batch has a span of its own."""

_RECEIVE: Final = name_field("receive")
_ADMISSION: Final = name_field("admission")
_LOAD_WAIT: Final = name_field("load_wait")
_QUEUE: Final = name_field("queue")
_LOST_ATTEMPTS: Final = name_field("lost_attempts")
_HAND_OVER: Final = name_field("hand_over")
_REMOTE: Final = name_field("remote")
_SEND: Final = name_field("send")
_PREEMPTED: Final = name_field("preempted")
_GENERATES: Final = [name_field(name) for name in ("tokenize", "schedule_wait", "prefill", "decode")]
_PREDICTS: Final = [name_field(name) for name in ("decode_inputs", "batch_wait", "compute", "encode")]
_THIRD: Final = 2  # of these stages: the prefill, or the time in which a prediction is computed
_LAST: Final = 3

_common: Final[dict[tuple[object, ...], bytes]] = {}
"""The fields of calls' spans that many calls have, by what they are made from. Used by the exporter's thread alone."""


def is_traced(event: HttpServed) -> bool:
    """Whether the call asked a model for something. Probes, scrapes and the operator's requests have no spans."""
    return event.operation is not None


def no_device(model: str) -> Mapping[str, Value]:
    """The attributes where devices are not read."""
    return {}


def spans_of(event: HttpServed, offset_s: float, device_of: DeviceOf = no_device) -> list[bytes]:
    """The call's span and, below it, those of its stages. ``offset_s``: the wall clock less the monotonic one."""
    operation = event.operation
    assert operation is not None, "other calls have no spans"
    trace = event.trace
    trace_id, span_id, flags = bytes.fromhex(trace[3:35]), bytes.fromhex(trace[36:52]), int(trace[53:55], 16)
    begin, total, state = event.started_at + offset_s, event.duration_s, event.trace_state
    rest = [_common_fields(event), *_own_attributes(event)]
    caller = event.trace_parent
    if caller:
        rest.append(parent_field(bytes.fromhex(caller)))
    if event.model is not None:
        rest += [attribute(key, value) for key, value in device_of(event.model).items()]
    context = context_fields(trace_id, state, flags, bool(caller))
    stages = _Stages(context_fields(trace_id, state, flags), span_id, begin, total)
    stages.spans.append(span_field(context, span_id, SERVER, begin, begin + total, b"".join(rest)))
    _add_stages(stages, event, operation.generates)
    return stages.spans


def child_id(span_id: bytes, number: int) -> bytes:
    """The id of a call's n-th span below its own."""
    found = (int.from_bytes(span_id, "big") + number) % (1 << 64)
    return (found or 1).to_bytes(8, "big")


# -- the span of the call ----------------------------------------------------------------------


def _common_fields(event: HttpServed) -> bytes:
    """The fields that few calls of a route, a model and a tenant differ in."""
    operation, model, tenant, key_id = event.operation, event.model, event.tenant, event.key_id
    method, route, status, error_code = event.method, event.route, event.status, event.error_code
    outcome, reasons, stream, priority = event.outcome, event.finish_reasons, event.stream, event.priority
    key = (operation, method, route, status, stream, priority, model, tenant, key_id, outcome, reasons, error_code)
    found = _common.get(key)
    if found is not None:
        return found
    assert operation is not None
    told: dict[str, Value] = {
        c.OPERATION.key: operation.name,
        c.PROVIDER_NAME.key: c.PROVIDER,
        c.METHOD.key: method[:MAX_CHARS],
        c.ROUTE.key: route,
        c.STATUS.key: status,
        c.STREAM.key: stream,
        c.CLASS.key: class_of(priority),
    }
    if model is not None:
        told[c.REQUEST_MODEL.key] = model[:MAX_CHARS]
        if status == 200:
            told[c.RESPONSE_MODEL.key] = model[:MAX_CHARS]
    if tenant:
        told[c.TENANT.key] = tenant[:MAX_CHARS]
    if key_id:
        told[c.KEY_ID.key] = key_id[:MAX_CHARS]
    if outcome is not None:
        told[c.OUTCOME.key] = outcome
    if reasons:
        told[c.FINISH_REASONS.key] = reasons
    is_error = status >= 500 or outcome == "failed"
    if is_error:
        told[c.ERROR_TYPE.key] = error_code or str(status)
    name = operation.name if model is None else f"{operation.name} {model[:MAX_CHARS]}"
    fields = name_field(name) + _attributes(told)
    if is_error:
        fields += status_field(ERROR, error_code or "")
    if len(_common) >= _MAX_COMMON:
        _common.clear()
    _common[key] = fields
    return fields


def _attributes(told: Attributes) -> bytes:
    return b"".join([attribute(key, value) for key, value in told.items()])


def _own_attributes(event: HttpServed) -> list[bytes]:
    """The attributes that differ from call to call."""
    told = [
        text_attribute(c.REQUEST_ID.key, event.request_id[:MAX_CHARS]),
        _REQUEST_BYTES.of(event.request_bytes),
        _RESPONSE_BYTES.of(event.response_bytes),
    ]
    blocked_s, usage, timings, end = event.blocked_s, event.usage, event.timings, event.end
    if blocked_s:
        told.append(_BLOCKED_S.of(blocked_s))
    if usage is not None:
        prompt, completion = usage.prompt_tokens, usage.completion_tokens
        told += (
            _INPUT_TOKENS.of(prompt),
            _PROMPT_TOKENS.of(prompt),
            _OUTPUT_TOKENS.of(completion),
            _COMPLETION_TOKENS.of(completion),
            _CACHED_TOKENS.of(usage.cached_tokens),
        )
    if timings is not None:
        _add_latencies(told, timings)
    if end is not None:
        if end.num_preemptions:
            told.append(_PREEMPTIONS.of(end.num_preemptions))
        if end.engine is not None:
            told.append(_STEPS.of(end.engine.num_steps))
        if end.routing is not None:
            _add_routing(told, end.routing, end.timings)
    return told


def _add_latencies(told: list[bytes], timings: Timings) -> None:
    scheduled, first, finished = timings.scheduled, timings.first_token, timings.finished
    if scheduled is not None:
        told.append(_QUEUE_S.of(scheduled))
        if first is not None:
            told.append(_PREFILL_S.of(first - scheduled))
        if finished is not None:
            told.append(_INFERENCE_S.of(finished - scheduled))
    if first is not None:
        told.append(_FIRST_TOKEN_S.of(first))
        if finished is not None:
            told.append(_DECODE_S.of(finished - first))
    if finished is not None:
        told.append(_TOTAL_S.of(finished))


def _add_routing(told: list[bytes], routing: Routing, timings: Timings) -> None:
    told.append(_ATTEMPTS.of(routing.attempts))
    if routing.replica is not None:
        told += (_REPLICA.of(routing.replica), _IS_REMOTE if _was_remote(timings, routing) else _IS_LOCAL)
    if routing.worker_deaths:
        told.append(_WORKER_DEATHS.of(routing.worker_deaths))
    if routing.was_hedged:
        told.append(_WAS_HEDGED)
    if routing.lost_s:
        told.append(_LOST_S.of(routing.lost_s))


def _was_remote(timings: Timings, routing: Routing) -> bool:
    """Whether another server answered: a worker reports more than the first token."""
    is_answered = timings.first_token is not None
    return routing.was_remote or (is_answered and timings.tokenized is None and timings.scheduled is None)


# -- the spans of its stages -------------------------------------------------------------------


class _Stages:
    """The spans of a call and of its stages."""

    __slots__ = ("_begin", "_context", "_number", "_span_id", "_total", "parent", "spans")

    def __init__(self, context: bytes, span_id: bytes, begin: float, total: float) -> None:
        self._context = context
        self._span_id = span_id
        self._begin = begin
        self._total = total
        self._number = 0
        self.parent = parent_field(span_id)
        self.spans: list[bytes] = []

    def add(self, name: bytes, start: float, stop: float, told: bytes = b"", below: bytes = b"") -> bytes:
        """Add the stage between two times after the call's begin, if it lasted. ``below``: the field of its parent, if
        that is not the call. Returns the field for spans below it."""
        self._number += 1
        start, stop = max(0.0, start), min(stop, self._total)
        if stop - start < SHORTEST_S:
            return self.parent
        span_id, begin = child_id(self._span_id, self._number), self._begin
        rest = name + (below or self.parent) + told
        self.spans.append(span_field(self._context, span_id, INTERNAL, begin + start, begin + stop, rest))
        return parent_field(span_id)


def _add_stages(stages: _Stages, event: HttpServed, is_generated: bool) -> None:
    """Add the stages in their order."""
    timings = event.timings or Timings()
    received, submitted, last = event.received_s, event.submitted_s, event.duration_s
    finished, end = timings.finished, event.end
    over = last if finished is None else min(finished, last)
    if received is not None:
        stages.add(_RECEIVE, 0.0, received)
        if submitted is not None:
            stages.add(_ADMISSION, received, submitted)
    if submitted is None:
        return
    routing = None if end is None else end.routing
    routing = routing if routing is not None else Routing()
    reached = timings.dispatched
    dispatched = over if reached is None else reached
    loaded = min(submitted + routing.load_s, dispatched)
    stages.add(_LOAD_WAIT, submitted, loaded)
    stages.add(_QUEUE, loaded, dispatched, _of_queue(routing))
    if reached is None:
        return
    sent = min(dispatched + routing.lost_s, over)
    stages.add(_LOST_ATTEMPTS, dispatched, sent)
    if routing.hand_over is not None:
        handed = min(sent + routing.hand_over.seconds, over)
        stages.add(_HAND_OVER, sent, handed)
        sent = handed
    if _was_remote(timings, routing):
        stages.add(_REMOTE, sent, over)
    else:
        _add_replica(stages, timings, None if end is None else end.engine, sent, over, is_generated)
    stages.add(_SEND, over, last)


def _of_queue(routing: Routing) -> bytes:
    told = _AHEAD.of(routing.ahead) + _AHEAD_OF_CLASS.of(routing.ahead_of_class)
    if routing.ahead_tenant:
        told += attribute(c.AHEAD_TENANT.key, routing.ahead_tenant) + _AHEAD_OF_TENANT.of(routing.ahead_of_tenant)
    if routing.restart_s:
        told += _RESTART_S.of(routing.restart_s)
    return told


def _add_replica(
    stages: _Stages, timings: Timings, engine: EngineTimes | None, sent: float, over: float, is_generated: bool
) -> None:
    """Add the stages in the worker; a stage that was not reached ends the one before it."""
    begin = sent
    names = _GENERATES if is_generated else _PREDICTS
    reached_at = (timings.tokenized, timings.scheduled, timings.first_token, timings.finished)
    for place, reached in enumerate(reached_at):
        end = over if reached is None else min(max(reached, begin), over)
        told = _of_engine(engine, place == _THIRD) if engine is not None and is_generated and place >= _THIRD else b""
        below = stages.add(names[place], begin, end, told)
        if place == _THIRD and not is_generated and timings.steps_s:
            _add_steps(stages, timings.steps_s, begin, end, below)
        if place == _LAST and engine is not None and engine.preempted:
            stages.add(_PREEMPTED, begin, min(begin + engine.preempted, end), b"", below)
        begin = end
        if reached is None:
            return


def _of_engine(engine: EngineTimes, is_prefill: bool) -> bytes:
    values = astuple(engine)
    told = [key.of(values[place]) for place, of_prefill, key in _PARTS if of_prefill == is_prefill and values[place]]
    return b"".join(told)


def _add_steps(stages: _Stages, steps_s: Mapping[str, float], begin: float, end: float, below: bytes) -> None:
    """Add the steps of a pipeline. Only their durations are known: each is shown after the one before it."""
    for step, seconds in steps_s.items():
        stop = min(begin + seconds, end)
        stages.add(name_field(step), begin, stop, b"", below)
        begin = stop


# -- loads -------------------------------------------------------------------------------------


def spans_of_load(load: LoadReport) -> list[bytes]:
    """The span of a load, with one below it for each phase."""
    told: dict[str, Value] = {
        c.MODEL.key: load.model[:MAX_CHARS],
        c.REPLICA.key: load.replica,
        c.CAUSE.key: load.cause,
        c.RESTARTS.key: load.restarts,
        c.OUTCOME.key: load.state,
    }
    is_error = load.state in ("failed", "died", "hung")
    if is_error:
        told[c.ERROR_TYPE.key] = load.state
    return _of_phases(f"load {load.model[:MAX_CHARS]}", load.begun_at, load.seconds, load.phases, told, is_error)


def spans_of_start(start: StartReport) -> list[bytes]:
    """The span of the server's own start, with one below it for each phase."""
    return _of_phases("start", start.begun_at, start.seconds, start.phases, {}, False)


def _of_phases(
    name: str, begun_at: float, seconds: float, phases: Sequence[Phase], told: Attributes, is_error: bool
) -> list[bytes]:
    span_id, end = secrets.token_bytes(8), begun_at + seconds
    context, parent = context_fields(secrets.token_bytes(16), "", 1), parent_field(span_id)
    error = status_field(ERROR) if is_error else b""
    spans = [span_field(context, span_id, INTERNAL, begun_at, end, name_field(name) + _attributes(told) + error)]
    for number, phase in enumerate(phases, start=1):
        begin = min(begun_at + phase.begin_s, end)
        rest = name_field(phase.name) + parent
        if number == len(phases):  # the phase in which it failed
            rest += error
        until = min(begin + phase.seconds, end)
        spans.append(span_field(context, child_id(span_id, number), INTERNAL, begin, until, rest))
    return spans
