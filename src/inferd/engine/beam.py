"""Beam search for one request: which beams continue, and which have ended.

Pure over token ids and log-probabilities; the caller forks sequences and computes logits. The rules are those of
transformers' ``generate(num_beams=..., early_stopping="never")``. The score of an ended hypothesis is its sum of
log-probabilities / length ** length_penalty, where the length counts generated tokens with the end-of-sequence token.
The search ends when no live beam can beat the worst of ``width`` ended ones, or at max_tokens.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

Candidate = tuple[int, float]
"""A token and its log-probability after one beam."""

Extension = tuple[int, int, float]
"""(index of the parent beam, token, cumulative log-probability) of a beam that lives on."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Generated tokens that ended, with an end-of-sequence token or at max_tokens."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float


class BeamState:
    """One search, from a single empty beam to ``best``.

    Give ``advance`` the likeliest ``candidates_per_beam`` tokens of every live beam, in the order of the beams that the
    last ``advance`` returned, until ``is_done``.
    """

    def __init__(self, *, width: int, max_tokens: int, eos_token_ids: frozenset[int], length_penalty: float) -> None:
        if width < 1 or max_tokens < 1:
            raise ValueError(f"width and max_tokens are at least 1, not {width} and {max_tokens}")
        self.width = width
        self._max_tokens = max_tokens
        self._eos_token_ids = eos_token_ids
        self._length_penalty = length_penalty
        self._live: list[Hypothesis] = [Hypothesis((), 0.0, 0.0)]
        self._ended: list[Hypothesis] = []  # best first, ``width`` at most
        self._length = 0
        self.is_done = False

    @property
    def candidates_per_beam(self) -> int:
        """Enough candidates that ``width`` beams continue even where every ending ranks first."""
        return self.width * (1 + max(len(self._eos_token_ids), 1))

    def advance(self, candidates: list[list[Candidate]]) -> list[Extension]:
        """Extend all live beams by a token; returns the beams that live on, likeliest first.

        At equal log-probability the earlier beam and then the lower token id come first.
        """
        if self.is_done or len(candidates) != len(self._live):
            raise ValueError(
                f"{len(candidates)} lists of candidates for {len(self._live)} live beams (done: {self.is_done})"
            )
        self._length += 1
        flat = [
            (-beam.cumulative_logprob - p, at, token)
            for at, beam in enumerate(self._live)
            for token, p in candidates[at]
        ]
        best = heapq.nsmallest(self.candidates_per_beam, flat)
        is_last = self._length == self._max_tokens
        live: list[Hypothesis] = []
        extensions: list[Extension] = []
        for rank, (cost, parent, token) in enumerate(best):
            token_ids = (*self._live[parent].token_ids, token)
            hypothesis = Hypothesis(token_ids, -cost, self._score(-cost, self._length))
            if is_last or token in self._eos_token_ids:
                # An ending outside the best ``width`` is not among the results of this step.
                if rank < self.width:
                    self._ended.append(hypothesis)
            elif len(live) < self.width:
                live.append(hypothesis)
                extensions.append((parent, token, -cost))
        self._ended.sort(key=lambda h: h.score, reverse=True)
        del self._ended[self.width :]
        self._live = live
        self.is_done = not live or self._is_settled()
        if self.is_done:
            return []
        return extensions

    def best(self, n: int) -> list[Hypothesis]:
        """The ``n`` best hypotheses, by score; live ones fill up where too few have ended."""
        found = list(self._ended)
        if len(found) < n:
            found += self._live
        return sorted(found, key=lambda h: h.score, reverse=True)[:n]

    def _score(self, cumulative: float, length: int) -> float:
        return float(cumulative / length**self._length_penalty)

    def _is_settled(self) -> bool:
        """Whether no live beam can still score better than the worst of ``width`` ended ones."""
        if len(self._ended) < self.width:
            return False
        # A sum only falls; dividing by a longer length helps where the penalty is positive.
        length = self._max_tokens if self._length_penalty > 0 else self._length + 1
        return self._score(self._live[0].cumulative_logprob, length) <= self._ended[-1].score
