"""Plans that end an answer: what of the plan from before may follow a token is taken, whatever stood before it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.structured import closing as closings
from inferd.structured.closing import Closing, Plan, Position
from inferd.structured.matching import plain_matcher
from inferd.structured.vocabulary import Vocabulary

EOS = 0
DIGITS = "".join(random.Random(1).choices("0123456789abcdef", k=40))
"""Of the grammar's 16^40 texts a search finds none that it does not know."""


@pytest.fixture(scope="module")
def vocabulary(tiny_model: Path) -> Vocabulary:
    tokenizer = Tokenizer.load(tiny_model)
    return Vocabulary(tokenizer, tokenizer.vocab_size, frozenset((EOS,)))


def letters(vocabulary: Vocabulary, text: str) -> Plan:
    """A token for each letter."""
    found = {vocabulary.token_bytes(number): number for number in range(vocabulary.size)}
    return tuple(found[letter.encode()] for letter in text)


def at_start(vocabulary: Vocabulary, pattern: str) -> Position:
    return Position(plain_matcher(f"start: /{pattern}/", vocabulary), None)


@pytest.mark.parametrize(
    ("token", "rest"),
    [
        ("x", f"x{DIGITS}!"),  # the whole plan
        (DIGITS[0], f"{DIGITS[1:]}!"),  # the plan without what the token is in place of
    ],
    ids=["whole", "rest"],
)
def test_what_of_the_plan_may_follow_a_token_ends_the_answer(vocabulary: Vocabulary, token: str, rest: str) -> None:
    closing, start = Closing(vocabulary), at_start(vocabulary, "x*[0-9a-f]{40}!")
    plan = (*letters(vocabulary, f"x{DIGITS}!"), EOS)
    (first,) = letters(vocabulary, token)
    found = closing.next(start, first, plan, 100)
    assert found is not None
    assert vocabulary.text(found) == rest
    assert closing.next(start, first, plan, len(found)) == found
    assert closing.next(start, first, plan, len(found) - 1) is None


def test_the_first_search_ends_at_its_limit_of_processor_time(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One mask of some grammars takes ten milliseconds, and a search may look at 3,000."""
    start = at_start(vocabulary, "[0-9a-f]{40}!")
    assert Closing(vocabulary).first(start)[0] is not None
    monkeypatch.setattr(closings, "FIRST_SECONDS", 0.0)
    plan, fuel = Closing(vocabulary).first(start)
    assert plan is None
    assert fuel == closings.FIRST_FUEL
