"""Our reader of ONNX files sees what onnx sees, and refuses what is cut off or refers to files elsewhere."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from tests.tiers import THOROUGH

from inferd.errors import ModelLoadError
from inferd.registry.onnx_file import check_external, read_onnx
from inferd.registry.signature import ANY_ROWS, onnx_signature


def model(*, external: dict[str, str] | None = None, in_node: bool = False, as_input: bool = False) -> onnx.ModelProto:
    """y = x @ w + b, rows of 3 to rows of 2."""
    weight = numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(3, 2), "w")
    bias = numpy_helper.from_array(np.ones(2, np.float32), "b")
    if external is not None:
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        for key, value in external.items():
            weight.external_data.add(key=key, value=value)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Add", ["z", "b"], ["y"])]
    initializers = [weight, bias]
    if in_node:
        nodes.insert(0, helper.make_node("Constant", [], ["w"], value=weight))
        initializers = [bias]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])]
    if as_input:  # models of IR versions before 4 list their weights as inputs
        inputs.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [3, 2]))
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def written(folder: Path, proto: onnx.ModelProto) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def test_inputs_outputs_and_weights_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, model(as_input=True))
    file = read_onnx(path)
    assert [(value.name, value.type, value.shape) for value in file.inputs] == [("x", "tensor(float)", ("n", 3))]
    assert (file.num_parameters, file.weights_bytes, file.external) == (8, 32, ())
    signature = onnx_signature(path, file)
    assert signature.max_batch_size() == ANY_ROWS
    assert [(spec.name, spec.datatype, spec.shape) for spec in signature.outputs] == [("y", "FP32", (-1, 2))]


@given(cut=st.integers(min_value=0))
@settings(max_examples=60, deadline=None)
def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    whole = model().SerializeToString()
    path = tmp_path_factory.mktemp("cut") / "model.onnx"
    path.write_bytes(whole[: cut % len(whole)])
    # A cut between two outermost fields leaves a message; without its graph it is no model.
    try:
        file = read_onnx(path)
    except ModelLoadError:
        return
    assert file.outputs


@THOROUGH
@given(at=st.integers(min_value=0), value=st.integers(0, 255))
@settings(max_examples=150, deadline=None)
def test_a_changed_byte_never_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    data = bytearray(model(in_node=True).SerializeToString())
    data[at % len(data)] = value
    path = tmp_path_factory.mktemp("changed") / "model.onnx"
    path.write_bytes(bytes(data))
    with contextlib.suppress(ModelLoadError):
        onnx_signature(path, read_onnx(path))


@pytest.mark.parametrize("in_node", [False, True])
@pytest.mark.parametrize(
    "location",
    ["../secret.bin", "/etc/passwd", "a/../../secret.bin", "link.bin", "folder/secret.bin", "", "..\\secret.bin"],
)
def test_weights_outside_the_models_folder_are_never_opened(tmp_path: Path, location: str, in_node: bool) -> None:
    folder, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    for place in (tmp_path, elsewhere):
        (place / "secret.bin").write_bytes(bytes(24))
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    (folder / "folder").symlink_to(elsewhere)
    path = written(folder, model(external={"location": location}, in_node=in_node))
    with pytest.raises(ModelLoadError, match="outside its folder"):
        check_external(path, read_onnx(path))


def test_weights_that_are_missing_short_or_no_file_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, model(external={"location": "w.bin", "offset": "8", "length": "24"}))
    file = read_onnx(path)
    with pytest.raises(ModelLoadError, match="not beside it"):
        check_external(path, file)
    os.mkfifo(tmp_path / "w.bin")
    with pytest.raises(ModelLoadError, match="no file"):
        check_external(path, file)
    (tmp_path / "w.bin").unlink()
    (tmp_path / "w.bin").write_bytes(bytes(31))
    with pytest.raises(ModelLoadError, match=r"has 31 bytes, but model\.onnx refers to 32"):
        check_external(path, file)
    (tmp_path / "w.bin").write_bytes(bytes(32))
    assert check_external(path, file) == (tmp_path / "w.bin",)


@pytest.mark.parametrize("number", ["-1", "1e9", "99999999999999999999", "0x10"])
def test_a_place_that_is_no_number_is_refused(tmp_path: Path, number: str) -> None:
    path = written(tmp_path, model(external={"location": "w.bin", "offset": number}))
    with pytest.raises(ModelLoadError, match="no number"):
        read_onnx(path)
