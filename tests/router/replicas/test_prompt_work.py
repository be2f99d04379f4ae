"""Prompts that are not computed, as load: what is added is removed once, whatever the order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferd.router.choosing.affinity import MAX_BYTES, new_bytes
from inferd.router.replicas.prompt_work import TOKENS_OF_A_SEQUENCE, PromptWork

ACTIONS = st.tuples(st.sampled_from(["add", "remove", "clear"]), st.sampled_from("abcd"), st.integers(0, 20_000))


@given(st.lists(ACTIONS, max_size=30))
def test_the_load_is_that_of_the_prompts_that_are_left(actions: list[tuple[str, str, int]]) -> None:
    work, left = PromptWork(), dict[str, int]()
    for action, name, tokens in actions:
        if action == "add" and name not in left:
            work.add(name, tokens)
            left[name] = tokens
        elif action == "remove":
            work.remove(name)
            left.pop(name, None)
        elif action == "clear":
            work.clear()
            left.clear()
        assert work.load == sum(left.values()) / TOKENS_OF_A_SEQUENCE


@given(st.integers(0, 10 * MAX_BYTES), st.integers(0, MAX_BYTES))
def test_what_is_new_in_a_prompt_is_never_more_than_the_prompt_and_less_where_more_was_seen(
    num_bytes: int, seen_bytes: int
) -> None:
    new = new_bytes(num_bytes, seen_bytes)
    assert 0 <= new <= num_bytes
    assert new == num_bytes or seen_bytes > 0
    assert new_bytes(num_bytes, min(seen_bytes + 1, MAX_BYTES)) <= new
    assert new_bytes(num_bytes, MAX_BYTES) == 0
