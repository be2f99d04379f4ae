"""A row that was computed with others is computed again alone, while nothing waits; a difference ends the batching."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from tests.predict.row_models import FLOAT, network, node, saved
from tests.predict.test_rows_that_are_no_batch import answers, backend

from inferd import clock
from inferd.predict.audit import PATIENCE_S, Audit
from inferd.predict.backend import PredictBackend
from inferd.predict.contract import Array, Contract
from inferd.predict.runtime import Item
from inferd.predict.stacked import Stacked
from inferd.types import StepStats, TensorSpec

CONTRACT = Contract(
    inputs=(TensorSpec("x", "FP32", (-1, 3)),),
    outputs=(TensorSpec("y", "FP32", (-1, 3)),),
    max_batch_size=8,
    because="declared",
)


def large_only(path: Path) -> Path:
    """The number of elements above 100 in the batch is added to all, which the file's names deny. Only operators of which
    nothing is known carry it, and no example of the trial shows it."""
    nodes = [
        node("Greater", "x limit", "is_large"),
        node("NonZero", "is_large", "places"),
        node("Shape", "places", "shape"),
        node("Gather", "shape last", "count"),
        node("Cast", "count", "real", to=FLOAT),
        node("Add", "x real", "y"),
    ]
    weights = {"limit": np.array(100, np.float32), "last": np.array(1)}
    return saved(path, nodes, {"x": (FLOAT, ["batch", 3])}, {"y": (FLOAT, ["batch", 3])}, weights)


def audited(model: PredictBackend) -> StepStats:
    """What the idle moment after the answers brings."""
    now = clock.now()
    assert model.due(now) == now
    outputs, stats = model.step(now)
    assert outputs == []
    assert stats is not None
    return stats


def asked(*numbers: float) -> list[Mapping[str, Array]]:
    return [{"x": np.full((1, 3), number, np.float32)} for number in numbers]


def test_a_row_that_differs_alone_ends_the_batching_with_an_alarm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = backend(large_only(tmp_path / "m.onnx"), audit=1.0)
    assert model.info.max_batch_size > 1
    stats = StepStats()
    with caplog.at_level(logging.ERROR):
        while not stats.not_batched:  # the row of 500 is the same alone
            wrong = answers(model, asked(1.0, 500.0, 2.0))
            assert wrong[0]["y"].max() > 1.0  # what the audit is there for
            stats = audited(model)
            assert stats.audited_rows == 1
    assert "an audit found that the output 'y' of a row changes with the rows beside it" in stats.not_batched
    assert model.info.not_batched == stats.not_batched
    assert "computed one by one from now on" in caplog.text
    right = answers(model, asked(1.0, 500.0, 2.0))
    assert [float(one["y"][0, 0]) for one in right] == [1.0, 503.0, 2.0]
    assert model.due(clock.now()) is None


def test_rows_that_are_the_same_alone_stay_together(tmp_path: Path) -> None:
    model = backend(network(tmp_path / "m.onnx"), audit=1.0)
    rows = np.random.default_rng(0).normal(size=(6, 1, 4)).astype(np.float32)
    for _ in range(5):
        answers(model, [{"x": row} for row in rows])
        stats = audited(model)
        assert (stats.audited_rows, stats.not_batched) == (1, "")
    assert model.due(clock.now()) is None


def test_nothing_is_audited_without_the_setting_or_company(tmp_path: Path) -> None:
    path = network(tmp_path / "m.onnx")
    rows = np.ones((3, 1, 4), np.float32)
    silent = backend(path)
    answers(silent, [{"x": row} for row in rows])
    assert silent.due(clock.now()) is None
    alone = backend(path, audit=1.0)
    answers(alone, [{"x": rows[0]}])
    assert alone.due(clock.now()) is None


def test_requests_go_before_an_audit_until_its_patience_ends() -> None:
    runtime = Stacked(CONTRACT, lambda inputs: {"y": inputs["x"]})
    audit = Audit(runtime, 1.0)
    items = [Item(request_id=str(n), inputs={"x": np.full((2, 3), n, np.float32)}, rows=2) for n in range(2)]
    audit.sample(items, runtime.predict(items), 10.0)
    assert audit.is_due(10.0, is_idle=True)
    assert not audit.is_due(10.0, is_idle=False)
    assert audit.is_due(10.0 + PATIENCE_S, is_idle=False)
    assert audit.run() == ""
    assert not audit.is_due(10.0 + PATIENCE_S, is_idle=True)


@pytest.mark.parametrize("share", [0.02, 0.3])
def test_the_share_of_audited_requests_is_the_one_asked_for(share: float) -> None:
    runtime = Stacked(CONTRACT, lambda inputs: {"y": inputs["x"]})
    audit = Audit(runtime, share)
    items = [Item(request_id=str(n), inputs={"x": np.zeros((1, 3), np.float32)}, rows=1) for n in range(2)]
    num_audited = 0
    for batch in range(5000):
        audit.sample(items, runtime.predict(items), float(batch))
        if audit.is_due(float(batch), is_idle=True):
            audit.run()
            num_audited += 1
    assert abs(num_audited / 10_000 - share) < 0.2 * share


def test_what_fails_alone_says_nothing_of_the_rows() -> None:
    calls = 0

    def failing(inputs: Mapping[str, Array]) -> dict[str, Array]:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise RuntimeError("no")
        return {"y": inputs["x"]}

    runtime = Stacked(CONTRACT, failing)
    audit = Audit(runtime, 1.0)
    items = [Item(request_id=str(n), inputs={"x": np.ones((1, 3), np.float32)}, rows=1) for n in range(2)]
    audit.sample(items, runtime.predict(items), 0.0)
    assert audit.run() == ""
