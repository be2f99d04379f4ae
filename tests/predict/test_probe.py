"""How many rows a model computes together is tried, within a bounded time, and never guessed upwards without reason."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.config import BatchingConfig, ModelConfig
from inferd.errors import ModelLoadError
from inferd.predict.contract import Array, Contract
from inferd.predict.estimate import BatchCost
from inferd.predict.limits import limits_for
from inferd.predict.probe import BUDGET_S, FEWEST_ROWS, MOST_ROWS, QUICK_S, probe, probe_rows, rows_within
from inferd.predict.stacked import Stacked
from inferd.types import TensorSpec

CONTRACT = Contract(
    inputs=(TensorSpec("x", "FP32", (-1, 3)),),
    outputs=(TensorSpec("y", "FP32", (-1, 3)),),
    max_batch_size=65536,
    because="declared",
)


def affine(fixed: float, per_row: float) -> Callable[[int], float]:
    return lambda rows: fixed + per_row * rows


def test_a_model_that_gains_nothing_from_more_rows_computes_few() -> None:
    assert probe_rows(affine(0.0, 0.01), MOST_ROWS, likely=64).rows == FEWEST_ROWS


def test_a_model_that_gains_from_more_rows_computes_many() -> None:
    assert probe_rows(affine(0.001, 0.0000001), MOST_ROWS).rows == MOST_ROWS


def test_quick_batches_are_not_made_smaller() -> None:
    assert probe_rows(affine(0.0, 0.000001), MOST_ROWS).rows == MOST_ROWS


def test_where_the_time_does_not_suffice_to_see_what_is_likely_is_believed() -> None:
    assert probe_rows(affine(0.07, 0.001), MOST_ROWS, likely=32).rows == 32


def test_a_size_that_cannot_be_computed_is_not_used() -> None:
    def limited(rows: int) -> float | None:
        return 0.01 + 0.0001 * rows if rows <= 8 else None

    assert probe_rows(limited, MOST_ROWS, likely=256).rows == 8


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 1), st.floats(1e-7, 0.2), st.integers(1, 300), st.integers(0, 300))
def test_trying_takes_no_longer_than_its_budget_or_the_first_row(
    fixed: float, per_row: float, most: int, likely: int
) -> None:
    spent = 0.0

    def measure(rows: int) -> float:
        nonlocal spent
        spent += fixed + per_row * rows
        return fixed + per_row * rows

    found = probe_rows(measure, most, likely=likely)
    assert 1 <= found.rows <= most
    assert spent <= max(BUDGET_S, fixed + per_row) + 2 * QUICK_S


def test_what_was_measured_tells_the_batcher_what_a_batch_costs() -> None:
    cost = BatchCost()
    probe_rows(affine(0.004, 0.0001), 16).teach(cost)
    assert cost.fixed_s == pytest.approx(0.004, rel=0.01)
    assert cost.per_unit_s == pytest.approx(0.0001, rel=0.01)


def test_a_model_is_tried_with_rows_of_its_contract() -> None:
    seen: list[int] = []

    def compute(inputs: dict[str, Array]) -> dict[str, Array]:
        seen.append(len(inputs["x"]))
        if len(inputs["x"]) > 16:
            raise RuntimeError("out of memory")
        return {"y": inputs["x"]}

    found = probe(Stacked(CONTRACT, compute), 64)
    assert found is not None
    assert found.rows == 16
    assert max(seen) == 32


def test_a_model_of_two_rows_is_tried_with_one_and_with_both() -> None:
    contract = msgspec.structs.replace(CONTRACT, max_batch_size=2)
    found = probe(Stacked(contract, lambda inputs: {"y": inputs["x"]}), 2)
    assert found is not None
    assert [rows for rows, _ in found.seconds] == [1, 2]


def test_a_size_that_takes_more_than_a_quarter_of_the_memory_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [0]

    def compute(inputs: dict[str, Array]) -> dict[str, Array]:
        taken[0] = max(taken[0], 1000 * len(inputs["x"]))
        return {"y": inputs["x"]}

    monkeypatch.setattr("inferd.predict.probe.rss_bytes", lambda: taken[0])
    found = probe(Stacked(CONTRACT, compute), 64, memory_bytes=64_000)
    assert found is not None
    assert found.rows == 16
    assert taken == [32_000]


@pytest.mark.parametrize(
    "changed",
    [
        {"inputs": (TensorSpec("x", "FP32", (-1, -1)),)},
        {"inputs": (*CONTRACT.inputs, TensorSpec("other", "FP32", (-1, -1)))},
        {"max_batch_size": 0},
        {"max_batch_size": 1},
        {"is_stateful": True},
        {"is_decoupled": True},
        {"any_rank": ("x",)},
    ],
)
def test_a_model_whose_examples_say_nothing_is_not_tried(changed: dict[str, object]) -> None:
    contract = msgspec.structs.replace(CONTRACT, **changed)
    assert probe(Stacked(contract, lambda inputs: pytest.fail("it was tried")), 8) is None


def test_a_model_that_fails_on_examples_is_left_alone_and_its_operator_told(caplog: pytest.LogCaptureFixture) -> None:
    def fails(inputs: dict[str, Array]) -> dict[str, Array]:
        raise ValueError(np.shape(inputs["x"]))

    assert probe(Stacked(CONTRACT, fails), 8) is None
    assert "cannot compute an example" in caplog.text


@pytest.mark.parametrize(
    ("contract", "batching", "mode", "rows"),
    [
        (CONTRACT, BatchingConfig(), "dynamic", 256),
        (CONTRACT, BatchingConfig(mode="static", max_batch_size=32), "static", 32),
        (msgspec.structs.replace(CONTRACT, typical_rows=16), BatchingConfig(), "dynamic", 16),
        (msgspec.structs.replace(CONTRACT, max_batch_size=4), BatchingConfig(), "dynamic", 4),
        (msgspec.structs.replace(CONTRACT, max_batch_size=0), BatchingConfig(), "off", 1),
        (msgspec.structs.replace(CONTRACT, max_batch_size=0, max_items=8), BatchingConfig(), "dynamic", 8),
        (CONTRACT, BatchingConfig(mode="off"), "off", 65536),
        (CONTRACT, BatchingConfig(mode="off", max_batch_size=8), "off", 8),
    ],
)
def test_limits_are_what_the_configuration_asks_within_what_the_artifact_allows(
    contract: Contract, batching: BatchingConfig, mode: str, rows: int
) -> None:
    limits = limits_for(contract, ModelConfig(source="m", batching=batching))
    assert (limits.mode, limits.max_rows) == (mode, rows)


@pytest.mark.parametrize(("able", "told"), [(0, "one request at a time"), (8, "at most 8 rows")])
def test_a_batch_size_that_the_artifact_cannot_compute_is_refused(able: int, told: str) -> None:
    config = ModelConfig(source="m", batching=BatchingConfig(max_batch_size=16))
    with pytest.raises(ModelLoadError, match=told):
        limits_for(msgspec.structs.replace(CONTRACT, max_batch_size=able), config)


@pytest.mark.parametrize(
    ("grown", "row_bytes", "allowed", "rows"),
    [
        ([(1, 10), (2, 12), (4, 16)], 0, 110, 50),  # 10 whatever the rows, and 2 for each
        ([(1, 10), (2, 12), (4, 16)], 4, 110, 10),  # and their inputs twice
        ([(1, 10)], 0, 110, 11),
        ([(1, 0), (4, 0)], 0, 110, MOST_ROWS),  # too small to be seen
        ([(1, 50), (4, 80)], 20, 60, 1),
        ([(1, 10), (8, 100)], 0, 100, 8),  # what was tried is known
    ],
)
def test_rows_that_were_not_tried_are_believed_to_take_what_each_more_took(
    grown: list[tuple[int, int]], row_bytes: int, allowed: float, rows: int
) -> None:
    assert rows_within(grown, row_bytes, allowed) == rows
