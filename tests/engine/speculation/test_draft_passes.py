"""Guesses of one call of the kernels are those of the passes one by one."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.engine.model.load import load_model
from inferd.engine.runner import Runner
from inferd.engine.scheduling.blocks import BlockPool
from inferd.engine.scheduling.sequence import Sequence
from inferd.engine.speculation.draft_model import DraftModel
from inferd.engine.speculation.draft_passes import Guess, Rule
from inferd.engine.speculation.gain import StepForecast
from inferd.native import compiled
from inferd.native.kv_cache import KVCache
from inferd.types import SamplingParams

pytestmark = pytest.mark.skipif(not compiled.BUILT, reason="inferd was installed without its compiled kernels")
# Tied and apart, a soft cap of the logits, a divisor, a scaled embedding, biases.
NAMES = ("llama2-mha", "llama-biases", "qwen2", "gemma2", "granite")
RULES = st.builds(
    Rule,
    bounds=st.just((0.6, 0.8, 0.95)),
    chances=st.tuples(
        *[st.floats(0.25, 1.0, width=32)] * 4
    ),  # as the kernels hold them: a chance may stand right at the bar
    next_chance=st.floats(0.2, 1.0),
    forecast=st.builds(StepForecast, st.integers(1, 8), st.floats(0.001, 0.01), st.floats(0.0, 0.001)),
    pass_s=st.floats(0.0, 0.001),
)
FREE = Rule((), (1.0,), 1.0, StepForecast(1, 1.0, 0.0), 0.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, families: ModuleType) -> object:
    folder = tmp_path_factory.mktemp("drafts")

    @cache
    def make(name: str) -> tuple[DraftModel, DraftModel]:
        files: Path = folder / name
        families.write_checkpoint(name, files)
        decoder = load_model(files, dtype="float32", device=torch.device("cpu"))
        dims = decoder.config

        def draft() -> DraftModel:
            arena = KVCache(
                num_layers=dims.num_layers,
                num_blocks=60,
                block_size=4,
                num_kv_heads=dims.num_kv_heads,
                head_dim=dims.head_dim,
                dtype=decoder.dtype,
                device=torch.device("cpu"),
            )
            runner = Runner(decoder, arena, "native", torch.device("cpu"))
            # The last ids stand for rows that the tokenizer has no token for.
            return DraftModel(runner, BlockPool(60), dims.vocab_size - 3, max_len=100, prefix_caching=True)

        one, twin = draft(), draft()
        assert one._native is not None, "covered"
        twin._native = None
        return one, twin

    return make


def sequence(name: str, prompt: list[int]) -> Sequence:
    return Sequence(request_id=name, index=0, prompt_ids=prompt, sampling=SamplingParams(), seed=0)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    prompts=st.lists(st.lists(st.integers(3, 90), min_size=1, max_size=12), min_size=1, max_size=4),
    rounds=st.lists(st.tuples(RULES, st.lists(st.integers(1, 6), min_size=4, max_size=4)), min_size=1, max_size=4),
    level=st.sampled_from([name for name in compiled.levels() if name != "generic"]),
)
def test_one_call_guesses_what_single_passes_guess(
    models: object,
    name: str,
    prompts: list[list[int]],
    rounds: list[tuple[Rule, list[int]]],
    level: str,
) -> None:
    assert callable(models)
    one, twin = models(name)
    sequences = [sequence(str(i), prompt) for i, prompt in enumerate(prompts)]
    with compiled.using_level(level), torch.inference_mode():
        for rule, most in rounds:
            found = []
            for draft in (one, twin):
                guesses = [Guess(each, count) for each, count in zip(sequences, most, strict=False)]
                passes = draft.guess(guesses, rule)
                found.append((passes, [guess.tokens for guess in guesses]))
                surenesses = [guess.surenesses for guess in guesses]
                for guess in guesses:  # some are right, and their keys and values stay
                    draft.accept_guesses(guess.sequence, len(guess.tokens) * 2 // 3)
            assert found[0] == found[1]
            for guess, sure in zip(guesses, surenesses, strict=True):
                assert len(guess.tokens) <= len(sure) <= len(guess.tokens) + 1
                guess.sequence.tokens += [*guess.tokens[: len(guess.tokens) * 2 // 3], 7]
    for draft in (one, twin):
        for each in sequences:
            draft.forget(each)
        draft.pool.check()
        assert draft.pool.num_used == 0


@settings(max_examples=15, deadline=None)
@given(prompt=st.lists(st.integers(3, 90), min_size=1, max_size=20), most=st.integers(1, 8))
def test_guesses_are_the_models_own_likeliest_tokens(models: object, prompt: list[int], most: int) -> None:
    assert callable(models)
    one, twin = models("qwen2")
    guess = Guess(sequence("s", prompt), most)
    with torch.inference_mode():
        assert one.guess([guess], FREE) == most
        said = list(prompt)
        for token, sureness in zip(guess.tokens, guess.surenesses, strict=True):
            alone = Guess(sequence("s", said), 1)
            twin.guess([alone], FREE)
            twin.forget(alone.sequence)
            assert alone.tokens == [token]
            assert alone.surenesses == pytest.approx([sureness], abs=1e-5)
            said.append(token)
    one.forget(guess.sequence)


def test_work_that_does_not_fit_its_blocks_is_refused(models: object) -> None:
    assert callable(models)
    drafter = models("qwen2")[0]._native
    with pytest.raises(ValueError, match="blocks that hold both"):
        drafter.guess([[5, 6]], [[0]], [0], [4], (), (1.0,), 1.0, 1.0, 1.0, 0.0, 0.0, 0.1, 1.0, 1)
    with pytest.raises(ValueError, match="one chance more"):
        drafter.guess([[5]], [[0]], [0], [1], (0.5,), (1.0,), 1.0, 1.0, 1.0, 0.0, 0.0, 0.1, 1.0, 1)
