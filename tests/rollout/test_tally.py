"""What is counted of the calls that end: each unit once, each of its bad events once, with the share of its chance."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest  # type: ignore[import-untyped]
from tests.tiers import THOROUGH

from inferd.events import Assigned, HttpServed
from inferd.rollout import tally as tally_module
from inferd.rollout.evidence import Count, added
from inferd.rollout.judge import judge
from inferd.rollout.plan import Guard, Plan, Step
from inferd.rollout.tally import BadEvent, Tally, is_bad
from inferd.types import End, Failure, Timings

ERRORS = Guard(kind="errors", max_ratio=2.0)
REPORTED = Guard(kind="reported", max_ratio=2.0)


def assigned(unit: bytes = b"", *, is_new: bool = False, share: float = 0.05, run: int = 1) -> Assigned:
    return Assigned(rollout="m:1:2", run=run, share=share, is_new=is_new, unit=unit)


def call(to: Assigned | None = None, status: int = 200, **given: Any) -> HttpServed:
    return HttpServed(request_id="r", method="POST", route="/x", status=status, duration_s=0.1, assigned=to, **given)


def ended(kind: str, outcome: Any = "failed", **given: Any) -> HttpServed:
    end = End(outcome, failure=Failure(kind, "said"))
    return call(None, 200, end=end, outcome=outcome, **given)


def test_a_unit_is_counted_once_and_is_bad_once() -> None:
    tally = Tally(1, (ERRORS,))
    news = [tally.ended(call(assigned(b"u", is_new=True), status)) for status in (200, 500, 500, 200, 503)]
    assert news == [False, True, False, False, False]
    batch = tally.take()
    assert batch.units == {("", 0.05): Count(0, 1)}
    assert batch.bad == [BadEvent("errors", 0.05, True, b"u")]
    assert tally.is_empty


def test_a_request_without_a_name_is_a_unit_of_its_own() -> None:
    tally = Tally(1, (ERRORS,))
    for is_new, status in [(False, 200), (False, 500), (True, 500), (True, 500)]:
        tally.ended(call(assigned(is_new=is_new), status))
    batch = tally.take()
    assert batch.units == {("", 0.05): Count(2, 2)}
    assert [(event.is_new, event.unit) for event in batch.bad] == [(False, b""), (True, b""), (True, b"")]


def test_what_no_chance_has_assigned_is_not_counted() -> None:
    tally = Tally(2, (ERRORS,))
    assert not tally.ended(call(None, 500))
    assert not tally.ended(call(assigned(run=1), 500)), "another run"
    assert tally.is_empty


def test_a_unit_that_has_moved_proves_nothing_and_the_others_keep_the_share_of_those_that_stayed() -> None:
    tally = Tally(1, (ERRORS,))
    for unit, is_new in [(b"moves", False), (b"stays", False), (b"early", True)]:
        tally.ended(call(assigned(unit, is_new=is_new)))
    for unit, is_new in [(b"moves", True), (b"stays", False), (b"early", True), (b"late", True)]:
        tally.ended(call(assigned(unit, is_new=is_new, share=0.25), 500))
    batch = tally.take()
    assert batch.units == {("", 0.05): Count(2, 1), ("", 0.25): Count(0, 1)}
    assert [(event.unit, event.is_new) for event in batch.bad] == [
        (b"stays", False),
        (b"early", True),
        (b"late", True),
    ]
    stayed = 0.05 / (0.05 + 0.75)
    assert [event.share for event in batch.bad] == pytest.approx([stayed, stayed, 0.25])


def test_the_share_of_units_that_stayed_is_theirs() -> None:
    """Of units that are drawn at 5 % and fail when the share is 25 %, whatever their version."""
    points = np.random.default_rng(3).random(20_000)
    tally = Tally(1, (ERRORS,))
    for index, point in enumerate(points):
        tally.ended(call(assigned(b"%d" % index, is_new=point >= 0.95)))
    for index, point in enumerate(points):
        tally.ended(call(assigned(b"%d" % index, is_new=point >= 0.75, share=0.25), 500))
        if index % 2000 == 0:
            found = tally.take().bad
            (share,) = {event.share for event in found} or {0.0625}
            assert share == pytest.approx(0.0625)
    kept = [point for point in points if not 0.75 <= point < 0.95]
    assert binomtest(sum(point >= 0.95 for point in kept), len(kept), 0.0625).pvalue > 0.001


@THOROUGH
def test_users_who_come_again_and_again_withdraw_no_version_that_is_alike() -> None:
    """Some of them always fail, others now and then, while the share grows and moves them to the new version."""
    random, runs, withdrawn = np.random.default_rng(21), 250, 0
    plan = Plan(model="m", stable="1", new="2", steps=(Step(share=1.0),), guards=(ERRORS,), alpha=0.05)
    for _ in range(runs):
        points = random.random(600)
        rates = np.where(random.random(600) < 0.05, 1.0, 0.02)
        tally, bad = Tally(1, (ERRORS,)), {"errors": dict[float, Count]()}
        is_worse = False
        for share in (0.05, 0.25, 0.5):
            for user in random.integers(0, 600, 900):
                is_new = bool(points[user] >= 1 - share)
                status = 500 if random.random() < rates[user] else 200
                if tally.ended(call(assigned(b"%d" % user, is_new=is_new, share=share), status)):
                    counts = bad["errors"] = added(bad["errors"], tally.bad_counts["errors"])
                    tally.take()
                    is_worse = is_worse or judge(plan, {"errors": counts}, {}).worse is not None
        withdrawn += is_worse
    assert binomtest(withdrawn, runs, plan.alpha, alternative="greater").pvalue > 0.001, withdrawn


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=60), st.integers(0, 60))
def test_what_could_not_be_stored_is_in_the_next_batch(events: list[tuple[int, bool, bool]], at: int) -> None:
    whole, parted = Tally(1, (ERRORS,)), Tally(1, (ERRORS,))
    for index, (unit, is_new, is_bad_one) in enumerate(events):
        event = call(assigned(b"%d" % unit, is_new=is_new), 500 if is_bad_one else 200)
        whole.ended(event)
        parted.ended(event)
        if index == at:
            parted.put_back(parted.take())
    first, second = whole.take(), parted.take()
    assert first.units == second.units
    assert Counter(first.bad) == Counter(second.bad)


def test_what_is_counted_while_a_batch_could_not_be_stored_is_kept_with_it() -> None:
    tally = Tally(1, (ERRORS,))
    tally.ended(call(assigned(b"a", is_new=True), 500))
    lost = tally.take()
    tally.ended(call(assigned(b"b"), 500))
    tally.put_back(lost)
    assert tally.bad_counts == {"errors": {0.05: Count(1, 1)}}
    batch = tally.take()
    assert [event.unit for event in batch.bad] == [b"a", b"b"]
    assert batch.units == {("", 0.05): Count(1, 1)}


def test_other_guards_count_the_units_that_earlier_ones_had_counted() -> None:
    differs = Guard(kind="differs", max_fraction=0.02)
    tally = Tally(1, (ERRORS, differs))
    to, copied = assigned(b"u", is_new=True), assigned(b"u", share=0.0)
    for guards in ((ERRORS, differs), (Guard(kind="errors", max_ratio=3.0), differs)):
        tally.watch(guards)
        assert tally.ended(call(to, 500))
        assert not tally.ended(call(to, 500))
        assert tally.compared(copied, differs=True)
        assert not tally.compared(copied, differs=True)
    batch = tally.take()
    assert batch.units == {("", 0.05): Count(0, 1), ("copies", 0.0): Count(0, 1)}, "a unit is one all the same"
    assert [event.guard for event in batch.bad] == ["errors", "differs", "errors", "differs"]


def test_the_memory_of_units_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally_module, "MAX_UNITS", 10)
    monkeypatch.setattr(tally_module, "MAX_BAD", 30)
    tally = Tally(1, (ERRORS,))
    for number in range(100):
        tally.ended(call(assigned(b"%d" % number), 500))
    assert len(tally._known) == 10
    batch = tally.take()
    assert (len(batch.bad), batch.units) == (30, {("", 0.05): Count(100, 0)})


def test_a_report_is_a_bad_event_of_its_unit_once() -> None:
    tally = Tally(1, (ERRORS, REPORTED))
    tally.ended(call(assigned(b"u", is_new=True), 500))
    assert tally.reported(assigned(b"u", is_new=True))
    assert not tally.reported(assigned(b"u", is_new=True))
    assert [event.guard for event in tally.take().bad] == ["errors", "reported"]
    assert not Tally(1, (ERRORS,)).reported(assigned(b"u")), "nothing is watched"


@pytest.mark.parametrize(
    ("event", "errors", "invalid"),
    [
        (call(status=200), False, False),
        (call(status=500), True, False),
        (call(status=503), True, False),
        (call(status=400), False, True),
        (call(status=422), False, True),
        (call(status=429), False, False),
        (call(status=499), False, False),
        (ended("worker_died"), True, False),
        (ended("internal"), True, False),
        (ended("invalid_request"), False, True),
        (ended("context_length_exceeded"), False, True),
        (ended("deadline_exceeded"), False, False),
        (ended("cancelled", "cancelled"), False, False),
        (call(status=200, rescued_from="worker_died"), True, False),
        (call(status=200, rescued_from="invalid_request"), False, True),
    ],
)
def test_errors_are_the_server_s_and_invalid_is_what_the_version_refuses(
    event: HttpServed, errors: bool, invalid: bool
) -> None:
    assert is_bad(ERRORS, event) == errors
    assert is_bad(Guard(kind="invalid", max_ratio=2.0), event) == invalid


@pytest.mark.parametrize(
    ("event", "total", "first"),
    [
        (call(outcome="done", timings=Timings(first_token=0.1, finished=0.2)), False, False),
        (call(outcome="done", timings=Timings(first_token=0.1, finished=0.4)), True, False),
        (call(outcome="done", timings=Timings(first_token=0.4, finished=0.5)), True, True),
        (ended("worker_died", timings=Timings(first_token=0.1, finished=0.5)), False, False),
        (ended("deadline_exceeded", timings=Timings(finished=0.5)), True, True),
        (ended("cancelled", "cancelled", timings=Timings(finished=0.2)), False, False),
        (ended("cancelled", "cancelled", timings=Timings(first_token=0.1, finished=0.5)), True, False),
        (call(status=503), False, False),
    ],
)
def test_slow_is_over_the_objective_also_where_the_client_gave_up(event: HttpServed, total: bool, first: bool) -> None:
    assert is_bad(Guard(kind="slow", max_ratio=2.0, over_s=0.3), event) == total
    assert is_bad(Guard(kind="slow", max_ratio=2.0, first_over_s=0.3), event) == first


@given(st.lists(st.tuples(st.sampled_from([b"", b"a", b"b", b"c"]), st.booleans()), max_size=30))
def test_a_copied_unit_counts_once_and_is_bad_once_when_one_of_its_copies_differs(
    copies: list[tuple[bytes, bool]],
) -> None:
    tally = Tally(1, (Guard(kind="differs", max_fraction=0.02),))
    news = []
    for unit, differs in copies:
        assigned = Assigned(rollout="m:1:2", run=1, share=0.0, is_new=False, unit=unit)
        news.append(tally.compared(assigned, differs=differs))
    named = {unit for unit, _ in copies if unit}
    bad = {unit for unit, differs in copies if unit and differs}
    alone = [differs for unit, differs in copies if not unit]
    total = len(named) + len(alone)
    assert tally.units_of("copies") == ({0.0: Count(new=total)} if total else {})
    assert tally.units_of("") == {}, "copies are no units of the versions"
    batch = tally.take()
    assert len(batch.bad) == sum(news) == len(bad) + sum(alone)
    assert {(event.guard, event.is_new) for event in batch.bad} <= {("differs", True)}


def test_copies_of_another_run_or_without_a_guard_are_no_bad_events() -> None:
    assigned = Assigned(rollout="m:1:2", run=1, share=0.0, is_new=False, unit=b"a")
    tally = Tally(2, (Guard(kind="differs", max_fraction=0.02),))
    assert not tally.compared(assigned, differs=True)
    assert tally.is_empty
    tally = Tally(1, (Guard(kind="errors", max_fraction=0.02),))
    assert not tally.compared(assigned, differs=True)
    assert tally.take().bad == []


def test_a_refusal_is_a_bad_event_of_its_unit() -> None:
    guard = Guard(kind="refused", max_ratio=2.0)
    for is_refusal in (True, False):
        assigned = Assigned(rollout="m:1:2", run=1, share=0.5, is_new=True, unit=b"", is_refusal=is_refusal)
        assert is_bad(guard, call(assigned)) == is_refusal
    assert not is_bad(guard, call())
