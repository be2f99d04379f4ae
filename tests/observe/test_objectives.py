"""Objectives are counted: which requests count for one, and which of them met it."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.observe.test_observer import ended, read, samples

from inferd import errors
from inferd.config import ObjectivesConfig
from inferd.errors import CLIENT_ERRORS, InferdError
from inferd.events import Event, RefusalReason, RequestRefused
from inferd.gateway.errors import TABLE
from inferd.observe import Observer
from inferd.observe import metrics as m
from inferd.types import Timings, Usage

ALL = ObjectivesConfig(availability=0.999, ttft_ms=500.0, tpot_ms=100.0, total_ms=2000.0, total_fraction=0.9)


def an_observer(objectives: ObjectivesConfig = ALL) -> Observer:
    return Observer(models=("tiny", "quiet"), objectives={"tiny": objectives}, stream=io.StringIO())


def counted(*events: Event, objectives: ObjectivesConfig = ALL) -> dict[str, tuple[float, float]]:
    """For each objective that requests counted for: how many met it, and how many there were."""
    observer = an_observer(objectives)
    try:
        for event in events:
            observer.emit(event)
        return tallies(observer)
    finally:
        observer.close()


def tallies(observer: Observer) -> dict[str, tuple[float, float]]:
    found = samples(observer)
    pairs = {
        objective: tuple(
            found.get((name, frozenset({("model", "tiny"), ("objective", objective)})), 0.0)
            for name in ("inferd_objective_good_total", "inferd_objective_requests_total")
        )
        for objective in m.OBJECTIVES
    }
    return {objective: (good, requests) for objective, (good, requests) in pairs.items() if requests}


def answered(first_token: float, finished: float, tokens: int = 11, **changes: Any) -> Event:
    timings = Timings(dispatched=0.0, scheduled=0.0, first_token=first_token, finished=finished)
    return ended(timings=timings, usage=Usage(prompt_tokens=1, completion_tokens=tokens), **changes)


def test_a_request_in_time_meets_every_objective() -> None:
    assert counted(answered(0.5, 1.5)) == dict.fromkeys(m.OBJECTIVES, (1, 1))


@pytest.mark.parametrize(
    ("first_token", "finished", "missed"),
    [(0.51, 1.0, "ttft"), (0.25, 1.3, "tpot"), (0.5, 2.01, "total tpot"), (1.5, 2.5, "ttft total")],
)
def test_a_slow_request_misses_the_objectives_that_it_is_too_slow_for(
    first_token: float, finished: float, missed: str
) -> None:
    found = counted(answered(first_token, finished))
    assert {name for name, (good, _) in found.items() if not good} == set(missed.split())
    assert {requests for _, requests in found.values()} == {1}


def test_a_failure_of_the_server_counts_for_availability_and_improves_no_duration() -> None:
    failed = ended(outcome="failed", error_kind="worker_died", timings=Timings(finished=0.1))
    refused = ended(outcome="refused", error_kind="overloaded", timings=Timings(finished=0.1))
    assert counted(failed, refused) == {"availability": (0, 2)}


@pytest.mark.parametrize("kind", CLIENT_ERRORS)
def test_an_error_of_the_client_counts_for_nothing(kind: str) -> None:
    assert counted(ended(outcome="failed", error_kind=kind, timings=Timings(finished=0.1))) == {}


def test_the_errors_of_clients_are_those_that_http_answers_below_500() -> None:
    kinds = {kind.kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, InferdError)}
    below = {kind for kind in kinds if TABLE[kind].status < 500}
    assert set(CLIENT_ERRORS) == below | {"cancelled"}, "a cancelled request has no client left to answer"


def test_a_client_that_leaves_before_the_limit_is_no_evidence_and_after_it_is() -> None:
    def left(after_s: float, first_token: float | None = None) -> Event:
        return ended(outcome="cancelled", timings=Timings(first_token=first_token, finished=after_s))

    assert counted(left(0.4)) == {}
    assert counted(left(0.6)) == {"ttft": (0, 1)}
    assert counted(left(3.0)) == {"ttft": (0, 1), "total": (0, 1)}
    assert counted(left(3.0, first_token=0.1)) == {"ttft": (1, 1), "total": (0, 1)}
    overdue = ended(outcome="failed", error_kind="deadline_exceeded", timings=Timings(finished=0.6))
    assert counted(overdue) == {"ttft": (0, 1)}


def test_time_per_token_is_of_single_answers_of_two_tokens_or_more() -> None:
    assert "tpot" not in counted(answered(0.1, 0.2, tokens=1))
    assert "tpot" not in counted(answered(0.1, 0.2, n=2))


@pytest.mark.parametrize("reason", m.REFUSALS)
def test_a_refusal_counts_unless_a_limit_of_the_tenant_is_its_reason(reason: RefusalReason) -> None:
    is_tenants = reason.startswith("quota_") or reason == "tenant_queue_full"
    found = counted(RequestRefused(model="tiny", reason=reason))
    assert found == ({} if is_tenants else {"availability": (0, 1)})


def test_a_request_that_is_refused_after_it_waited_counts_once() -> None:
    refused = RequestRefused(model="tiny", reason="queue_timeout", was_queued=True)
    end = ended(outcome="refused", error_kind="overloaded", timings=Timings(finished=0.1))
    assert counted(refused, end) == {"availability": (0, 1)}


def test_the_series_of_an_objective_exist_before_the_first_request_and_others_do_not() -> None:
    observer = an_observer(ObjectivesConfig(ttft_ms=250.0))
    labels = {"model": "tiny", "objective": "ttft"}
    assert read(observer, "inferd_objective_requests_total", **labels) == 0
    assert read(observer, "inferd_objective_good_total", **labels) == 0
    assert read(observer, "inferd_objective_target_ratio", **labels) == 0.95
    assert read(observer, "inferd_objective_limit_seconds", **labels) == 0.25
    named = {labels for name, labels in samples(observer) if name.startswith("inferd_objective_")}
    assert named == {frozenset(labels.items())}
    observer.close()


def test_another_objective_holds_for_the_requests_after_it() -> None:
    observer = an_observer(ObjectivesConfig(ttft_ms=100.0))
    observer.emit(answered(0.2, 0.3))
    observer.configure({"tiny": 1}, access_log=False, objectives={"tiny": ObjectivesConfig(ttft_ms=300.0)})
    observer.emit(answered(0.2, 0.3))
    assert tallies(observer) == {"ttft": (1, 2)}
    observer.configure({"tiny": 1}, access_log=False, objectives={"tiny": ObjectivesConfig()})
    observer.emit(answered(0.2, 0.3))
    assert tallies(observer) == {"ttft": (1, 2)}, "the counters of a removed objective stay"
    assert not [name for name, _ in samples(observer) if name.startswith(("inferd_objective_t", "inferd_objective_l"))]
    observer.close()


OUTCOMES = st.sampled_from(["done", "failed", "cancelled", "refused"])
KINDS = st.sampled_from([None, "overloaded", "internal", "invalid_request", "deadline_exceeded"])
SECONDS = st.none() | st.floats(0.0, 5.0)


@given(st.lists(st.tuples(OUTCOMES, KINDS, SECONDS, SECONDS, st.integers(0, 20)), max_size=20))
def test_good_requests_are_requests(requests: list[tuple[str, str | None, float | None, float | None, int]]) -> None:
    events = [
        ended(
            outcome=outcome,
            error_kind=kind if outcome != "done" else None,
            timings=Timings(first_token=first, finished=finished),
            usage=Usage(completion_tokens=tokens),
        )
        for outcome, kind, first, finished, tokens in requests
    ]
    for good, all_of_them in counted(*events).values():
        assert 0 <= good <= all_of_them <= len(events)
