"""Operations on the outputs of models: probabilities, classes, labels, decisions, embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta

from inferd.config.pipeline_graph import Spec
from inferd.predict.contract import Tensors, object_array
from inferd.predict.steps.operation import (
    Function,
    Operation,
    as_floats,
    axis_of,
    dense,
    floats,
    is_behind_rows,
    numbers,
    read_lines,
)


class _AlongAxis(Operation, frozen=True, kw_only=True):
    """Numbers to as many floats, whose values depend on those along ``axis``."""

    axis: int = -1

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        spec = numbers("input", inputs["input"])
        axis_of(spec, self.axis)
        return {"output": as_floats(spec)}

    def is_by_rows(self, ndim: int) -> bool:
        return is_behind_rows(self.axis, ndim)


class Softmax(_AlongAxis, frozen=True, kw_only=True):
    """Logits to probabilities along ``axis``."""

    temperature: Annotated[float, Meta(gt=0)] = 1.0

    def run(self, inputs: Tensors) -> Tensors:
        logits = floats(inputs["input"])
        made = logits - logits.max(axis=self.axis, keepdims=True)
        if self.temperature != 1.0:
            made /= made.dtype.type(self.temperature)
        np.exp(made, out=made)
        made /= made.sum(axis=self.axis, keepdims=True)
        return {"output": made}


class Sigmoid(Operation, frozen=True, kw_only=True):
    """Logits to independent probabilities."""

    by_rows: ClassVar[bool] = True

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        return {"output": as_floats(numbers("input", inputs["input"]))}

    def run(self, inputs: Tensors) -> Tensors:
        logits = floats(inputs["input"])
        # The form whose power does not overflow.
        small = np.exp(-np.abs(logits))
        return {"output": np.where(logits >= 0, 1 / (1 + small), small / (1 + small)).astype(logits.dtype, copy=False)}


class Argmax(Operation, frozen=True, kw_only=True):
    """The place of the largest value along ``axis`` (the first of equals)."""

    gives: ClassVar[tuple[str, ...]] = ("classes", "scores")

    axis: int = -1

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        spec = numbers("input", inputs["input"])
        place = axis_of(spec, self.axis)
        assert spec.shape is not None
        shape = (*spec.shape[:place], *spec.shape[place + 1 :])
        return {"classes": Spec("INT64", shape), "scores": Spec(spec.datatype, shape)}

    def is_by_rows(self, ndim: int) -> bool:
        return is_behind_rows(self.axis, ndim)

    def run(self, inputs: Tensors) -> Tensors:
        array = dense(inputs["input"])
        return {
            "classes": array.argmax(axis=self.axis).astype(np.int64, copy=False),
            "scores": array.max(axis=self.axis),
        }


class TopK(Operation, frozen=True, kw_only=True):
    """The ``k`` largest values of the last axis, largest first (the first of equals), and their places."""

    gives: ClassVar[tuple[str, ...]] = ("classes", "scores")

    k: Annotated[int, Meta(ge=1, le=10_000)] = 5

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        spec = numbers("input", inputs["input"])
        axis_of(spec, -1)
        assert spec.shape is not None
        last = spec.shape[-1]
        shape = (*spec.shape[:-1], min(self.k, last) if last != -1 else -1)
        return {"classes": Spec("INT64", shape), "scores": Spec(as_floats(spec).datatype, shape)}

    def is_by_rows(self, ndim: int) -> bool:
        return ndim > 1

    def run(self, inputs: Tensors) -> Tensors:
        array = floats(inputs["input"])
        classes = np.argsort(-array, axis=-1, kind="stable")[..., : self.k].astype(np.int64, copy=False)
        return {"classes": classes, "scores": np.take_along_axis(array, classes, axis=-1)}


class Labels(Operation, frozen=True, kw_only=True):
    """Names of classes: of ``labels``, or of ``file`` with one on each line. A negative class (padding) has an empty
    name, one beyond the list its number."""

    takes: ClassVar[tuple[str, ...]] = ("classes",)
    gives: ClassVar[tuple[str, ...]] = ("labels",)
    by_rows: ClassVar[bool] = True

    labels: tuple[str, ...] = ()
    file: str | None = None

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        if bool(self.labels) == (self.file is not None):
            raise ValueError("it needs either labels or a file")
        spec = inputs["classes"]
        if spec.datatype == "BYTES" or spec.datatype.startswith(("FP", "BF")):
            raise ValueError(
                f"its input 'classes' must be integers, not {spec.datatype}; put argmax or top_k before it"
            )
        return {"labels": Spec("BYTES", spec.shape)}

    def load(self) -> Function:
        names = [name.encode() for name in (self.labels or read_lines(self.file or ""))]

        def run(inputs: Tensors) -> Tensors:
            classes = inputs["classes"]
            flat = [
                b"" if place < 0 else names[place] if place < len(names) else str(place).encode()
                for place in map(int, classes.ravel().tolist())
            ]
            return {"labels": object_array(flat).reshape(classes.shape)}

        return run


class Threshold(Operation, frozen=True, kw_only=True):
    """Whether each value is at least ``at``; with two ``labels`` their names (below, at least) instead."""

    by_rows: ClassVar[bool] = True

    at: float = 0.5
    labels: tuple[str, ...] = ()

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        if len(self.labels) not in (0, 2):
            raise ValueError(f"labels are two, for values below and from {self.at:g}, not {len(self.labels)}")
        return {"output": Spec("BYTES" if self.labels else "BOOL", numbers("input", inputs["input"]).shape)}

    def run(self, inputs: Tensors) -> Tensors:
        found = dense(inputs["input"]) >= self.at  # type: ignore[operator]
        if not self.labels:
            return {"output": np.asarray(found)}
        names = object_array([label.encode() for label in self.labels])
        return {"output": names[np.asarray(found).astype(np.intp)]}


class L2Normalize(_AlongAxis, frozen=True, kw_only=True):
    """Vectors of length one along ``axis``; a zero vector stays one."""

    def run(self, inputs: Tensors) -> Tensors:
        vectors = floats(inputs["input"])
        length = np.sqrt(np.square(vectors).sum(axis=self.axis, keepdims=True))
        return {"output": vectors / np.maximum(length, np.finfo(vectors.dtype).tiny)}


class MeanPool(Operation, frozen=True, kw_only=True):
    """Token vectors [rows, tokens, size] to one vector a row: their mean where ``attention_mask`` is not 0."""

    may_take: ClassVar[tuple[str, ...]] = ("attention_mask",)
    by_rows: ClassVar[bool] = True

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        spec = numbers("input", inputs["input"])
        if spec.shape is None or len(spec.shape) != 3:
            raise ValueError("its input must have three dimensions: rows, tokens, size")
        return {"output": Spec(as_floats(spec).datatype, (spec.shape[0], spec.shape[2]))}

    def run(self, inputs: Tensors) -> Tensors:
        vectors = floats(inputs["input"])
        mask = inputs.get("attention_mask")
        if mask is None:
            return {"output": vectors.mean(axis=1)}
        weights = (mask != 0).astype(vectors.dtype)[..., np.newaxis]
        return {"output": (vectors * weights).sum(axis=1) / np.maximum(weights.sum(axis=1), 1)}
