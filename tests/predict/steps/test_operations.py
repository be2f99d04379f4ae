"""What holds for every operation: its options are checked, and what it says of its outputs is what comes out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from tests.predict.steps.pictures import picture, png, tokenizer_file

from inferd.config.pipeline_graph import Spec
from inferd.predict.contract import NUMPY, Array, object_array
from inferd.predict.steps.registry import OPERATIONS, operation, operation_type

Inputs = Mapping[str, Array]
_RANDOM = np.random.default_rng(7)
_SCORES = _RANDOM.normal(size=(2, 6)).astype(np.float32)
_PIXELS = _RANDOM.integers(0, 255, (2, 9, 12, 3), dtype=np.uint8)
_BOXES = np.sort(_RANDOM.uniform(0, 50, (2, 7, 2, 2)), axis=2).reshape(2, 7, 4).astype(np.float32)
_WORDS = object_array([b"One  text", "Zwei T\u00e9xte".encode()])

# Options and inputs with which an operation works; the file of ``tokenize`` is filled in.
EXAMPLES: Mapping[str, tuple[dict[str, object], dict[str, Array]]] = {
    "image.decode": ({}, {"image": object_array([png(picture(8, 6)), png(picture(8, 6))])}),
    "image.resize": ({"width": 5, "height": 4, "fit": "letterbox"}, {"image": _PIXELS}),
    "image.crop": ({"width": 5, "height": 4}, {"image": _PIXELS}),
    "image.ink": ({"margin": 0.1}, {"image": _PIXELS[..., :1]}),
    "image.encode": ({}, {"image": _PIXELS}),
    "text.normalize": ({"lower": True}, {"text": _WORDS}),
    "tokenize": ({"file": "", "max_tokens": 4}, {"text": _WORDS}),
    "normalize": ({"mean": [1, 2, 3, 4, 5, 6], "std": 2}, {"input": _SCORES}),
    "rescale": ({"scale": 2.0, "offset": 1.0, "exp": True}, {"input": _SCORES}),
    "transpose": ({"axes": [0, 3, 1, 2]}, {"input": _PIXELS}),
    "reshape": ({"shape": [3, 2]}, {"input": _SCORES}),
    "cast": ({"datatype": "INT32"}, {"input": _SCORES}),
    "concat": ({}, {"a": _SCORES, "b": _SCORES.astype(np.float64)}),
    "either": ({}, {"a": _SCORES}),
    "softmax": ({"temperature": 2.0}, {"input": _SCORES}),
    "sigmoid": ({}, {"input": _SCORES}),
    "argmax": ({}, {"input": _SCORES}),
    "top_k": ({"k": 3}, {"input": _SCORES}),
    "labels": ({"labels": ["a", "b"]}, {"classes": np.array([[0, 1], [1, -1]])}),
    "threshold": ({"at": 0.1}, {"input": _SCORES}),
    "l2_normalize": ({}, {"input": _SCORES}),
    "mean_pool": ({}, {"input": _SCORES.reshape(2, 3, 2), "attention_mask": np.array([[1, 1, 0], [1, 0, 0]])}),
    "boxes.split": ({"objectness": True}, {"input": _RANDOM.uniform(0, 1, (2, 7, 8)).astype(np.float32)}),
    "boxes": (
        {"score_threshold": 0.1},
        {"boxes": _BOXES, "scores": _RANDOM.uniform(0, 1, (2, 7, 3)).astype(np.float32)},
    ),
    "json": ({"records": True}, {"scores": _SCORES, "names": object_array([b"x"] * 12).reshape(2, 6)}),
}


def spec_of(array: Array) -> Spec:
    word = "BYTES" if array.dtype == np.object_ else next(w for w, dtype in NUMPY.items() if dtype == array.dtype)
    return Spec(word, (-1, *array.shape[1:]))


def test_every_operation_has_an_example() -> None:
    assert EXAMPLES.keys() == OPERATIONS.keys()


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_what_it_says(name: str, tmp_path: Path) -> None:
    options, inputs = EXAMPLES[name]
    if name == "tokenize":
        options = {**options, "file": str(tokenizer_file(tmp_path))}
    made = operation(name, options)
    specs = {key: spec_of(array) for key, array in inputs.items()}
    described = made.describe({**specs, "other": specs["a"]} if name == "either" else specs)
    before = {key: array.copy() for key, array in inputs.items()}
    outputs = made.load()(inputs)
    assert set(outputs) == set(described) == set(made.gives)
    for key, array in outputs.items():
        spec = described[key]
        assert array.dtype == NUMPY[spec.datatype], key
        assert spec.shape is not None
        assert len(spec.shape) == array.ndim, key
        assert all(said in (-1, size) for said, size in zip(spec.shape, array.shape, strict=True)), (
            key,
            spec,
            array.shape,
        )
    for key, array in inputs.items():
        assert np.array_equal(array, before[key]), "an operation changed its input"


@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_do_not_know_of_each_other(name: str, tmp_path: Path) -> None:
    options, inputs = EXAMPLES[name]
    if name == "tokenize":
        options = {**options, "file": str(tokenizer_file(tmp_path)), "pad_to": 4}
    run = operation(name, options).load()
    together = run(inputs)
    for row in range(2):
        alone = run({key: array[row : row + 1] for key, array in inputs.items()})
        for key, array in alone.items():
            both = together[key][row : row + 1]
            if array.shape != both.shape:  # detections: the other row had more
                both = both[tuple(map(slice, array.shape))]
            assert np.array_equal(array, both), key


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_option_that_nothing_knows_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name} has no option 'widht'")):
        operation(name, {**EXAMPLES[name][0], "widht": 3})


def test_an_unknown_operation_is_refused_with_the_closest_one() -> None:
    with pytest.raises(ValueError, match=r"there is no operation 'softmaks'; did you mean softmax\?"):
        operation_type("softmaks")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("image.resize", {"width": 0, "height": 2}, "width"),
        ("image.resize", {"width": 2}, "height"),
        ("image.resize", {"width": 2, "height": 2, "fit": "squeeze"}, "fit"),
        ("normalize", {"std": [1.0, 0.0]}, "std"),
        ("top_k", {"k": "many"}, "k"),
        ("boxes", {"iou_threshold": 1.5}, "iou_threshold"),
        ("image.decode", {"formats": ["SVG"]}, "formats"),
    ],
)
def test_an_option_of_a_wrong_value_is_refused_by_name(name: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: .*{said}"):
        operation(name, options)


@pytest.mark.parametrize(
    ("name", "options", "inputs", "said"),
    [
        ("softmax", {}, {"input": Spec("BYTES", (-1,))}, "must be numbers, not BYTES"),
        ("softmax", {"axis": 2}, {"input": Spec("FP32", (-1, 4))}, "axis 2 is none of the 2 dimensions"),
        ("normalize", {"mean": [1, 2]}, {"input": Spec("FP32", (-1, 3))}, "mean has 2 numbers, but axis -1"),
        ("transpose", {"axes": [0, 0]}, {"input": Spec("FP32", (-1, 3))}, "each of 0 to 1 once"),
        ("labels", {}, {"classes": Spec("INT64", (-1,))}, "either labels or a file"),
        ("labels", {"labels": ["a"]}, {"classes": Spec("FP32", (-1, 4))}, "put argmax or top_k before it"),
        (
            "boxes",
            {"background": 3},
            {"boxes": Spec("FP32", (-1, 5, 4)), "scores": Spec("FP32", (-1, 5, 2))},
            "background",
        ),
        (
            "boxes",
            {"output": "relative"},
            {"boxes": Spec("FP32", (-1, 5, 4)), "scores": Spec("FP32", (-1, 5, 2))},
            "transform",
        ),
        ("image.resize", {"width": 2, "height": 2}, {"image": Spec("FP32", (-1, 4, 4, 3))}, "must be pixels"),
        ("json", {"names": {"x": "y"}}, {"a": Spec("FP32", (-1,))}, "names has 'x', which is not one of its inputs"),
        ("threshold", {"labels": ["one"]}, {"input": Spec("FP32", (-1,))}, "labels are two"),
        ("tokenize", {"file": "x", "pad_to": 3}, {"text": Spec("BYTES", (-1,))}, "pad_to = 3 is below"),
        (
            "concat",
            {},
            {"a": Spec("FP32", (-1, 3, 2)), "b": Spec("FP32", (-1, 4, 2))},
            r"sizes \[3, 4\] in dimension 1",
        ),
    ],
)
def test_what_an_operation_cannot_work_with_is_refused_before_any_request(
    name: str, options: dict[str, object], inputs: dict[str, Spec], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        operation(name, options).describe(inputs)


@pytest.mark.parametrize(
    ("name", "options"),
    [("softmax", {}), ("argmax", {}), ("concat", {}), ("normalize", {"mean": [1, 2]}), ("normalize", {"std": [1, 2]})],
)
def test_rows_of_requests_are_computed_together_where_an_operation_works_behind_them(
    name: str, options: dict[str, object]
) -> None:
    behind = [axis for axis in range(-4, 5) if operation(name, {**options, "axis": axis}).is_by_rows(3)]
    assert behind == [-2, -1, 1, 2], "the rows' own axis is 0 or -3, and the others are none"


def test_one_number_for_all_is_of_no_axis() -> None:
    assert operation("normalize", {"mean": 1.0, "std": 2.0, "axis": 0}).is_by_rows(2)
