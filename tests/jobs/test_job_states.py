"""The laws of a batch's states, whatever happens to it in whatever order."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.jobs import machine
from inferd.jobs.batch import TERMINAL, Batch, Place, Problem, Progress, Tokens
from inferd.jobs.survey import Survey

TIMES = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")
NEXT = {
    "validating": {"in_progress", "cancelling", "finalizing", "failed", "cancelled"},
    "in_progress": {"finalizing", "cancelling", "failed"},
    "finalizing": {"completed", "expired", "failed"},
    "cancelling": {"cancelled", "failed"},
}
REFUSAL = Problem("empty_file", "There is nothing.")


def new() -> Batch:
    return Batch(
        id="batch_1", tenant="a", key_id="", endpoint="/v1/completions", input_file_id="file-1", created_at=0.0,
        expires_at=100.0,
    )  # fmt: skip


def survey(total: int) -> Survey:
    return Survey(total, "m", frozenset(), (), None if total else REFUSAL)


def progress(batch: Batch, num_done: int, num_failed: int) -> Progress:
    end = Place(batch.place.line + num_done + num_failed, batch.place.offset + 10 * (num_done + num_failed))
    return Progress(
        begin=batch.place,
        end=end,
        num_done=num_done,
        num_failed=num_failed,
        output_bytes=7 * num_done,
        error_bytes=5 * num_failed,
        tokens=Tokens(num_done, 0, 2 * num_done),
    )


steps = st.lists(
    st.one_of(
        st.tuples(st.just("survey"), st.integers(0, 4)),
        st.just(("cancel",)),
        st.tuples(st.just("stop"), st.sampled_from(["expired", "failed"])),
        st.tuples(st.just("advance"), st.integers(0, 2), st.integers(0, 2), st.integers(1, 3)),
        st.just(("finalize",)),
        st.just(("end",)),
        st.just(("lose",)),
        st.just(("resume",)),
        st.tuples(st.just("note"), st.sampled_from(["", "the disk is full"])),
    ),
    max_size=14,
)


def take(batch: Batch, step: tuple[Any, ...], now: float) -> Batch:
    """The batch after a step, where a run would take it."""
    match step:
        case ("survey", total):
            return machine.surveyed(batch, survey(total), now)
        case ("cancel",):
            return machine.cancelled(batch, now)
        case ("stop", ending):
            return machine.stopped(batch, ending, now)
        case ("advance", num_done, num_failed, fence):
            left = batch.total - batch.num_answered
            num_done = min(num_done, left)
            num_failed = min(num_failed, left - num_done)
            made = progress(batch, num_done, num_failed)
            if batch.has_ended or made.begin == made.end:
                return batch
            after = machine.advanced(batch, made, fence)
            assert machine.advanced(after, made, fence) == after, "again it changes nothing"
            return after
        case ("finalize",):
            is_ready = batch.total and batch.num_answered == batch.total
            return machine.finalized(batch, "file-o", "file-e", now) if is_ready else batch
        case ("end",):
            is_final = batch.ending and (batch.output_file_id or batch.error_file_id)
            return machine.ended(batch, now) if is_final else batch
        case ("resume",):
            return machine.resumed(batch, now) if batch.status in ("cancelled", "expired") else batch
        case ("lose",):
            return machine.failed_at_once(batch, REFUSAL, now)
        case ("note", note):
            return machine.noted(batch, note)
    raise AssertionError(step)


@given(steps)
def test_a_batch_goes_only_forward(taken: list[tuple[Any, ...]]) -> None:
    batch = new()
    for now, step in enumerate(taken, start=1):
        before, batch = batch, take(batch, step, float(now))
        if step == ("resume",) and batch != before:
            assert batch.status == ("in_progress" if before.total else "validating")
            assert (batch.total, batch.num_answered, batch.num_bytes) == (before.total, 0, 0)
            assert batch.former is not None
            assert (batch.former.output, batch.former.errors) == (before.output_file_id, before.error_file_id)
            before = msgspec.structs.replace(batch, status=batch.status)
        if before.has_ended:
            assert batch == before, "what has ended stays as it is"
        if before.status != batch.status:
            assert batch.status in NEXT[before.status]
        for name in TIMES:
            was = getattr(before, name)
            assert was is None or getattr(batch, name) == was, "a time is set once"
        assert batch.num_answered <= batch.total or not batch.total
        assert before.num_answered <= batch.num_answered
        assert batch.has_ended == (batch.status in TERMINAL)
        assert [name for name in TERMINAL if getattr(batch, f"{name}_at") is not None] == (
            [batch.status] if batch.has_ended else []
        )
        if batch.status in ("completed", "expired", "cancelled") and batch.total:
            assert batch.num_answered == batch.total, "every request is answered once"
        if batch.status != "failed":
            assert sum(one.num_bytes for one in batch.output) == 7 * batch.num_done
            assert sum(one.num_bytes for one in batch.errors) == 5 * batch.num_failed
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=Batch) == batch


def test_answers_of_lines_that_another_server_answered_do_not_count() -> None:
    batch = machine.surveyed(new(), survey(4), 1.0)
    stale = progress(batch, 1, 0)
    batch = machine.advanced(batch, progress(batch, 2, 0), 1)
    with pytest.raises(machine.WrongPlace):
        machine.advanced(batch, stale, 1)


def test_each_lease_counts_what_it_has_written_itself() -> None:
    batch = machine.surveyed(new(), survey(6), 1.0)
    for fence in (1, 1, 2):
        batch = machine.advanced(batch, progress(batch, 1, 1), fence)
    assert [(one.fence, one.num_bytes) for one in batch.output] == [(1, 14), (2, 7)]
    assert [(one.fence, one.num_bytes) for one in batch.errors] == [(1, 10), (2, 5)]


def test_a_window_that_has_passed_ends_what_has_not_ended() -> None:
    batch = machine.surveyed(new(), survey(1), 1.0)
    assert not machine.is_due(batch, 99.9)
    assert machine.is_due(batch, 100.0)
    assert not machine.is_due(machine.cancelled(batch, 2.0), 100.0)


def test_a_batch_whose_input_was_not_read_is_not_in_progress_when_it_is_resumed() -> None:
    unread = machine.surveyed(machine.cancelled(new(), 1.0), survey(0), 2.0)
    assert (unread.status, unread.total) == ("cancelled", 0)
    resumed = machine.resumed(unread, 3.0)
    assert (resumed.status, resumed.in_progress_at) == ("validating", None)
    assert machine.surveyed(resumed, survey(2), 4.0).in_progress_at == 4.0


def test_a_batch_that_goes_on_does_not_say_any_more_why_it_waited() -> None:
    batch = machine.noted(machine.surveyed(new(), survey(4), 1.0), "the disk is full")
    assert batch.note == "the disk is full"
    assert machine.advanced(batch, progress(batch, 1, 0), 1).note == ""
    assert machine.stopped(batch, "expired", 2.0).note == ""
