"""ONNX models: what the contract says is what the session does, also where the file says something else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from skl2onnx import to_onnx
from sklearn.linear_model import LogisticRegression
from tests.predict.runtimes.loading import answered, loaded, texts

from inferd.config import ModelConfig
from inferd.errors import InvalidRequest, ModelLoadError
from inferd.predict.runtimes.onnx import threads_for
from inferd.registry.onnx_file import read_onnx
from inferd.registry.signature import ANY_ROWS

FLOAT = TensorProto.FLOAT


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[tuple[str, int, Sequence[int | str] | None]],
    outputs: Sequence[tuple[str, int, Sequence[int | str] | None]],
    weights: dict[str, np.ndarray] | None = None,
) -> Path:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(*one) for one in inputs],
        [helper.make_tensor_value_info(*one) for one in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def product(path: Path, first: int | str = "n") -> Path:
    weight = np.arange(6, dtype=np.float32).reshape(3, 2)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    return save(path, nodes, [("x", FLOAT, [first, 3])], [("y", FLOAT, [first, 2])], {"w": weight})


def test_the_contract_is_the_sessions(tmp_path: Path) -> None:
    runtime = loaded(product(tmp_path / "m.onnx"))
    contract = runtime.contract
    assert [(spec.name, spec.datatype, spec.shape) for spec in contract.inputs] == [("x", "FP32", (-1, 3))]
    assert [(spec.name, spec.datatype, spec.shape) for spec in contract.outputs] == [("y", "FP32", (-1, 2))]
    assert (contract.max_batch_size, contract.platform, contract.num_parameters) == (ANY_ROWS, "onnxruntime_onnx", 6)
    rows = np.eye(3, dtype=np.float32)
    np.testing.assert_array_equal(answered(runtime, {"x": rows})["y"], rows @ np.arange(6).reshape(3, 2))


def test_a_fixed_first_dimension_is_no_batch(tmp_path: Path) -> None:
    contract = loaded(product(tmp_path / "m.onnx", 1)).contract
    assert (contract.max_batch_size, contract.inputs[0].shape, contract.outputs[0].shape) == (0, (1, 3), (1, 2))


def test_a_first_dimension_whose_rows_know_of_each_other_is_no_batch(tmp_path: Path) -> None:
    centred = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1),
        helper.make_node("Sub", ["x", "mean"], ["y"]),
    ]
    path = save(tmp_path / "centred.onnx", centred, [("x", FLOAT, ["n", 3])], [("y", FLOAT, ["n", 3])])
    assert loaded(path).contract.max_batch_size == 0
    pooled = [helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)]
    weights = {"axes": np.array([0], np.int64)}
    path = save(tmp_path / "sum.onnx", pooled, [("x", FLOAT, ["n", 3])], [("y", FLOAT, [3])], weights)
    assert loaded(path).contract.max_batch_size == 0


def test_outputs_of_no_declared_shape_get_the_one_that_comes_out(tmp_path: Path) -> None:
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.INT64)]
    path = save(tmp_path / "m.onnx", nodes, [("x", FLOAT, ["n", 3])], [("y", TensorProto.INT64, None)])
    assert loaded(path).contract.outputs[0].shape == (-1, 3)


@pytest.mark.parametrize("zipmap", [True, False])
def test_a_classifiers_probabilities_have_its_classes(tmp_path: Path, zipmap: bool) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(60, 4)).astype(np.float32)
    classes = np.array(["cat", "dog", "eel"])
    model = LogisticRegression().fit(rows, classes[np.arange(60) % 3])
    path = tmp_path / "m.onnx"
    path.write_bytes(to_onnx(model, rows[:1], options={"zipmap": zipmap}).SerializeToString())
    runtime = loaded(path)
    label, probabilities = runtime.contract.outputs
    assert (label.datatype, probabilities.shape, probabilities.labels) == ("BYTES", (-1, 3), ("cat", "dog", "eel"))
    outputs = answered(runtime, {runtime.contract.inputs[0].name: rows})
    np.testing.assert_allclose(outputs[probabilities.name], model.predict_proba(rows), atol=1e-5)
    assert outputs[label.name].tolist() == [name.encode() for name in model.predict(rows)]


def test_texts_are_utf8_in_and_bytes_out(tmp_path: Path) -> None:
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, [("x", TensorProto.STRING, ["n"])], [("y", TensorProto.STRING, ["n"])])
    runtime = loaded(path)
    assert answered(runtime, {"x": texts("Grüße", "")})["y"].tolist() == ["Grüße".encode(), b""]
    with pytest.raises(InvalidRequest, match="'x' holds bytes that are no UTF-8"):
        answered(runtime, {"x": texts(b"\xff")})


def test_half_precision_and_bfloat16_go_in_and_out(tmp_path: Path) -> None:
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.BFLOAT16)]
    path = save(tmp_path / "to.onnx", nodes, [("x", FLOAT, ["n", 2])], [("y", TensorProto.BFLOAT16, ["n", 2])])
    there = answered(loaded(path), {"x": np.array([[1.0, -2.5]], np.float32)})["y"]
    assert (there.dtype.name, there.tolist()) == ("uint16", [[0x3F80, 0xC020]])
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT16)]
    path = save(
        tmp_path / "from.onnx", nodes, [("x", TensorProto.BFLOAT16, ["n", 2])], [("y", TensorProto.FLOAT16, ["n", 2])]
    )
    runtime = loaded(path)
    assert [spec.datatype for spec in (*runtime.contract.inputs, *runtime.contract.outputs)] == ["BF16", "FP16"]
    assert answered(runtime, {"x": there})["y"].tolist() == [[1.0, -2.5]]


def test_weights_beside_the_model_are_used_and_others_never_opened(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    proto = onnx.load(product(tmp_path / "whole.onnx"))
    onnx.save(
        proto,
        folder / "m.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
        convert_attribute=True,
    )
    rows = np.eye(3, dtype=np.float32)
    expected = answered(loaded(tmp_path / "whole.onnx"), {"x": rows})["y"]
    np.testing.assert_array_equal(answered(loaded(folder / "m.onnx"), {"x": rows})["y"], expected)
    os.rename(folder / "weights.bin", tmp_path / "weights.bin")
    (folder / "weights.bin").symlink_to(tmp_path / "weights.bin")
    with pytest.raises(ModelLoadError, match="outside its folder"):
        loaded(folder / "m.onnx")


def test_a_graph_that_does_not_hold_together_is_refused_with_the_librarys_reason(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "nothing"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, [("x", FLOAT, ["n", 3])], [("y", FLOAT, ["n", 2])])
    with pytest.raises(ModelLoadError) as caught:
        loaded(path)
    assert "nothing" in caught.value.message
    assert "onnxruntime_src" not in caught.value.message


def test_weights_that_are_shorter_than_they_say_are_refused(tmp_path: Path) -> None:
    proto = onnx.load(product(tmp_path / "m.onnx"))
    proto.graph.initializer[0].dims[0] = 1 << 40
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelLoadError):
        loaded(tmp_path / "m.onnx")


def test_a_library_of_operators_is_code(tmp_path: Path) -> None:
    path = product(tmp_path / "m.onnx")
    with pytest.raises(ModelLoadError, match="allow_code"):
        loaded(path, options={"custom_ops": str(tmp_path / "ops.so")})
    with pytest.raises(ModelLoadError, match="no library"):
        loaded(path, options={"custom_ops": str(tmp_path / "ops.so")}, allow_code=True)
    with pytest.raises(ModelLoadError, match="no option 'threds'"):
        loaded(path, options={"threds": 2})


def test_loading_and_failing_are_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A weight that is an input as well makes onnxruntime warn, once for each: UltraFace has hundreds."""
    proto = onnx.load(product(tmp_path / "m.onnx"))
    proto.graph.input.append(helper.make_tensor_value_info("w", FLOAT, [3, 2]))
    proto.graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.float32), "unused"))
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    runtime = loaded(tmp_path / "m.onnx")
    assert [spec.name for spec in runtime.contract.inputs] == ["x"]
    assert "".join(capfd.readouterr()) == ""


def test_threads_are_the_models_or_the_cores_shared_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    small = read_onnx(product(tmp_path / "small.onnx"))
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"])]
    weights = {"w": np.zeros((1, 1, 3, 3), np.float32)}
    shape: list[int | str] = ["n", 1, 8, 8]
    path = save(tmp_path / "conv.onnx", nodes, [("x", FLOAT, shape)], [("y", FLOAT, ["n", 1, 6, 6])], weights)
    convolution = read_onnx(path)
    assert threads_for(small, ModelConfig(source="m")) == 1
    assert threads_for(small, ModelConfig(source="m", threads=3)) == 3
    assert threads_for(convolution, ModelConfig(source="m")) == 8
    assert threads_for(convolution, ModelConfig(source="m", replicas=4)) == 2


def test_a_device_that_is_not_there_is_told_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="onnxruntime-gpu"):
        loaded(product(tmp_path / "m.onnx"), device="cuda")
