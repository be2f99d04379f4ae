"""What a model is as a step of a pipeline."""

from __future__ import annotations

import msgspec
import pytest

from inferd.predict.contract import Contract
from inferd.predict.pipelines.wiring import gives, is_one_by_one, may_take, model_part, takes
from inferd.types import TensorSpec

CONTRACT = Contract(
    inputs=(
        TensorSpec("x", "FP32", (-1, 3)),
        TensorSpec("state", "FP32", (-1, 2), is_optional=True),
        TensorSpec("any", "FP32", (-1,)),
    ),
    outputs=(TensorSpec("y", "INT64", (-1,)), TensorSpec("z", "FP32", (-1, 4))),
    max_batch_size=8,
    because="declared",
    any_rank=("any",),
)


def test_a_step_must_have_what_its_model_needs_and_may_have_what_is_optional() -> None:
    part = model_part(CONTRACT)
    assert takes(part) == ("x", "any")
    assert may_take(part) == ("state",)
    assert gives(part) == ("y", "z")
    assert {name: (spec.datatype, spec.shape) for name, spec in part.inputs.items()} == {
        "x": ("FP32", (-1, 3)),
        "state": ("FP32", (-1, 2)),
        "any": ("FP32", None),
    }
    assert {name: (spec.datatype, spec.shape) for name, spec in part.outputs.items()} == {
        "y": ("INT64", (-1,)),
        "z": ("FP32", (-1, 4)),
    }


def test_of_a_step_that_cannot_be_made_nothing_is_known() -> None:
    assert takes(None) == may_take(None) == gives(None) == ()


@pytest.mark.parametrize(
    ("rows_in", "rows_out", "max_batch_size", "expected"),
    [(1, 1, 0, True), (1, 1, 4, False), (2, 1, 0, False), (1, 2, 0, False), (1, -1, 0, False), (-1, -1, 0, False)],
)
def test_a_model_of_exactly_one_row_takes_rows_one_after_the_other(
    rows_in: int, rows_out: int, max_batch_size: int, expected: bool
) -> None:
    contract = msgspec.structs.replace(
        CONTRACT,
        inputs=(TensorSpec("x", "FP32", (rows_in, 3)),),
        outputs=(TensorSpec("y", "FP32", (rows_out, 4)),),
        max_batch_size=max_batch_size,
    )
    assert is_one_by_one(contract) is expected
    part = model_part(contract)
    assert part.inputs["x"].shape == (-1 if expected else rows_in, 3)
    assert part.outputs["y"].shape == (-1 if expected else rows_out, 4)
