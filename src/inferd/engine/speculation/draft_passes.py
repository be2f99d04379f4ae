"""A draft model's passes: each computes the tokens that the pass before guessed, until a further guess does not pay.

There are two ways to the same guesses. One is a call of the kernels (kernels/drafting.h), which returns to Python only
at the end. The other goes pass by pass through a ``Runner``; it is the oracle of the tests and computes everywhere
else. Both know tokens, blocks and a ``Rule``. ``gain`` decides what a guess is worth.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from inferd.engine.model.llama import LlamaDecoder
from inferd.engine.runner import Runner
from inferd.engine.scheduling.scheduler import Slice, Step
from inferd.engine.scheduling.sequence import Sequence
from inferd.engine.speculation.gain import StepForecast
from inferd.native.attention import FlatBatch
from inferd.native.compiled import CODES, kernels


@dataclass(frozen=True, slots=True)
class Rule:
    """When a guess is kept and another pass follows. A token's chance includes those of the tokens before it."""

    bounds: tuple[float, ...]  # of surenesses: ``chances[i]`` is that from ``bounds[i - 1]`` to below ``bounds[i]``
    chances: tuple[float, ...]
    next_chance: float  # of a token, given only that the tokens before it are right
    forecast: StepForecast  # of the step, without these guesses
    pass_s: float

    def chance(self, sureness: float) -> float:
        return self.chances[bisect_right(self.bounds, sureness)]


@dataclass(slots=True)
class Guess:
    """The guessed tokens of one sequence in one step."""

    sequence: Sequence
    most: int  # tokens
    tokens: list[int] = field(default_factory=list)
    # Of each pass, its token kept or not: the share of what it and the second likeliest have, 0.5 to 1.
    surenesses: list[float] = field(default_factory=list)


def native_passes(runner: Runner, vocab_size: int) -> kernels.Drafter | None:
    """The runner's decoder as one call that guesses; None where the kernels do not support it."""
    one_call, decoder = runner.one_call, runner.decoder
    if one_call is None or not isinstance(decoder, LlamaDecoder):
        return None
    if decoder.embedding.described is None or decoder.head.described is None:
        return None
    config = decoder.config
    return kernels.Drafter(
        decoder=one_call.plan,
        head=decoder.head.described,
        dtype=CODES[decoder.dtype],
        hidden=config.hidden_size,
        vocab=vocab_size,
        block_size=runner.cache.block_size,
        divisor=config.logits_divisor,
        softcap=config.final_softcap or 0.0,
    )


def run_natively(drafter: kernels.Drafter, guesses: list[Guess], views: Seq[Sequence], rule: Rule) -> int:
    """Fill the guesses; returns the number of passes.

    ``views``: what the draft model has computed of each sequence, and its blocks, which hold all guesses but the last.
    """
    tokens, surenesses, passes = drafter.guess(
        [view.tokens[view.num_computed :] for view in views],
        [view.blocks for view in views],
        [view.num_computed for view in views],
        [guess.most for guess in guesses],
        rule.bounds,
        rule.chances,
        rule.next_chance,
        rule.forecast.tokens,
        rule.forecast.seconds,
        rule.forecast.row_s,
        rule.pass_s,
        rule.forecast.least,
        rule.forecast.least_per_s,
        torch.get_num_threads(),
    )
    for guess, found, sure in zip(guesses, tokens, surenesses, strict=True):
        guess.tokens, guess.surenesses = found, sure
    return passes


def run_stepwise(runner: Runner, vocab_size: int, guesses: list[Guess], views: Seq[Sequence], rule: Rule) -> int:
    """``run_natively`` pass by pass, on any device and for any decoder."""
    step = Step([Slice(view, view.num_computed, len(view.tokens) - view.num_computed) for view in views])
    logits = runner.logits(runner.run(step), _last_rows(step))
    going = list(zip(guesses, views, [1.0] * len(guesses), strict=True))
    forecast = copy(rule.forecast)
    passes = 0
    under_way: _Pass | None = None
    while True:
        passes += 1
        forecast.seconds += rule.pass_s
        alive, expected = [], 0.0
        for (guess, view, before), (token, sureness) in zip(going, _likeliest(logits, vocab_size), strict=True):
            guess.surenesses.append(sureness)
            chance = before * rule.chance(sureness)
            if chance < forecast.min_chance(forecast.row_s):
                continue
            forecast.add(chance)
            guess.tokens.append(token)
            if len(guess.tokens) < guess.most:
                alive.append((guess, view, chance))
                expected += chance
        share = 1.0 / max(len(alive), 1)
        if not alive or rule.next_chance * expected * share < forecast.min_chance(forecast.row_s + rule.pass_s * share):
            return passes
        if under_way is not None and len(alive) == len(going):
            under_way.move()
        else:
            under_way = _Pass([guess for guess, _, _ in alive], [view for _, view, _ in alive], runner)
        going = alive
        logits = runner.decoder.logits(runner.compute(under_way.batch))


class _Pass:
    """One row for each guess, as tensors that advance by a token."""

    __slots__ = ("_block_size", "_blocks", "_guesses", "_lengths", "_positions", "_slots", "_tokens", "batch")

    def __init__(self, guesses: list[Guess], views: Seq[Sequence], runner: Runner) -> None:
        """The row after all known tokens, for guesses that have their first token."""
        self._guesses = guesses
        self._block_size = runner.cache.block_size
        count = len(guesses)
        self._tokens = np.array([guess.tokens[-1] for guess in guesses], dtype=np.int64)
        self._positions = np.array([len(v.tokens) + len(g.tokens) - 1 for g, v in zip(guesses, views, strict=True)])
        self._lengths = (self._positions + 1).astype(np.int32)
        self._blocks = np.zeros((count, max(len(view.blocks) for view in views)), dtype=np.int32)
        for row, view in zip(self._blocks, views, strict=True):
            row[: len(view.blocks)] = view.blocks
        self._slots = np.empty(count, dtype=np.int64)
        self._place()
        self.batch = FlatBatch(
            token_ids=torch.from_numpy(self._tokens),
            positions=torch.from_numpy(self._positions),
            query_start=torch.arange(count + 1, dtype=torch.int32),
            seq_len=torch.from_numpy(self._lengths),
            block_table=torch.from_numpy(self._blocks),
            slots=torch.from_numpy(self._slots),
            num_sequences=count,
        )

    def move(self) -> None:
        """To each guess's latest token."""
        self._tokens[:] = [guess.tokens[-1] for guess in self._guesses]
        self._positions += 1
        self._lengths += 1
        self._place()

    def _place(self) -> None:
        size = self._block_size
        for i, at in enumerate(self._positions.tolist()):
            self._slots[i] = self._blocks[i, at // size] * size + at % size


def _likeliest(logits: Tensor, vocab_size: int) -> list[tuple[int, float]]:
    """The likeliest token of each row [V], and its probability."""
    values, ids = logits[:, :vocab_size].topk(2, dim=-1)
    return [
        (token, 1.0 / (1.0 + math.exp(second - first)) if second - first > -50 else 1.0)
        for (first, second), (token, _) in zip(values.tolist(), ids.tolist(), strict=True)
    ]


def _last_rows(step: Step) -> list[int]:
    rows, at = [], -1
    for part in step.slices:
        at += part.count
        rows.append(at)
    return rows
