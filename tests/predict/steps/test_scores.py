"""The operations on numbers, against plain twins."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from inferd.errors import InvalidRequest, ModelLoadError
from inferd.predict.contract import Array, object_array
from inferd.predict.steps.registry import operation

matrices = hnp.arrays(
    np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=7), elements=st.floats(-1e4, 1e4, width=32)
)


def run(name: str, options: dict[str, object], **inputs: Array) -> dict[str, Array]:
    return dict(operation(name, options).load()(inputs))


@settings(max_examples=60, deadline=None)
@given(matrices)
def test_softmax_and_sigmoid_are_their_definitions(logits: Array) -> None:
    found = run("softmax", {}, input=logits)["output"]
    for row, values in enumerate(logits.tolist()):
        powers = [math.exp(value - max(values)) for value in values]
        assert np.allclose(found[row], [power / sum(powers) for power in powers], atol=1e-6)
    for value, got in zip(logits.ravel().tolist(), run("sigmoid", {}, input=logits)["output"].ravel(), strict=True):
        expected = 1 / (1 + math.exp(-value)) if value > -700 else 0.0
        assert math.isclose(expected, got, rel_tol=1e-5, abs_tol=1e-30 if value > -80 else 1e-6)


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=3, max_side=6), elements=st.integers(-3, 3)),
    st.integers(1, 7),
)
def test_top_k_is_a_stable_sort_and_argmax_its_first(values: Array, k: int) -> None:
    top, best = run("top_k", {"k": k}, input=values), run("argmax", {}, input=values)
    for place in np.ndindex(*values.shape[:-1]):
        row = values[place].tolist()
        order = sorted(range(len(row)), key=lambda column: (-row[column], column))[:k]
        assert top["classes"][place].tolist() == order
        assert top["scores"][place].tolist() == [row[column] for column in order]
        assert best["classes"][place].tolist() == order[0]
        assert best["scores"][place].tolist() == row[order[0]]


@settings(max_examples=40, deadline=None)
@given(matrices, st.floats(0.1, 10), st.floats(-5, 5))
def test_normalize_is_its_formula_and_rescale_takes_it_back(values: Array, std: float, mean: float) -> None:
    width = values.shape[1]
    normal = run("normalize", {"mean": [mean] * width, "std": std}, input=values)["output"]
    assert np.allclose(normal, (values.astype(np.float64) - mean) / std, rtol=1e-4, atol=1e-3)
    back = run("rescale", {"scale": std, "offset": mean}, input=normal)["output"]
    assert np.allclose(back, values, rtol=1e-3, atol=1e-2)


def test_a_request_with_another_number_of_features_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="3 places where 2 features are expected"):
        run("normalize", {"mean": [1, 2]}, input=np.zeros((1, 3), np.float32))


@settings(max_examples=40, deadline=None)
@given(matrices)
def test_normalized_vectors_have_length_one_or_none(vectors: Array) -> None:
    for row, made in zip(vectors, run("l2_normalize", {}, input=vectors)["output"], strict=True):
        length = float(np.sqrt(np.square(made.astype(np.float64)).sum()))
        assert math.isclose(length, 1.0, rel_tol=1e-4) or np.abs(row).max() < 1e-18


def test_mean_pool_leaves_padding_out() -> None:
    vectors = np.array([[[1, 2], [3, 4], [100, 100]]], np.float32)
    pooled = run("mean_pool", {}, input=vectors, attention_mask=np.array([[1, 1, 0]]))["output"]
    assert pooled.tolist() == [[2.0, 3.0]]
    assert run("mean_pool", {}, input=vectors, attention_mask=np.zeros((1, 3), int))["output"].tolist() == [[0.0, 0.0]]


def test_labels_are_names_of_classes(tmp_path: Path) -> None:
    file = tmp_path / "labels.txt"
    file.write_text("cat\ndog\n\n")
    classes = np.array([[1, 0], [-1, 7]])
    expected = [[b"dog", b"cat"], [b"", b"7"]]
    assert run("labels", {"labels": ["cat", "dog"]}, classes=classes)["labels"].tolist() == expected
    assert run("labels", {"file": str(file)}, classes=classes)["labels"].tolist() == expected
    with pytest.raises(ModelLoadError, match="cannot be read"):
        operation("labels", {"file": str(tmp_path / "gone")}).load()
    file.write_text("\n")
    with pytest.raises(ModelLoadError, match="is empty"):
        operation("labels", {"file": str(file)}).load()


def test_thresholds_decide_at_and_above() -> None:
    values = np.array([[0.2, 0.5, 0.7]], np.float32)
    assert run("threshold", {}, input=values)["output"].tolist() == [[False, True, True]]
    named = run("threshold", {"at": 0.6, "labels": ["no", "yes"]}, input=values)["output"]
    assert named.tolist() == [[b"no", b"no", b"yes"]]


def test_axes_and_shapes_change_without_a_copy() -> None:
    pixels = np.zeros((1, 4, 5, 3), np.uint8)
    turned = run("transpose", {"axes": [0, 3, 1, 2]}, input=pixels)["output"]
    assert turned.shape == (1, 3, 4, 5)
    assert np.shares_memory(turned, pixels)
    assert np.shares_memory(run("reshape", {"shape": [-1]}, input=pixels)["output"], pixels)
    with pytest.raises(InvalidRequest, match=r"cannot become \[7, -1\]"):
        run("reshape", {"shape": [7, -1]}, input=pixels)


def test_a_json_document_holds_a_row() -> None:
    scores = np.array([[0.123456, np.nan], [1, 2]], np.float32)
    names = object_array([b"a", b"b", b"c", b"\xff"]).reshape(2, 2)
    plain = run("json", {"digits": 2, "names": {"scores": "p"}}, scores=scores, names=names)["json"]
    assert plain.tolist() == [b'{"p":[0.12,null],"names":["a","b"]}', '{"p":[1.0,2.0],"names":["c","\ufffd"]}'.encode()]
    records = run("json", {"records": True}, scores=scores, names=names, count=np.array([2, 1], np.int32))["json"]
    assert records[1] == b'[{"scores":1.0,"names":"c"}]'
    assert records[0].count(b"scores") == 2
