"""Refusals, by the first words of an answer: which are found, and that the answer passes unchanged."""

from __future__ import annotations

import pytest
from tests.rollout.test_copies import GENERATE, FakeRouter, Reader

from inferd.compare.refusals import is_refusal
from inferd.rollout.refusals import reading_refusals
from inferd.types import Delta, End, Output


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, but I can't help with that.",
        "I\u2019m sorry, but I can\u2019t assist with that request.",
        "Sorry, I cannot help you with that.",
        "I cannot provide instructions for that.",
        "I can't do that.",
        "I am unable to assist with this.",
        "I won't create content like that.",
        "Unfortunately, I am not able to answer this question.",
        "As an AI language model, I cannot give legal advice.",
        " \n**I must decline to help.**",
        "I'm really sorry, we are unable to comply.",
    ],
)
def test_refusals_are_found(text: str) -> None:
    assert is_refusal(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Paris is the capital of France.",
        "I can help with that.",
        "Sorry for the delay! Here is the list.",
        "I cannot overstate how good this film is. It helps.",
        'The phrase "I can\'t help with that" is a refusal.',
        "Here you are. I can't do more than that.",
        "I won the race with that bike.",
    ],
)
def test_answers_are_none(text: str) -> None:
    assert not is_refusal(text)


@pytest.mark.parametrize(("outcome", "count"), [("done", 1), ("failed", 0), ("cancelled", 0)])
def test_the_beginning_of_a_streamed_answer_is_read(outcome: str, count: int) -> None:
    router, reader, found = FakeRouter(), Reader(), []

    def refused() -> None:
        found.append(len(reader.items))

    reading_refusals(router, refused).submit(GENERATE, reader)
    items = [Output("r", (Delta(0, text), Delta(1, "I can."))) for text in ("I ", "can't help ", "with that.")]
    items.append(Output("r", end=End(outcome)))  # type: ignore[arg-type]
    router.submitted[0].say(*items)
    assert reader.items == items
    assert found == [3] * count, "before the end is passed on"
