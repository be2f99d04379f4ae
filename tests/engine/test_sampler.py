"""Draws follow exactly the distribution that the parameters describe, in any batch.

``exact`` is an independent twin: plain Python over lists, written from the parameters' definitions.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare  # type: ignore[import-untyped]
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inferd.engine.sampler import Sampled, Sampler, SampleRow, _invert, _thresholds, uniform
from inferd.errors import InferdError, InternalError, InvalidRequest
from inferd.native import compiled
from inferd.native.masks import RowMasks
from inferd.types import SamplingParams

VOCAB = 24


def some_logits(seed: int, size: int = VOCAB, scale: float = 2.0) -> list[float]:
    chosen = random.Random(seed)
    return [chosen.gauss(0, scale) for _ in range(size)]


def row(sampling: SamplingParams, *, seed: int = 0, index: int = 0, **more: Any) -> SampleRow:
    said = [list(more.get(name, ())) for name in ("prompt", "output")]
    return SampleRow(sampling, said[0], said[1], seed, index, more.get("stop", frozenset()), more.get("bad", ()))


def tokens(results: list[Sampled | InferdError]) -> list[int]:
    for result in results:
        assert isinstance(result, Sampled), result
    return [result.token_id for result in results if isinstance(result, Sampled)]


def exact(logits: list[float], r: SampleRow) -> list[float]:
    """Probability of each token."""
    s = r.sampling
    z = list(logits)
    allowed = set(range(len(z))) if s.allowed_token_ids is None else set(s.allowed_token_ids)
    banned = {
        w[-1] for w in r.bad_words if tuple(r.output_ids[len(r.output_ids) - len(w) + 1 :]) == w[:-1] or len(w) == 1
    }
    if len(r.output_ids) < s.min_tokens:
        banned |= r.stop_ids
    for i in range(len(z)):
        if i not in allowed or i in banned:
            z[i] = -math.inf
        z[i] += s.logit_bias.get(i, 0.0)
        if i in r.prompt_ids or i in r.output_ids:
            z[i] = z[i] / s.repetition_penalty if z[i] > 0 else z[i] * s.repetition_penalty
        count = r.output_ids.count(i)
        z[i] -= s.frequency_penalty * count + s.presence_penalty * (count > 0)
    if s.temperature == 0:
        best = z.index(max(z))
        return [float(i == best) for i in range(len(z))]
    z = [x / s.temperature for x in z]
    weights = [math.exp(x - max(z)) for x in z]

    def normal(w: list[float]) -> list[float]:
        return [x / sum(w) for x in w]

    p = normal(weights)
    p = normal([x if x >= s.min_p * max(p) else 0.0 for x in p])
    if s.top_k > 0:
        least = sorted(p, reverse=True)[min(s.top_k, len(p)) - 1]
        p = normal([x if x >= least else 0.0 for x in p])
    if s.top_p < 1:
        mass = 0.0
        least = 0.0
        for x in sorted(p, reverse=True):
            mass, least = mass + x, x
            if mass >= s.top_p:
                break
        p = normal([x if x >= least else 0.0 for x in p])
    return p


P = SamplingParams
SAID: dict[str, Any] = {"prompt": [0, 1, 2, 2], "output": [3, 3, 4, 0]}
CASES: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
    "plain": (P(), {}),
    "hot": (P(temperature=1.7), {}),
    "cold": (P(temperature=0.4), {}),
    "top_p": (P(top_p=0.8), {}),
    "top_p tiny": (P(top_p=1e-6), {}),
    "top_k": (P(top_k=5), {}),
    "top_k one": (P(top_k=1), {}),
    "top_k all": (P(top_k=100), {}),
    "min_p": (P(min_p=0.1), {}),
    "top_k and top_p": (P(top_k=8, top_p=0.7, temperature=1.5), {}),
    "all filters": (P(top_k=12, top_p=0.9, min_p=0.02, temperature=2.0), {}),
    "repetition": (P(repetition_penalty=1.8), SAID),
    "repetition below one": (P(repetition_penalty=0.6), SAID),
    "presence": (P(presence_penalty=1.2), SAID),
    "frequency": (P(frequency_penalty=0.9), SAID),
    "negative frequency": (P(frequency_penalty=-1.0, presence_penalty=-0.5), SAID),
    "logit_bias": (P(logit_bias={0: 3.0, 7: -100.0, 9: 1.5}), {}),
    "allowed": (P(allowed_token_ids=(1, 5, 6, 20)), {}),
    "allowed with bias": (P(allowed_token_ids=(1, 5, 6), logit_bias={2: 100.0, 5: 1.0}), {}),
    "bad words": (P(), {"output": [9, 4], "bad": ((8,), (4, 2), (9, 3), (9, 4, 5))}),
    "min_tokens": (P(min_tokens=3), {"output": [1, 1], "stop": frozenset((0, 2))}),
    "min_tokens reached": (P(min_tokens=2), {"output": [1, 1], "stop": frozenset((0, 2))}),
    "min_tokens reached with bias": (P(min_tokens=2, logit_bias={5: 1.0}), {"output": [1, 1], "stop": frozenset((0, 2))}),
    "everything": (
        P(
            temperature=1.3, top_p=0.95, top_k=15, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.2,
            logit_bias={11: 2.0}, min_tokens=9,
        ),
        {**SAID, "stop": frozenset((6,)), "bad": ((5,),)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_draws_have_the_exact_distribution(name: str) -> None:
    sampling, more = CASES[name]
    draws = 4000
    logits = some_logits(1)
    rows = [row(sampling, seed=seed, **more) for seed in range(draws)]
    counts = Counter(tokens(Sampler(VOCAB).draw(torch.tensor([logits] * draws), rows).results))
    probabilities = exact(logits, rows[0])
    assert all(probabilities[t] > 0 for t in counts), "a token was drawn that is filtered out"
    # The chi-square test wants about five expected draws in each class: pool the rarer ones.
    common = [i for i in range(VOCAB) if probabilities[i] * draws >= 5]
    observed = [counts[i] for i in common]
    wanted = [probabilities[i] * draws for i in common]
    if draws - sum(wanted) > 1e-6:
        observed.append(draws - sum(observed))
        wanted.append(draws - sum(wanted))
    if len(wanted) > 1:
        assert chisquare(observed, wanted).pvalue > 1e-3


# -- draws of constrained answers --------------------------------------------------------------

END = 3  # ends answers


def masks_of(allowed: set[int], count: int) -> RowMasks:
    """One mask for all rows."""
    bits = np.zeros(32, dtype=np.uint8)
    bits[list(allowed)] = 1
    words = np.packbits(bits, bitorder="little").view(np.int32)[None, :].copy()
    return RowMasks(words, words.ctypes.data, [0] * count)


def constrained(logits: Tensor, rows: list[SampleRow], allowed: set[int]) -> list[int]:
    """The tokens that the engine would append, where only these may follow."""
    drawn = Sampler(VOCAB).draw(logits, rows)
    ended = [i for i, token in enumerate(tokens(drawn.results)) if token == END not in allowed]
    if ended:
        drawn.apply(ended, masks_of(set(range(VOCAB)) - {END}, len(ended)), ["unended"] * len(ended))
    drawn.apply(list(range(len(rows))), masks_of(allowed, len(rows)), ["masked"] * len(rows))
    return tokens(drawn.results)


@pytest.mark.parametrize("allowed", [{0, 1, 2, 9, 23}, {0, END, 9, 23}, {17}, set(range(VOCAB)) - {4}])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_constrained_draws_have_the_distribution_under_the_mask(allowed: set[int], temperature: float) -> None:
    draws, logits = 4000, some_logits(2)
    logits[END] += 3.0  # a model that would end the answer
    rows = [row(P(temperature=temperature), seed=seed) for seed in range(draws)]
    counts = Counter(constrained(torch.tensor([logits] * draws), rows, allowed))
    wanted = exact(logits, row(P(temperature=temperature, allowed_token_ids=tuple(allowed))))
    assert counts.keys() <= allowed
    common = [i for i in range(VOCAB) if wanted[i] * draws >= 5]
    rest = draws * (1 - sum(wanted[i] for i in common))
    observed, hoped = [counts[i] for i in common], [wanted[i] * draws for i in common]
    if rest > 1e-6:
        observed.append(draws - sum(observed))
        hoped.append(rest)
    assert len(hoped) == 1 or chisquare(observed, hoped).pvalue > 1e-3


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(0, VOCAB - 1), min_size=1), st.integers(0, 99), st.sampled_from([None, 2]))
def test_a_greedy_constrained_token_is_the_best_that_is_allowed(
    allowed: set[int], seed: int, logprobs: int | None
) -> None:
    logits = torch.tensor([some_logits(seed)]).round()  # equal ones too
    best = min(allowed, key=lambda i: (-float(logits[0, i]), i))
    assert constrained(logits.clone(), [row(P(temperature=0.0))], allowed) == [best]
    drawn = Sampler(VOCAB).draw(logits.clone(), [row(P(temperature=0.0, logprobs=logprobs))])
    drawn.apply([0], masks_of(allowed, 1), ["masked"])
    (result,) = drawn.results
    assert isinstance(result, Sampled)
    assert result.token_id == best
    if logprobs is not None:
        assert result.logprob == pytest.approx(float(logits[0].log_softmax(0)[best]), abs=1e-5)
        assert result.rank == 1 + int((logits[0] > logits[0, best]).sum())
    assert drawn.scored(0, END).logprob == (
        0.0 if logprobs is None else pytest.approx(float(logits[0].log_softmax(0)[END]), abs=1e-5)
    )


def test_what_a_mask_changes_is_its_row_alone() -> None:
    """Each row has the token that it has alone, whichever others are drawn again; a row with an error keeps it."""
    logits = torch.tensor([some_logits(i) for i in range(6)])
    logits[5] = math.nan
    rows = [row(P(temperature=1.0, logprobs=1 if i % 2 else None), seed=i) for i in range(6)]
    drawn = Sampler(VOCAB).draw(logits.clone(), rows)
    before = list(drawn.results)
    drawn.apply([1, 2, 5], masks_of({6, 7}, 3), ["masked"] * 3)
    assert [drawn.results[i] for i in (0, 3, 4)] == [before[i] for i in (0, 3, 4)]
    assert isinstance(drawn.results[5], InternalError)
    for i in (1, 2):
        alone = Sampler(VOCAB).draw(logits[i : i + 1].clone(), [rows[i]])
        alone.apply([0], masks_of({6, 7}, 1), ["masked"])
        (theirs,), ours = alone.results, drawn.results[i]
        assert isinstance(ours, Sampled)
        assert isinstance(theirs, Sampled)
        assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
        assert ours.token_id in (6, 7)


def test_a_row_whose_mask_leaves_nothing_is_refused_alone() -> None:
    rows = [row(P(temperature=1.0, allowed_token_ids=(4, 5)), seed=1), row(P(temperature=1.0), seed=2)]
    drawn = Sampler(VOCAB).draw(torch.tensor([some_logits(1)] * 2), rows)
    drawn.apply([0, 1], masks_of({6}, 2), ["masked"] * 2)
    assert isinstance(drawn.results[0], InvalidRequest)
    assert tokens([drawn.results[1]]) == [6]


@pytest.mark.parametrize(
    ("sampling", "warper"),
    [
        (P(top_p=0.8), TopPLogitsWarper(0.8)),
        (P(top_p=0.05), TopPLogitsWarper(0.05)),
        (P(top_k=6), TopKLogitsWarper(6)),
        (P(min_p=0.1), MinPLogitsWarper(0.1)),
        (P(repetition_penalty=1.7), RepetitionPenaltyLogitsProcessor(1.7)),
        (P(temperature=0.6), TemperatureLogitsWarper(0.6)),
    ],
)
def test_the_definitions_tested_against_are_those_of_transformers(
    sampling: SamplingParams, warper: LogitsProcessor
) -> None:
    for seed in range(20):
        logits = some_logits(seed)
        theirs = warper(torch.tensor([[1, 2, 2, 5]]), torch.tensor([logits])).softmax(-1)[0].tolist()
        assert exact(logits, row(sampling, prompt=[1, 2], output=[2, 5])) == pytest.approx(theirs, abs=1e-6)


def test_the_uniform_numbers_are_uniform_and_differ_by_seed_choice_and_position() -> None:
    numbers = [uniform(s, i, p) for s in range(20) for i in range(10) for p in range(20)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= u < 1 for u in numbers)
    assert chisquare(list(Counter(int(u * 20) for u in numbers).values())).pvalue > 1e-3
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


def test_draws_at_successive_positions_are_independent() -> None:
    pairs = Counter((int(uniform(7, 0, p) * 5), int(uniform(7, 0, p + 1) * 5)) for p in range(10_000))
    assert chisquare([pairs[a, b] for a in range(5) for b in range(5)]).pvalue > 1e-3


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 7, 200]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    logprobs=st.sampled_from([None, 0, 3]),
)


@given(
    all_params=st.lists(params, min_size=2, max_size=6),
    size=st.sampled_from([5, 128, 1000, 5000]),
    scale=st.sampled_from([0.01, 1.0, 6.0]),
    coarse=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150)
def test_a_row_is_the_same_alone_and_in_any_batch(
    all_params: list[SamplingParams], size: int, scale: float, coarse: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(all_params), size, generator=generator) * scale
    if coarse:  # many equal logits, as a bfloat16 output layer makes
        logits = logits.bfloat16().float()
    rows = [row(p, seed=seed + i, prompt=[1, 2], output=[3, 4, 4]) for i, p in enumerate(all_params)]
    together = Sampler(size).draw(logits.clone(), rows).results
    backwards = Sampler(size).draw(logits.flip(0), rows[::-1]).results[::-1]
    for i, r in enumerate(rows):
        (alone,) = Sampler(size).draw(logits[i : i + 1].clone(), [r]).results
        assert isinstance(alone, Sampled)
        for other in (together[i], backwards[i]):
            assert isinstance(other, Sampled)
            assert (other.token_id, other.rank) == (alone.token_id, alone.rank)
            assert other.logprob == pytest.approx(alone.logprob, abs=1e-5)


def assert_same_tokens(logits: Tensor, rows: list[SampleRow], level: str) -> None:
    """The kernel's tokens are torch's, but where a draw falls on the border between two within rounding."""
    sampler = Sampler(logits.shape[1])
    with compiled.using_level(level):
        ours = sampler.draw(logits.clone(), rows).results
    with compiled.using_level("none"):
        theirs = sampler.draw(logits.clone(), rows).results
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not (isinstance(a, Sampled) and isinstance(b, Sampled)):
            assert type(a) is type(b)
        elif a.token_id != b.token_id:
            p = exact(logits[i].tolist(), rows[i])
            border = sum(p[: max(a.token_id, b.token_id)])
            assert p[a.token_id] > 0
            assert abs(uniform(rows[i].seed, rows[i].index, len(rows[i].output_ids)) - border) < 1e-5


@pytest.mark.parametrize("level", compiled.levels())
@given(
    all_params=st.lists(params, min_size=1, max_size=5),
    size=st.sampled_from([1, 5, 128, 300, 5000]),
    scale=st.sampled_from([0.01, 1.0, 6.0]),
    coarse=st.booleans(),
    banned=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_the_kernel_takes_the_tokens_that_torch_takes(
    level: str, all_params: list[SamplingParams], size: int, scale: float, coarse: bool, banned: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(all_params), size, generator=generator) * scale
    if coarse:
        logits = logits.bfloat16().float()
    logits[torch.rand(logits.shape, generator=generator) < banned] = -math.inf
    rows = [row(p, seed=seed + i, prompt=[1, 2], output=[3, 4, 4]) for i, p in enumerate(all_params)]
    assert_same_tokens(logits, rows, level)


@pytest.mark.parametrize("level", compiled.levels())
@pytest.mark.parametrize(("top_p", "top_k"), [(0.5, 0), (0.9, 0), (0.999, 0), (0.9, 2000), (0.02, 0), (1.0, 19_999)])
def test_the_kernel_cuts_a_flat_distribution_where_torch_does(level: str, top_p: float, top_k: int) -> None:
    logits = torch.randn(8, 20_000, generator=torch.Generator().manual_seed(5))
    rows = [row(SamplingParams(top_p=top_p, top_k=top_k), seed=i) for i in range(8)]
    assert_same_tokens(logits, rows, level)


@pytest.mark.parametrize("level", compiled.levels())
@pytest.mark.parametrize("banned", [0, 1500, 30_000])
@pytest.mark.parametrize("fall", [3.0, 0.03, 0.004, 0.0005])
def test_the_kernel_finds_a_nucleus_of_any_number_of_tokens(level: str, fall: float, banned: int) -> None:
    """The logit falls by so much from token to token, so that the nucleus has 1 to 5,000 of them."""
    size = 40_000
    generator = torch.Generator().manual_seed(7)
    logits = torch.stack([-fall * torch.randperm(size, generator=generator).float() for _ in range(4)])
    logits[:, :banned] = -math.inf
    rows = [row(SamplingParams(top_p=p), seed=i) for i, p in enumerate((0.3, 0.9, 0.9, 0.99))]
    assert_same_tokens(logits, rows, level)


@given(data=st.data())
@settings(max_examples=100)
def test_only_tokens_with_probability_are_drawn(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([3, 130, 300]))
    logits = [data.draw(st.floats(-8, 8, width=16)) for _ in range(min(size, 12))]
    logits += some_logits(size, size - len(logits))
    r = row(data.draw(params), seed=data.draw(st.integers()), prompt=[0, 1], output=[2, 0])
    (token,) = tokens(Sampler(size).draw(torch.tensor([logits]), [r]).results)
    p = exact(logits, r)
    if r.sampling.temperature == 0:
        adjusted = exact(
            logits,
            row(
                SamplingParams(
                    repetition_penalty=r.sampling.repetition_penalty, presence_penalty=r.sampling.presence_penalty
                ),
                prompt=[0, 1],
                output=[2, 0],
            ),
        )
        assert adjusted[token] == pytest.approx(max(adjusted), rel=1e-5)
    elif p[token] == 0:
        # The twin computes in float64: a token may lie at the border of a filter within float32.
        kept = min(x for x in p if x > 0)
        plain = exact(
            logits,
            row(
                SamplingParams(
                    temperature=r.sampling.temperature,
                    repetition_penalty=r.sampling.repetition_penalty,
                    presence_penalty=r.sampling.presence_penalty,
                ),
                prompt=[0, 1],
                output=[2, 0],
            ),
        )
        kept_plain = plain[p.index(kept)]
        assert plain[token] >= kept_plain * (1 - 1e-4)


@pytest.mark.parametrize(("top_p", "top_k"), [(0.5, 0), (0.9, 0), (0.999, 0), (0.5, 6000), (0.9, 2000), (0.02, 0)])
def test_a_flat_distribution_is_cut_by_top_p_where_a_full_sort_cuts_it(top_p: float, top_k: int) -> None:
    size = 20_000
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(5))
    y = logits - logits.max()
    floors = _thresholds(y, [SamplingParams(top_p=top_p, top_k=top_k)])
    assert floors is not None
    ordered = y[0].double().sort(descending=True).values[: top_k or size]
    nucleus = int((ordered.softmax(0).cumsum(0) < top_p).sum()) + 1
    assert abs(int((y[0] >= floors[0]).sum()) - nucleus) <= 1  # the border may lie within rounding
    assert top_p == 0.02 or nucleus > 1024
    # And a row is cut the same beside rows that need other candidates.
    beside = [SamplingParams(top_k=5000), SamplingParams(top_p=top_p, top_k=top_k), SamplingParams(min_p=0.2)]
    others = _thresholds(y.repeat(3, 1), beside)
    assert others is not None
    assert others[1] == floors[0]


@pytest.mark.parametrize("top_k", [0, 2])
def test_equal_tokens_beyond_the_likeliest_count_for_top_p(top_k: int) -> None:
    """More of them than are looked at first have the logit at which top-k cuts, and all of them are kept."""
    y = torch.full((1, 20_000), math.log(0.0001))
    y[0, 7] = 0.0
    floors = _thresholds(y, [SamplingParams(top_p=0.9, top_k=top_k)])
    assert floors is not None
    assert floors[0] == y[0, 0], "the first has a third of the mass"


@pytest.mark.parametrize("size", [1, 24, 128, 129, 1000, 10_001])
def test_a_draw_inverts_the_cumulative_distribution_in_vocabulary_order(size: int) -> None:
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(size))
    ends = logits[0].double().softmax(0).cumsum(0)
    rows = [row(SamplingParams(), seed=s, index=2, output=[0]) for s in range(400)]
    for r, token in zip(rows, tokens(Sampler(size).draw(logits.repeat(400, 1), rows).results), strict=True):
        u = uniform(r.seed, 2, 1)
        assert u < ends[token] + 1e-6
        assert token == 0 or u >= ends[token - 1] - 1e-6


@pytest.mark.parametrize("draw", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("place", [0, 5, 127, 128, 200, 383])
def test_the_ends_of_the_unit_interval_fall_on_possible_tokens(draw: float, place: int) -> None:
    weights = torch.zeros(1, 3, 128)
    weights.view(-1)[place] = 0.3
    assert _invert(weights, torch.tensor([draw], dtype=torch.float64)).tolist() == [place]


# -- greedy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 5, 128, 300])
def test_greedy_takes_the_lowest_of_equal_ids(size: int) -> None:
    logits = torch.zeros(3, size)
    logits[1, size // 2 :] = 1.0
    logits[2, -1] = 1.0
    got = tokens(Sampler(size).draw(logits, [row(SamplingParams(temperature=0.0))] * 3).results)
    assert got == [0, size // 2, size - 1]


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.tensor([some_logits(3)])
    for temperature in (1e-300, 1e-38, 1e-6, 0.0):
        (token,) = tokens(
            Sampler(VOCAB).draw(logits.clone(), [row(SamplingParams(temperature=temperature), seed=9)]).results
        )
        assert token == int(logits.argmax())


def test_padding_beyond_the_vocabulary_is_never_chosen() -> None:
    logits = torch.zeros(200, 40)
    logits[:, 30:] = 50.0
    sampler = Sampler(30)
    rows = [row(SamplingParams(temperature=t, logprobs=5), seed=s) for s, t in enumerate([0.0, 1.0] * 100)]
    results = sampler.draw(logits, rows).results
    assert max(tokens(results)) < 30
    assert all(isinstance(r, Sampled) and max(t for t, _ in r.top) < 30 for r in results)


# -- log-probabilities ------------------------------------------------------------------------


def test_log_probabilities_are_those_of_the_untouched_logits() -> None:
    logits = torch.tensor([some_logits(4)] * 3)
    before = logits.log_softmax(-1)
    rows = [
        row(SamplingParams(temperature=0.0, logprobs=2, logit_bias={7: 100.0})),
        row(SamplingParams(temperature=0.0)),
        row(SamplingParams(temperature=0.0, n=1, best_of=2)),
    ]
    first, second, third = Sampler(VOCAB).draw(logits, rows).results
    assert isinstance(first, Sampled)
    assert isinstance(third, Sampled)
    assert first.token_id == 7
    assert first.logprob == pytest.approx(float(before[0, 7]), abs=1e-6)
    assert first.rank == 1 + int((before[0] > before[0, 7]).sum())
    best = before[0].topk(2)
    assert [t for t, _ in first.top] == best.indices.tolist()
    assert [p for _, p in first.top] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert second == Sampled(int(before[1].argmax()), 0.0, 0, ())
    assert third.logprob == pytest.approx(float(before[2].max()), abs=1e-6)
    assert (third.token_id, third.rank, third.top) == (int(before[2].argmax()), 1, ())


def test_log_probabilities_count_the_padding_as_the_model_does() -> None:
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(1))
    want = logits.log_softmax(-1)
    got = Sampler(30).prompt_logprobs(logits, [3, 29], 30)
    assert [s.logprob for s in got] == pytest.approx([float(want[0, 3]), float(want[1, 29])], abs=1e-6)
    assert [len(s.top) for s in got] == [30, 30]
    assert all(a >= b for s in got for (_, a), (_, b) in zip(s.top, s.top[1:], strict=False))


def test_as_many_rivals_are_given_as_each_row_asks_for() -> None:
    rows = [row(SamplingParams(temperature=0.0, logprobs=k)) for k in (0, 1, 4)]
    results = Sampler(VOCAB).draw(torch.tensor([some_logits(8)] * 3), rows).results
    assert [len(r.top) for r in results if isinstance(r, Sampled)] == [0, 1, 4]


# -- rows that cannot be sampled --------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(temperature: float, value: float) -> None:
    logits = torch.tensor([some_logits(1)] * 3)
    logits[1, 20] = value
    rows = [row(SamplingParams(temperature=temperature, logprobs=1, top_p=0.9, top_k=5), seed=s) for s in range(3)]
    good = Sampler(VOCAB).draw(logits[[0, 2]], [rows[0], rows[2]]).results
    results = Sampler(VOCAB).draw(logits, rows).results
    assert isinstance(results[1], InternalError)
    assert [results[0], results[2]] == good


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_tokens_are_all_banned_fails_with_the_remedy(temperature: float) -> None:
    rows = [
        row(SamplingParams(temperature=temperature, allowed_token_ids=(2,), min_tokens=4), stop=frozenset((2,))),
        row(SamplingParams(temperature=temperature)),
    ]
    banned, fine = Sampler(VOCAB).draw(torch.tensor([some_logits(1)] * 2), rows).results
    assert isinstance(banned, InvalidRequest)
    assert banned.param == "allowed_token_ids"
    assert "allowed_token_ids, min_tokens and the form" in banned.message
    assert isinstance(fine, Sampled)


def test_the_field_that_bans_every_token_is_named() -> None:
    rows = [
        row(SamplingParams(), bad=tuple([(i,) for i in range(VOCAB)])),
        row(SamplingParams(min_tokens=4), stop=frozenset(range(VOCAB))),
    ]
    found = Sampler(VOCAB).draw(torch.tensor([some_logits(1)] * 2), rows).results
    assert [error.param for error in found if isinstance(error, InvalidRequest)] == ["bad_words", "min_tokens"]


def test_only_what_bans_a_token_at_this_place_is_named() -> None:
    begun = tuple([(5, i) for i in range(VOCAB)])  # complete behind token 5 alone
    rows = [row(SamplingParams(), bad=begun, output=[5]), row(SamplingParams(), bad=begun), row(SamplingParams())]
    none_left = torch.full((3, VOCAB), -math.inf)
    banned, *failed = Sampler(VOCAB).draw(none_left, rows).results
    assert isinstance(banned, InvalidRequest)
    assert banned.param == "bad_words"
    assert all(isinstance(error, InternalError) for error in failed)  # the model's fault


def test_a_prompt_whose_logits_are_not_numbers_is_an_error() -> None:
    with pytest.raises(InternalError):
        Sampler(4).prompt_logprobs(torch.full((1, 4), math.nan), [0], 1)


def test_ids_outside_the_vocabulary_are_ignored_where_they_can_do_nothing() -> None:
    sampling = SamplingParams(temperature=0.0, logit_bias={99: 5.0}, repetition_penalty=1.5, presence_penalty=1.0)
    r = row(sampling, prompt=[50], output=[60], bad=((70,), ()))
    logits = torch.tensor([some_logits(1)])
    assert tokens(Sampler(VOCAB).draw(logits.clone(), [r]).results) == [int(logits.argmax())]
