"""A beam search over sequences: forks the beams that continue, and replays the best hypotheses as an answer.

Knows the scheduler's sequences and one request's ``Generation``. ``beam`` decides which beams continue.
"""

from __future__ import annotations

from inferd.engine.beam import BeamState, Candidate
from inferd.engine.generation import Generation
from inferd.engine.prepare import Prepared
from inferd.engine.sampler import Sampled
from inferd.engine.scheduling.scheduler import Scheduler
from inferd.engine.scheduling.sequence import Sequence


class BeamSearch:
    """The beams of one request. They advance in lockstep: all must have been computed before any is extended."""

    __slots__ = ("_live", "_num_made", "_ready", "_scheduler", "_state")

    def __init__(self, prepared: Prepared, root: Sequence, scheduler: Scheduler) -> None:
        sampling = prepared.sampling
        self._state = BeamState(
            width=sampling.width,
            max_tokens=sampling.max_tokens or 0,
            eos_token_ids=prepared.eos_ids,
            length_penalty=sampling.length_penalty,
        )
        self._scheduler = scheduler
        self._live: list[Sequence] = [root]
        self._ready: dict[Sequence, list[Candidate]] = {}  # candidates of the beams that have been computed
        self._num_made = 1

    @property
    def candidates_per_beam(self) -> int:
        """Number of likeliest tokens that ``extend`` needs for each beam."""
        return self._state.candidates_per_beam

    @property
    def is_done(self) -> bool:
        return self._state.is_done

    def extend(self, sequence: Sequence, candidates: list[Candidate]) -> int:
        """A beam has been computed. When all have been, extend them together; returns how many were extended."""
        self._ready[sequence] = candidates
        if len(self._ready) < len(self._live):
            return 0
        parents = self._live
        extended = self._state.advance([self._ready[parent] for parent in parents])
        self._live, self._ready = [], {}
        for parent_at, token_id, cumulative in extended:
            child = self._scheduler.fork(parents[parent_at], self._num_made)
            self._num_made += 1
            child.tokens.append(token_id)
            child.cumulative_logprob = cumulative
            self._live.append(child)
        for parent in parents:
            self._scheduler.remove(parent)
        return len(parents)

    def close(self) -> None:
        """Remove the beams from the scheduler."""
        for sequence in self._live:
            self._scheduler.remove(sequence)

    def play_best(self, generation: Generation) -> None:
        """Give ``generation`` the best hypotheses as its choices, with text, stops and log-probabilities."""
        prepared = generation.prepared
        generation.choices.clear()
        for index, hypothesis in enumerate(self._state.best(prepared.sampling.n)):
            sequence = Sequence(
                request_id=generation.id,
                index=index,
                prompt_ids=prepared.prompt_ids,
                sampling=prepared.sampling,
                seed=prepared.seed,
            )
            choice = generation.open_choice(sequence)
            generated = generation.num_generated
            for token_id in hypothesis.token_ids:
                if choice.finish_reason is None:
                    generation.push(sequence, Sampled(token_id, 0.0, 0, ()))
            generation.num_generated = generated
            sequence.cumulative_logprob = hypothesis.cumulative_logprob
            choice.finish_reason = choice.finish_reason or "length"
