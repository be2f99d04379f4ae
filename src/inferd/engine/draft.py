"""A second, smaller decoder that guesses what the first will say.

It has KV blocks of its own and the scheduler's one idea: of each sequence it knows all tokens and has computed some of
them, and it catches up before it guesses. It computes a sequence's prompt when that is first drafted for, in chunks, and finds
prefixes in a cache of its own. Knows tensors through its runner; whether drafting pays is decided elsewhere.

It guesses its likeliest token. The target's draw agrees with the probability that the target gives that token, and a
rejection sampler would accept a guess that was not drawn itself just as often (``docs/speculation.md``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from inferd.engine.attention import FlatBatch
from inferd.engine.blocks import BlockPool
from inferd.engine.runner import Runner
from inferd.engine.scheduler import Slice, Step
from inferd.engine.sequence import Sequence


@dataclass(slots=True)
class Guess:
    """What is guessed for one sequence in one step."""

    sequence: Sequence
    most: int  # tokens
    tokens: list[int] = field(default_factory=list)
    sureness: float = 0.0  # of the last one: its share of what it and the second likeliest have, 0.5 to 1

    @property
    def is_full(self) -> bool:
        return len(self.tokens) >= self.most


class _Mirror(Sequence):
    """The draft's view of a sequence: the same tokens, other blocks."""

    __slots__ = ("num_ahead", "used_at")

    num_ahead: int  # guessed tokens whose KV was computed, behind ``num_computed``
    used_at: int


class _Pass:
    """One row for each of some guesses, as tensors that move on by a token."""

    __slots__ = ("_block_size", "_blocks", "_lengths", "_positions", "_slots", "_tokens", "batch", "guesses")

    def __init__(self, guesses: list[Guess], mirrors: list[_Mirror], block_size: int) -> None:
        """The row behind everything that is known, of guesses that have their first token."""
        self.guesses = guesses
        self._block_size = block_size
        count = len(guesses)
        self._tokens = np.array([guess.tokens[-1] for guess in guesses], dtype=np.int64)
        self._positions = np.array([len(m.tokens) + len(g.tokens) - 1 for g, m in zip(guesses, mirrors, strict=True)])
        self._lengths = (self._positions + 1).astype(np.int32)
        self._blocks = np.zeros((count, max(len(m.blocks) for m in mirrors)), dtype=np.int32)
        for row, mirror in zip(self._blocks, mirrors, strict=True):
            row[: len(mirror.blocks)] = mirror.blocks
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
        self._tokens[:] = [guess.tokens[-1] for guess in self.guesses]
        self._positions += 1
        self._lengths += 1
        self._place()

    def _place(self) -> None:
        size = self._block_size
        for i, at in enumerate(self._positions.tolist()):
            self._slots[i] = self._blocks[i, at // size] * size + at % size


class DraftModel:
    """Guesses for many sequences together, a token of each per pass."""

    def __init__(self, runner: Runner, pool: BlockPool, vocab_size: int, *, max_len: int, prefix_caching: bool) -> None:
        self.pool = pool
        self.max_len = max_len  # tokens of a sequence, guesses included
        self._runner = runner
        self._vocab_size = vocab_size
        self._prefix_caching = prefix_caching
        self._mirrors: dict[Sequence, _Mirror] = {}
        self._block_size = runner.cache.block_size
        self._clock = 0  # of uses
        self._pass: _Pass | None = None

    def gap(self, sequence: Sequence) -> int:
        """Tokens that must be computed before the first guess. Looks the prefix cache up the first time."""
        mirror = self._mirrors.get(sequence) or self._open(sequence)
        return len(sequence.tokens) - mirror.num_computed

    def catch_up(self, sequences: list[Sequence], budget: int) -> None:
        """Compute at most ``budget`` tokens of sequences that are behind, leaving each its last."""
        step = Step()
        self._clock += 1
        for sequence in sequences:
            mirror = self._use(sequence)
            count = min(len(sequence.tokens) - 1 - mirror.num_computed, budget)
            if count > 0 and self._reserve(mirror, mirror.num_computed + count):
                step.slices.append(Slice(mirror, mirror.num_computed, count))
                budget -= count
        if step.slices:
            self._runner.run(step)
            self._computed(step)

    def begin(self, guesses: list[Guess]) -> list[Guess]:
        """The first token of each; what is missing before it is computed along. Returns those that got one: where
        blocks are short, not all do."""
        self._clock += 1
        self._pass = None
        served, step = [], Step()
        for guess in guesses:
            mirror = self._use(guess.sequence)
            mirror.num_ahead = 0
            known = len(mirror.tokens)
            if self._reserve(mirror, known + guess.most - 1):
                served.append(guess)
                step.slices.append(Slice(mirror, mirror.num_computed, known - mirror.num_computed))
        if served:
            hidden = self._runner.run(step)
            self._computed(step)
            self._say(served, self._runner.logits(hidden, _last_rows(step)))
        return served

    def go_on(self, guesses: list[Guess]) -> None:
        """One token more of each; they are among those of the pass before."""
        if self._pass is not None and len(self._pass.guesses) == len(guesses):
            self._pass.move()
        else:
            mirrors = [self._mirrors[guess.sequence] for guess in guesses]
            self._pass = _Pass(guesses, mirrors, self._block_size)
        for guess in guesses:
            self._mirrors[guess.sequence].num_ahead = len(guess.tokens)
        hidden = self._runner.compute(self._pass.batch)
        self._say(guesses, self._runner.decoder.logits(hidden))

    def settle(self, sequence: Sequence, num_right: int) -> None:
        """So many of the guesses were right: their KV stays."""
        mirror = self._mirrors.get(sequence)
        if mirror is not None:
            mirror.num_computed += min(num_right, mirror.num_ahead)
            mirror.num_ahead = 0

    def forget(self, sequence: Sequence) -> None:
        """Give the sequence's blocks back. Idempotent."""
        mirror = self._mirrors.pop(sequence, None)
        if mirror is not None:
            self.pool.release(mirror.blocks)

    # -- passes -----------------------------------------------------------------------------

    def _say(self, guesses: list[Guess], logits: Tensor) -> None:
        values, ids = logits[:, : self._vocab_size].topk(2, dim=-1)
        for guess, (first, second), (token, _) in zip(guesses, values.tolist(), ids.tolist(), strict=True):
            guess.tokens.append(token)
            guess.sureness = 1.0 / (1.0 + math.exp(second - first)) if second - first > -50 else 1.0

    def _computed(self, step: Step) -> None:
        for part in step.slices:
            mirror = part.sequence
            mirror.num_computed = part.start + part.count
            while self._prefix_caching and mirror.num_hashed < mirror.num_computed // self._block_size:
                i = mirror.num_hashed
                self.pool.publish(mirror.blocks[i], mirror.block_key(i, self._block_size))
                mirror.num_hashed = i + 1

    # -- books ------------------------------------------------------------------------------

    def _open(self, sequence: Sequence) -> _Mirror:
        mirror = self._mirrors[sequence] = _Mirror(
            request_id=sequence.request_id,
            index=sequence.index,
            prompt_ids=[],
            sampling=sequence.sampling,
            seed=sequence.seed,
            salt=sequence.salt,
        )
        mirror.tokens = sequence.tokens  # the list itself: what the target learns is known here
        mirror.num_prompt = sequence.num_prompt
        mirror.cache_keys = sequence.cache_keys
        mirror.num_ahead = 0
        mirror.used_at = self._clock
        if self._prefix_caching:
            for i in range((len(mirror.tokens) - 1) // self._block_size):
                block = self.pool.find(mirror.block_key(i, self._block_size))
                if block is None:
                    break
                self.pool.reuse([block])
                mirror.blocks.append(block)
            mirror.num_hashed = len(mirror.blocks)
            mirror.num_computed = len(mirror.blocks) * self._block_size
        return mirror

    def _use(self, sequence: Sequence) -> _Mirror:
        mirror = self._mirrors.get(sequence) or self._open(sequence)
        mirror.used_at = self._clock
        return mirror

    def _reserve(self, mirror: _Mirror, end: int) -> bool:
        """Make the blocks hold ``end`` tokens. Sequences that are not drafted for now give theirs."""
        missing = -(-end // self._block_size) - len(mirror.blocks)
        while missing > self.pool.num_available:
            idle = [(m.used_at, s) for s, m in self._mirrors.items() if m.used_at < self._clock and m.blocks]
            if not idle:
                return False
            self.forget(min(idle, key=lambda pair: pair[0])[1])
        if missing > 0:
            mirror.blocks += self.pool.allocate(missing)
        return True


def _last_rows(step: Step) -> list[int]:
    rows, at = [], -1
    for part in step.slices:
        at += part.count
        rows.append(at)
    return rows
