"""Texts of different lengths behind each other, and attention within each of them."""

from __future__ import annotations

import pytest
import torch

from inferd.predict.encoder.ragged import ragged

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("types", "joined"),
    [
        ([None, None, None, None], None),
        ([None, [0, 1], None, None], [0, 0, 1, 0, 0, 0, 0, 0]),
        ([[1], [0, 1], [1, 0], [1, 1, 1]], [1, 0, 1, 1, 0, 1, 1, 1]),
        ([None, None, None, [0, 0, 1]], [0, 0, 0, 0, 0, 0, 0, 1]),
    ],
)
def test_texts_lie_behind_each_other_with_their_types(types: list[list[int] | None], joined: list[int] | None) -> None:
    batch = ragged([[2], [3, 4], [5, 6], [7, 8, 9]], types, CPU)
    assert batch.token_ids.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert batch.positions.tolist() == [0, 0, 1, 0, 1, 0, 1, 2]
    assert batch.starts.tolist() == [0, 1, 3, 5, 8]
    assert batch.last_rows.tolist() == [0, 2, 4, 7]
    assert (None if batch.type_ids is None else batch.type_ids.tolist()) == joined
    assert [tuple(group) for group in batch.groups] == [(0, 1, 1), (1, 2, 2), (5, 1, 3)]
