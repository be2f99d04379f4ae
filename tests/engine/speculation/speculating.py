"""Engines that always speculate, and a draft model that is right as often as a test wants."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.engine.test_engine import Answer

from inferd.engine.engine import Engine
from inferd.engine.scheduling.sequence import Sequence
from inferd.engine.speculation.draft_model import DraftModel
from inferd.engine.speculation.draft_passes import Guess, Rule
from inferd.engine.speculation.gain import Acceptance, BatchCost, Chances, Costs
from inferd.engine.speculation.speculation import Speculation
from inferd.types import GenerateRequest


class Free(BatchCost):
    """Steps in which more rows cost nothing."""

    def may_try(self) -> bool:
        return True

    def plain_s(self, num_decodes: int) -> float:
        return 1.0

    def row_s(self, num_decodes: int) -> float:
        return 0.0


class FreeCosts(Costs):
    def at(self, num_decodes: int, *, is_random: bool) -> BatchCost:
        return Free(1)


class Sure(Acceptance):
    """Tokens that are believed in, whatever became of those before them."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def record(self, was_right: bool) -> None:
        pass


class AllSure(Chances):
    def __init__(self) -> None:
        super().__init__((), (1.0,))

    def __getitem__(self, value: float) -> Acceptance:
        return Sure()


class Recorded(Chances):
    """What became of the guesses, whatever their value."""

    def __init__(self) -> None:
        super().__init__((), (1.0,))
        self.outcomes: list[bool] = []

    def __getitem__(self, value: float) -> Acceptance:
        return _Recording(self.outcomes)


class _Recording(Sure):
    def __init__(self, outcomes: list[bool]) -> None:
        super().__init__()
        self._outcomes = outcomes

    def record(self, was_right: bool) -> None:
        self._outcomes.append(was_right)


def always(engine: Engine, draft: DraftModel | None = None) -> Speculation:
    """Let the engine speculate wherever it can; with ``draft`` in the place of its own draft model."""
    speculation = engine._speculation
    assert speculation is not None
    speculation.costs = FreeCosts()
    speculation._matches = speculation._contested = speculation._surenesses = AllSure()
    speculation._any_guess = Sure()
    if draft is not None:
        speculation.draft = draft
        speculation._looks_up = False
    return speculation


class Prophet(DraftModel):
    """Knows every answer beforehand, and errs on purpose."""

    def __init__(self, answer_of: Callable[[Sequence], list[int]], seed: int, error_rate: float) -> None:
        self.max_len = 1 << 30
        self._answer_of = answer_of
        self._random = random.Random(seed)
        self._error_rate = error_rate

    def takes(self, sequence: Sequence) -> bool:
        return True

    def gap(self, sequence: Sequence) -> int:
        return 1

    def guess(self, guesses: list[Guess], rule: Rule) -> int:
        forecast, passes = rule.forecast, 0
        for guess in guesses:
            chance = 1.0
            while len(guess.tokens) < guess.most:
                passes = max(passes, len(guess.tokens) + 1)
                forecast.seconds += rule.pass_s / len(guesses)
                rest = self._answer_of(guess.sequence)[guess.sequence.num_outputs + len(guess.tokens) :]
                token = rest[0] if rest else 5
                is_error = self._random.random() < self._error_rate
                guess.surenesses.append(self._sureness())
                chance *= rule.chance(guess.surenesses[-1])
                if chance < forecast.min_chance(forecast.row_s):
                    break
                forecast.add(chance)
                guess.tokens.append((token + 1) % 200 if is_error else token)
                if chance * rule.next_chance < forecast.min_chance(forecast.row_s + rule.pass_s / len(guesses)):
                    break
        return passes

    def _sureness(self) -> float:
        return 1.0

    def accept_guesses(self, sequence: Sequence, num_right: int) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass


def run_guessing(engine: Engine, requests: list[GenerateRequest]) -> list[list[int]]:
    """The tokens of requests that run together; some of them were guessed."""
    answers = {each.id: Answer() for each in requests}
    for each in requests:
        engine.add(engine.prepare(each), 1.0)
    num_guessed = 0
    while engine.due(1.0) is not None:
        outputs, stats = engine.step(1.0)
        assert stats is not None
        num_guessed += stats.drafted_tokens
        for output in outputs:
            answers[output.request_id].take(output)
    assert num_guessed
    return [answer.tokens() for answer in answers.values()]
