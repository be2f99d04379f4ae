"""What a reader learns about a call: its sentence and causes, and never more of other tenants than classes and counts."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.observe.why.calls import call, calls, engine_times

from inferd.events import HttpServed
from inferd.observe.why.causes import NAMES
from inferd.observe.why.explain import Explainer, RecordReport
from inferd.observe.why.pressure import NoPressure, Strain
from inferd.types import EngineTimes, Routing, Timings, Usage

_SECRET = "tenant-with-a-secret-name"


class Strained(NoPressure):
    def __init__(self, strain: Strain) -> None:
        self.strain = strain

    def between(self, begin: float, end: float) -> Strain:
        return self.strain


def explained(
    event: HttpServed,
    *beside: HttpServed,
    usual: HttpServed | None = None,
    strain: Strain = Strain(),
    viewer: str | None = None,
) -> RecordReport:
    """What is said of a call, among calls beside it and behind twenty usual ones."""
    explainer = Explainer(pressure=Strained(strain))
    for number in range(20):
        if usual is not None:
            explainer.recorder.served(msgspec.structs.replace(usual, request_id=f"usual-{number}", started_at=-1000.0))
    for other in sorted((*beside, event), key=lambda one: one.started_at + one.duration_s):
        explainer.recorder.served(other)
    (report,) = explainer.find(event.request_id, viewer)
    return report


def in_engine(total: float, *, id: str = "r", **seconds: float) -> HttpServed:
    """A call of ``total`` seconds, of which the engine spent some on its parts, and the rest on decoding."""
    inside = total - 0.05
    times = msgspec.structs.replace(EngineTimes(), **seconds, decode=inside - sum(seconds.values()))
    return call(id=id, total=total, timings=Timings(0.03, 0.04, 0.05, 0.1, total - 0.01), engine=times)


def test_the_sentence_of_the_issue() -> None:
    usual = in_engine(1.2)
    times = EngineTimes(decode=1.0, preempted=0.4)
    slow = call(
        total=4.06,
        submitted=0.02,
        timings=Timings(2.62, 2.64, 2.65, 2.7, 4.05),
        engine=times,
        routing=Routing(ahead=31, ahead_of_class=31, ahead_tenant="team-b", ahead_of_tenant=31, attempts=1, replica=0),
        preemptions=1,
    )
    assert explained(slow, usual=usual).sentence == (
        "4.1 s, usually 1.2 s: 2.6 s in the queue behind 31 requests of tenant team-b (class normal); "
        "0.4 s preempted once."
    )
    to_tenant = explained(slow, usual=usual, viewer="team-a")
    assert "behind 31 requests of another tenant (class normal)" in to_tenant.sentence
    assert [cause.name for cause in to_tenant.causes] == ["queue_other_tenant", "preemption"]


def test_the_seconds_of_generating_are_what_it_took_with_guessed_tokens() -> None:
    said = explained(in_engine(1.0, speculation=-1.0, prefill=0.1))
    assert said.sentence.startswith("1 s: 0.85 s generating"), said.sentence


def test_a_usual_call_has_no_cause_and_its_longest_parts_are_named() -> None:
    usual = in_engine(1.0)
    report = explained(in_engine(1.02), usual=usual)
    assert report.causes == []
    assert report.cause is None
    assert report.sentence == "1 s, usually 1 s: 0.97 s generating 50 tokens."


def test_a_failed_call_says_so() -> None:
    event = call(total=0.5, timings=Timings(finished=0.5), status=503, outcome="refused")
    event = msgspec.structs.replace(event, error_code="queue_timeout")
    assert explained(event).sentence.startswith(
        "0.5 s until it failed (status 503, queue_timeout): 0.48 s in the queue"
    )


def _beside(count: int, **options: object) -> list[HttpServed]:
    return [call(id=f"o{n}", tenant="team-b", total=2.0, at=99.5, **options) for n in range(count)]  # type: ignore[arg-type]


_LONG_PROMPT = call(
    id="long", tenant=_SECRET, usage=Usage(5000, 1), total=1.5, at=99.8, timings=Timings(0.03, 0.1, 0.2, 1.2, 1.4)
)
_LOST = Routing(attempts=2, lost_s=0.6, replica=1)


@pytest.mark.parametrize(
    ("cause", "report"),
    [
        ("long_neighbour_prefill", explained(in_engine(1.5, others_prefill=0.9), _LONG_PROMPT, usual=in_engine(0.6))),
        ("crowding", explained(in_engine(1.5, crowding=0.9), *_beside(5), usual=in_engine(0.6))),
        ("batch_job", explained(in_engine(1.5, crowding=0.9), *_beside(5, priority=1), usual=in_engine(0.6))),
        ("preemption", explained(in_engine(1.5, preempted=0.5, recomputed=0.4), usual=in_engine(0.6))),
        ("slow_steps", explained(in_engine(1.5, slowed=0.9), usual=in_engine(0.6))),
        (
            "stolen_cpu",
            explained(in_engine(1.5, slowed=0.9), usual=in_engine(0.6), strain=Strain(taken_share=0.6)),
        ),
        ("stolen_cpu", explained(in_engine(1.5, slowed=0.9), usual=in_engine(0.6), strain=Strain(steal_share=0.3))),
        (
            "throttled_device",
            explained(in_engine(1.5, slowed=0.9), usual=in_engine(0.6), strain=Strain(throttled=("thermal",))),
        ),
        ("cold_load", explained(call(timings=Timings(0.7, 0.8, 0.85, 0.9, 0.95), routing=Routing(load_s=0.6)))),
        ("worker_restart", explained(call(timings=Timings(0.7, 0.8, 0.85, 0.9, 0.95), routing=Routing(restart_s=0.6)))),
        ("retry", explained(call(timings=Timings(0.03, 0.7, 0.75, 0.8, 0.99), engine=EngineTimes(), routing=_LOST))),
        (
            "failover",
            explained(
                call(timings=Timings(0.03, finished=0.9), routing=msgspec.structs.replace(_LOST, was_remote=True))
            ),
        ),
        ("slow_reader", explained(call(total=3.0, blocked=1.9))),
        ("slow_upload", explained(call(total=3.0, received=2.0, submitted=2.01, timings=None), usual=call())),
        (
            "batch_window",
            explained(call(route="/v2/models/{model}/infer", timings=Timings(0.03, 0.04, 0.9, 0.92, 0.95))),
        ),
        (
            "crowding",
            explained(
                call(route="/v2/models/{model}/infer", timings=Timings(0.03, 0.04, 0.9, 0.92, 0.95, behind_s=0.85))
            ),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_first_cause_is_the_injected_one(cause: str, report: RecordReport) -> None:
    assert report.cause == cause, report.sentence
    assert cause in NAMES


@settings(max_examples=60)
@given(
    calls(),
    st.lists(st.tuples(calls(), st.sampled_from((_SECRET, "team-a"))), max_size=8),
    st.sampled_from((Strain(), Strain(taken_share=0.5), Strain(throttled=("power",)))),
)
def test_a_tenant_reads_no_name_and_no_id_of_another(
    event: HttpServed, others: list[tuple[HttpServed, str]], strain: Strain
) -> None:
    assert event.end is not None
    routing = Routing(ahead=9, ahead_of_class=9, ahead_of_tenant=9, ahead_tenant=_SECRET)
    event = msgspec.structs.replace(event, end=msgspec.structs.replace(event.end, routing=routing))
    explainer = Explainer(pressure=Strained(strain))
    for number, (other, tenant) in enumerate(others):
        id = f"{tenant}-{number}"
        explainer.recorder.served(msgspec.structs.replace(other, request_id=id, tenant=tenant, key_id=tenant))
    explainer.recorder.served(event)
    (report,) = explainer.find("r", "team-a")
    shown = msgspec.json.encode([report, *explainer.select("team-a", limit=100)]).decode()
    assert _SECRET not in shown
    assert explainer.find(f"{_SECRET}-0", "team-a") == []
    assert all(line.tenant == "team-a" for line in explainer.select("team-a", tenant=_SECRET))


@given(calls(), st.lists(calls(), max_size=5))
@settings(max_examples=60)
def test_causes_never_explain_more_than_the_call_took(event: HttpServed, others: list[HttpServed]) -> None:
    beside = [msgspec.structs.replace(other, request_id=f"o{n}") for n, other in enumerate(others)]
    report = explained(event, *beside)
    claimed = sum(cause.seconds for cause in report.causes)
    saved = -sum(part.seconds for part in report.parts if part.seconds < 0)
    assert claimed <= (report.total_s + saved) * 1.0001 + 1e-6
    assert [cause.seconds for cause in report.causes] == sorted((c.seconds for c in report.causes), reverse=True)
    assert all(cause.seconds >= 0.05 * report.total_s for cause in report.causes)
    assert not report.causes or report.causes[0].seconds >= 0.1 * report.total_s


def test_nothing_is_usual_before_eight_calls() -> None:
    explainer = Explainer()
    for number in range(9):
        explainer.recorder.served(call(id=f"r{number}", engine=engine_times([0.05] * 12, 3)))
        (report,) = explainer.find(f"r{number}", None)
        assert (report.usual_s is None) == (number < 7), number


def test_an_incident_does_not_become_usual() -> None:
    explainer = Explainer()
    explainer.usual._random = random.Random(7).random
    for number in range(600):
        explainer.recorder.served(call(id=f"r{number}", total=1.0))
    for number in range(200):
        explainer.recorder.served(call(id=f"s{number}", total=9.0))
    (report,) = explainer.find("s199", None)
    assert report.usual_s == pytest.approx(1.0, rel=0.1)


def test_the_id_of_an_answer_finds_its_request() -> None:
    explainer = Explainer()
    explainer.recorder.served(call(id="0123456789abcdef01234567"))
    explainer.recorder.served(call(id="my-own-id"))
    assert explainer.find("chatcmpl-0123456789abcdef01234567", None)
    assert explainer.find("chatcmpl-my-own-id-0123456789ab", None)[0].id == "my-own-id"
    assert explainer.find("chatcmpl-other", None) == []


def test_probes_and_pages_are_no_requests() -> None:
    explainer = Explainer()
    for route, status in (("/health", 200), ("/metrics", 401), ("unmatched", 404), ("/admin/requests/{id}", 404)):
        explainer.recorder.served(call(model=None, route=route, status=status, timings=None))
    assert explainer.select(None) == []
    explainer.recorder.served(call(model=None, status=400, timings=None, outcome="refused"))
    assert len(explainer.select(None, order="errors")) == 1
