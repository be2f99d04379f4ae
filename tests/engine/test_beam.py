"""Beam search finds what transformers finds, and the true best where the beam is wide enough."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput

from inferd.engine.beam import BeamState, Hypothesis

VOCAB = 12


class Toy:
    """A model whose next-token distribution depends on all tokens so far."""

    def __init__(self, seed: int, vocab: int = VOCAB) -> None:
        self.seed, self.vocab = seed, vocab

    def logprobs(self, token_ids: tuple[int, ...]) -> list[float]:
        chosen = random.Random(repr((self.seed, token_ids)))
        weights = [chosen.gauss(0, 1.5) for _ in range(self.vocab)]
        total = math.log(sum(map(math.exp, weights)))
        return [w - total for w in weights]


def search(model: Toy, width: int, max_tokens: int, eos: frozenset[int], penalty: float) -> BeamState:
    state = BeamState(width=width, max_tokens=max_tokens, eos_token_ids=eos, length_penalty=penalty)
    lines: list[tuple[int, ...]] = [()]
    while not state.is_done:
        candidates = []
        for line in lines:
            ranked = sorted(enumerate(model.logprobs(line)), key=lambda pair: -pair[1])
            candidates.append(ranked[: state.candidates_per_beam])
        extended = state.advance(candidates)
        lines = [(*lines[parent], token) for parent, token, _ in extended]
        assert len(lines) <= width
    return state


def all_hypotheses(model: Toy, max_tokens: int, eos: frozenset[int], penalty: float) -> list[Hypothesis]:
    found = []
    for length in range(1, max_tokens + 1):
        for line in itertools.product(range(model.vocab), repeat=length):
            ends = line[-1] in eos or length == max_tokens
            if ends and not any(t in eos for t in line[:-1]):
                total = sum(model.logprobs(line[:i])[t] for i, t in enumerate(line))
                found.append(Hypothesis(line, total, total / length**penalty))
    return sorted(found, key=lambda h: -h.score)


@given(
    seed=st.integers(0, 10_000),
    penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    eos=st.sampled_from([frozenset[int](), frozenset({0}), frozenset({0, 3})]),
    n=st.integers(1, 4),
)
@settings(max_examples=40)
def test_a_beam_as_wide_as_the_tree_finds_the_true_best(seed: int, penalty: float, eos: frozenset[int], n: int) -> None:
    model = Toy(seed, vocab=4)
    best = search(model, 4**4, 4, eos, penalty).best(n)
    truth = all_hypotheses(model, 4, eos, penalty)[:n]
    assert [h.token_ids for h in best] == [h.token_ids for h in truth]
    assert [h.score for h in best] == pytest.approx([h.score for h in truth])
    assert [h.cumulative_logprob for h in best] == pytest.approx([h.cumulative_logprob for h in truth])


@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 8),
    penalty=st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=60)
def test_hypotheses_are_whole_distinct_and_ordered(seed: int, width: int, max_tokens: int, penalty: float) -> None:
    eos = frozenset({0})
    model = Toy(seed)
    best = search(model, width, max_tokens, eos, penalty).best(width)
    assert len(best) == width
    assert len({h.token_ids for h in best}) == width
    assert [h.score for h in best] == sorted((h.score for h in best), reverse=True)
    for h in best:
        assert not any(t in eos for t in h.token_ids[:-1])
        assert len(h.token_ids) == max_tokens or h.token_ids[-1] in eos
        assert h.cumulative_logprob == pytest.approx(
            sum(model.logprobs(h.token_ids[:i])[t] for i, t in enumerate(h.token_ids))
        )


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.5,
    )
    model: Any = LlamaForCausalLM(config)
    return model.eval()


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("penalty", [-0.5, 0.0, 1.0, 1.7])
@pytest.mark.parametrize("eos", [[36], [36, 37, 11], []])
def test_the_hypotheses_are_those_of_transformers(llama: Any, width: int, penalty: float, eos: list[int]) -> None:
    for prompt in ([1, 2, 3], [5, 5], [30, 31, 32, 33]):
        expected = llama.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=10,
            length_penalty=penalty,
            early_stopping="never",
            do_sample=False,
            eos_token_id=eos or None,
            pad_token_id=39,
            output_scores=True,
            return_dict_in_generate=True,
        )
        assert isinstance(expected, GenerateBeamDecoderOnlyOutput)
        assert expected.sequences_scores is not None
        state = BeamState(width=width, max_tokens=10, eos_token_ids=frozenset(eos), length_penalty=penalty)
        lines = [list(prompt)]
        while not state.is_done:
            with torch.inference_mode():
                logprobs = llama(torch.tensor(lines)).logits[:, -1].log_softmax(-1)
            top = logprobs.topk(min(state.candidates_per_beam, logprobs.shape[1]))
            candidates = [
                list(zip(i, v, strict=True)) for i, v in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            ]
            lines = [[*lines[parent], token] for parent, token, _ in state.advance(candidates)]
        best = state.best(width)
        for hypothesis, line in zip(best, expected.sequences.tolist(), strict=True):
            generated = line[len(prompt) :]
            length = len(hypothesis.token_ids)
            assert generated == [*hypothesis.token_ids, *[39] * (len(generated) - length)]
        assert [h.score for h in best] == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)


def test_a_beam_of_one_is_greedy_search() -> None:
    model = Toy(3)
    line: tuple[int, ...] = ()
    for _ in range(6):
        line = (*line, max(range(VOCAB), key=lambda t: model.logprobs(line)[t]))
    assert search(model, 1, 6, frozenset(), 1.0).best(1)[0].token_ids == line


def test_equal_candidates_are_taken_in_order_of_beam_and_token() -> None:
    state = BeamState(width=2, max_tokens=3, eos_token_ids=frozenset(), length_penalty=1.0)
    assert state.advance([[(5, -1.0), (2, -1.0), (9, -1.0)]]) == [(0, 2, -1.0), (0, 5, -1.0)]


def test_too_few_candidates_make_fewer_beams() -> None:
    state = BeamState(width=3, max_tokens=2, eos_token_ids=frozenset({0}), length_penalty=1.0)
    assert state.advance([[(0, -0.1), (4, -2.0)]]) == [(0, 4, -2.0)]
    assert state.advance([[(1, -0.5)]]) == []
    assert state.is_done
    assert [h.token_ids for h in state.best(3)] == [(0,), (4, 1)]


def test_advancing_with_the_wrong_number_of_beams_is_a_defect() -> None:
    state = BeamState(width=2, max_tokens=2, eos_token_ids=frozenset(), length_penalty=1.0)
    with pytest.raises(ValueError, match="2 lists of candidates for 1 live beams"):
        state.advance([[(0, -1.0)], [(1, -1.0)]])
    with pytest.raises(ValueError, match="at least 1"):
        BeamState(width=0, max_tokens=2, eos_token_ids=frozenset(), length_penalty=1.0)
