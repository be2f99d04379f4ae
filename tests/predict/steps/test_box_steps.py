"""Non-maximum suppression against a slow twin, and boxes that find their way back to the original image."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.predict.steps.pictures import picture

from inferd.config.pipeline_graph import Spec
from inferd.predict.contract import Array
from inferd.predict.steps.boxes import suppress
from inferd.predict.steps.registry import operation

box = st.tuples(*(st.integers(0, 12) for _ in range(4)))


def overlap(a: list[float], b: list[float]) -> float:
    """Intersection over union, as it is defined."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    both = max(width, 0) * max(height, 0)
    areas = [max(one[2] - one[0], 0) * max(one[3] - one[1], 0) for one in (a, b)]
    union = sum(areas) - both
    return both / union if union > 0 else 0.0


def slowly(boxes: list[list[float]], scores: list[float], groups: list[int] | None, threshold: float) -> list[int]:
    kept: list[int] = []
    for place in sorted(range(len(boxes)), key=lambda one: (-scores[one], one)):
        rivals = [one for one in kept if groups is None or groups[one] == groups[place]]
        if all(overlap(boxes[one], boxes[place]) <= threshold for one in rivals):
            kept.append(place)
    return kept


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(box, st.integers(0, 5), st.integers(0, 2)), max_size=14),
    st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    st.booleans(),
)
def test_suppression_is_its_definition(
    found: list[tuple[tuple[int, ...], int, int]], threshold: float, grouped: bool
) -> None:
    boxes = np.array([one[0] for one in found], np.float64).reshape(-1, 4)
    scores = np.array([one[1] for one in found], np.float64)
    groups = np.array([one[2] for one in found], np.int64) if grouped else None
    kept = suppress(boxes, scores, groups, threshold, max_kept=100, max_candidates=100)
    named = groups.tolist() if groups is not None else None
    expected = slowly(boxes.tolist(), scores.tolist(), named, threshold)
    assert kept.tolist() == expected
    assert suppress(boxes, scores, groups, threshold, max_kept=2, max_candidates=100).tolist() == expected[:2]


def detect(boxes: Array, scores: Array, transform: Array | None = None, **options: object) -> dict[str, Array]:
    inputs = {"boxes": boxes, "scores": scores} | ({} if transform is None else {"transform": transform})
    return dict(operation("boxes", options).load()(inputs))


def test_the_best_of_two_that_overlap_stays_and_the_background_is_nothing() -> None:
    boxes = np.array([[[0, 0, 10, 10], [1, 1, 11, 11], [40, 40, 50, 50], [0, 0, 9, 9]]], np.float32)
    scores = np.array([[[0.1, 0.8, 0.0], [0.05, 0.9, 0.0], [0.2, 0.0, 0.7], [0.99, 0.5, 0.0]]], np.float32)
    made = detect(boxes, scores, background=0)
    assert made["count"].tolist() == [2]
    assert made["classes"].tolist() == [[1, 2]]
    assert made["boxes"].tolist() == [[[1, 1, 11, 11], [40, 40, 50, 50]]]
    assert np.allclose(made["scores"], [[0.9, 0.7]])
    assert detect(boxes, scores)["classes"].tolist() == [[0, 1, 2]]
    both = detect(boxes, scores, background=0, multi_label=True, score_threshold=0.0, iou_threshold=1.0)
    assert both["count"].tolist() == [8]


def test_boxes_of_different_classes_share_a_place_unless_told_otherwise() -> None:
    boxes = np.array([[[0, 0, 10, 10], [0, 0, 10, 10]]], np.float32)
    scores = np.array([[[0.9, 0.0], [0.0, 0.8]]], np.float32)
    assert detect(boxes, scores)["count"].tolist() == [2]
    assert detect(boxes, scores, class_agnostic=True)["count"].tolist() == [1]


def test_rows_with_fewer_detections_are_filled_up() -> None:
    boxes = np.tile(np.array([[0, 0, 10, 10], [20, 20, 30, 30]], np.float32), (3, 1, 1))
    scores = np.array([[0.9, 0.8], [0.0, 0.7], [0.0, 0.0]], np.float32)
    made = detect(boxes, scores)
    assert made["count"].tolist() == [2, 1, 0]
    assert made["classes"].tolist() == [[0, 0], [0, -1], [-1, -1]]
    assert made["boxes"][1].tolist() == [[20, 20, 30, 30], [0, 0, 0, 0]]
    assert detect(boxes[2:], scores[2:])["boxes"].shape == (1, 0, 4)


def test_numbers_that_are_none_detect_nothing() -> None:
    boxes = np.array([[[np.nan, 0, 10, 10], [0, 0, np.inf, 10], [0, 0, 5, 5]]], np.float32)
    scores = np.array([[0.9, 0.9, np.nan]], np.float32)
    assert detect(boxes, scores)["count"].tolist() == [0]


@pytest.mark.parametrize("format", ["xyxy", "xywh", "cxcywh"])
@pytest.mark.parametrize("fit", ["stretch", "letterbox", "cover"])
@pytest.mark.parametrize("units", ["pixels", "relative"])
def test_a_box_on_the_resized_image_is_the_same_place_of_the_original(format: str, fit: str, units: str) -> None:
    options = {"width": 64, "height": 48, "fit": fit}
    transform = operation("image.resize", options).load()({"image": picture(200, 100)[np.newaxis]})["transform"]
    left, top, right, bottom = original = np.array([60.0, 30.0, 120.0, 80.0])
    scale, offset = np.tile(transform[0, :2], 2), np.tile(transform[0, 2:4], 2)
    left, top, right, bottom = original * scale + offset
    told = {
        "xyxy": [left, top, right, bottom],
        "xywh": [left, top, right - left, bottom - top],
        "cxcywh": [(left + right) / 2, (top + bottom) / 2, right - left, bottom - top],
    }[format]
    boxes = np.array([[told]], np.float32)
    if units == "relative":
        boxes = (boxes / np.array([64, 48, 64, 48], np.float32)).astype(np.float32)
    made = detect(boxes, np.ones((1, 1), np.float32), transform, format=format, units=units, output="pixels")
    assert np.allclose(made["boxes"][0, 0], original, atol=0.01)
    part = detect(boxes, np.ones((1, 1), np.float32), transform, format=format, units=units, output="relative")
    assert np.allclose(part["boxes"][0, 0], original / [200, 100, 200, 100], atol=1e-4)


@pytest.mark.parametrize(
    ("options", "shape", "boxes", "scores"),
    [
        ({}, (-1, 7, 9), (-1, 7, 4), (-1, 7, 5)),
        ({}, (2, -1, -1), (2, -1, 4), (2, -1, -1)),
        ({}, (-1, 7, 5), (-1, 7, 4), (-1, 7, 1)),
        ({"axis": 1}, (-1, 9, 7), (-1, 7, 4), (-1, 7, 5)),
        ({"axis": 1}, (2, 9, -1), (2, -1, 4), (2, -1, 5)),
        ({"objectness": True}, (-1, 7, 9), (-1, 7, 4), (-1, 7, 4)),
        ({"objectness": True, "axis": 1}, (-1, 6, 7), (-1, 7, 4), (-1, 7, 1)),
    ],
)
def test_the_shapes_of_split_columns_are_told_before_any_request(
    options: dict[str, object], shape: tuple[int, ...], boxes: tuple[int, ...], scores: tuple[int, ...]
) -> None:
    made = operation("boxes.split", options)
    described = made.describe({"input": Spec("FP16", shape)})
    assert (described["boxes"].shape, described["scores"].shape) == (boxes, scores)
    concrete = np.zeros([9 if size == -1 else size for size in shape], np.float32)
    for name, array in made.load()({"input": concrete}).items():
        told = described[name].shape
        assert told is not None
        assert [size for size in told if size != -1] == [
            size for size, known in zip(array.shape, told, strict=True) if known != -1
        ]


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (-1, 7, 4)),
        ({"objectness": True}, (-1, 7, 5)),
        ({"axis": 1}, (-1, 4, 7)),
        ({}, (-1, 7)),
        ({}, (-1, 7, 9, 1)),
        ({}, None),
    ],
)
def test_columns_without_a_class_are_refused(options: dict[str, object], shape: tuple[int, ...] | None) -> None:
    with pytest.raises(ValueError, match="its input"):
        operation("boxes.split", options).describe({"input": Spec("FP32", shape)})


@pytest.mark.parametrize(
    ("boxes", "scores", "is_right"),
    [
        ((-1, 7, 4), (-1, 7, 3), True),
        ((-1, 7, 4), (-1, 7), True),
        ((-1, -1, -1), (-1, -1, -1), True),
        ((-1, 7, 5), (-1, 7, 3), False),
        ((-1, 4), (-1, 7, 3), False),
        ((-1, 7, 4), (-1,), False),
        ((-1, 7, 4), (-1, 7, 3, 1), False),
        (None, (-1, 7, 3), False),
        ((-1, 7, 4), None, False),
    ],
)
def test_the_shapes_of_detections_are_told_before_any_request(
    boxes: tuple[int, ...] | None, scores: tuple[int, ...] | None, is_right: bool
) -> None:
    made = operation("boxes", {})
    inputs = {"boxes": Spec("FP32", boxes), "scores": Spec("FP32", scores)}
    if not is_right:
        with pytest.raises(ValueError, match="must have the shape"):
            made.describe(inputs)
        return
    described = {name: (spec.datatype, spec.shape) for name, spec in made.describe(inputs).items()}
    assert described == {
        "boxes": ("FP32", (-1, -1, 4)),
        "scores": ("FP32", (-1, -1)),
        "classes": ("INT64", (-1, -1)),
        "count": ("INT32", (-1,)),
    }


@pytest.mark.parametrize(
    ("scores", "background", "is_right"),
    [((-1, 7, 3), 2, True), ((-1, 7, 3), 3, False), ((-1, 7), 0, True), ((-1, 7), 1, False), ((-1, 7, -1), 9, True)],
)
def test_a_background_is_one_of_the_classes(scores: tuple[int, ...], background: int, is_right: bool) -> None:
    made = operation("boxes", {"background": background})
    inputs = {"boxes": Spec("FP32", (-1, 7, 4)), "scores": Spec("FP32", scores)}
    if is_right:
        made.describe(inputs)
    else:
        with pytest.raises(ValueError, match="background is class"):
            made.describe(inputs)


def test_columns_are_split_and_weighed_by_objectness() -> None:
    columns = np.arange(1, 15, dtype=np.float32).reshape(1, 2, 7)
    made = operation("boxes.split", {"objectness": True}).load()({"input": columns})
    assert made["boxes"].tolist() == [[[1, 2, 3, 4], [8, 9, 10, 11]]]
    assert made["scores"].tolist() == [[[30, 35], [156, 168]]]
    turned = operation("boxes.split", {"axis": 1}).load()({"input": columns.swapaxes(1, 2)})
    assert turned["scores"].tolist() == [[[5, 6, 7], [12, 13, 14]]]
