"""Laws of the policy that keeps batch work from delaying other classes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferd.engine.scheduling.batch_guard import LEAST_BATCH, REMEMBERED, SHARE_EVERY, BatchGuard

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


@given(st.lists(TOKENS, min_size=1, max_size=30), st.floats(0, 1000))
def test_a_steps_batch_work_is_at_most_half_of_the_largest_prefill_that_was_seen(
    prefills: list[int], fixed: float
) -> None:
    guard = BatchGuard()
    for tokens in prefills:
        guard.record_prefill(tokens)
    assert LEAST_BATCH <= guard.limit(fixed) <= max(max(prefills) / 2 + fixed / 20, LEAST_BATCH) + 1e-6
    assert guard.limit(fixed) >= min(prefills) / 2 - 1e-6


@given(st.integers(0, 10_000), st.floats(LEAST_BATCH, 5000))
def test_while_a_first_token_is_due_one_step_in_several_computes_batch_work(begin: int, limit: float) -> None:
    guard = BatchGuard()
    due = [guard.allowance(step, limit, first_token_due=True) for step in range(begin, begin + SHARE_EVERY)]
    assert sorted(due) == [0] * (SHARE_EVERY - 1) + [limit]
    assert guard.allowance(begin, limit, first_token_due=False) == limit


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
