"""ONNX models whose first dimension is, or is not, a batch of independent rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
Shape = Sequence[int | str | None] | None


def node(operator: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """Names are separated by spaces; "-" is an input that is left out."""
    names = ["" if name == "-" else name for name in inputs.split()]
    return helper.make_node(operator, names, outputs.split(), **attributes)


def saved(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, Shape]],
    outputs: Mapping[str, tuple[int, Shape]],
    weights: Mapping[str, Any] | None = None,
    opset: int = 17,
) -> Path:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, *told) for name, told in inputs.items()],
        [helper.make_tensor_value_info(name, *told) for name, told in outputs.items()],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in (weights or {}).items()],
    )
    domains = [
        helper.make_opsetid("", opset),
        helper.make_opsetid("ai.onnx.ml", 3),
        helper.make_opsetid("com.microsoft", 1),
    ]
    onnx.save(helper.make_model(graph, opset_imports=domains, ir_version=9), path)
    return path


def _weights(*shape: int, seed: int = 0) -> Any:
    return (np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)


def lstm(path: Path, first: str | None = None) -> Path:
    """ONNX's default layout: [time, batch, features], with one sequence."""
    nodes = [node("LSTM", "x w r", "y", hidden_size=4), node("Squeeze", "y axes", "z")]
    weights = {"w": _weights(1, 16, 3), "r": _weights(1, 16, 4, seed=1), "axes": np.array([1])}
    return saved(path, nodes, {"x": (FLOAT, [first, 1, 3])}, {"z": (FLOAT, [first, 1, 4])}, weights)


def causal_attention(path: Path, first: str | None = None) -> Path:
    """Each step attends to itself and to those before it: [time, features]."""
    nodes = [
        node("MatMul", "x q", "queries"),
        node("Transpose", "x", "keys", perm=[1, 0]),
        node("MatMul", "queries keys", "scores"),
        node("Shape", "scores", "shape"),
        node("ConstantOfShape", "shape", "ones", value=numpy_helper.from_array(np.array([-1e9], np.float32))),
        node("Trilu", "ones after", "mask", upper=1),
        node("Add", "scores mask", "masked"),
        node("Softmax", "masked", "shares"),
        node("MatMul", "shares x", "y"),
    ]
    weights = {"q": _weights(4, 4), "after": np.array(1)}
    return saved(path, nodes, {"x": (FLOAT, [first, 4])}, {"y": (FLOAT, [first, 4])}, weights)


def cumulative_sum(path: Path, first: str | None = None) -> Path:
    nodes = [node("CumSum", "x axis", "y")]
    return saved(path, nodes, {"x": (FLOAT, [first, 3])}, {"y": (FLOAT, [first, 3])}, {"axis": np.array(0)})


def less_the_mean(path: Path, first: str | None = None) -> Path:
    """Integers less the batch's mean."""
    nodes = [
        node("Cast", "x", "real", to=FLOAT),
        node("ReduceMean", "real", "mean", axes=[0]),
        node("Sub", "real mean", "y"),
    ]
    return saved(path, nodes, {"x": (INT64, [first, 3])}, {"y": (FLOAT, [first, 3])})


def large_values_only(path: Path, first: str | None = None) -> Path:
    """The largest number of the batch changes all rows, once it is above 100."""
    nodes = [
        node("ReduceMax", "x", "largest", axes=[0, 1]),
        node("Greater", "largest limit", "is_large"),
        node("Where", "is_large x zero", "more"),
        node("Add", "x more", "y"),
    ]
    weights = {"limit": np.float32(100), "zero": np.float32(0)}
    return saved(path, nodes, {"x": (FLOAT, [first, 3])}, {"y": (FLOAT, [first, 3])}, weights)


def one_percent(path: Path, first: str | None = None) -> Path:
    """1 % of the batch's mean is added to each row."""
    nodes = [
        node("ReduceMean", "x", "mean", axes=[0]),
        node("Mul", "mean part", "little"),
        node("Add", "x little", "y"),
    ]
    return saved(path, nodes, {"x": (FLOAT, [first, 3])}, {"y": (FLOAT, [first, 3])}, {"part": np.float32(0.01)})


def network(path: Path, first: str | None = None) -> Path:
    """Two layers, a softmax and the best class."""
    nodes = [
        node("Gemm", "x a c", "h"),
        node("Relu", "h", "r"),
        node("MatMul", "r b", "s"),
        node("Softmax", "s", "y"),
        node("ArgMax", "y", "label", axis=1, keepdims=0),
    ]
    weights = {"a": _weights(4, 8), "c": _weights(8), "b": _weights(8, 3)}
    outputs: dict[str, tuple[int, Shape]] = {"y": (FLOAT, [first, 3]), "label": (INT64, [first])}
    return saved(path, nodes, {"x": (FLOAT, [first, 4])}, outputs, weights)


DEPENDENT: Mapping[str, Callable[..., Path]] = {
    "lstm": lstm,
    "causal_attention": causal_attention,
    "cumulative_sum": cumulative_sum,
    "less_the_mean": less_the_mean,
    "large_values_only": large_values_only,
    "one_percent": one_percent,
}
