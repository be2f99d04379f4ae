"""What is read of a prediction for its model's drift: numbers and declared labels of its first row, never content."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tests.predict.fake_runtime import CONTRACT, Doubler, info, numbers, request

from inferd.predict.backend import PredictBackend
from inferd.predict.batcher import Batcher, Limits
from inferd.predict.contract import Contract
from inferd.predict.facts import FactsReader
from inferd.types import Facts, TensorSpec

PIXELS = TensorSpec("pixels", "FP32", (-1, 4))


def reader(*outputs: TensorSpec, rows: int = 8, inputs: tuple[TensorSpec, ...] = (PIXELS,)) -> FactsReader:
    return FactsReader(Contract(inputs=inputs, outputs=outputs, max_batch_size=rows, because="declared"))


def f32(*values: Any) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


def test_a_classifier_tells_its_label_and_its_score_of_the_first_row() -> None:
    spec = TensorSpec("probabilities", "FP32", (-1, 3), labels=("cat", "dog", "eel"))
    found = reader(spec).read(
        {"pixels": f32([1, 2, 3, 6], [0, 0, 0, 0])}, {"probabilities": f32([0.25, 0.5, 0.25], [1, 0, 0])}
    )
    assert found == Facts(rows=2, input=3.0, is_missing=False, label="dog", score=0.5)


def test_without_declared_labels_a_class_is_its_number_and_a_text_of_the_model_is_not_read() -> None:
    text, scores = TensorSpec("label", "BYTES", (-1,)), TensorSpec("probabilities", "FP32", (-1, -1))
    outputs = {"label": np.array([b"secret"], object), "probabilities": f32([0.25, 0.75])}
    assert reader(text, scores).read({}, outputs) == Facts(label="1", score=0.75)
    assert reader(text).read({}, outputs) == Facts()
    number = TensorSpec("label", "INT64", (-1, 1))
    assert reader(number).read({}, {"label": np.array([[7], [8]])}) == Facts(label="7")


def test_a_few_numbers_are_averaged_and_an_embedding_is_projected() -> None:
    few, many = TensorSpec("y", "FP32", (-1, 2)), TensorSpec("embedding", "FP32", (-1, 64))
    assert reader(few).read({}, {"y": f32([1, 2], [9, 9])}).output == 1.5
    values = np.random.default_rng(0).standard_normal((1, 64)).astype(np.float32)
    one, other = (reader(many).read({}, {"embedding": values * sign}).output for sign in (1, -1))
    assert one is not None
    assert other == pytest.approx(-one)
    assert abs(one - float(values.mean())) > 1e-3


def test_missing_values_are_told_and_left_out_of_the_mean() -> None:
    inputs = {"pixels": f32([1, np.nan, 3, np.nan])}
    assert reader(TensorSpec("y", "FP32", (-1,))).read(inputs, {}) == Facts(input=2.0, is_missing=True)
    nothing = {"pixels": f32([np.nan] * 4)}
    assert reader(TensorSpec("y", "FP32", (-1,))).read(nothing, {}) == Facts(is_missing=True)
    text = {"text": np.array([b"a", b"b"], object)}
    assert reader(TensorSpec("y", "FP32", (-1,))).read(text, {}) == Facts(rows=2)


def test_a_model_without_rows_is_read_whole() -> None:
    found = reader(TensorSpec("y", "FP64", (3,)), rows=0).read({"x": f32(1, 3)}, {"y": f32(1, 2, 6)})
    assert found == Facts(input=2.0, is_missing=False, output=3.0)


@given(
    arrays.arrays(
        st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.bool_, np.float16]),
        arrays.array_shapes(min_dims=0, max_dims=3, min_side=0),
    ),
    st.booleans(),
)
def test_no_array_is_an_error(array: Any, has_rows: bool) -> None:
    for spec in (
        TensorSpec("y", "FP32", (-1, 2)),
        TensorSpec("y", "FP32", (-1, 2), labels=("a", "b")),
        TensorSpec("y", "INT64", (-1,)),
    ):
        found = reader(spec, rows=8 if has_rows else 0).read({"x": array}, {"y": array})
        assert all(value is None or np.isfinite(value) for value in (found.input, found.score, found.output))
        assert reader(spec).read({}, {}) == Facts()


def test_an_end_has_facts_where_the_model_is_watched_and_nowhere_else() -> None:
    for is_watched in (True, False):
        limits = Limits(max_rows=4, max_delay_s=0.0)
        backend = PredictBackend(Doubler(CONTRACT), Batcher(limits), info(4), codecs=numbers, facts=is_watched)
        backend.add(request("a", 3, 4), 0.0)
        (end,) = [output.end for output in backend.step(1.0)[0] if output.end is not None]
        assert (end.facts == Facts(rows=2, input=3.0, label="6")) == is_watched
        assert (end.facts is None) != is_watched
