"""Operations on the outputs of detectors: boxes, their scores, and non-maximum suppression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta

from inferd.config.pipeline_graph import Spec
from inferd.errors import InternalError
from inferd.predict.contract import Tensors
from inferd.predict.steps.image import TRANSFORM
from inferd.predict.steps.operation import Operation, as_floats, floats, numbers

Floats = np.ndarray[tuple[int, ...], np.dtype[np.floating]]
Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
_Part = Annotated[float, Meta(ge=0, le=1)]


class Split(Operation, frozen=True, kw_only=True):
    """One tensor of a detector to boxes and scores. Its columns are four numbers of the box, the objectness (with
    ``objectness``), and a score for each class.

    ``axis``: which axis the columns are, -1 for [rows, boxes, columns] and 1 for [rows, columns, boxes].
    """

    gives: ClassVar[tuple[str, ...]] = ("boxes", "scores")

    objectness: bool = False
    axis: Literal[-1, 1] = -1

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        spec = numbers("input", inputs["input"])
        if spec.shape is None or len(spec.shape) != 3:
            raise ValueError("its input must have three dimensions: rows, boxes, columns")
        rows, count, columns = spec.shape if self.axis == -1 else (spec.shape[0], spec.shape[2], spec.shape[1])
        others = 5 if self.objectness else 4
        if columns != -1 and columns <= others:
            raise ValueError(f"its input has {columns} columns; expected {others} and one for each class")
        word = as_floats(spec).datatype
        return {
            "boxes": Spec(word, (rows, count, 4)),
            "scores": Spec(word, (rows, count, columns - others if columns != -1 else -1)),
        }

    def run(self, inputs: Tensors) -> Tensors:
        array = floats(inputs["input"])
        if self.axis == 1:
            array = array.swapaxes(1, 2)
        if not self.objectness:
            return {"boxes": array[..., :4], "scores": array[..., 4:]}
        return {"boxes": array[..., :4], "scores": array[..., 5:] * array[..., 4:5]}


class Boxes(Operation, frozen=True, kw_only=True):
    """Candidates to detections: those of a sufficient score, and of those that overlap the best
    (non-maximum suppression).

    Takes ``boxes`` [rows, candidates, 4] and ``scores`` [rows, candidates, classes] (or without the last dimension),
    and ``transform`` of ``image.resize``, by which boxes become those of the original image. Gives for each row its
    detections, best first: ``boxes`` [rows, n, 4] (left, top, right, bottom), ``scores`` and ``classes`` [rows, n],
    where n is the largest ``count``; a row with fewer is filled with zeros and the class -1.
    """

    takes: ClassVar[tuple[str, ...]] = ("boxes", "scores")
    may_take: ClassVar[tuple[str, ...]] = ("transform",)
    gives: ClassVar[tuple[str, ...]] = ("boxes", "scores", "classes", "count")

    format: Literal["xyxy", "xywh", "cxcywh"] = "xyxy"
    units: Literal["pixels", "relative"] = (
        "pixels"  # the unit of the model's boxes: pixels of its input image, or a fraction of it
    )
    output: Literal["same", "pixels", "relative"] = "same"  # of the answer's, where there is a transform
    background: Annotated[int, Meta(ge=0)] | None = None  # the class of the background
    multi_label: bool = False  # a box may be several classes; otherwise it is its best one
    class_agnostic: bool = False  # boxes of different classes suppress each other too
    score_threshold: _Part = 0.25
    iou_threshold: _Part = 0.45
    max_boxes: Annotated[int, Meta(ge=1, le=10_000)] = 300
    max_candidates: Annotated[int, Meta(ge=1, le=100_000)] = 4096

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        boxes, scores = numbers("boxes", inputs["boxes"]), numbers("scores", inputs["scores"])
        if boxes.shape is None or len(boxes.shape) != 3 or boxes.shape[2] not in (4, -1):
            raise ValueError("its input 'boxes' must have the shape [rows, candidates, 4]")
        if scores.shape is None or len(scores.shape) not in (2, 3):
            raise ValueError("its input 'scores' must have the shape [rows, candidates, classes] or [rows, candidates]")
        classes = scores.shape[2] if len(scores.shape) == 3 else 1
        if self.background is not None and classes != -1 and self.background >= classes:
            raise ValueError(f"the background is class {self.background}, but scores are of {classes} classes")
        if "transform" not in inputs and self.output not in ("same", self.units):
            raise ValueError("other units need the input 'transform' of image.resize")
        rows = boxes.shape[0]
        return {
            "boxes": Spec("FP32", (rows, -1, 4)),
            "scores": Spec("FP32", (rows, -1)),
            "classes": Spec("INT64", (rows, -1)),
            "count": Spec("INT32", (rows,)),
        }

    def run(self, inputs: Tensors) -> Tensors:
        boxes = corners(floats(inputs["boxes"]), self.format)
        scores = floats(inputs["scores"])
        if scores.ndim == 2:
            scores = scores[..., np.newaxis]
        if boxes.shape[:2] != scores.shape[:2]:
            raise InternalError(
                f"The model answered {list(boxes.shape)} boxes and {list(scores.shape)} scores, which do not belong "
                "together."
            )
        transform = inputs.get("transform")
        found = [self._row(boxes[row], scores[row]) for row in range(len(boxes))]
        if transform is not None:
            found = [
                (self._restored(kept, floats(transform)[row]), score, label)
                for row, (kept, score, label) in enumerate(found)
            ]
        longest = max((len(score) for _, score, _ in found), default=0)
        out_boxes = np.zeros((len(found), longest, 4), dtype=np.float32)
        out_scores = np.zeros((len(found), longest), dtype=np.float32)
        out_classes = np.full((len(found), longest), -1, dtype=np.int64)
        for row, (kept, score, label) in enumerate(found):
            out_boxes[row, : len(kept)], out_scores[row, : len(kept)], out_classes[row, : len(kept)] = (
                kept,
                score,
                label,
            )
        count = np.array([len(score) for _, score, _ in found], dtype=np.int32)
        return {"boxes": out_boxes, "scores": out_scores, "classes": out_classes, "count": count}

    def _row(self, boxes: Floats, scores: Floats) -> tuple[Floats, Floats, Integers]:
        """One row's detections: boxes, scores and classes, best first."""
        if self.background is not None:
            scores = scores.copy()
            scores[:, self.background] = -np.inf
        if self.multi_label:
            places, labels = np.nonzero(scores >= self.score_threshold)
        else:
            best = scores.argmax(axis=1)
            places = np.nonzero(scores[np.arange(len(scores)), best] >= self.score_threshold)[0]
            labels = best[places]
        is_sound = np.isfinite(boxes[places]).all(axis=1)
        places, labels = places[is_sound], labels[is_sound].astype(np.int64)
        chosen, candidates = scores[places, labels], boxes[places]
        groups = None if self.class_agnostic else labels
        kept = suppress(
            candidates, chosen, groups, self.iou_threshold, max_kept=self.max_boxes, max_candidates=self.max_candidates
        )
        return candidates[kept], chosen[kept], labels[kept]

    def _restored(self, boxes: Floats, way: Floats) -> Floats:
        """Boxes of the original image, cut at its borders."""
        scale, offset, size, new_size = (np.tile(way[place : place + 2], 2) for place in range(0, TRANSFORM, 2))
        pixels = boxes * new_size if self.units == "relative" else boxes
        pixels = np.clip((pixels - offset) / scale, 0, size)
        units = self.units if self.output == "same" else self.output
        return np.asarray(pixels / size if units == "relative" else pixels)


def corners(boxes: Floats, format: str) -> Floats:
    """Boxes as left, top, right, bottom."""
    if format == "xyxy":
        return boxes
    first, size = boxes[..., :2], boxes[..., 2:4]
    if format == "cxcywh":
        first = first - size / 2
    return np.concatenate([first, first + size], axis=-1)


def suppress(
    boxes: Floats,
    scores: Floats,
    groups: Integers | None,
    iou_threshold: float,
    *,
    max_kept: int,
    max_candidates: int,
) -> Integers:
    """Places of the boxes that stay, best first; of equal scores the first comes first.

    Greedy non-maximum suppression: the best box stays, and removes every other of its group (None: of all) whose
    intersection over union with it is above the threshold. Only the best ``max_candidates`` are considered, so that the
    time is bounded for any image. ``boxes`` [n, 4] are left, top, right, bottom; ``scores`` and ``groups`` [n].
    """
    left = np.argsort(-scores, kind="stable")[:max_candidates]
    areas = np.maximum(boxes[:, 2] - boxes[:, 0], 0) * np.maximum(boxes[:, 3] - boxes[:, 1], 0)
    kept: list[int] = []
    while left.size and len(kept) < max_kept:
        best, left = int(left[0]), left[1:]
        kept.append(best)
        others = boxes[left]
        width = np.minimum(others[:, 2], boxes[best, 2]) - np.maximum(others[:, 0], boxes[best, 0])
        height = np.minimum(others[:, 3], boxes[best, 3]) - np.maximum(others[:, 1], boxes[best, 1])
        both = np.maximum(width, 0) * np.maximum(height, 0)
        union = areas[left] + areas[best] - both
        is_taken = both > iou_threshold * union
        if groups is not None:
            is_taken &= groups[left] == groups[best]
        left = left[~is_taken]
    return np.array(kept, dtype=np.int64)
