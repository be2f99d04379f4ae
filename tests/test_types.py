"""The nouns of the system: classes of priority, and what a request counts as."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.types import (
    CLASSES,
    RANKS,
    GenerateRequest,
    MemoryPlan,
    PredictRequest,
    PriorityClass,
    SamplingParams,
    TextPrompt,
    class_index,
    class_of,
)


@pytest.mark.parametrize(
    ("priority", "name"),
    [
        (-100, "critical"),
        (-3, "critical"),
        (-2, "critical"),
        (-1, "interactive"),
        (0, "normal"),
        (1, "batch"),
        (2, "batch"),
        (100, "batch"),
    ],
)
def test_a_number_stands_for_the_nearest_class(priority: int, name: PriorityClass) -> None:
    assert class_of(priority) == name
    assert class_index(priority) == CLASSES.index(name)


@given(st.sampled_from(CLASSES), st.sampled_from(CLASSES))
def test_a_better_class_has_the_lower_rank_and_the_lower_place(one: PriorityClass, other: PriorityClass) -> None:
    assert class_of(RANKS[one]) == one
    is_better = CLASSES.index(one) < CLASSES.index(other)
    assert (RANKS[one] < RANKS[other]) == is_better
    assert (class_index(RANKS[one]) < class_index(RANKS[other])) == is_better


@pytest.mark.parametrize(
    ("sampling", "width"),
    [
        (SamplingParams(), 1),
        (SamplingParams(n=3), 3),
        (SamplingParams(n=3, best_of=5), 5),
        (SamplingParams(n=3, best_of=2), 3),
    ],
)
def test_a_request_counts_as_many_sequences_as_are_made_for_it(sampling: SamplingParams, width: int) -> None:
    assert sampling.width == width
    request = GenerateRequest(id="r", model="m", prompt=TextPrompt(text="a"), sampling=sampling)
    assert request.width == width


def test_a_prediction_counts_as_one() -> None:
    assert PredictRequest(id="r", model="m", dialect="v2", body=b"").width == 1


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0.0, True), (1e-9, False), (1.0, False)])
def test_only_a_temperature_of_nothing_is_greedy(temperature: float, is_greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is is_greedy


@pytest.mark.parametrize("part", ["weights_bytes", "kv_bytes", "activation_bytes", "process_bytes"])
def test_a_byte_more_of_any_part_of_a_memory_plan_is_one_byte_more_of_memory(part: str) -> None:
    plan = MemoryPlan(weights_bytes=400, kv_bytes=300, kv_bytes_per_token=3, activation_bytes=200, process_bytes=100)
    assert plan.total_bytes == 1000
    assert msgspec.structs.replace(plan, **{part: getattr(plan, part) + 1}).total_bytes == 1001


@pytest.mark.parametrize(
    ("sampling", "is_wanted"),
    [
        (SamplingParams(), False),
        (SamplingParams(n=3), False),
        (SamplingParams(logprobs=0), True),
        (SamplingParams(n=3, best_of=4), True),
        (SamplingParams(prompt_logprobs=1), False),
    ],
)
def test_log_probabilities_are_computed_where_they_are_asked_for_or_rank_answers(
    sampling: SamplingParams, is_wanted: bool
) -> None:
    assert sampling.wants_logprob is is_wanted
