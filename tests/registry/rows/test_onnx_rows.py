"""The proof over ONNX graphs: what it accepts computes each row by itself, and what it knows to mix rows it refutes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper
from tests.predict.row_models import FLOAT, INT64, node, saved
from tests.tiers import THOROUGH

from inferd.errors import ModelLoadError
from inferd.registry.onnx_file import read_onnx
from inferd.registry.onnx_graph import read_graph
from inferd.registry.rows.onnx import prove
from inferd.registry.rows.value import Fixed, Mixed, Rows, Value
from inferd.registry.rows.verdict import Verdict, is_batch_name
from inferd.registry.signature import onnx_rows

Values = npt.NDArray[Any]
ROW = (4, 3)  # of the inputs below, behind the rows


def ml(operator: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """A node of the operators for tables."""
    made = node(operator, inputs, outputs, **attributes)
    made.domain = "ai.onnx.ml"
    return made


def weights(*shape: int) -> Values:
    return (np.arange(np.prod(shape)).reshape(shape) % 7 / 3.0 - 1.0).astype(np.float32)


CONSTANTS: dict[str, Values] = {
    "w33": weights(3, 3),
    "w35": weights(3, 5),
    "w123": weights(12, 3),
    "v3": weights(3),
    "v4": weights(4),
    "one": np.array(1.5, np.float32),
    "five": np.array(5.0, np.float32),
    "k133": weights(4, 4, 3),
    "zero": np.array([0], np.int64),
    "first": np.array([1], np.int64),
    "second": np.array([2], np.int64),
    "last": np.array([-1], np.int64),
    "both": np.array([1, 2], np.int64),
    "to_end": np.array([2**62], np.int64),
    "two": np.array([2], np.int64),
    "keep_flat": np.array([0, -1], np.int64),
    "wide": np.array([-1, 12], np.int64),
    "narrow": np.array([-1, 3], np.int64),
    "crossing": np.array([-1, 5], np.int64),
    "pairs": np.array([-1, 2, 6], np.int64),
    "back": np.array([0, 4, 3], np.int64),
    "axis0": np.array(0, np.int64),
    "axis1": np.array(1, np.int64),
    "column": np.array(1, np.int64),
    "columns": np.array([2, 0], np.int64),
    "pads": np.array([0, 1, 0, 0, 0, 2], np.int64),
    "row_pads": np.array([1, 0, 0, 0, 0, 0], np.int64),
    "lw": weights(1, 16, 3),
    "lr": weights(1, 16, 4),
    "tiles": np.array([1, 2, 1], np.int64),
    "row_tiles": np.array([2, 1, 1], np.int64),
}

# Rows that lie within an axis, as [4 x rows, 3], and back from [4 x rows, n]; and indices.
COLUMNS = [node("Transpose", "x", "t", perm=[1, 0, 2]), node("Reshape", "t narrow", "f")]
BACK = [node("Reshape", "g four", "u"), node("Transpose", "u", "y", perm=[1, 0, 2])]
ONES = [node("Greater", "x zero_f", "p"), node("Cast", "p", "i", to=INT64)]
ZEROS = [*ONES, node("Sub", "i i", "z")]

# Nodes from x, of the shape [rows, 4, 3], to y. Whether rows stay apart is for the proof to say.
GRAPHS: dict[str, Sequence[onnx.NodeProto]] = {
    "relu": [node("Relu", "x", "y")],
    "add a vector": [node("Add", "x v3", "y")],
    "matmul": [node("MatMul", "x w35", "y")],
    "flatten": [node("Flatten", "x", "f"), node("Gemm", "f w123 v3", "y")],
    "flatten all": [node("Flatten", "x", "f", axis=0), node("Softmax", "f", "s"), node("Reshape", "s back_shape", "y")],
    "reshape": [node("Reshape", "x wide", "f"), node("MatMul", "f w123", "y")],
    "reshape to pairs": [node("Reshape", "x pairs", "p"), node("ReduceSum", "p second", "y", keepdims=0)],
    "reshape across rows": [node("Reshape", "x crossing", "p"), node("Softmax", "p", "y")],
    "fold and unfold": [
        node("Reshape", "x narrow", "f"),
        node("MatMul", "f w33", "m"),
        node("Reshape", "m back_shape", "y"),
    ],
    "fold and give": [node("Reshape", "x narrow", "y")],
    "transpose and back": [
        node("Transpose", "x", "t", perm=[1, 2, 0]),
        node("Relu", "t", "r"),
        node("Transpose", "r", "y", perm=[2, 0, 1]),
    ],
    "transpose away": [node("Transpose", "x", "y", perm=[1, 0, 2])],
    "softmax": [node("Softmax", "x", "y", axis=-1)],
    "softmax over rows": [node("Softmax", "x", "y", axis=0)],
    "mean": [node("ReduceMean", "x", "y", axes=[1, 2])],
    "mean of rows": [node("ReduceMean", "x", "m", axes=[0]), node("Sub", "x m", "y")],
    "sum of all": [node("ReduceSum", "x", "m", keepdims=1), node("Sub", "x m", "y")],
    "largest": [node("ArgMax", "x", "a", axis=2, keepdims=0), node("Cast", "a", "y", to=FLOAT)],
    "largest row": [node("ArgMax", "x", "a", axis=0), node("Cast", "a", "c", to=FLOAT), node("Add", "x c", "y")],
    "cumsum": [node("CumSum", "x axis1", "y")],
    "cumsum of rows": [node("CumSum", "x axis0", "y")],
    "top": [node("TopK", "x two", "y i", axis=1)],
    "top rows": [node("TopK", "x first", "t i", axis=0), node("Add", "x t", "y")],
    "attention": [
        node("Transpose", "x", "t", perm=[0, 2, 1]),
        node("MatMul", "x t", "s"),
        node("Softmax", "s", "p", axis=-1),
        node("MatMul", "p x", "y"),
    ],
    "attention over rows": [
        node("Transpose", "x", "a", perm=[1, 0, 2]),
        node("Transpose", "x", "b", perm=[1, 2, 0]),
        node("MatMul", "a b", "s"),
        node("Softmax", "s", "p", axis=-1),
        node("MatMul", "p a", "m"),
        node("Transpose", "m", "y", perm=[1, 0, 2]),
    ],
    "each row with all": [node("Flatten", "x", "f"), node("Transpose", "f", "t"), node("MatMul", "f t", "y")],
    "slice": [node("Slice", "x zero two first", "y")],
    "slice of rows": [node("Slice", "x zero first zero", "s"), node("Add", "x s", "y")],
    "all rows": [node("Slice", "x zero to_end zero", "y")],
    "reversed rows": [node("Slice", "x last begin zero last", "y")],
    "gather": [node("Gather", "x columns", "y", axis=2)],
    "gather one": [node("Gather", "x column", "y", axis=1)],
    "gather a row": [node("Gather", "x zero", "g", axis=0), node("Add", "x g", "y")],
    "pad": [node("Pad", "x pads", "y")],
    "pad rows": [node("Pad", "x row_pads", "p"), node("Slice", "p zero last zero", "y")],
    "concat": [node("Concat", "x x", "y", axis=2)],
    "concat rows": [node("Concat", "x x", "c", axis=0), node("Slice", "c zero last zero", "y")],
    "split": [node("Split", "x", "a b", axis=1), node("Sub", "a b", "y")],
    "tile": [node("Tile", "x tiles", "y")],
    "tile rows": [node("Tile", "x row_tiles", "y")],
    "squeeze": [node("Unsqueeze", "x first", "u"), node("Squeeze", "u first", "y")],
    "squeeze whatever": [node("Squeeze", "x", "s"), node("Reshape", "s rows_back", "y")],
    "convolution": [node("Conv", "x k133", "y")],
    "convolution over rows": [
        node("Transpose", "x", "t", perm=[2, 1, 0]),
        node("Conv", "t k133", "c", pads=[1, 1]),
        node("Transpose", "c", "y", perm=[2, 1, 0]),
    ],
    "pool": [node("MaxPool", "x", "y", kernel_shape=[2])],
    "global pool": [node("GlobalAveragePool", "x", "y")],
    "batch norm": [node("BatchNormalization", "x v4 v4 v4 positive", "y")],
    "instance norm": [node("InstanceNormalization", "x v4 v4", "y")],
    "layer norm": [node("LayerNormalization", "x v3 v3", "y")],
    "lstm": [
        node("Transpose", "x", "t", perm=[1, 0, 2]),
        node("LSTM", "t lw lr", "s h", hidden_size=4),
        node("Squeeze", "h zero", "y"),
    ],
    "lstm over rows": [node("LSTM", "x lw lr", "s h", hidden_size=4), node("Squeeze", "s first", "y")],
    "lstm by rows": [node("LSTM", "x lw lr", "s h", hidden_size=4, layout=1), node("Squeeze", "h first", "y")],
    "zeros like the rows": [
        node("Shape", "x", "s"),
        node("ConstantOfShape", "s", "z"),
        node("Concat", "x z", "y", axis=1),
    ],
    "number of rows": [
        node("Shape", "x", "s"),
        node("Gather", "s axis0", "n"),
        node("Cast", "n", "r", to=FLOAT),
        node("Div", "x r", "y"),
    ],
    "numbers of the rows": [
        node("Shape", "x", "s"),
        node("Gather", "s axis0", "n"),
        node("Range", "axis0 n axis1", "i"),
        node("Cast", "i", "r", to=FLOAT),
        node("Unsqueeze", "r both", "u"),
        node("Add", "x u", "y"),
    ],
    "exporters' reshape": [
        node("Shape", "x", "s"),
        node("Gather", "s axis0", "n"),
        node("Unsqueeze", "n zero", "b"),
        node("Concat", "b last", "shape", axis=0),
        node("Reshape", "x shape", "f"),
        node("MatMul", "f w123", "y"),
    ],
    "expand": [
        node("Shape", "x", "s"),
        node("Slice", "s zero two", "h"),
        node("Concat", "h two", "shape", axis=0),
        node("ReduceSum", "x second", "r"),
        node("Expand", "r shape", "y"),
    ],
    "einsum": [node("Einsum", "x w35", "y", equation="bij,jk->bik")],
    "einsum over rows": [node("Einsum", "x x", "y", equation="bij,cij->bc")],
    "quantised by the largest": [
        node("DynamicQuantizeLinear", "x", "q scale zp"),
        node("DequantizeLinear", "q scale zp", "y"),
    ],
    "a choice of one row": [
        node("ReduceMax", "x", "m", keepdims=0),
        node("Greater", "m five", "c"),
        node("Where", "c x zero_f", "y"),
    ],
    "equal elements": [node("Equal", "x one", "e"), node("Where", "e one x", "y")],
    "random": [node("RandomNormalLike", "x", "r"), node("Add", "x r", "y")],
    "one hot": [node("Cast", "x", "i", to=INT64), node("OneHot", "i depth values", "y")],
    "places": [
        node("NonZero", "x", "p"),
        node("ReduceMax", "p", "k", keepdims=0),
        node("Cast", "k", "c", to=FLOAT),
        node("Add", "x c", "y"),
    ],
    "norm of a table": [
        node("Flatten", "x", "f"),
        ml("Normalizer", "f", "y", norm="L2"),
    ],
    "scaler": [
        node("Flatten", "x", "f"),
        ml("Scaler", "f", "y", offset=[0.5] * 12, scale=[2.0] * 12),
    ],
    "gemm there and back": [*COLUMNS, node("Gemm", "f w35 v5", "g"), *BACK],
    "gemm with turned weights there and back": [*COLUMNS, node("Gemm", "f w53", "g", transB=1), *BACK],
    "gemm with a bias from the rows": [*COLUMNS, node("Gemm", "f w33 f", "g"), *BACK],
    "gemm of turned rows": [*COLUMNS, node("Gemm", "f f", "g", transA=1), node("MatMul", "x g", "y")],
    "gemm with rows of weights": [
        *COLUMNS,
        node("Gemm", "f f", "g", transB=1),
        node("ReduceMax", "g", "m", keepdims=0),
        node("Add", "x m", "y"),
    ],
    "elements": [node("ArgMax", "x", "i", axis=1), node("GatherElements", "x i", "y", axis=1)],
    "elements of rows": [*ZEROS, node("GatherElements", "x z", "y", axis=0)],
    "elements of columns": [
        *ZEROS,
        node("Transpose", "x", "t", perm=[1, 0, 2]),
        node("Transpose", "z", "u", perm=[1, 0, 2]),
        node("GatherElements", "t u", "g", axis=1),
        node("Transpose", "g", "y", perm=[1, 0, 2]),
    ],
    "elements of a constant": [*ZEROS, node("GatherElements", "k133 z", "y", axis=1)],
    "elements of fewer dimensions": [*ZEROS, node("Flatten", "x", "f"), node("GatherElements", "f z", "y", axis=1)],
    "elements of constants": [node("GatherElements", "w33 places_of_w", "k", axis=1), node("MatMul", "x k", "y")],
    "scattered": [
        node("ArgMax", "x", "i", axis=1),
        node("ReduceMin", "x", "m", axes=[1]),
        node("ScatterElements", "x i m", "y", axis=1),
    ],
    "scattered among rows": [*ZEROS, node("ScatterElements", "x z x", "y", axis=0)],
    "scattered from other rows": [
        *ZEROS,
        node("Transpose", "x", "t", perm=[1, 0, 2]),
        node("ScatterElements", "x z t", "y", axis=2),
    ],
    "places of each row": [
        node("ArgMax", "x", "i", axis=1, keepdims=0),
        node("Unsqueeze", "i last", "u"),
        node("GatherND", "x u", "y", batch_dims=1),
    ],
    "places of a constant": [*ONES, node("Unsqueeze", "i last", "u"), node("GatherND", "v4 u", "y")],
    "places of all rows": [
        *ZEROS,
        node("Unsqueeze", "z last", "u"),
        node("GatherND", "x u", "g"),
        node("ReduceMax", "g", "y", axes=[3, 4]),
    ],
    "places behind the rows": [
        node("Transpose", "x", "t", perm=[1, 0, 2]),
        node("GatherND", "t two_places", "g"),
        node("Transpose", "g", "y", perm=[1, 0, 2]),
    ],
    "places of the rows": [node("GatherND", "x first_place", "g"), node("Add", "x g", "y")],
    "places of constants": [
        node("GatherND", "w33 two_places", "g"),
        node("Concat", "g g", "k", axis=0),
        node("Add", "x k", "y"),
    ],
    "scaler of a deeper tensor": [ml("Scaler", "x", "y", offset=[0.5], scale=[2.0])],
    "scaler of columns": [
        node("Flatten", "x", "f"),
        node("Transpose", "f", "t", perm=[1, 0]),
        ml("Scaler", "t", "u", offset=[0.5], scale=[2.0]),
        node("Transpose", "u", "y", perm=[1, 0]),
    ],
    "imputer": [
        node("Flatten", "x", "f"),
        ml("Imputer", "f", "y", imputed_value_floats=[0.5], replaced_value_float=0.0),
    ],
    "regressor": [
        node("Flatten", "x", "f"),
        ml("LinearRegressor", "f", "y", coefficients=[0.5, -1.0, 2.0] * 8, intercepts=[0.0, 1.0], targets=2),
    ],
    "scores of classes": [
        node("Flatten", "x", "f"),
        ml(
            "LinearClassifier",
            "f",
            "l y",
            coefficients=[0.5, -1.0, 2.0] * 8,
            intercepts=[0.0, 1.0],
            classlabels_ints=[4, 7],
        ),
    ],
    "classes": [
        node("Flatten", "x", "f"),
        ml(
            "LinearClassifier",
            "f",
            "l s",
            coefficients=[0.5, -1.0, 2.0] * 8,
            intercepts=[0.0, 1.0],
            classlabels_ints=[4, 7],
        ),
        node("Cast", "l", "y", to=FLOAT),
    ],
    "binarizer": [ml("Binarizer", "x", "y", threshold=0.5)],
    "categories": [node("Cast", "x", "i", to=INT64), ml("OneHotEncoder", "i", "y", cats_int64s=[-1, 0, 1])],
    "features": [ml("ArrayFeatureExtractor", "x columns", "y")],
    "features of rows": [
        node("Flatten", "x", "f"),
        node("Transpose", "f", "t", perm=[1, 0]),
        ml("ArrayFeatureExtractor", "t zero", "u"),
        node("Transpose", "u", "y", perm=[1, 0]),
    ],
    "features of a constant": [
        node("Greater", "x zero_f", "g"),
        node("Cast", "g", "i", to=INT64),
        ml("ArrayFeatureExtractor", "v4 i", "e"),
        node("Reshape", "e rows_back", "y"),
    ],
    "features of a constant by columns": [
        node("Greater", "x zero_f", "g"),
        node("Cast", "g", "i", to=INT64),
        node("Transpose", "i", "t", perm=[1, 0, 2]),
        ml("ArrayFeatureExtractor", "v4 t", "e"),
        node("Reshape", "e rows_back", "y"),
    ],
    "features by each row": [
        node("Flatten", "x", "f"),
        node("ReduceMax", "f", "m", axes=[1], keepdims=0),
        node("Greater", "m five", "g"),
        node("Cast", "g", "i", to=INT64),
        ml("ArrayFeatureExtractor", "f i", "y"),
    ],
    "features beside each other": [
        node("Flatten", "x", "f"),
        ml("FeatureVectorizer", "f f", "y", inputdimensions=[12, 12]),
    ],
    "features beside fewer": [
        node("Flatten", "x", "f"),
        node("ReduceSum", "x second", "s"),
        node("Flatten", "s", "g"),
        ml("FeatureVectorizer", "f g", "y", inputdimensions=[12, 4]),
    ],
    "features beside those of more rows": [
        node("Flatten", "x", "f"),
        node("Reshape", "x narrow", "g"),
        ml("FeatureVectorizer", "f g", "y", inputdimensions=[12, 3]),
    ],
    "features beside those of a constant": [
        node("Flatten", "x", "f"),
        ml("FeatureVectorizer", "f w33", "y", inputdimensions=[12, 3]),
    ],
    "depth": [
        node("Unsqueeze", "x second", "u"),
        node("Concat", "u u", "c", axis=2),
        node("Transpose", "c", "t", perm=[0, 1, 2, 3]),
        node("Reshape", "t square", "d"),
        node("DepthToSpace", "d", "y", blocksize=2),
    ],
    "padded with the number of rows": [
        node("Shape", "x", "s"),
        node("Gather", "s axis0", "n"),
        node("Cast", "n", "r", to=FLOAT),
        node("Pad", "x pads r", "y"),
    ],
    "stretched by the number of rows": [
        node("Shape", "x", "s"),
        node("Slice", "s zero first", "n"),
        node("Concat", "n back_end n", "to", axis=0),
        node("Resize", "x - - to", "z", mode="nearest"),
        node("ReduceMean", "z", "y", axes=[2]),
    ],
    "cast like a wider tensor": [
        node("ReduceSum", "x both", "r", keepdims=0),
        node("CastLike", "r column_of_two", "c"),
        node("ReduceSum", "c zero", "t", keepdims=1),
        node("Flatten", "x", "f"),
        node("Transpose", "f", "g", perm=[1, 0]),
        node("Add", "g t", "a"),
        node("Transpose", "a", "y", perm=[1, 0]),
    ],
    "squeezed along no axes": [
        node("ReduceSum", "x second", "r"),
        node("Squeeze", "r none", "q"),
        node("ReduceSum", "q minus_two", "t"),
        node("Add", "x t", "y"),
    ],
    "identity of constants": [node("Add", "w33 w33", "k"), node("MatMul", "x k", "y")],
}
CONSTANTS |= {
    "four": np.array([4, -1, 5], np.int64),
    "v5": weights(5),
    "w53": weights(5, 3),
    "places_of_w": np.array([[0, 2, 1], [1, 1, 1], [2, 0, 0]], np.int64),
    "two_places": np.array([[0], [2]], np.int64),
    "first_place": np.array([0], np.int64),
    "back_shape": np.array([-1, 4, 3], np.int64),
    "rows_back": np.array([-1, 4, 3], np.int64),
    "begin": np.array([-(2**62)], np.int64),
    "positive": np.abs(weights(4)) + 1,
    "zero_f": np.array(0, np.float32),
    "depth": np.array(3, np.int64),
    "values": np.array([0, 1], np.float32),
    "square": np.array([0, 4, 2, 3], np.int64),
    "back_end": np.array([4], np.int64),
    "column_of_two": np.ones((2, 1), np.float32),
    "none": np.array([], np.int64),
    "minus_two": np.array([-2], np.int64),
}
PROVED = {
    "relu", "add a vector", "matmul", "flatten", "reshape", "reshape to pairs", "fold and unfold", "transpose and back",
    "softmax", "mean", "largest", "cumsum", "top", "attention", "slice", "all rows", "gather", "gather one", "pad", "concat",
    "split", "tile", "squeeze", "convolution", "pool", "global pool", "batch norm", "instance norm", "layer norm", "lstm",
    "lstm by rows", "zeros like the rows", "exporters' reshape", "expand", "einsum", "equal elements", "one hot",
    "norm of a table", "scaler", "depth", "identity of constants", "imputer", "regressor", "scores of classes", "classes",
    "binarizer", "categories", "features", "features of a constant", "features beside each other", "features beside fewer",
    "gemm there and back", "gemm with turned weights there and back", "elements", "elements of constants", "scattered",
    "places of each row", "places of a constant", "places behind the rows", "places of constants",
}  # fmt: skip
REFUTED = {
    "flatten all", "softmax over rows", "mean of rows", "sum of all", "largest row", "cumsum of rows", "top rows",
    "attention over rows", "each row with all", "slice of rows", "reversed rows", "gather a row", "pad rows", "concat rows",
    "convolution over rows", "lstm over rows", "einsum over rows", "quantised by the largest", "a choice of one row",
    "cast like a wider tensor", "features of rows", "gemm of turned rows", "gemm with rows of weights", "elements of rows", "elements of columns", "scattered among rows",
}  # fmt: skip


def model(path: Path, nodes: Sequence[onnx.NodeProto]) -> Path:
    used = {name for one in nodes for name in one.input}
    kept = {name: array for name, array in CONSTANTS.items() if name in used}
    return saved(path, nodes, {"x": (FLOAT, [None, *ROW])}, {"y": (FLOAT, None)}, kept)


def value(path: Path) -> Value:
    return prove(read_graph(path), {"x": ((None, *ROW), 0)})["y"]


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_what_is_known_of_each_operator(tmp_path: Path, name: str) -> None:
    path = model(tmp_path / "m.onnx", GRAPHS[name])
    verdict, found = onnx_rows(path, read_onnx(path)), value(path)
    assert (verdict.because == "proved") == (name in PROVED), verdict
    assert (isinstance(found, Mixed) and found.is_certain) == (name in REFUTED), found


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def differs(path: Path, rows: Values) -> bool:
    """Whether a row's output is another one beside other rows, in any order of three."""
    run = session(path)
    alone = [run.run(["y"], {"x": rows[[row]]})[0] for row in range(3)]
    for order in itertools.permutations(range(3)):
        together = run.run(["y"], {"x": rows[list(order)]})[0]
        expected = np.concatenate([alone[row] for row in order])
        if expected.shape != together.shape or not np.allclose(expected, together, rtol=1e-4, atol=1e-5):
            return True
    return False


@pytest.mark.parametrize("name", sorted((PROVED | REFUTED) - {"lstm by rows"}))  # which onnxruntime does not compute
def test_what_is_proved_and_refuted_is_what_onnxruntime_computes(tmp_path: Path, name: str) -> None:
    path = model(tmp_path / "m.onnx", GRAPHS[name])
    rows = np.random.default_rng(0).normal(size=(3, *ROW)).astype(np.float32) * np.array(
        [[[0.1]], [[1]], [[9]]], np.float32
    )
    assert differs(path, rows) == (name in REFUTED)


STEPS = [
    *(node(name, "x", "y") for name in ("Relu", "Softmax", "Sigmoid")),
    *(node("Transpose", "x", "y", perm=list(order)) for order in itertools.permutations(range(3))),
    *(node("ReduceSum", f"x {axis}", "y") for axis in ("zero", "first", "second", "last")),
    *(node("Softmax", "x", "y", axis=axis) for axis in (0, 1, 2)),
    *(node("CumSum", f"x {axis}", "y") for axis in ("axis0", "axis1")),
    *(node("Reshape", f"x {shape}", "y") for shape in ("back", "back_shape", "mixed", "folded", "free")),
    *(node("MatMul", f"x {matrix}", "y") for matrix in ("w33", "w44")),
    *(node("Concat", "x x", "y", axis=axis) for axis in (0, 1, 2)),
    *(node("Slice", f"x zero two {axis}", "y") for axis in ("zero", "first", "second")),
    *(node("Gather", "x columns", "y", axis=axis) for axis in (0, 1, 2)),
    *(node("Expand", f"x {shape}", "y") for shape in ("like",)),
    node("Flatten", "x", "y"),
    node("Unsqueeze", "x first", "y"),
    node("Squeeze", "x first", "y"),
    node("ReduceMax", "x", "y", keepdims=0, axes=[2]),
    node("Add", "x x", "y"),
    node("Mul", "x v3", "y"),
    node("MatMul", "x x", "y"),
    node("ArgMax", "x", "y", axis=1),
    node("LayerNormalization", "x v3", "y"),
    node("Conv", "x k133", "y", pads=[1, 1]),
    node("LSTM", "x lw lr", "y"),
    node("Tile", "x tiles", "y"),
    node("Pad", "x pads", "y"),
]
CONSTANTS |= {
    "w44": weights(4, 4),
    "mixed": np.array([4, -1, 3], np.int64),
    "folded": np.array([1, -1, 3], np.int64),
    "free": np.array([-1, 2, 3], np.int64),
    "like": np.array([1, 4, 1], np.int64),
}


@THOROUGH
@given(
    steps=st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.booleans()), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_is_proved_gives_the_same_rows_alone_and_in_every_order(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, bool]], seed: int
) -> None:
    nodes = []
    for place, (number, is_cast) in enumerate(steps):
        made = onnx.NodeProto()
        made.CopyFrom(STEPS[number])
        for at, name in enumerate(made.input):
            if name == "x":
                made.input[at] = f"h{place}" if place else "x"
        last = place == len(steps) - 1 and not is_cast
        made.output[0] = "y" if last else f"m{place}" if is_cast else f"h{place + 1}"
        nodes.append(made)
        if is_cast:
            nodes.append(node("Cast", f"m{place}", "y" if place == len(steps) - 1 else f"h{place + 1}", to=FLOAT))
    path = model(tmp_path_factory.mktemp("graph") / "m.onnx", nodes)
    if onnx_rows(path, read_onnx(path)).because != "proved":
        return
    rows = np.random.default_rng(seed).normal(size=(3, *ROW)).astype(np.float32)
    try:
        assert not differs(path, rows)
    except Exception as error:  # a graph that does not compute computes nothing wrong
        if isinstance(error, AssertionError):
            raise


def test_the_rows_of_the_published_models_are_proved_where_their_sizes_are_free(
    shared_data: Path, tmp_path: Path
) -> None:
    """The files fix their batch at 1; with a free first dimension those without a reshape to 1 row are proved."""
    found = {}
    for path in sorted((shared_data / "onnx-models").rglob("*.onnx")):
        file = read_onnx(path)
        if len(file.inputs) != 1:
            continue
        (only,) = file.inputs
        shape = tuple(size if isinstance(size, int) and number else None for number, size in enumerate(only.shape))
        values = prove(read_graph(path), {only.name: (shape, 0)})
        found[path.stem if path.stem != "model" else path.parent.name] = all(
            isinstance(one, Rows) and one.axis == 0 for one in values.values()
        )
    proved = {name for name, is_proved in found.items() if is_proved}
    assert proved == {
        "light_densenet121", "light_squeezenet", "byte_sb_bidi_lstm", "lgbm_classifier_tensor", "lgbm_regressor_tensor",
        "linear_classifier", "linear_regressor", "version-RFB-320", "version-RFB-640", "pytorch_super_resolution",
    }  # fmt: skip


def test_a_branch_that_one_row_decides_is_refuted_and_one_of_constants_is_not(tmp_path: Path) -> None:
    def branch(operator: str) -> onnx.GraphProto:
        out = onnx.helper.make_tensor_value_info(f"o{operator}", TensorProto.FLOAT, None)
        return onnx.helper.make_graph([node(operator, "x", f"o{operator}")], operator, [], [out])

    both = {"then_branch": branch("Relu"), "else_branch": branch("Tanh")}
    by_row = [node("ReduceMax", "x", "m", keepdims=0), node("Greater", "m one", "c"), node("If", "c", "y", **both)]
    found = value(model(tmp_path / "r.onnx", by_row))
    assert isinstance(found, Mixed)
    assert found.is_certain
    fixed = [node("Greater", "one zero_f", "c"), node("If", "c", "y", **both)]
    assert isinstance(value(model(tmp_path / "f.onnx", fixed)), Rows)


@given(at=st.integers(min_value=0), byte=st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_a_changed_byte_ends_in_a_verdict_or_in_a_load_error(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int
) -> None:
    path = model(tmp_path_factory.mktemp("changed") / "m.onnx", GRAPHS["exporters' reshape"])
    data = bytearray(path.read_bytes())
    data[at % len(data)] = byte
    path.write_bytes(bytes(data))
    try:
        onnx_rows(path, read_onnx(path))
    except ModelLoadError:
        return


def test_sizes_that_grow_without_end_are_given_up(tmp_path: Path) -> None:
    """Each step doubles the elements of a shape, or multiplies a number with itself."""
    doubling = [node("Shape", "x", "s0"), *[node("Concat", f"s{n} s{n}", f"s{n + 1}", axis=0) for n in range(60)]]
    squaring = [node("Size", "x", "p0"), *[node("Mul", f"p{n} p{n}", f"p{n + 1}") for n in range(60)]]
    end = [node("Cast", "p60", "r", to=FLOAT), node("Add", "x r", "t"), node("Reshape", "t s60", "y")]
    found = value(model(tmp_path / "m.onnx", [*doubling, *squaring, *end]))
    assert isinstance(found, Mixed)


def test_constants_are_no_rows(tmp_path: Path) -> None:
    assert isinstance(value(model(tmp_path / "m.onnx", [node("Add", "w33 one", "y")])), Fixed)
    assert onnx_rows(tmp_path / "m.onnx", read_onnx(tmp_path / "m.onnx")).because is None


@pytest.mark.parametrize(
    ("name", "is_batch"),
    [
        ("batch", True), ("batch_size", True), ("N", True), ("B", True), ("bs", True), ("Batch", True), ("num_examples", True),
        ("num_samples", False), ("rows", False), ("num_rows", False),
        ("seq", False), ("sequence_length", False), ("time", False), ("T", False), ("L", False), ("n", False),
        ("batch_seq", False), ("unk__6", False), ("s77", False), ("frames", False), ("x_dynamic_axes_1", False),
    ],
)  # fmt: skip
def test_names_of_a_batch(name: str, is_batch: bool) -> None:
    assert is_batch_name(name) is is_batch


def test_the_axes_of_a_tensor_are_read_in_all_their_forms(tmp_path: Path) -> None:
    """Packed as raw bytes, as a list of integers, and as an attribute."""
    raw = numpy_helper.from_array(np.array([0], np.int64), "axes")
    listed = onnx.helper.make_tensor("axes", TensorProto.INT64, [1], [0])
    for tensor in (raw, listed):
        nodes = [onnx.helper.make_node("Constant", [], ["axes"], value=tensor), node("ReduceSum", "x axes", "y")]
        assert isinstance(value(model(tmp_path / "m.onnx", nodes)), Mixed)
    nodes = [onnx.helper.make_node("Constant", [], ["axes"], value_ints=[1]), node("ReduceSum", "x axes", "y")]
    assert isinstance(value(model(tmp_path / "m.onnx", nodes)), Rows)


UNKNOWN = [
    node("NonZero", "x", "places"),
    node("Shape", "places", "s"),
    node("Sub", "s s", "n"),
    node("Cast", "n", "r", to=FLOAT),
    node("ReduceMax", "r", "k", keepdims=0),
    node("Add", "x k", "u"),
]
"""``u`` is ``x``, and the proof cannot know it."""


def named(path: Path, nodes: Sequence[onnx.NodeProto]) -> Verdict:
    """The verdict where the exporter calls the first dimension a batch."""
    used = {name for one in nodes for name in one.input}
    kept = {name: array for name, array in CONSTANTS.items() if name in used}
    saved(path, nodes, {"x": (FLOAT, ["batch", *ROW])}, {"y": (FLOAT, ["batch", None, None])}, kept)
    return onnx_rows(path, read_onnx(path))


@pytest.mark.parametrize(
    "after",
    [
        [node("CumSum", "u axis0", "y")],
        [node("Relu", "u", "v"), node("CumSum", "v axis0", "y")],
        [node("CumSum", "x axis0", "c"), node("Add", "u c", "y")],
        [node("Softmax", "u", "y", axis=0)],
        [node("ReduceMean", "u", "m", axes=[0]), node("Sub", "u m", "y")],
        [node("DynamicQuantizeLinear", "u", "q scale z"), node("Mul", "u scale", "y")],
    ],
)
def test_an_operator_that_is_not_known_hides_none_that_mixes_rows_behind_it(
    tmp_path: Path, after: list[onnx.NodeProto]
) -> None:
    assert named(tmp_path / "u.onnx", [*UNKNOWN, node("Relu", "u", "y")]).because == "named"
    found = named(tmp_path / "m.onnx", [*UNKNOWN, *after])
    assert found.because is None
    assert "NonZero" in found.sentence or "CumSum" in found.sentence


def test_a_name_is_no_reason_where_a_definition_of_the_file_s_own_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    summed = onnx.helper.make_node("Summed", ["x", "axis0"], ["y"], domain="own")
    body = [onnx.helper.make_node("CumSum", ["a", "b"], ["c"])]
    function = onnx.helper.make_function("own", "Summed", ["a", "b"], ["c"], body, [onnx.helper.make_opsetid("", 17)])
    saved(path, [summed], {"x": (FLOAT, ["batch", *ROW])}, {"y": (FLOAT, ["batch", *ROW])}, {"axis0": np.array(0)})
    proto = onnx.load(path)
    proto.functions.append(function)
    proto.opset_import.append(onnx.helper.make_opsetid("own", 1))
    onnx.save(proto, path)
    found = onnx_rows(path, read_onnx(path))
    assert found.because is None
    assert "is not read" in found.sentence
