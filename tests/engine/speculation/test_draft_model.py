"""The draft model's books: what it has computed, what that costs next, and whose blocks it takes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from inferd.engine.model.load import load_model
from inferd.engine.runner import Runner
from inferd.engine.scheduling.blocks import BlockPool
from inferd.engine.scheduling.sequence import Sequence
from inferd.engine.speculation.draft_model import DraftModel
from inferd.engine.speculation.draft_passes import Guess, Rule
from inferd.engine.speculation.gain import StepForecast
from inferd.native.kv_cache import KVCache
from inferd.types import SamplingParams

BLOCK = 4
FREE = Rule((), (1.0,), 1.0, StepForecast(1, 1.0, 0.0), 0.0)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def made(folder: Path, num_blocks: int = 6, *, prefix_caching: bool = False, max_len: int = 100) -> DraftModel:
    decoder = load_model(folder, dtype="float32", device=torch.device("cpu"))
    dims, device = decoder.config, torch.device("cpu")
    cache = KVCache(
        num_layers=dims.num_layers,
        num_blocks=num_blocks,
        block_size=BLOCK,
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        dtype=decoder.dtype,
        device=device,
    )
    runner = Runner(decoder, cache, "reference", device)
    return DraftModel(runner, BlockPool(num_blocks), dims.vocab_size, max_len=max_len, prefix_caching=prefix_caching)


def sequence(length: int, *, first: int = 3, salt: bytes = b"") -> Sequence:
    prompt = list(range(first, first + length))
    return Sequence(request_id=str(first), index=0, prompt_ids=prompt, sampling=SamplingParams(), seed=0, salt=salt)


def test_a_budget_is_spent_in_order_and_leaves_each_sequence_its_last_token(tiny_model: Path) -> None:
    draft = made(tiny_model)
    one, two, three = sequence(6), sequence(7, first=20), sequence(5, first=40)
    assert [draft.gap(each) for each in (one, two, three)] == [6, 7, 5]
    draft.catch_up([one, two, three], 8)
    assert [draft.gap(each) for each in (one, two, three)] == [1, 4, 5]
    draft.catch_up([one, two, three], 100)
    assert [draft.gap(each) for each in (one, two, three)] == [1, 1, 1]
    used = draft.pool.num_used
    draft.catch_up([one, two, three], 100)
    assert (draft.pool.num_used, [draft.gap(each) for each in (one, two, three)]) == (used, [1, 1, 1])
    for each in (one, two, three, three):
        draft.forget(each)
    assert draft.pool.num_used == 0
    draft.pool.check()


@pytest.mark.parametrize(("num_right", "gap"), [(0, 1), (1, 1), (2, 1), (3, 2)])
def test_what_was_computed_behind_right_guesses_is_kept(tiny_model: Path, num_right: int, gap: int) -> None:
    """The last of the guesses was never computed itself."""
    draft, one = made(tiny_model), sequence(6)
    guess = Guess(one, 3)
    assert draft.guess([guess], FREE) == 3
    assert len(guess.tokens) == 3
    draft.accept_guesses(one, num_right)
    one.tokens += [*guess.tokens[:num_right], 50]
    assert draft.gap(one) == gap
    draft.accept_guesses(one, num_right)  # they are counted once
    assert draft.gap(one) == gap
    alone = Guess(sequence(0), 4)
    alone.sequence.tokens = list(one.tokens)
    again = Guess(one, 4)
    draft.guess([again], FREE)
    made(tiny_model).guess([alone], FREE)
    assert again.tokens == alone.tokens, "the keys and values are those of these tokens"


def test_blocks_are_taken_back_from_what_was_drafted_for_longest_ago(tiny_model: Path) -> None:
    draft = made(tiny_model)
    a, b, c, d = (sequence(8, first=first) for first in (3, 20, 40, 60))
    for each in (a, b, c):
        draft.catch_up([each], 100)
    draft.guess([Guess(a, 1)], FREE)  # now it is the latest
    draft.catch_up([d], 100)
    assert [draft.gap(each) for each in (a, c, d)] == [0, 1, 1]
    assert draft.gap(b) == 8
    draft.pool.check()


def test_no_blocks_are_taken_from_what_is_drafted_for_together(tiny_model: Path) -> None:
    draft = made(tiny_model)
    each = [sequence(8, first=first) for first in (3, 20, 40, 60)]
    draft.catch_up(each, 100)
    assert [draft.gap(one) for one in each] == [1, 1, 1, 8]
    guesses = [Guess(one, 1) for one in each]
    draft.guess(guesses, FREE)
    assert [len(guess.tokens) for guess in guesses] == [1, 1, 1, 0]
    assert made(tiny_model, 1).guess([Guess(each[0], 1)], FREE) == 0
    draft.pool.check()


@pytest.mark.parametrize(("length", "found"), [(8, 4), (9, 8), (12, 8), (13, 12)])
def test_a_prefix_that_was_computed_is_found_but_for_the_last_token(tiny_model: Path, length: int, found: int) -> None:
    draft, first = made(tiny_model, 8, prefix_caching=True), sequence(14)
    draft.catch_up([first], 100)
    assert draft.gap(sequence(length)) == length - found
    assert draft.gap(sequence(length, salt=b"other tenant")) == length
    draft.forget(first)
    assert draft.gap(sequence(length)) == length - found
    draft.pool.check()
    without = made(tiny_model, 8)
    without.catch_up([first], 100)
    assert without.gap(sequence(length)) == length


def test_a_sequence_that_the_draft_model_cannot_compute_is_not_taken(tiny_model: Path) -> None:
    draft = made(tiny_model, max_len=8)
    size = draft._num_embedded
    assert draft.takes(sequence(7))
    assert not draft.takes(sequence(8))
    assert draft.takes(sequence(2, first=size - 2))
    assert not draft.takes(sequence(2, first=size - 1))
