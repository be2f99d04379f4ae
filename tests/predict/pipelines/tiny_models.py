"""Small ONNX models for pipelines, and what they compute, in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from inferd.predict.contract import Array

SIDE, CELL = 32, 8
CELLS = SIDE // CELL


def linear(path: Path, weights: Array, *, rows: int | None = None) -> Path:
    """features [rows, n] -> logits [rows, k]; ``rows``: a fixed number of them."""
    size, classes = weights.shape
    first: int | str = "rows" if rows is None else rows
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["features", "weights"], ["logits"])],
        "linear",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, [first, size])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [first, classes])],
        [numpy_helper.from_array(weights.astype(np.float32), "weights")],
    )
    return _saved(path, graph)


def detector(path: Path, *, rows: int | None = None) -> Path:
    """image [rows, 1, 32, 32] -> scores [rows, 16], the mean brightness of each cell of 8 x 8 pixels, and boxes
    [rows, 16, 4], the cells as left, top, right, bottom in 0 to 1."""
    first: int | str = "rows" if rows is None else rows
    cells = [
        [x * CELL / SIDE, y * CELL / SIDE, (x + 1) * CELL / SIDE, (y + 1) * CELL / SIDE]
        for y in range(CELLS)
        for x in range(CELLS)
    ]
    graph = helper.make_graph(
        [
            helper.make_node("AveragePool", ["image"], ["means"], kernel_shape=[CELL, CELL], strides=[CELL, CELL]),
            helper.make_node("Reshape", ["means", "flat"], ["scores"]),
            helper.make_node("Reshape", ["means", "boxed"], ["column"]),
            helper.make_node("Mul", ["column", "zero"], ["nothing"]),
            helper.make_node("Add", ["nothing", "cells"], ["boxes"]),
        ],
        "detector",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [first, 1, SIDE, SIDE])],
        [
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, [first, CELLS * CELLS]),
            helper.make_tensor_value_info("boxes", TensorProto.FLOAT, [first, CELLS * CELLS, 4]),
        ],
        [
            numpy_helper.from_array(np.array([0, -1]), "flat"),
            numpy_helper.from_array(np.array([0, -1, 1]), "boxed"),
            numpy_helper.from_array(np.array(0, np.float32), "zero"),
            numpy_helper.from_array(np.array([cells], np.float32), "cells"),
        ],
    )
    return _saved(path, graph)


def _saved(path: Path, graph: onnx.GraphProto) -> Path:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(path))
    return path


def squares(*cells: tuple[int, int], width: int = 64, height: int = 64) -> Array:
    """A dark photo whose cells (x, y) are white."""
    pixels = np.zeros((height, width, 3), np.uint8)
    for x, y in cells:
        pixels[y * height // CELLS : (y + 1) * height // CELLS, x * width // CELLS : (x + 1) * width // CELLS] = 255
    return pixels
