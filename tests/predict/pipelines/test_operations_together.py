"""Operations compute the rows of several requests in one call, with the answers of one request alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from tests.predict.steps.test_operations import EXAMPLES

from inferd.config import ModelConfig
from inferd.errors import InferdError, InvalidRequest
from inferd.predict.contract import Array
from inferd.predict.pipelines.execution import Pipeline
from inferd.predict.runtime import Item, Result
from inferd.predict.runtimes import pipeline
from inferd.predict.steps.arrays import Cast, Reshape
from inferd.predict.steps.registry import OPERATIONS, operation
from inferd.registry.source import silent


def built(*steps: dict[str, Any], **more: str) -> Pipeline:
    """``more``: outputs besides that of the last step."""
    settings = {"source": "pipeline", "pipeline": {"inputs": {"x": "FP32 [-1, -1]"}, "steps": list(steps)}}
    outputs = {"y": f"{steps[-1]['name']}.{steps[-1].pop('gives', 'output')}", **more}
    settings["pipeline"]["outputs"] = outputs  # type: ignore[index]
    import msgspec

    return pipeline.load("p", "pipeline", msgspec.convert(settings, ModelConfig), silent)


def answers(made: Pipeline, *given: Array) -> list[Array | InferdError]:
    items = [Item(request_id=str(place), inputs={"x": array}, rows=len(array)) for place, array in enumerate(given)]
    return [found.outputs["y"] if isinstance(found, Result) else found for found in made.predict(items)]


CHAIN: tuple[dict[str, Any], ...] = (
    {"name": "n", "op": "normalize", "options": {"mean": 0.5, "std": 2.0}},
    {"name": "s", "op": "softmax"},
    {"name": "a", "op": "argmax", "gives": "scores"},
)


def test_together_is_as_alone_bit_for_bit_whatever_the_shapes() -> None:
    made = built(*map(dict, CHAIN))
    random = np.random.default_rng(0)
    shapes = [(1, 10), (3, 10), (2, 7), (1, 10), (1, 7), (1, 30_000), (0, 10)]
    given = [random.normal(size=shape).astype(np.float32) for shape in shapes]
    alone = [answers(made, array)[0] for array in given[:-1]]
    together = answers(made, *given)
    for one, other in zip(alone, together, strict=False):
        assert isinstance(one, np.ndarray)
        assert isinstance(other, np.ndarray)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """The calls of an operation, by the number of rows."""
    counted: Counter[int] = Counter()
    run = Cast.run

    def counting(self: Cast, inputs: Any) -> Any:
        counted[len(inputs["input"])] += 1
        return run(self, inputs)

    monkeypatch.setattr(Cast, "run", counting)
    return counted


def cast() -> Pipeline:
    return built({"name": "c", "op": "cast", "options": {"datatype": "INT64"}})


def test_requests_of_one_shape_are_computed_in_one_call(calls: Counter[int]) -> None:
    found = answers(cast(), *(np.full((1, 4), number, np.float32) for number in range(5)), np.zeros((2, 3), np.float32))
    assert [array.tolist() for array in found if isinstance(array, np.ndarray)][:2] == [[[0] * 4], [[1] * 4]]
    assert calls == {5: 1, 2: 1}


def test_requests_of_several_rows_are_computed_in_one_call(calls: Counter[int]) -> None:
    found = answers(cast(), *(np.full((rows, 4), rows, np.float32) for rows in (2, 3, 1)))
    assert [np.asarray(array).tolist() for array in found] == [[[rows] * 4] * rows for rows in (2, 3, 1)]
    assert calls == {6: 1}


@pytest.mark.parametrize(("num_bytes", "expected"), [(64 << 10, {2: 1}), ((64 << 10) + 4, {1: 2})])
def test_large_requests_are_computed_alone(calls: Counter[int], num_bytes: int, expected: dict[int, int]) -> None:
    answers(cast(), *[np.zeros((1, num_bytes // 4), np.float32)] * 2)
    assert calls == expected


def test_requests_without_rows_are_computed_alone(calls: Counter[int]) -> None:
    answers(cast(), *[np.zeros((0, 4), np.float32)] * 2)
    assert calls == {0: 2}


def test_an_answer_has_the_outputs_that_were_asked_for() -> None:
    made = built({"name": "a", "op": "argmax", "gives": "scores"}, more="a.classes")
    item = Item(request_id="1", inputs={"x": np.eye(2, dtype=np.float32)}, rows=2)
    for wanted, expected in (((), {"y", "more"}), (("more",), {"more"})):
        (found,) = made.predict([item.about(item.inputs, wanted, 2, 2)])
        assert isinstance(found, Result)
        assert set(found.outputs) == expected


def test_one_whose_values_are_wrong_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Reshape, inputs: Any) -> Any:
        if (inputs["input"] < 0).any():
            raise InvalidRequest("negative")
        return {"output": inputs["input"] + 1}

    monkeypatch.setattr(Reshape, "run", run)
    made = built({"name": "r", "op": "reshape", "options": {"shape": [2]}})
    found = answers(made, *(np.full((1, 2), number, np.float32) for number in (1, -1, 3)))
    assert isinstance(found[1], InvalidRequest)
    assert [array.tolist() for array in found if isinstance(array, np.ndarray)] == [[[2, 2]], [[4, 4]]]


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "tokenize"])
def test_what_may_be_computed_in_one_call_answers_each_row_alike_and_as_many(name: str) -> None:
    options, inputs = EXAMPLES[name]
    made = operation(name, options)
    if not all(made.is_by_rows(array.ndim) for array in inputs.values()):
        pytest.skip("each request is computed by itself")
    run = made.load()
    twice = run({key: np.concatenate([array, array[:1]]) for key, array in inputs.items()})
    rows = len(next(iter(inputs.values())))
    for key, array in run(inputs).items():
        assert len(array) == rows
        np.testing.assert_array_equal(twice[key][:rows], array)


@pytest.mark.parametrize("axis", [0, -2])
def test_an_axis_that_is_the_rows_keeps_requests_apart(axis: int) -> None:
    made = built({"name": "s", "op": "softmax", "options": {"axis": axis}})
    found = answers(made, *(np.full((1, 4), number, np.float32) for number in range(3)))
    assert [np.asarray(array).tolist() for array in found] == [[[1.0] * 4]] * 3
