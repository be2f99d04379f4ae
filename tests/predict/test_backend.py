"""Every request that a predictive worker is given ends once, rightly, whatever happens to the others."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.predict.fake_runtime import BAD, POISON, REFUSED, Counter, Doubler, Driven, info, numbers, request

from inferd import clock
from inferd.errors import InferdError, InvalidRequest
from inferd.predict import backend as backend_module
from inferd.predict.batcher import Batcher, Limits
from inferd.predict.runtime import Item, Result
from inferd.types import End, Output

now = 100.0


@pytest.fixture(autouse=True)
def still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "now", lambda: now)


def backend(runtime: Doubler | None = None, **limits: object) -> Driven:
    chosen = Limits(**{"max_rows": 4, "max_delay_s": 0.0, **limits})  # type: ignore[arg-type]
    return Driven(runtime or Doubler(), Batcher(chosen), info(chosen.max_rows), codecs=numbers)


def run(backend: Driven) -> list[Output]:
    """Everything that is told until there is nothing more to do."""
    outputs: list[Output] = []
    while (due := backend.due(now)) is not None:
        assert due == now
        outputs += backend.step(now)[0]
    return outputs


def ends(outputs: list[Output]) -> dict[str, End]:
    found = {output.request_id: output.end for output in outputs if output.end is not None}
    assert len(found) == sum(output.end is not None for output in outputs), "a request ended twice"
    return found


def answers(outputs: list[Output]) -> dict[str, list[int]]:
    return {
        output.request_id: msgspec.json.decode(output.prediction.body)
        for output in outputs
        if output.prediction is not None
    }


def test_a_version_that_is_being_replaced_answers_for_no_other() -> None:
    made = backend()
    for name, version in (("any", ""), ("this", "1"), ("other", "2")):
        made.submit(msgspec.structs.replace(request(name, 1), version=version), now)
    found = ends(run(made))
    assert (found["any"].outcome, found["this"].outcome) == ("done", "done")
    failure = found["other"].failure
    assert failure is not None
    assert failure.kind == "unavailable"
    assert "Version 2" in failure.message


def test_requests_that_came_together_are_computed_together() -> None:
    runtime = Doubler()
    made = backend(runtime)
    for place in range(6):
        made.submit(request(f"r{place}", place), now)
    outputs = run(made)
    assert runtime.batches == [["r0", "r1", "r2", "r3"], ["r4", "r5"]]
    assert answers(outputs) == {f"r{place}": [2 * place] for place in range(6)}
    assert all(end.outcome == "done" for end in ends(outputs).values())


def test_a_request_with_more_rows_than_a_batch_is_computed_in_parts_and_answered_whole() -> None:
    runtime = Doubler()
    made = backend(runtime)
    made.submit(request("large", *range(11)), now)
    made.submit(request("small", 7), now)
    outputs = run(made)
    assert answers(outputs) == {"large": [2 * place for place in range(11)], "small": [14]}
    assert [len(batch) for batch in runtime.batches] == [1, 1, 2]
    assert list(ends(outputs)) == ["large", "small"]


def test_a_part_that_fails_ends_the_request_and_the_other_parts_never_run() -> None:
    runtime = Doubler()
    made = backend(runtime)
    made.submit(request("large", 1, 2, 3, BAD, *range(8)), now)
    outputs = run(made)
    assert ends(outputs)["large"].failure is not None
    assert runtime.batches == [["large/0"]]


@pytest.mark.parametrize(("number", "kind"), [(POISON, "internal"), (BAD, "invalid_request")])
def test_one_bad_item_fails_alone(number: int, kind: str) -> None:
    made = backend()
    for place in (1, 2, number, 3):
        made.submit(request(f"r{place}", place), now)
    found = ends(run(made))
    assert {name: end.outcome for name, end in found.items() if name != f"r{number}"} == dict.fromkeys(
        ("r1", "r2", "r3"), "done"
    )
    failure = found[f"r{number}"].failure
    assert failure is not None
    assert failure.kind == kind
    assert "poison" not in failure.message


def test_what_cannot_be_decoded_or_prepared_is_refused_and_reaches_no_model() -> None:
    runtime = Doubler()
    made = backend(runtime)
    made.submit(msgspec.structs.replace(request("broken"), body=b"{"), now)
    made.submit(request("refused", REFUSED), now)
    made.submit(request("empty"), now)
    found = ends(run(made))
    assert {end.outcome for end in found.values()} == {"refused"}
    assert set(found) == {"broken", "refused", "empty"}
    assert not runtime.batches


def test_an_expired_request_is_neither_decoded_nor_computed() -> None:
    runtime = Doubler()
    made = backend(runtime)
    late = request("late", 1, arrived_at=now - 2, deadline_s=1.0)
    made.submit(msgspec.structs.replace(late, body=b"no JSON"), now)
    found = ends(run(made))
    assert found["late"].failure is not None
    assert found["late"].failure.kind == "deadline_exceeded"
    assert not runtime.batches


def test_a_request_that_expires_while_others_are_computed_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Doubler()
    made = backend(runtime, max_rows=1)
    made.submit(request("first", 1, arrived_at=now), now)
    made.submit(request("second", 2, arrived_at=now, deadline_s=1.0), now)
    assert list(ends(made.step(now)[0])) == ["first"]
    later = now + 1.0
    monkeypatch.setattr(clock, "now", lambda: later)
    assert made.due(later) == later
    found = ends(made.step(later)[0])
    assert found["second"].failure is not None
    assert found["second"].failure.kind == "deadline_exceeded"
    assert runtime.batches == [["first"]]


def test_a_request_that_is_cancelled_before_it_begins_ends_at_once_and_never_runs() -> None:
    runtime = Doubler()
    made = backend(runtime, mode="static")
    made.submit(request("a", 1), now)
    made.submit(request("b", 2, 3, 4, 5, 6), now)
    assert made.due(now) == now  # b's first part is a full batch
    made.cancel("b")
    made.cancel("b")
    made.cancel("nobody")
    found = ends(run(made))
    assert {name: end.outcome for name, end in found.items()} == {"b": "cancelled"}
    assert not runtime.batches
    assert made.num_waiting == 1


def test_a_second_submission_of_a_running_request_changes_nothing() -> None:
    made = backend()
    made.submit(request("same", 1), now)
    made.submit(request("same", 2), now)
    assert answers(run(made)) == {"same": [2]}


def test_halting_ends_all_that_is_left() -> None:
    made = backend(mode="static")
    made.submit(request("a", 1), now)
    assert {name: end.outcome for name, end in ends(made.halt(now)).items()} == {"a": "cancelled"}
    assert made.due(now) is None


def test_timings_tell_the_stages_in_order() -> None:
    made = backend()
    made.submit(request("a", 1, arrived_at=now - 5), now)
    timings = ends(run(made))["a"].timings
    assert (timings.tokenized, timings.scheduled, timings.first_token, timings.finished) == (5.0, 5.0, 5.0, 5.0)


def test_the_wait_for_a_batch_is_told_apart_from_the_wait_for_other_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    at = now

    def compute(items: Sequence[Item]) -> None:
        nonlocal at
        at += 0.5

    monkeypatch.setattr(clock, "now", lambda: at)
    made = backend(Doubler(on_predict=compute), max_rows=1, max_delay_s=0.1)
    made.submit(request("first", 1, arrived_at=now), at)
    at += 0.25  # the loop was busy before it read the second
    made.submit(request("second", 1, arrived_at=now), at)
    outputs = made.step(at)[0]
    at += 0.125
    outputs += made.step(at)[0]
    first, second = ends(outputs)["first"].timings, ends(outputs)["second"].timings
    assert (first.begun, first.scheduled, first.behind_s) == (0.0, 0.25, 0.0)
    assert (second.begun, second.tokenized, second.scheduled, second.behind_s) == (0.25, 0.25, 0.875, 0.5)
    assert second.finished == 1.375


def test_a_failed_or_cancelled_request_keeps_the_times_of_its_stages() -> None:
    made = backend(mode="static")
    made.submit(request("bad", BAD, arrived_at=now - 2), now)
    made.submit(request("gone", 1, arrived_at=now - 3), now)
    made.cancel("gone")
    found = ends([*made.step(now)[0], *made.halt(now)])
    assert found["gone"].timings.tokenized == 3.0
    assert found["bad"].timings.tokenized == 2.0


def test_statistics_tell_the_rows_of_each_batch() -> None:
    made = backend()
    made.submit(request("a", 1, 2), now)
    made.submit(request("b", 3), now)
    _, stats = made.step(now)
    assert stats is not None
    assert (stats.batch_rows, stats.step_sequences, stats.num_waiting) == (3, 2, 0)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.0, 0.1), st.floats(1e-4, 0.01), st.integers(1, 32))
def test_a_row_has_the_same_utilized_seconds_in_every_batch(fixed: float, per_row: float, rows: int) -> None:
    """So the utilization of replicas adds up to the load, on however many of them it is computed."""
    at = [now]

    def compute(items: Sequence[Item]) -> None:
        at[0] += fixed + per_row * sum(item.rows for item in items)

    made = backend(Doubler(on_predict=compute), max_rows=32)

    def utilized_s(rows: int) -> float:
        made.submit(request("a", *range(rows)), at[0])
        _, stats = made.step(at[0])
        assert stats is not None
        return stats.utilization * stats.step_s

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "now", lambda: at[0])
        for size in (1, 2, 4, 8, 16, 32):
            utilized_s(size)
        assert utilized_s(rows) / rows == pytest.approx(utilized_s(32) / 32, rel=0.01)


@pytest.mark.parametrize("mode", ["dynamic", "off"])
def test_a_model_that_computes_one_request_at_a_time_is_utilized_as_a_whole(mode: str) -> None:
    made = backend(max_rows=32, mode=mode, cuts=mode != "off")
    for size in (1, 32):
        made._batcher.cost.observe(size, 0.01)
    made.submit(request("a", 1), now)
    _, stats = made.step(now)
    assert stats is not None
    assert (stats.utilization == 1.0) == (mode == "off")


def test_a_batch_is_full_while_requests_wait_that_it_cannot_take() -> None:
    """Of other shapes, or beyond the budget of latency: more replicas would serve them."""
    made = backend(max_rows=32)
    for size in (1, 32):
        made._batcher.cost.observe(size, 0.01)
    for number in range(9):
        made.submit(request(f"r{number}", *range(8)), now)
    found = []
    while made._batcher:
        _, stats = made.step(now)
        assert stats is not None
        found.append((stats.num_waiting > 0, stats.utilization == 1.0))
    assert found == [(True, True), (True, True), (False, False)]


@pytest.mark.parametrize("mode", ["dynamic", "off"])
def test_batch_work_utilizes_no_replica(mode: str) -> None:
    made = backend(max_rows=32, mode=mode, cuts=mode != "off")
    for size in (1, 32):
        made._batcher.cost.observe(size, 0.01 + 0.001 * size)
    shares = []
    for number in range(3):
        made.submit(request(f"b{number}", *range(16), priority=1), now)
        made.submit(request(f"c{number}", *range(16), priority=int(number < 2)), now)
    while made._batcher:
        _, stats = made.step(now)
        assert stats is not None
        shares.append(stats.utilization)
    rest = 5 if mode == "off" else 2
    assert shares[1:] == [0.0] * rest, "others wait behind none"
    assert 0.0 < shares[0] <= 1.0, "the one of another class goes first"
    assert (shares[0] == 1.0) == (mode == "off")


# -- several answers -----------------------------------------------------------------------------


def test_several_answers_to_one_request_come_one_after_the_other_and_others_have_their_turn() -> None:
    runtime = Counter()
    made = backend(runtime)
    made.submit(request("three", 3), now)
    made.submit(request("two", 2), now)
    outputs = run(made)
    told = [(o.request_id, msgspec.json.decode(o.prediction.body)) for o in outputs if o.prediction is not None]
    assert [number for name, number in told if name == "three"] == [[0], [1], [2]]
    assert told[:2] == [("three", [0]), ("two", [0])]
    assert {name: end.outcome for name, end in ends(outputs).items()} == {"three": "done", "two": "done"}
    assert runtime.closed == ["two", "three"]


def test_no_answer_at_all_is_an_answer() -> None:
    made = backend(Counter())
    made.submit(request("none", 0), now)
    assert ends(run(made))["none"].outcome == "done"


def test_a_stream_that_fails_or_is_cancelled_is_closed_and_ends_once() -> None:
    runtime = Counter()
    made = backend(runtime)
    made.submit(request("poison", POISON), now)
    made.submit(request("cancelled", 1000), now)
    first, _ = made.step(now)
    made.cancel("cancelled")
    found = ends([*first, *run(made)])
    assert {name: end.outcome for name, end in found.items()} == {"poison": "failed", "cancelled": "cancelled"}
    assert sorted(runtime.closed) == ["cancelled", "poison"]


def test_a_request_is_not_accepted_while_another_has_its_id() -> None:
    made = backend()
    made.add(request("same", 1), now)
    with pytest.raises(InvalidRequest, match="'same' is already running"):
        made.add(request("same", 2), now)
    assert answers(run(made)) == {"same": [2]}


def test_a_stream_beyond_its_deadline_ends_as_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    made = backend(Counter())
    made.submit(request("endless", 1000, arrived_at=now, deadline_s=1.0), now)
    made.step(now)
    monkeypatch.setattr(clock, "now", lambda: now + 1.0)
    failure = ends(run(made))["endless"].failure
    assert failure is not None
    assert failure.kind == "deadline_exceeded"
    assert "before the answer was complete" in failure.message


# -- for any events ------------------------------------------------------------------------------

number = st.sampled_from([1, 2, 3, POISON, BAD, REFUSED])
actions = st.lists(
    st.one_of(
        st.lists(number, min_size=0, max_size=9),
        st.lists(number, min_size=1, max_size=1),
        st.integers(0, 20),
        st.just("step"),
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(actions, st.sampled_from(["dynamic", "off"]), st.integers(1, 6))
def test_every_request_ends_once_and_what_is_answered_is_what_it_would_be_alone(
    actions: list[list[int] | int | str], mode: str, max_rows: int
) -> None:
    made = backend(mode=mode, max_rows=max_rows)
    asked: dict[str, list[int]] = {}
    outputs: list[Output] = []
    for action in actions:
        if isinstance(action, list):
            name = f"r{len(asked)}"
            asked[name] = action
            made.submit(request(name, *action), now)
        elif isinstance(action, int):
            made.cancel(f"r{action}")
        elif made.due(now) == now:
            outputs += made.step(now)[0]
    outputs += run(made)
    found = ends(outputs)
    assert found.keys() == asked.keys()
    for name, answer in answers(outputs).items():
        assert answer == [2 * number for number in asked[name]]
        assert not {POISON, BAD, REFUSED} & set(asked[name])
    for name, end in found.items():
        if end.outcome == "done":
            assert name in answers(outputs)
        if asked[name] and not {POISON, BAD, REFUSED} & set(asked[name]):
            assert end.outcome in ("done", "cancelled")


def test_what_is_held_is_counted_until_each_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "MAX_HELD_BYTES", 10)
    made = backend(mode="static")
    made.submit(request("broken", 10**20, 10**20), now)  # refused: too large for an int64
    assert not made.is_full
    made.submit(request("a", 10**9), now)
    made.submit(request("b", 10**9), now)
    assert made.is_full
    made.cancel("a")
    made.halt(now)
    assert not made.is_full


def test_a_paused_stream_makes_no_answers_until_its_reader_wants_more() -> None:
    runtime = Counter()
    made = backend(runtime)
    made.submit(request("slow", 3), now)
    made.submit(request("quick", 2), now)
    first, _ = made.step(now)
    made.pause("slow", is_paused=True)
    made.pause("nobody", is_paused=True)
    rest = run(made)
    assert {output.request_id for output in rest} == {"quick"}
    assert made.due(now) is None
    made.pause("slow", is_paused=False)
    outputs = [*first, *rest, *run(made)]
    assert [answer for name, answer in told(outputs) if name == "slow"] == [[0], [1], [2]]
    assert {name: end.outcome for name, end in ends(outputs).items()} == {"slow": "done", "quick": "done"}


def test_a_paused_stream_can_be_cancelled() -> None:
    runtime = Counter()
    made = backend(runtime)
    made.submit(request("slow", 1000), now)
    made.step(now)
    made.pause("slow", is_paused=True)
    made.cancel("slow")
    assert ends(run(made))["slow"].outcome == "cancelled"
    assert runtime.closed == ["slow"]


def told(outputs: list[Output]) -> list[tuple[str, list[int]]]:
    return [(o.request_id, msgspec.json.decode(o.prediction.body)) for o in outputs if o.prediction is not None]


def test_parts_that_do_not_fit_together_fail_their_request_alone() -> None:
    class Uneven(Doubler):
        def predict(self, items: Sequence[Item]) -> Sequence[Result | InferdError]:
            results = list(super().predict(items))
            return [
                Result(outputs={"y": np.ones((item.rows, 1, 1))}) if item.rows == 1 else result
                for item, result in zip(items, results, strict=True)
            ]

    made = backend(Uneven(), max_rows=4)
    made.submit(request("uneven", *range(5)), now)
    made.submit(request("other", 1, 2), now)
    found = ends(run(made))
    assert (found["uneven"].outcome, found["other"].outcome) == ("failed", "done")
