"""What a request asks of a model of texts: where a text is cut, and how many dimensions a vector has."""

from __future__ import annotations

import pytest

from inferd.errors import InvalidRequest
from inferd.predict.encoder.text_options import cut_of, dimensions_of, text_options_of


@pytest.mark.parametrize(
    ("parameters", "to", "side"),
    [
        ({}, None, None),
        ({"truncate": False}, None, None),
        ({"truncation_side": "left"}, None, None),
        ({"truncate": True}, 40, "right"),
        ({"truncate": True, "truncation_side": "left"}, 40, "left"),
        ({"truncate_prompt_tokens": -1}, 40, "right"),
        ({"truncate_prompt_tokens": -1, "truncation_side": "left"}, 40, "left"),
        ({"truncate_prompt_tokens": 1}, 1, "right"),
        ({"truncate_prompt_tokens": 40, "truncate": True}, 40, "right"),
        ({"truncate_prompt_tokens": 8, "truncation_side": "left"}, 8, "left"),
    ],
)
def test_a_text_is_cut_where_and_at_the_side_that_is_asked_for(
    parameters: dict[str, object], to: int | None, side: str | None
) -> None:
    cut = cut_of(text_options_of(parameters), 40)
    assert cut.to == to
    if side is not None:
        assert cut.side == side


@pytest.mark.parametrize("to", [0, -2, 41])
def test_a_length_that_the_model_does_not_read_is_refused(to: int) -> None:
    with pytest.raises(InvalidRequest, match="from 1 to 40") as caught:
        cut_of(text_options_of({"truncate_prompt_tokens": to}), 40)
    assert caught.value.param == "truncate_prompt_tokens"


@pytest.mark.parametrize(("asked", "found"), [(None, 8), (1, 1), (7, 7), (8, 8)])
def test_a_vector_has_as_many_dimensions_as_are_asked_for(asked: int | None, found: int) -> None:
    assert dimensions_of(text_options_of({} if asked is None else {"dimensions": asked}), 8) == found


@pytest.mark.parametrize("asked", [0, -1, 9])
def test_dimensions_that_there_are_not_are_refused(asked: int) -> None:
    with pytest.raises(InvalidRequest, match="from 1 to 8"):
        dimensions_of(text_options_of({"dimensions": asked}), 8)


def test_a_wish_of_another_kind_is_refused_by_name_and_other_parameters_are_left_alone() -> None:
    with pytest.raises(InvalidRequest, match="'dimensions'") as caught:
        text_options_of({"dimensions": "many"})
    assert caught.value.param == "dimensions"
    assert text_options_of({"of_another_reader": object()}) == text_options_of({})
