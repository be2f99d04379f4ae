"""Spans of any ended call, read with OpenTelemetry's messages."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span
from tests.observe.traces.collector import attributes

from inferd.events import HttpServed
from inferd.gateway.operations import CHAT, PREDICT
from inferd.observe.traces.conventions import PARTS, TABLE
from inferd.observe.traces.otlp import Doubles, Integers, attribute, context_fields, span_field
from inferd.observe.traces.spans import spans_of
from inferd.types import End, EngineTimes, HandOver, Routing, Timings, Usage

TRACE_ID, SPAN_ID, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "b7ad6b7169203331"


def read(fields: list[bytes]) -> list[Span]:
    return list(ScopeSpans.FromString(b"".join(fields)).spans)


def alone(told: bytes) -> dict[str, object]:
    """The attributes of a span that has these."""
    context = context_fields(bytes.fromhex(TRACE_ID), "", 1)
    (span,) = read([span_field(context, bytes.fromhex(SPAN_ID), 1, 1.0, 2.0, told)])
    return attributes(span)


texts = st.text(st.characters(codec="utf-8"), max_size=300)
keys = st.text(st.characters(codec="ascii", categories=["L"]), min_size=1, max_size=100)


@given(keys, st.integers(-(1 << 63), (1 << 63) - 1), st.floats(allow_nan=False), texts, st.booleans(), st.lists(texts))
def test_every_value_of_an_attribute_arrives(
    key: str, number: int, share: float, text: str, is_so: bool, words: list[str]
) -> None:
    assert alone(Integers(key).of(number)) == {key: number}
    assert alone(Doubles(key).of(share)) == {key: share}
    for value in (number, share, text, is_so, words):
        found = alone(attribute(key, value))
        assert found == {key: value}
        assert type(found[key]) is type(value)


seconds = st.floats(0.0, 1e5)
maybe = st.none() | seconds
counts = st.integers(0, 1 << 40)
engines = st.builds(
    EngineTimes, **{part: st.just(0.0) | st.floats(-10.0, 1e4) for part in PARTS if part != "preempted"},
    preempted=st.just(0.0) | seconds, num_steps=counts,
)  # fmt: skip
routings = st.builds(
    Routing, ahead=counts, ahead_of_class=counts, ahead_tenant=texts, ahead_of_tenant=counts, load_s=seconds,
    restart_s=seconds, lost_s=st.just(0.0) | seconds, attempts=counts, worker_deaths=counts, was_hedged=st.booleans(),
    was_remote=st.booleans(), replica=st.none() | counts,
)  # fmt: skip
timings = st.builds(
    Timings, dispatched=maybe, tokenized=maybe, scheduled=maybe, first_token=maybe, finished=maybe,
    steps_s=st.none() | st.dictionaries(st.text("abc", min_size=1), seconds, max_size=3),
)  # fmt: skip
usages = st.builds(Usage, prompt_tokens=counts, completion_tokens=counts, cached_tokens=counts)


@st.composite
def ended_calls(draw: st.DrawFn) -> HttpServed:
    times, usage = draw(timings), draw(usages)
    end = End("done", usage, times, None, draw(counts), draw(st.none() | engines), draw(st.none() | routings))
    is_reached = draw(st.booleans())
    return HttpServed(
        request_id=draw(texts),
        method="POST",
        route="/v1/chat/completions",
        operation=draw(st.sampled_from((CHAT, PREDICT))),
        status=draw(st.sampled_from((200, 400, 499, 503))),
        duration_s=draw(seconds),
        request_bytes=draw(counts),
        response_bytes=draw(counts),
        model=draw(st.none() | texts),
        tenant=draw(texts),
        key_id=draw(texts),
        stream=draw(st.booleans()),
        outcome=draw(st.none() | st.sampled_from(("done", "failed", "cancelled", "refused"))),
        finish_reasons=tuple(draw(st.lists(st.sampled_from(("stop", "length")), max_size=3))),
        error_code=draw(st.none() | texts),
        usage=usage if is_reached else None,
        timings=times if is_reached else None,
        end=end if is_reached else None,
        started_at=draw(seconds),
        received_s=draw(maybe),
        submitted_s=draw(maybe),
        blocked_s=draw(seconds),
        trace=f"00-{TRACE_ID}-{SPAN_ID}-03",
        trace_parent=draw(st.sampled_from(("", CALLER))),
        trace_state=draw(st.sampled_from(("", "congo=t61"))),
        priority=draw(st.integers(-10, 10)),
    )


@given(ended_calls())
def test_the_spans_of_any_call_are_a_tree_within_its_time(event: HttpServed) -> None:
    root, *below = read(spans_of(event, 1.7e9))
    assert (root.trace_id.hex(), root.span_id.hex()) == (TRACE_ID, SPAN_ID)
    assert root.parent_span_id.hex() == event.trace_parent
    assert root.flags == (0x303 if event.trace_parent else 0x103)
    ids = {root.span_id}
    begin, end = root.start_time_unix_nano, root.end_time_unix_nano
    assert abs(end - begin - event.duration_s * 1e9) < 2000  # a double has no finer time
    for span in below:
        assert (span.trace_id, span.kind, span.flags) == (root.trace_id, Span.SPAN_KIND_INTERNAL, 0x103)
        assert span.trace_state == root.trace_state == event.trace_state
        assert span.parent_span_id in ids
        assert span.span_id not in ids
        ids.add(span.span_id)
        assert begin <= span.start_time_unix_nano <= span.end_time_unix_nano <= end


KINDS = {"string": str, "int": int, "double": float, "boolean": bool, "string[]": list}


@given(ended_calls())
def test_the_attributes_of_any_call_are_of_the_table_and_what_it_was(event: HttpServed) -> None:
    spans = read(spans_of(event, 0.0))
    types = {row.key: KINDS[row.type] for row in TABLE}
    for span in spans:
        assert len({pair.key for pair in span.attributes}) == len(span.attributes)
        assert all(type(value) is types[key] for key, value in attributes(span).items())
    told = attributes(spans[0])
    assert told["gen_ai.request.id"] == event.request_id[:256]
    assert told.get("gen_ai.request.model") == (None if event.model is None else event.model[:256])
    assert told.get("inferd.tenant", "") == event.tenant[:256]
    assert (told["http.response.status_code"], told["inferd.stream"]) == (event.status, event.stream)
    assert told["http.request.body.size"] == event.request_bytes
    is_error = event.status >= 500 or event.outcome == "failed"
    assert spans[0].status.code == (2 if is_error else 0)
    assert ("error.type" in told) == is_error
    usage, times, end = event.usage, event.timings, event.end
    if usage is not None:
        assert told["gen_ai.usage.prompt_tokens"] == told["gen_ai.usage.input_tokens"] == usage.prompt_tokens
        assert told["gen_ai.usage.completion_tokens"] == told["gen_ai.usage.output_tokens"] == usage.completion_tokens
    else:
        assert not any("usage" in key for key in told)
    if times is not None and times.first_token is not None and times.finished is not None:
        assert told["gen_ai.latency.time_in_model_decode"] == times.finished - times.first_token
    by_name = {span.name: attributes(span) for span in spans[1:]}
    if end is not None and end.engine is not None:
        for name, parts in {
            "prefill": ("prefill", "prefill_shared"),
            "decode": ("decode", "crowding", "slowed"),
        }.items():
            for part in parts:
                if name in by_name:
                    assert by_name[name].get(f"inferd.part.{part}_s", 0.0) == getattr(end.engine, part)


def test_calls_that_differ_in_one_field_differ_in_their_spans() -> None:
    """Fields that many calls have in common are written once."""
    base = {"request_id": "r", "method": "POST", "route": "/a", "operation": CHAT, "status": 200, "duration_s": 1.0}
    trace = f"00-{TRACE_ID}-{SPAN_ID}-01"
    changes: list[dict[str, object]] = [
        {}, {"method": "PUT"}, {"route": "/b"}, {"operation": PREDICT}, {"status": 400}, {"model": "m"},
        {"model": "n"}, {"tenant": "t"}, {"key_id": "k"}, {"outcome": "done"}, {"outcome": "failed"},
        {"outcome": "failed", "error_code": "oom"}, {"finish_reasons": ("stop",)}, {"stream": True}, {"priority": 5},
    ]  # fmt: skip
    found = []
    for change in changes * 2:
        (span,) = read(spans_of(HttpServed(**{**base, "trace": trace, **change}), 0.0))  # type: ignore[arg-type]
        found.append(span.SerializeToString(deterministic=True))
    assert found[: len(changes)] == found[len(changes) :]
    assert len(set(found)) == len(changes)


@pytest.mark.parametrize("seconds", [0.0, 1.0, 1.8e9, 1.7e9 + 1e-6])
def test_times_are_nanoseconds(seconds: float) -> None:
    context = context_fields(bytes.fromhex(TRACE_ID), "", 1)
    (span,) = read([span_field(context, bytes.fromhex(SPAN_ID), 1, seconds, math.nextafter(seconds, 2e9), b"")])
    assert abs(span.start_time_unix_nano - round(seconds * 1e9)) <= 1


def stages_of(timings: Timings, **routing: float) -> dict[str, tuple[float, float]]:
    """By their names, of a call of ten seconds that was received after one and submitted after two."""
    way = Routing(load_s=routing.get("load_s", 0.0), lost_s=routing.get("lost_s", 0.0))
    if "hand_over_s" in routing:
        way = msgspec.structs.replace(way, hand_over=HandOver("", seconds=routing["hand_over_s"]))
    event = HttpServed(
        request_id="r", method="POST", route="/a", operation=CHAT, status=200, duration_s=10.0, received_s=1.0,
        submitted_s=2.0, timings=timings, end=End("done", timings=timings, routing=way),
        trace=f"00-{TRACE_ID}-{SPAN_ID}-01",
    )  # fmt: skip
    spans = read(spans_of(event, 0.0))[1:]
    return {span.name: (span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9) for span in spans}


def test_the_stages_of_a_call_follow_each_other_and_none_is_longer_than_what_is_left() -> None:
    before = {"receive": (0.0, 1.0), "admission": (1.0, 2.0)}
    whole = Timings(dispatched=4.0, tokenized=6.0, scheduled=7.0, first_token=8.0, finished=9.0)
    assert stages_of(whole, load_s=1.0, lost_s=0.5, hand_over_s=0.5) == before | {
        "load_wait": (2.0, 3.0),
        "queue": (3.0, 4.0),
        "lost_attempts": (4.0, 4.5),
        "hand_over": (4.5, 5.0),
        "tokenize": (5.0, 6.0),
        "schedule_wait": (6.0, 7.0),
        "prefill": (7.0, 8.0),
        "decode": (8.0, 9.0),
        "send": (9.0, 10.0),
    }
    assert stages_of(whole, load_s=99.0, lost_s=99.0) == before | {
        "load_wait": (2.0, 4.0),
        "lost_attempts": (4.0, 9.0),
        "send": (9.0, 10.0),
    }
    assert stages_of(whole, lost_s=1.0, hand_over_s=99.0) == before | {
        "queue": (2.0, 4.0),
        "lost_attempts": (4.0, 5.0),
        "hand_over": (5.0, 9.0),
        "send": (9.0, 10.0),
    }
    assert stages_of(Timings(dispatched=4.0, tokenized=6.0)) == before | {
        "queue": (2.0, 4.0),
        "tokenize": (4.0, 6.0),
        "schedule_wait": (6.0, 10.0),
    }
    assert stages_of(Timings(), load_s=3.0) == before | {"load_wait": (2.0, 5.0), "queue": (5.0, 10.0)}
