"""The second product of a layer, of which each rank has a part: summed by inputs, put together by outputs."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from inferd.engine.model.cuts import Peers
from inferd.engine.model.divided import Joined
from inferd.engine.model.share import Share


class Twice:
    """A peer with the same part."""

    def sum(self, x: Tensor) -> Tensor:
        return x + x

    def concat(self, x: Tensor) -> Tensor:
        return torch.cat((x, x), -1)


def joined(**share: Any) -> Joined:
    return Joined(Share(**share), cast(Peers, Twice()))


PART = torch.tensor([[1.0, 2.0]])


def test_parts_by_inputs_are_float32_sums() -> None:
    of = joined(tensor=2)
    assert of.shape(8, 6) == (8, 6)
    assert of.format is torch.float32
    assert of.inputs(PART) is PART
    whole = of.outputs(PART, torch.bfloat16)
    assert (whole.dtype, whole.tolist()) == (torch.bfloat16, [[2.0, 4.0]])


def test_parts_by_outputs_are_put_together() -> None:
    of = joined(tensor=2, by_outputs=True)
    assert of.shape(8, 6) == (4, 12)
    assert of.format is None
    assert of.inputs(PART).tolist() == of.outputs(PART, torch.float32).tolist() == [[1.0, 2.0, 1.0, 2.0]]


def test_a_rank_that_is_alone_in_its_stage_asks_no_peer() -> None:
    of = joined(tensor=1, pipeline=2, rank=1)
    assert of.shape(8, 6) == (8, 6)
    assert of.format is None
    assert of.inputs(PART) is of.outputs(PART, torch.bfloat16) is PART


@pytest.mark.parametrize(("by_outputs", "biased"), [(False, [True, False, True, False]), (True, [True] * 4)])
def test_a_bias_is_added_once(by_outputs: bool, biased: list[bool]) -> None:
    share = {"tensor": 2, "pipeline": 2, "by_outputs": by_outputs}
    assert [joined(rank=rank, **share).is_biased for rank in range(4)] == biased
