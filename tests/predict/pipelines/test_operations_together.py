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


def built(*steps: dict[str, Any], **inputs: str) -> Pipeline:
    settings = {"source": "pipeline", "pipeline": {"inputs": inputs or {"x": "FP32 [-1, -1]"}, "steps": list(steps)}}
    outputs = {"y": f"{steps[-1]['name']}.{steps[-1].pop('gives', 'output')}"}
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


def test_requests_of_one_shape_are_computed_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[int] = Counter()
    run = Cast.run

    def counted(self: Cast, inputs: Any) -> Any:
        calls[len(inputs["input"])] += 1
        return run(self, inputs)

    monkeypatch.setattr(Cast, "run", counted)
    made = built({"name": "c", "op": "cast", "options": {"datatype": "INT64"}})
    found = answers(made, *(np.full((1, 4), number, np.float32) for number in range(5)), np.zeros((2, 3), np.float32))
    assert [array.tolist() for array in found if isinstance(array, np.ndarray)][:2] == [[[0] * 4], [[1] * 4]]
    assert calls == {5: 1, 2: 1}


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
