"""The shapes and the sizes that the proof over ONNX graphs computes are those that onnxruntime computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from tests.predict.row_models import FLOAT, INT64, node, saved

from inferd.registry.onnx_graph import read_graph
from inferd.registry.rows.onnx import prove
from inferd.registry.rows.value import Fixed, Mixed, Rows, Size, Value, axis_of

ROW = (4, 6)


class Case(NamedTuple):
    """Nodes from x, of the shape [rows, 4, 6], to y. ``told``: the dimensions of y, or its elements; r: the number of rows,
    ?: not known. ``axis``: of the rows."""

    nodes: Sequence[onnx.NodeProto]
    told: str
    axis: int | None = 0
    opset: int = 17
    constants: dict[str, npt.ArrayLike] = {}


def case(told: str, *nodes: onnx.NodeProto, axis: int | None = 0, opset: int = 17, **constants: npt.ArrayLike) -> Case:
    return Case(nodes, told, axis, opset, constants)


SHAPES = {
    "slice by attributes": case("r 2 3", node("Slice", "x", "y", starts=[1, 3], ends=[3, 9], axes=[1, 2]), opset=9),
    "slice all of the rows by attributes": case("r 2 6", node("Slice", "x", "y", starts=[0, 2], ends=[2**31, 4]), opset=9),
    "slice": case("r 2 6", node("Slice", "x b e a", "y"), b=[1], e=[3], a=[1]),
    "slice from the end": case("r 4 2", node("Slice", "x b e a", "y"), b=[-2], e=[2**31], a=[-1]),
    "slice with a step": case("r 2 3", node("Slice", "x b e a s", "y"), b=[0, 0], e=[4, 6], a=[1, 2], s=[2, 2]),
    "slice backwards": case("r 4 2", node("Slice", "x b e a s", "y"), b=[4], e=[-6], a=[2], s=[-2]),
    "slice of nothing": case("r 0 6", node("Slice", "x b e a", "y"), b=[3], e=[3], a=[1]),
    "slice of everything": case("r 4 6", node("Slice", "x b e", "y"), b=[0, 0, 0], e=[2**62] * 3),
    "split evenly": case("r 2 6", node("Split", "x", "z y", axis=1)),
    "split by attributes": case("r 3 6", node("Split", "x", "z y", axis=1, split=[1, 3]), opset=11),
    "split by sizes": case("r 4 5", node("Split", "x s", "z y", axis=-1), s=[1, 5]),
    "pad by attributes": case("r 7 6", node("Pad", "x", "y", pads=[0, 1, 0, 0, 2, 0]), opset=9),
    "pad": case("r 7 7", node("Pad", "x p", "y"), p=[0, 1, 1, 0, 2, 0]),
    "pad axes": case("r 4 9", node("Pad", "x p - a", "y"), opset=18, p=[1, 2], a=[-1]),
    "crop": case("r 3 6", node("Pad", "x p", "y"), p=[0, -1, 0, 0, 0, 0]),
    "concatenate": case("r 12 6", node("Concat", "x x x", "y", axis=1)),
    "concatenate the last": case("r 4 12", node("Concat", "x x", "y", axis=-1)),
    "tile": case("r 8 18", node("Tile", "x t", "y"), t=[1, 2, 3]),
    "expand": case("r 4 6", node("ReduceSum", "x a", "s"), node("Expand", "s e", "y"), a=[2], e=[1, 4, 6]),
    "expand to more dimensions": case("2 r 4 6", node("Expand", "x e", "y"), axis=1, e=[2, 1, 1, 1]),
    "flatten": case("r 24", node("Flatten", "x", "y")),
    "flatten to two": case("4r 6", node("Flatten", "x", "y", axis=2)),
    "flatten from the end": case("4r 6", node("Flatten", "x", "y", axis=-1)),
    "flatten all": case("24r 1", node("Flatten", "x", "y", axis=3)),
    "reshape": case("r 2 12", node("Reshape", "x s", "y"), s=[-1, 2, 12]),
    "reshape with copies": case("r 3 8", node("Reshape", "x s", "y"), s=[0, 3, -1]),
    "reshape with a copy behind": case("r 4 2 3", node("Reshape", "x s", "y"), s=[-1, 0, 2, 3]),
    "reshape to rows of columns": case("12r 2", node("Reshape", "x s", "y"), s=[-1, 2]),
    "unsqueeze by attributes": case("r 1 4 6 1", node("Unsqueeze", "x", "y", axes=[1, 4]), opset=11),
    "unsqueeze": case("1 r 4 1 6", node("Unsqueeze", "x a", "y"), axis=1, a=[0, -2]),
    "squeeze by attributes": case("r 6", node("ReduceSum", "x", "s", axes=[1]), node("Squeeze", "s", "y", axes=[1]), opset=11),
    "squeeze": case("r 4", node("ReduceSum", "x a", "s"), node("Squeeze", "s a", "y"), a=[-1]),
    "transpose": case("6 r 4", node("Transpose", "x", "y", perm=[2, 0, 1]), axis=1),
    "transpose backwards": case("6 4 r", node("Transpose", "x", "y"), axis=2),
    "reduce": case("r 1 6", node("ReduceSum", "x a", "y"), a=[1]),
    "reduce away": case("r 6", node("ReduceSum", "x a", "y", keepdims=0), a=[-2]),
    "reduce by attributes": case("r", node("ReduceMax", "x", "y", axes=[1, 2], keepdims=0)),
    "reduce no axes": case("r 4 6", node("ReduceSum", "x", "y", noop_with_empty_axes=1)),
    "the largest": case("r 4", node("ArgMax", "x", "i", axis=-1, keepdims=0), node("Cast", "i", "y", to=FLOAT)),
    "the smallest": case("r 1 6", node("ArgMin", "x", "i", axis=1), node("Cast", "i", "y", to=FLOAT)),
    "the best": case("r 4 2", node("TopK", "x k", "y i"), k=[2]),
    "the best of an axis": case("r 3 6", node("TopK", "x k", "y i", axis=1), k=[3]),
    "the best by attributes": case("r 4 2", node("TopK", "x", "y i", k=2), opset=9),
    "softmax of the last": case("r 4 6", node("Softmax", "x", "y")),
    "softmax from an axis on": case("r 4 6", node("Softmax", "x", "y", axis=1), opset=11),
    "gather": case("r 3 6", node("Gather", "x i", "y", axis=1), i=[0, 3, 1]),
    "gather one": case("r 4", node("Gather", "x i", "y", axis=2), i=5),
    "gather a matrix": case("r 4 2 3", node("Gather", "x i", "y", axis=-1), i=[[0, 1, 2], [3, 4, 5]]),
    "one hot": case("r 4 6 5", node("Cast", "x", "i", to=INT64), node("OneHot", "i d v", "y"), d=5, v=np.array([0, 1], np.float32)),
    "one hot in front": case(
        "5 r 4 6", node("Cast", "x", "i", to=INT64), node("OneHot", "i d v", "y", axis=0), axis=1, d=5, v=np.array([0, 1], np.float32)
    ),
    "depth to space": case(
        "r 1 4 6", node("Reshape", "x s", "d"), node("DepthToSpace", "d", "y", blocksize=2), s=[-1, 4, 2, 3]
    ),
    "space to depth": case(
        "r 4 2 3", node("Unsqueeze", "x a", "d"), node("SpaceToDepth", "d", "y", blocksize=2), a=[1]
    ),
    "resize by scales": case("r ? 6", node("Resize", "x - s", "y"), s=np.array([1, 2, 1], np.float32)),
    "resize by scales before there were regions": case("r ? 6", node("Resize", "x s", "y"), opset=10, s=np.array([1, 2, 1], np.float32)),
    "resize to sizes": case(
        "r 1 8 3", node("Unsqueeze", "x a", "u"), node("Shape", "u", "n", start=0, end=2), node("Concat", "n e", "t", axis=0),
        node("Resize", "u - - t", "y"), a=[1], e=[8, 3],
    ),
    "resize axes": case("r 8 6", node("Resize", "x - - t", "y", axes=[1]), opset=18, t=[8]),
    "upsample": case("r 4 ?", node("Upsample", "x s", "y"), opset=9, s=np.array([1, 1, 2], np.float32)),
    "matrices": case("r 4 5", node("MatMul", "x w", "y"), w=np.ones((6, 5), np.float32)),
    "a matrix and a vector": case("r 4", node("MatMul", "x w", "y"), w=np.ones(6, np.float32)),
    "a stack of matrices": case("r 3 6", node("MatMul", "w x", "y"), w=np.ones((1, 3, 4), np.float32)),
    "broadcast": case("2 r 4 6", node("Add", "x w", "y"), axis=1, w=np.ones((2, 1, 1, 6), np.float32)),
    "broadcast to a wider row": case("r 4 6", node("ReduceSum", "x a", "s"), node("Add", "s w", "y"), a=[2], w=np.ones(6, np.float32)),
    "a product with weights": case("r 5", node("Flatten", "x", "f"), node("Gemm", "f w", "y"), w=np.ones((24, 5), np.float32)),
    "a product with turned weights": case(
        "r 5", node("Flatten", "x", "f"), node("Gemm", "f w b", "y", transB=1), w=np.ones((5, 24), np.float32), b=np.ones(5, np.float32)
    ),
    "a sum over indices": case("r 5 4", node("Einsum", "x w", "y", equation="bij,jk->bki"), w=np.ones((6, 5), np.float32)),
    "a convolution": case("r 5 4", node("Conv", "x w", "y"), w=np.ones((5, 4, 3), np.float32)),
    "a padded convolution": case("r 5 6", node("Conv", "x w", "y", pads=[1, 1]), w=np.ones((5, 4, 3), np.float32)),
    "a convolution with strides": case("r 5 3", node("Conv", "x w", "y", pads=[1, 1], strides=[2]), w=np.ones((5, 4, 3), np.float32)),
    "a dilated convolution": case("r 5 2", node("Conv", "x w", "y", dilations=[2]), w=np.ones((5, 4, 3), np.float32)),
    "a convolution of the same size": case("r 5 3", node("Conv", "x w", "y", auto_pad="SAME_UPPER", strides=[2]), w=np.ones((5, 4, 3), np.float32)),
    "a convolution of what is valid": case("r 5 4", node("Conv", "x w", "y", auto_pad="VALID"), w=np.ones((5, 4, 3), np.float32)),
    "a pool": case("r 4 5", node("MaxPool", "x", "y", kernel_shape=[2])),
    "a pool with strides": case("r 4 3", node("AveragePool", "x", "y", kernel_shape=[2], strides=[2])),
    "a pool of everything": case("r 4 1", node("GlobalMaxPool", "x", "y")),
    "a recurrent layer": case(
        "4 1 r 3", node("Transpose", "x", "t", perm=[1, 0, 2]), node("GRU", "t w u", "y", hidden_size=3),
        axis=2, w=np.ones((1, 9, 6), np.float32), u=np.ones((1, 9, 3), np.float32),
    ),
    "a recurrent layer's state": case(
        "2 r 3", node("Transpose", "x", "t", perm=[1, 0, 2]), node("LSTM", "t w u", "- y", hidden_size=3, direction="bidirectional"),
        axis=1, w=np.ones((2, 12, 6), np.float32), u=np.ones((2, 12, 3), np.float32),
    ),
    "zeros of a shape": case("r 2", node("Shape", "x", "s", end=1), node("Concat", "s e", "t", axis=0), node("ConstantOfShape", "t", "y"), e=[2]),
    "features": case(
        "r 2", node("Flatten", "x", "f"), onnx.helper.make_node("ArrayFeatureExtractor", ["f", "i"], ["y"], domain="ai.onnx.ml"), i=[3, 5]
    ),
    "categories": case(
        "r 24 ?", node("Flatten", "x", "f"),
        onnx.helper.make_node("OneHotEncoder", ["f"], ["y"], domain="ai.onnx.ml", cats_int64s=[1, 2, 3]),
    ),
    "features beside each other": case(
        "r ?", node("Flatten", "x", "f"),
        onnx.helper.make_node("FeatureVectorizer", ["f", "f"], ["y"], domain="ai.onnx.ml", inputdimensions=[24, 24]),
    ),
    "imputed features": case(
        "r 24", node("Flatten", "x", "f"),
        onnx.helper.make_node("Imputer", ["f"], ["y"], domain="ai.onnx.ml", imputed_value_floats=[0.5], replaced_value_float=1.0),
    ),
    "scores": case(
        "r ?", node("Flatten", "x", "f"),
        onnx.helper.make_node("LinearRegressor", ["f"], ["y"], domain="ai.onnx.ml", coefficients=[0.5] * 48, intercepts=[0.0, 1.0], targets=2),
    ),
    "a branch that is known": case(
        "r 6 4", node(
            "If", "c", "y",
            then_branch=onnx.helper.make_graph(
                [node("Transpose", "x", "a", perm=[0, 2, 1])], "a", [], [onnx.helper.make_tensor_value_info("a", FLOAT, None)]
            ),
            else_branch=onnx.helper.make_graph(
                [node("Relu", "x", "b")], "b", [], [onnx.helper.make_tensor_value_info("b", FLOAT, None)]
            ),
        ), c=True,
    ),
}  # fmt: skip


def branches(then: onnx.NodeProto, otherwise: onnx.NodeProto) -> onnx.NodeProto:
    """One of two, by a condition that comes with the request."""
    return node("If", "c", "y", then_branch=branch(then, "t"), else_branch=branch(otherwise, "e"))


def branch(one: onnx.NodeProto, name: str) -> onnx.GraphProto:
    one.output[0] = name
    return onnx.helper.make_graph([one], name, [], [onnx.helper.make_tensor_value_info(name, FLOAT, None)])


BRANCHES = {
    "of equal shapes": (branches(node("Relu", "x", "-"), node("Tanh", "x", "-")), "r 4 6", 0),
    "of one size that differs": (branches(node("Relu", "x", "-"), node("Concat", "x x", "-", axis=1)), "r ? 6", 0),
    "of constants": (branches(node("Relu", "w", "-"), node("Tanh", "w", "-")), "2 3", None),
    "of constants of a size that differs": (
        branches(node("Relu", "w", "-"), node("Concat", "w w", "-", axis=1)), "2 ?", None
    ),
    "of constants of other ranks": (branches(node("Relu", "w", "-"), node("ReduceSum", "w", "-", keepdims=0)), None, None),
    "of rows along different axes": (branches(node("Relu", "x", "-"), node("Transpose", "x", "-", perm=[1, 0, 2])), "", None),
    "of rows and of a constant": (branches(node("Relu", "x", "-"), node("Relu", "w", "-")), "", None),
}  # fmt: skip

SHAPE = node("Shape", "x", "s")
ITEMS = {
    "all": case("r 4 6", node("Shape", "x", "y"), axis=None),
    "from the second on": case("4 6", node("Shape", "x", "y", start=1), axis=None),
    "without the last": case("r 4", node("Shape", "x", "y", end=-1), axis=None),
    "how many": case("24r", node("Size", "x", "y"), axis=None),
    "sums": case("2r 8 12", SHAPE, node("Add", "s s", "y"), axis=None),
    "differences": case("0 0 0", SHAPE, node("Sub", "s s", "y"), axis=None),
    "of itself and nothing": case("r 4 6", SHAPE, node("Add", "s n", "y"), axis=None, n=[0]),
    "products": case("3r 12 18", SHAPE, node("Mul", "s n", "y"), axis=None, n=[3]),
    "quotients": case("r 2 3", SHAPE, node("Mul", "s n", "m"), node("Div", "m d", "y"), axis=None, n=2, d=[2, 4, 4]),
    "remainders": case("0 1", node("Shape", "x", "s", start=1), node("Mod", "s n", "y"), axis=None, n=[2, 5]),
    "the lower": case("4 5", node("Shape", "x", "s", start=1), node("Min", "s n", "y"), axis=None, n=5),
    "the higher": case("5 6", node("Shape", "x", "s", start=1), node("Max", "s n", "y"), axis=None, n=5),
    "what is equal": case("0 1", node("Shape", "x", "s", start=1), node("Equal", "s n", "e"), node("Cast", "e", "y", to=INT64), axis=None, n=6),
    "no size is negative": case("0 0 0", SHAPE, node("Equal", "s n", "e"), node("Cast", "e", "y", to=INT64), axis=None, n=-1),
    "a choice": case("r 7 6", SHAPE, node("Where", "c s n", "y"), axis=None, c=[True, False, True], n=[7]),
    "a choice where -1 is meant": case("r 4 6", SHAPE, node("Equal", "s m", "e"), node("Where", "e n s", "y"), axis=None, m=-1, n=[7]),
    "gathered": case("6 r", SHAPE, node("Gather", "s i", "y"), axis=None, i=[2, 0]),
    "gathered from the end": case("4", SHAPE, node("Gather", "s i", "y"), axis=None, i=-2),
    "sliced": case("4 6", SHAPE, node("Slice", "s b e", "y"), axis=None, b=[1], e=[9]),
    "sliced backwards": case("6 r", SHAPE, node("Slice", "s b e a t", "y"), axis=None, b=[2], e=[-9], a=[0], t=[-2]),
    "joined": case("r 4 6 7 6", SHAPE, node("Slice", "s l z", "e"), node("Concat", "s n e", "y", axis=0), axis=None, n=[7], l=[-1], z=[9]),
    "unsqueezed": case("4", SHAPE, node("Gather", "s i", "g"), node("Unsqueeze", "g a", "y"), axis=None, i=1, a=[0]),
    "multiplied together": case("24r", SHAPE, node("ReduceProd", "s", "y", keepdims=0), axis=None),
    "a range": case("1 3 5", node("Range", "b e t", "y"), axis=None, b=1, e=7, t=2),
    "a range backwards": case("3 2 1", node("Range", "b e t", "y"), axis=None, b=3, e=0, t=-1),
    "filled": case("5 5", node("ConstantOfShape", "n", "y", value=onnx.numpy_helper.from_array(np.array([5]), "v")), axis=None, n=[2]),
    "an integer": case("9", node("Constant", "", "y", value_int=9), axis=None),
    "integers": case("9 8", node("Constant", "", "y", value_ints=[9, 8]), axis=None),
    "cast": case("r 4 6", SHAPE, node("Cast", "s", "f", to=FLOAT), node("Cast", "f", "y", to=INT64), axis=None),
}  # fmt: skip


def proved(path: Path, one: Case, kind: int) -> Value:
    constants = {name: np.asarray(value) for name, value in one.constants.items()}
    saved(path, one.nodes, {"x": (FLOAT, [None, *ROW])}, {"y": (kind, None)}, constants, one.opset)
    return prove(read_graph(path), {"x": ((None, *ROW), 0)})["y"]


def computed(path: Path, rows: int) -> npt.NDArray[Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (found,) = session.run(["y"], {"x": np.ones((rows, *ROW), np.float32)})
    return np.asarray(found)


def written(sizes: Sequence[Size]) -> str:
    def one(size: Size) -> str:
        if size.symbols:
            return "?"
        if not size.rows:
            return str(size.factor)
        return f"{'' if size.factor == 1 else size.factor}r"

    return " ".join(map(one, sizes))


def put(told: str, rows: int) -> list[int | None]:
    """What is told, where there are so many rows; None: not known."""
    words = told.split()
    return [
        None if word == "?" else int(word.removesuffix("r") or 1) * (rows if word[-1] == "r" else 1) for word in words
    ]


@pytest.mark.parametrize("name", SHAPES)
def test_the_shape_of_a_tensor_of_rows_is_known(tmp_path: Path, name: str) -> None:
    one = SHAPES[name]
    found = proved(tmp_path / "m.onnx", one, FLOAT)
    assert isinstance(found, Rows), found
    assert (written(found.dims), found.axis) == (one.told, one.axis)
    for rows in (2, 5):
        shape = computed(tmp_path / "m.onnx", rows).shape
        told = put(one.told, rows)
        assert [size if known is None else known for size, known in zip(shape, told, strict=True)] == list(shape)


@pytest.mark.parametrize("name", ITEMS)
def test_the_sizes_that_a_graph_computes_with_are_known(tmp_path: Path, name: str) -> None:
    one = ITEMS[name]
    found = proved(tmp_path / "m.onnx", one, INT64)
    assert isinstance(found, Fixed), found
    assert found.items is not None
    assert written(found.items) == one.told
    for rows in (2, 5):
        array = computed(tmp_path / "m.onnx", rows)
        assert array.ravel().tolist() == put(one.told, rows)
        assert written(found.dims or ()) == " ".join(map(str, array.shape))


@pytest.mark.parametrize("name", BRANCHES)
def test_what_is_known_of_one_of_two_branches_is_what_they_share(tmp_path: Path, name: str) -> None:
    choice, told, axis = BRANCHES[name]
    path, kind = tmp_path / "m.onnx", onnx.TensorProto.BOOL
    inputs = {"x": (FLOAT, [None, *ROW]), "c": (kind, [])}
    saved(path, [choice], inputs, {"y": (FLOAT, None)}, {"w": np.ones((2, 3), np.float32)})
    found = prove(read_graph(path), {"x": ((None, *ROW), 0), "c": ((), None)})["y"]
    if told == "":
        assert isinstance(found, Mixed)
        assert not found.is_certain
        return
    assert not isinstance(found, Mixed), found
    assert (None if found.dims is None else written(found.dims)) == told
    assert axis_of(found) == axis


# A number that a graph computes from the number of rows is no constant: in the place of any constant, or of the data.


NUMBERS = (np.arange(24, dtype=np.float32) % 7 - 2).reshape(1, *ROW)


def with_rows(name: str, way: str, array: npt.NDArray[Any]) -> tuple[list[onnx.NodeProto], dict[str, npt.ArrayLike]]:
    """Nodes that make ``name`` from an array and the number of rows; for one row it is the array itself."""
    kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    nodes = [
        node("Shape", "x", f"{name}_s", start=0, end=1),
        node("Squeeze", f"{name}_s", f"{name}_n"),
        node("Sub", f"{name}_n {name}_1", f"{name}_m"),
        node("Cast", f"{name}_{'n' if way == 'Mul' else 'm'}", f"{name}_c", to=kind),
        node(way, f"{name}_a {name}_c", f"{name}_v"),
        node("Reshape", f"{name}_v {name}_d", name),  # numbers are followed within vectors, and through this
    ]
    dims = np.array(array.shape, np.int64)
    return nodes, {f"{name}_a": array.ravel(), f"{name}_1": np.array(1, np.int64), f"{name}_d": dims}


def touched() -> Iterator[tuple[str, str, str]]:
    for name, one in (SHAPES | ITEMS).items():
        for place, value in (("x", np.ones(1, np.float32)), *one.constants.items()):
            if np.asarray(value).dtype != bool:
                yield from ((name, place, way) for way in ("Mul", "Add"))


def run(path: Path, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    (found,) = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(["y"], {"x": x})
    return np.asarray(found)


@pytest.mark.parametrize(("name", "place", "way"), touched())
def test_what_is_computed_from_the_number_of_rows_is_never_taken_for_a_constant(
    tmp_path: Path, name: str, place: str, way: str
) -> None:
    one = (SHAPES | ITEMS)[name]
    changed = "data" if place == "x" else place
    array = NUMBERS if place == "x" else np.asarray(one.constants[place])
    before, constants = with_rows(changed, way, array)
    nodes = []
    for made in one.nodes:
        copy = onnx.NodeProto()
        copy.CopyFrom(made)
        copy.input[:] = [changed if given == place else given for given in made.input]
        nodes.append(copy)
    kept = {given: np.asarray(value) for given, value in {**one.constants, **constants}.items() if given != place}
    kind = INT64 if name in ITEMS else FLOAT
    path = saved(
        tmp_path / "m.onnx", [*before, *nodes], {"x": (FLOAT, [None, *ROW])}, {"y": (kind, None)}, kept, one.opset
    )
    found = prove(read_graph(path), {"x": ((None, *ROW), 0)})["y"]
    if isinstance(found, Mixed) or (isinstance(found, Fixed) and found.counts_rows):
        return
    x = np.random.default_rng(0).normal(size=(3, *ROW)).astype(np.float32)
    try:
        alone, together = [run(path, x[[row]]) for row in range(3)], run(path, x)
    except (onnxruntime.capi.onnxruntime_pybind11_state.Fail, RuntimeError, ValueError):
        return  # what does not run gives no wrong rows
    expected = alone[0] if isinstance(found, Fixed) else np.concatenate(alone, axis=found.axis)
    assert together.shape == expected.shape
    assert np.allclose(together, expected, rtol=1e-4, atol=1e-5)
