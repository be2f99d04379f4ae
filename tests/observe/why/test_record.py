"""The record of a call is small, and the parts of its time add up to the measured time."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from tests.observe.why.calls import call, calls, engine_times

from inferd.events import HttpServed
from inferd.gateway.routes import ROUTES
from inferd.observe.why.recorder import record_of
from inferd.types import EngineTimes, Routing, Timings, Usage

_NAMES = (
    *(
        "receive",
        "admission",
        "load_wait",
        "queue",
        "lost_attempts",
        "hand_over",
        "remote",
        "tokenize",
        "schedule_wait",
        "prefill",
    ),
    *("prefill_shared", "decode", "crowding", "others_prefill", "preempted", "recomputed", "masks", "speculation"),
    *("slowed", "decode_inputs", "batch_wait", "compute", "encode", "send", "rest"),
)


@given(calls())
def test_the_parts_follow_each_other_and_add_up_to_the_total(event: HttpServed) -> None:
    parts = record_of(event, 0.0).parts()
    allowed = 1e-5 * max(event.duration_s, 1.0)
    assert sum(part.seconds for part in parts) == pytest.approx(event.duration_s, abs=allowed)
    at = 0.0
    for part in parts:
        assert part.begin_s == pytest.approx(at, abs=allowed)
        assert part.seconds >= -allowed or part.name == "speculation"
        at += part.seconds
    names = [part.name for part in parts]
    assert names == sorted(names, key=_NAMES.index)


@given(calls())
def test_a_call_of_which_every_stage_is_known_leaves_no_rest(event: HttpServed) -> None:
    seconds = {part.name: part.seconds for part in record_of(event, 0.0).parts()}
    accounted = event.end.engine.rest if event.end is not None and event.end.engine is not None else 0.0
    assert seconds.get("rest", 0.0) == pytest.approx(accounted, abs=2e-5 * max(event.duration_s, 1.0))


def test_the_record_of_every_route_that_generates_is_of_a_text() -> None:
    generates = {route.pattern for route in ROUTES if route.operation is not None and route.operation.generates}
    assert {"/v1/chat/completions", "/v1/completions", "/v1/messages"} < generates
    assert {pattern for pattern in generates if "/generate" in pattern} != set()
    assert {route for route in generates if not record_of(call(route=route), 0.0).is_text} == set()
    others = {route.pattern for route in ROUTES} - generates
    assert {route for route in others if record_of(call(route=route), 0.0).is_text} == set()


def test_every_part_of_an_engine_keeps_its_name() -> None:
    times = engine_times([number / 100 for number in range(1, 13)], num_steps=9)
    tokenized = 0.1
    event = call(timings=Timings(0.05, tokenized, 0.1, 0.2, tokenized + 0.78), engine=times, total=1.0)
    record = record_of(event, 0.0)
    seconds = record.seconds(record.numbers)
    for name in times.__struct_fields__[:-2]:
        assert seconds[name] == pytest.approx(getattr(times, name), abs=1e-6), name
    assert record.numbers.num_steps == 9


def test_the_wait_for_a_load_is_not_the_queue() -> None:
    event = call(timings=Timings(0.9, 0.91, 0.92, 0.93, 0.95), routing=Routing(load_s=0.5, restart_s=0.2))
    record = record_of(event, 0.0)
    seconds = record.seconds(record.numbers)
    assert seconds["load_wait"] == pytest.approx(0.7, abs=1e-6)
    assert seconds["queue"] == pytest.approx(0.18, abs=1e-6)


def test_a_call_that_never_left_the_queue_waited_until_its_end() -> None:
    record = record_of(call(timings=Timings(finished=1.0), status=503, outcome="refused"), 0.0)
    assert record.seconds(record.numbers)["queue"] == pytest.approx(0.98, abs=1e-6)


def test_a_record_takes_about_400_bytes() -> None:
    record = record_of(call(id="5f0c2d9be1a75f0c2d9be1a7", engine=EngineTimes(prefill=1.0)), 0.0)
    own = sys.getsizeof(record) + sys.getsizeof(record.id) + sys.getsizeof(record.packed)
    assert own <= 400, "the other names are shared with other records"


def test_the_trace_is_that_of_the_caller() -> None:
    trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
    assert record_of(call(trace=trace), 0.0).trace_id == "ab" * 16
    assert record_of(call(), 0.0).trace_id == ""


def test_counts_of_any_size_are_kept_within_32_bits() -> None:
    numbers = record_of(call(usage=Usage(2**80, -5, 7)), 0.0).numbers
    assert (numbers.prompt_tokens, numbers.completion_tokens, numbers.cached_tokens) == (2**32 - 1, 0, 7)
