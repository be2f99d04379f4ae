"""A second, smaller decoder that guesses the next tokens of the first.

It has KV blocks of its own, and works by the scheduler's rule: it knows all tokens of a sequence, has computed some,
and catches up before it guesses. A prompt is computed in chunks when its sequence is first drafted for, with a prefix
cache of its own. Knows tensors through its runner. ``gain`` decides whether drafting pays.

It guesses its likeliest token. The target's draw agrees with the probability that the target gives that token. A
rejection sampler would accept a guess that was not drawn itself just as often (``docs/speculation.md``).
"""

from __future__ import annotations

from inferd.engine.runner import Runner
from inferd.engine.scheduling.blocks import BlockPool
from inferd.engine.scheduling.scheduler import Slice, Step
from inferd.engine.scheduling.sequence import Sequence
from inferd.engine.speculation.draft_passes import Guess, Rule, native_passes, run_natively, run_stepwise


class _Mirror(Sequence):
    """The draft model's copy of a sequence: the same tokens, other blocks."""

    __slots__ = ("num_ahead", "used_at")

    num_ahead: int  # guessed tokens whose KV was computed, behind ``num_computed``
    used_at: int


class DraftModel:
    """Guesses for many sequences together, one token of each per pass (``draft_passes``)."""

    def __init__(self, runner: Runner, pool: BlockPool, vocab_size: int, *, max_len: int, prefix_caching: bool) -> None:
        self.pool = pool
        self.max_len = max_len  # tokens of a sequence, guesses included
        self._runner = runner
        self._vocab_size = vocab_size
        self._num_embedded = runner.decoder.config.vocab_size
        self._prefix_caching = prefix_caching
        self._mirrors: dict[Sequence, _Mirror] = {}
        self._block_size = runner.cache.block_size
        self._clock = 0  # of uses
        self._native = native_passes(runner, vocab_size)

    def takes(self, sequence: Sequence) -> bool:
        """Whether the draft model can compute the sequence's tokens and more.

        A prompt of token ids may have one for which only the target has a row: models of one family have tables of
        different sizes.
        """
        is_known = sequence in self._mirrors or max(sequence.tokens) < self._num_embedded
        return is_known and len(sequence.tokens) < self.max_len

    def gap(self, sequence: Sequence) -> int:
        """Tokens to compute before the first guess. The first call looks the prefix cache up."""
        mirror = self._mirrors.get(sequence) or self._open(sequence)
        return len(sequence.tokens) - mirror.num_computed

    def catch_up(self, sequences: list[Sequence], budget: int) -> None:
        """Compute at most ``budget`` tokens of sequences that are behind, and leave each its last token."""
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
            for part in step.slices:
                self._computed(part.sequence, part.start + part.count)

    def guess(self, guesses: list[Guess], rule: Rule) -> int:
        """Fill the guesses, after computing the tokens before them; returns the number of passes. Some stay empty where
        blocks are short."""
        self._clock += 1
        served: list[Guess] = []
        mirrors: list[_Mirror] = []
        for guess in guesses:
            mirror = self._use(guess.sequence)
            mirror.num_ahead = 0
            if self._reserve(mirror, len(mirror.tokens) + guess.most - 1):
                served.append(guess)
                mirrors.append(mirror)
        if not served:
            return 0
        if self._native is not None and self._runner.one_call is not None:
            passes = run_natively(self._native, served, mirrors, rule)
        else:
            passes = run_stepwise(self._runner, self._vocab_size, served, mirrors, rule)
        for guess, mirror in zip(served, mirrors, strict=True):
            mirror.num_ahead = len(guess.surenesses) - 1
            self._computed(mirror, len(mirror.tokens))
        return passes

    def accept_guesses(self, sequence: Sequence, num_right: int) -> None:
        """The first ``num_right`` guesses were right: their keys and values are kept."""
        mirror = self._mirrors.get(sequence)
        if mirror is not None:
            mirror.num_computed += min(num_right, mirror.num_ahead)
            mirror.num_ahead = 0

    def forget(self, sequence: Sequence) -> None:
        """Give the sequence's blocks back. Idempotent."""
        mirror = self._mirrors.pop(sequence, None)
        if mirror is not None:
            self.pool.release(mirror.blocks)

    # -- books ------------------------------------------------------------------------------

    def _computed(self, mirror: Sequence, end: int) -> None:
        mirror.num_computed = end
        while self._prefix_caching and mirror.num_hashed < end // self._block_size:
            i = mirror.num_hashed
            key = mirror.block_key(i, self._block_size)
            self.pool.publish(mirror.blocks[i], key, mirror.tenant, mirror.weight)
            mirror.num_hashed = i + 1

    def _open(self, sequence: Sequence) -> _Mirror:
        mirror = self._mirrors[sequence] = _Mirror(
            request_id=sequence.request_id,
            index=sequence.index,
            prompt_ids=[],
            sampling=sequence.sampling,
            seed=sequence.seed,
            salt=sequence.salt,
            tenant=sequence.tenant,
            weight=sequence.weight,
        )
        mirror.tokens = sequence.tokens  # the target's own list, so new tokens appear here as well
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
        """Make the blocks hold ``end`` tokens, releasing those of sequences that are not drafted for now."""
        missing = -(-end // self._block_size) - len(mirror.blocks)
        while missing > self.pool.num_available:
            idle = [(m.used_at, s) for s, m in self._mirrors.items() if m.used_at < self._clock and m.blocks]
            if not idle:
                return False
            self.forget(min(idle, key=lambda pair: pair[0])[1])
        if missing > 0:
            mirror.blocks += self.pool.allocate(missing)
        return True
