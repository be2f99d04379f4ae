"""Laws of the policy that keeps batch work from delaying other classes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferd.engine.scheduling.batch_guard import (
    FADE_EVERY,
    LEAST_BATCH,
    LIMIT_SHARE,
    REMEMBERED,
    SHARE_EVERY,
    BatchGuard,
)

TOKENS = st.integers(1, 10_000)


def admits(guard: BatchGuard, step: int, **changed: int) -> bool:
    values = {"needed_blocks": 1, "available_blocks": 1000, "num_blocks": 1000, "block_size": 16}
    values |= {"num_running": 1, "num_others_running": 0, "max_num_seqs": 16}
    return guard.admits(step, **(values | changed))


@given(st.integers(0, 100_000), st.integers(1, 50), st.integers(0, 2 * REMEMBERED))
def test_protection_ends_when_no_other_class_was_seen_for_long(seen_at: int, others: int, later: int) -> None:
    guard = BatchGuard()
    guard.record_step(seen_at, others)
    for step in range(seen_at + 1, seen_at + 4):
        guard.record_step(step, 0)
    assert guard.is_active(seen_at + later) == (later < REMEMBERED)
    if later >= REMEMBERED:
        assert admits(guard, seen_at + later, num_running=16, available_blocks=0)


@given(st.lists(TOKENS, min_size=1, max_size=30), st.floats(0, 1000), st.integers(0, FADE_EVERY - 1))
def test_a_steps_batch_work_is_at_most_a_share_of_the_largest_prefill_that_was_seen(
    prefills: list[int], fixed: float, step: int
) -> None:
    guard = BatchGuard()
    guard.record_step(0, 1)
    for tokens in prefills:
        guard.record_prefill(tokens)
    limit = guard.limit(step, fixed)
    assert LEAST_BATCH <= limit <= max(max(prefills) * LIMIT_SHARE + fixed / 20, LEAST_BATCH) + 1e-6
    assert limit >= min(prefills) * LIMIT_SHARE - 1e-6


@given(TOKENS, st.integers(0, REMEMBERED), st.integers(1, 64))
def test_the_protection_fades_while_no_other_class_is_seen(prefill: int, passed: int, others: int) -> None:
    guard = BatchGuard()
    guard.record_step(0, others)
    guard.record_prefill(prefill)
    at_once = guard.limit(0, 10.0)
    for step in range(1, passed + 1):
        guard.record_step(step, 0)
    assert guard.limit(passed, 10.0) == at_once * 2 ** (passed // FADE_EVERY)
    if passed >= 6 * FADE_EVERY:
        assert admits(guard, passed, num_running=13), "two of sixteen slots are kept free at most"
    guard.record_step(passed + 1, others)
    assert guard.limit(passed + 1, 10.0) == at_once


@given(st.integers(0, 10_000), TOKENS, st.floats(0, 1000), st.booleans())
def test_while_a_first_token_is_due_one_step_in_several_computes_batch_work(
    begin: int, prefill: int, fixed: float, may_pause: bool
) -> None:
    guard = BatchGuard()
    guard.record_step(begin, 1)
    guard.record_prefill(prefill)
    limit = guard.limit(begin, fixed, may_pause=may_pause)
    due = [guard.allowance(step, limit, fixed, first_token_due=True) for step in range(begin, begin + SHARE_EVERY)]
    assert sorted(due) == [0] * (SHARE_EVERY - 1) + [guard.limit(begin, fixed)], "of a step that does not pause"
    assert guard.allowance(begin, limit, fixed, first_token_due=False) == limit


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 40), st.data())
def test_an_admitted_batch_sequence_leaves_the_slots_that_others_usually_take(
    usual: int, running: int, slots: int, data: st.DataObject
) -> None:
    running = min(running, slots - 1)
    others = data.draw(st.integers(0, running))
    guard = BatchGuard()
    guard.record_step(0, usual)
    if admits(guard, 1, num_running=running, num_others_running=others, max_num_seqs=slots):
        free_afterwards = slots - running - 1
        assert free_afterwards >= min(usual + 1, slots / 2) - others - 1


@given(st.integers(1, 10), st.integers(1, 2000), st.integers(0, 1000), st.integers(1, 100))
def test_an_admitted_batch_sequence_leaves_the_blocks_that_others_usually_take(
    usual: int, length: int, available: int, needed: int
) -> None:
    guard = BatchGuard()
    guard.record_step(0, usual)
    guard.record_length(length)
    reserved = min(usual + 1, 32) * length / 16
    admitted = admits(guard, 1, available_blocks=available, needed_blocks=needed, max_num_seqs=64)
    assert admitted == (needed + min(reserved, 500) <= available)


def test_without_running_sequences_batch_work_is_always_admitted() -> None:
    guard = BatchGuard()
    guard.record_step(0, 100)
    assert admits(guard, 1, num_running=0, available_blocks=0)
    assert not admits(guard, 1, num_running=1, available_blocks=0)
