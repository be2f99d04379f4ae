"""Adds guessed tokens to a step's decodes, and records what became of them.

Between scheduling and computing, ``extend`` looks for tokens that may follow, in the sequence's own text
(``prompt_lookup``) or by a smaller model (``draft_model``), and adds those that pay (``gain``). A guess cannot change
an answer: the engine draws every token as without guesses, and a guess is only a row that is computed early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from inferd import clock
from inferd.config import ModelConfig
from inferd.engine.memory import most_sampled_rows
from inferd.engine.scheduling.scheduler import Scheduler, Slice, Step
from inferd.engine.scheduling.sequence import Sequence
from inferd.engine.speculation.draft_model import DraftModel
from inferd.engine.speculation.draft_passes import Guess, Rule
from inferd.engine.speculation.gain import Acceptance, BatchCost, Chances, Costs, StepForecast
from inferd.engine.speculation.native_lookup import finder
from inferd.engine.speculation.prompt_lookup import KEPT, SHORTEST, Finder, Found
from inferd.structured.guide import Guide

_LEAST_CHUNK = 64  # fewest tokens that a draft model computes when it is behind
_TIMED_EVERY = 8  # steps of a pause; one of so many is timed: for a small model even that takes a hundredth of a step
_EXPLORE_EVERY = 16  # drafts that do not pay by forecast; one of so many is made anyway


@dataclass(slots=True)
class _Drafted:
    """One sequence's guesses, with the statistics that their outcome updates."""

    chances: list[Acceptance]
    by_model: bool


class Speculation:
    """Belongs to the step loop. ``draft``: None where only texts are looked up. ``read_clock``: a clock, in seconds."""

    def __init__(
        self,
        config: ModelConfig,
        scheduler: Scheduler,
        max_model_len: int,
        draft: DraftModel | None = None,
        read_clock: Callable[[], float] = clock.now,
    ) -> None:
        self.draft = draft
        self.costs = Costs()
        self.read_clock = read_clock
        self._most = config.speculation.max_tokens
        self._most_rows = most_sampled_rows(config)
        self._looks_up = config.speculation.method in ("auto", "prompt_lookup")
        self._scheduler = scheduler
        self._max_model_len = max_model_len
        self._texts: dict[Sequence, Finder] = {}
        self._drafted: dict[Sequence, _Drafted] = {}
        # Of tokens found in the text, where all places go on alike, by equal tokens before it: none but before another
        # one, 1 close behind, 2, 3, 4, 5-6, 7-9, 10-15, 16 and more;
        self._matches = Chances((1, 2, 3, 4, 5, 7, 10, 16), (0.3, 0.4, 0.35, 0.5, 0.6, 0.65, 0.75, 0.85, 0.9))
        # where another place says something else, by how many tokens more are equal than there: none, 1, 2, 3-4, 5 and
        # more.
        self._contested = Chances((1, 2, 3, 5), (0.3, 0.5, 0.6, 0.7, 0.8))
        self._untried: dict[
            Sequence, tuple[int, int, Acceptance]
        ] = {}  # position of a found token, the token, and its statistics
        self._surenesses = Chances((0.6, 0.7, 0.8, 0.9, 0.95, 0.99), (0.35, 0.45, 0.55, 0.65, 0.8, 0.9, 0.95))
        self._guides: Mapping[Sequence, Guide] = {}  # of the step's constrained answers
        self._any_guess = Acceptance(0.6)  # of a draft model's first tokens, before it is known how sure it is
        self._pass_s: dict[int, float] = {}  # seconds of a draft model's pass, by number of sequences
        self._prompt_token_s: float | None = None  # of the draft model, catching up
        self._answer_len = 64.0  # tokens of finished answers, smoothed
        self._num_found_unworthy = 0
        self._cost: BatchCost | None = None  # of the current step, where it consists of decodes alone
        self._is_try = False
        self._num_decodes = 0
        self._num_certain = 0  # rows of the step for tokens that were appended without being drawn
        self._num_taken = 0  # tokens that the step gave
        self._rows_left = 0  # of its budget
        self._began = self._drafting_s = 0.0
        self.num_drafts = self.num_drafted = self.num_accepted = 0  # of the step under way

    # -- the step ---------------------------------------------------------------------------

    def extend(self, step: Step, guides: Mapping[Sequence, Guide]) -> None:
        """Add guesses to the step's decodes where that pays. ``guides``: of constrained answers."""
        self._guides = guides
        self.num_drafts = self.num_drafted = self.num_accepted = 0
        self._cost = None
        self._is_try = False
        self._drafting_s = 0.0
        decodes, is_random = step.slices, False
        for part in decodes:
            sequence = part.sequence
            if part.start < sequence.num_prompt or not part.catches_up:
                return  # beside a prompt neither a row's cost nor its outcome can be measured
            is_random = is_random or not sequence.sampling.is_greedy
        if not decodes or not (self._looks_up or self.draft is not None):
            return
        cost = self.costs.at(len(decodes), is_random=is_random)
        if cost.off_for % _TIMED_EVERY == 0:
            self._cost = cost
            self._began = self.read_clock()
        self._num_decodes = self._num_taken = len(decodes)
        self._num_certain = step.num_tokens - len(decodes)
        budget = self._scheduler.config.max_num_batched_tokens - step.num_tokens
        self._rows_left = min(budget, self._most_rows - len(decodes))
        if self._rows_left <= 0 or not cost.may_try():
            return
        self._is_try = True
        began = self._began
        forecast = StepForecast(len(decodes), cost.plain_s(len(decodes)), cost.row_s(len(decodes)), cost.gain)
        rest = []
        for part in decodes:
            most = 0 if part.sequence.is_copy else self._room(part.sequence)  # the draft has a cache of its own
            if most <= 0:
                continue
            if not self._look_up(part, most, forecast):
                rest.append(part)
        if self.draft is not None and rest:
            self._guess(rest, forecast)
        self._drafting_s = self.read_clock() - began

    def record_outcome(self, part: Slice, num_right: int, was_wrong: bool) -> None:
        """The first ``num_right`` of the slice's guesses were drawn; ``was_wrong``: the next one was not."""
        drafted = self._drafted.pop(part.sequence)
        for acceptance in drafted.chances[:num_right]:
            acceptance.record(True)
        if was_wrong and num_right < len(drafted.chances):
            drafted.chances[num_right].record(False)
        if drafted.by_model and self.draft is not None:
            self._any_guess.record(num_right > 0)
            self.draft.accept_guesses(part.sequence, num_right)
        self.num_accepted += num_right
        self._num_taken += num_right

    def record_step(self) -> None:
        """The step that ``extend`` began has been computed."""
        cost = self._cost
        if cost is None:
            return
        seconds = self.read_clock() - self._began
        computing_s = seconds - self._drafting_s if self._is_try else seconds
        num_rows = self.num_drafted + self._num_certain
        if not num_rows:
            cost.record_plain(self._num_decodes, computing_s)
        elif cost.num_plain:
            cost.record_rows(self._num_decodes, num_rows, computing_s)
        if self._num_certain:
            return  # without guesses the step would have taken longer than a plain one
        if self._is_try and cost.record_try(self._num_decodes, self._num_taken, seconds):
            self.costs.pause_above(cost)

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over. Idempotent."""
        self._drafted.pop(sequence, None)
        self._untried.pop(sequence, None)
        if self._texts.pop(sequence, None) is not None:
            self._answer_len += (sequence.num_outputs - self._answer_len) * 0.1
        if self.draft is not None:
            self.draft.forget(sequence)

    # -- where tokens come from -------------------------------------------------------------

    def _room(self, sequence: Sequence) -> int:
        """Number of guesses that could all be used: one more token is drawn after them."""
        wanted = (sequence.sampling.max_tokens or 0) - sequence.num_outputs
        if sequence.sampling.use_beam_search:
            return 0
        return min(self._most, wanted - 1, self._max_model_len - len(sequence.tokens) - 1)

    def _look_up(self, part: Slice, most: int, forecast: StepForecast) -> bool:
        sequence = part.sequence
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = finder()
        if not self._looks_up:
            return False
        self._learn_untried(sequence)
        found = text.find(sequence.tokens, most)
        before: list[Acceptance] = []
        chance = 1.0
        for count in range(len(found.tokens)):
            acceptance = self._chance_of(found, count)
            if count == 0 and self.draft is not None and acceptance.chance < self._any_guess.chance:
                break
            chance *= acceptance.chance
            if chance < forecast.min_chance(forecast.row_s):
                break
            forecast.add(chance)
            before.append(acceptance)
        if before and self._add(part, found.tokens[: len(before)], before, by_model=False):
            return True
        if found.tokens:
            self._untried[sequence] = len(sequence.tokens), found.tokens[0], self._chance_of(found, 0)
        return False

    def _chance_of(self, found: Found, at: int) -> Acceptance:
        """The statistics of a found token, given that those before it are right."""
        if found.rivals[at]:
            return self._contested[found.length - found.rivals[at]]
        if found.length >= SHORTEST or not at:
            return self._matches[found.length + at]  # what was right makes the match longer
        return self._matches[KEPT + at]  # a quote that goes on

    def _learn_untried(self, sequence: Sequence) -> None:
        """A found token that was not worth a row updates the statistics too: the actual token is known by now."""
        untried = self._untried.pop(sequence, None)
        if untried is not None and untried[0] < len(sequence.tokens):
            at, token, acceptance = untried
            acceptance.record(sequence.tokens[at] == token)

    def _guess(self, parts: list[Slice], forecast: StepForecast) -> None:
        assert self.draft is not None
        level: list[Slice] = []
        behind: list[Slice] = []
        for part in parts:
            if not self.draft.takes(part.sequence):
                continue
            (level if self.draft.gap(part.sequence) <= self._most + 1 else behind).append(part)
        if behind:
            self._catch_up([part.sequence for part in behind], forecast)
        chance = self._any_guess.chance
        level = level[: self._rows_left]
        if not level or not self._pays(chance, len(level), forecast):
            return
        share = self._rows_left // len(level)  # passes whose tokens have no row would be wasted
        guesses = [
            Guess(part.sequence, min(self._room(part.sequence), self.draft.max_len - len(part.sequence.tokens), share))
            for part in level
        ]
        rule = Rule(
            self._surenesses.bounds,
            self._surenesses.chances,
            next_chance=chance,
            forecast=forecast,
            pass_s=self._pass_s.get(_size(len(level)), 0.0),
        )
        began = self.read_clock()
        passes = self.draft.guess(guesses, rule)
        if passes:
            self._record_pass(len(level), (self.read_clock() - began) / passes)
        for part, guess in zip(level, guesses, strict=True):
            if guess.tokens:
                classes = [self._surenesses[sureness] for sureness in guess.surenesses[: len(guess.tokens)]]
                self._add(part, guess.tokens, classes, by_model=True)

    def _pays(self, chance: float, count: int, forecast: StepForecast) -> bool:
        """Whether a pass of the draft model over so many sequences is expected to be worth its time."""
        pass_s = self._pass_s.get(_size(count))
        if pass_s is None or chance >= forecast.min_chance(forecast.row_s + pass_s / count):
            return True
        self._num_found_unworthy += 1
        return self._num_found_unworthy % _EXPLORE_EVERY == 0

    def _record_pass(self, count: int, seconds: float) -> None:
        size = _size(count)
        self._pass_s[size] = _usual(self._pass_s.get(size), seconds)

    def _catch_up(self, sequences: list[Sequence], forecast: StepForecast) -> None:
        """Let the draft model compute sequences that are behind, where their answers are long enough to repay it."""
        assert self.draft is not None
        each_s = self._prompt_token_s
        count = len(sequences)
        worth_s = forecast.seconds / forecast.tokens
        saved_s = (
            self._any_guess.chance * worth_s - forecast.row_s - self._pass_s.get(_size(count), 0.0) / count
        )  # by a guess
        chosen = []
        for sequence in sequences:
            left = min((sequence.sampling.max_tokens or 0) - sequence.num_outputs, self._answer_len)
            gap = self.draft.gap(sequence)
            if each_s is None or gap * each_s < left * saved_s / 2:
                chosen.append(sequence)
        if not chosen:
            return
        budget = _LEAST_CHUNK
        if each_s:
            budget = max(budget, int(worth_s * self._num_decodes / each_s))
        budget = min(budget, self._scheduler.config.max_num_batched_tokens)
        before = sum(map(self.draft.gap, chosen))
        began = self.read_clock()
        self.draft.catch_up(chosen, budget)
        count = before - sum(map(self.draft.gap, chosen))
        if count > 0:
            self._prompt_token_s = _usual(each_s, (self.read_clock() - began) / count)

    def _add(self, part: Slice, tokens: list[int], chances: list[Acceptance], *, by_model: bool) -> bool:
        tokens = tokens[: self._rows_left]
        guide = self._guides.get(part.sequence)
        if guide is not None:
            tokens = tokens[: guide.num_possible(tokens)]
        self._scheduler.speculate(part, tuple(tokens))
        count = len(part.draft)
        if count:
            self._drafted[part.sequence] = _Drafted(chances[:count], by_model)
            self._rows_left -= count
            self.num_drafts += 1
            self.num_drafted += count
        return count > 0


def _usual(known: float | None, seconds: float) -> float:
    """A duration updated by one more measurement. Longer ones, such as a first call, count less."""
    if known is None or seconds < known:
        return seconds
    return known + (min(seconds, 2.0 * known) - known) / 16


def _size(count: int) -> int:
    """Numbers of sequences whose passes cost about the same."""
    return count if count < 4 else 1 << count.bit_length()
