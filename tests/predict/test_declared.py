"""A model seen through declared inputs and outputs: other names, shapes and labels, the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from inferd.config import ModelConfig, StepConfig
from inferd.errors import InferdError, ModelLoadError
from inferd.predict.contract import Array, Contract
from inferd.predict.declared import declared
from inferd.predict.load import load_runtime
from inferd.predict.runtime import Item, Result, Runtime
from inferd.registry.artifact import artifact_of
from inferd.registry.source import silent
from inferd.registry.triton import read_repository
from inferd.types import TensorSpec

DOUBLED = (StepConfig(op="rescale", options={"scale": 2}),)


class Echo:
    """A ``Runtime`` that gives its inputs back, and remembers them."""

    def __init__(self, inputs: Sequence[TensorSpec], *, max_batch_size: int = 8, **contract: Any) -> None:
        outputs = tuple(TensorSpec(f"{spec.name}_out", spec.datatype, spec.shape) for spec in inputs)
        self.contract = Contract(
            inputs=tuple(inputs), outputs=outputs, max_batch_size=max_batch_size, because="declared", **contract
        )
        self.seen: list[Item] = []

    def prepare(self, item: Item) -> None:
        item.bucket = "inner"

    def predict(self, items: Sequence[Item]) -> Sequence[Result | InferdError]:
        self.seen += items
        return [Result(outputs={f"{name}_out": array for name, array in item.inputs.items()}) for item in items]

    def close(self) -> None: ...


def config(**settings: Any) -> ModelConfig:
    return msgspec.convert({"source": "m", **settings}, ModelConfig)


def tensor(name: str, shape: list[int], datatype: str = "FP32", **more: object) -> dict[str, object]:
    return {"name": name, "datatype": datatype, "shape": shape, **more}


def ask(runtime: Runtime, inputs: dict[str, Array], **fields: Any) -> dict[str, Array]:
    item = Item(request_id="r", inputs=inputs, rows=len(next(iter(inputs.values()))), **fields)
    runtime.prepare(item)
    (result,) = runtime.predict([item])
    assert isinstance(result, Result), result
    return dict(result.outputs)


def test_an_input_of_any_rank_stays_one_unless_its_shape_is_declared(tmp_path: Path) -> None:
    (labels := tmp_path / "labels.txt").write_text("no\nyes\n")
    echo = Echo([TensorSpec("x", "FP32", (-1, 2)), TensorSpec("free", "UINT8", (-1,))], any_rank=("free",))
    outputs = [tensor("x_out", [-1, 2], labels_file=str(labels)), tensor("free_out", [-1], "UINT8")]
    assert declared("m", echo, config(outputs=outputs)).contract.any_rank == ("free",)
    inputs = [tensor("x", [-1, 2]), tensor("free", [-1], "UINT8", optional=True)]
    assert declared("m", echo, config(inputs=inputs)).contract.any_rank == ()


def test_a_model_that_declares_nothing_is_itself() -> None:
    echo = Echo([TensorSpec("x", "FP32", (-1, 2))])
    assert declared("m", echo, config()) is echo
    same = config(inputs=[tensor("x", [-1, 2])], outputs=[tensor("x_out", [-1, 2])])
    assert declared("m", echo, same) is echo
    assert declared("m", echo, config(inputs=[tensor("x", [-1, 2], optional=True)])) is not echo


def test_other_names_and_shapes_without_a_copy(tmp_path: Path) -> None:
    (tmp_path / "labels").write_text("no\nyes\n")
    echo = Echo([TensorSpec("x", "FP32", (-1, 2)), TensorSpec("y", "FP32", (-1,))])
    runtime = declared(
        "m",
        echo,
        config(
            inputs=[tensor("INPUT__0", [-1, 2]), tensor("y", [-1, 1], reshape=[-1])],
            outputs=[
                tensor("x_out", [-1, 2], labels_file=str(tmp_path / "labels")),
                tensor("OUT__1", [-1, 1], reshape=[-1]),
            ],
        ),
    )
    assert runtime.contract.inputs == (TensorSpec("INPUT__0", "FP32", (-1, 2)), TensorSpec("y", "FP32", (-1, 1)))
    assert runtime.contract.outputs[0].labels == ("no", "yes")
    x, y = np.ones((3, 2), np.float32), np.arange(3, dtype=np.float32).reshape(3, 1)
    outputs = ask(runtime, {"INPUT__0": x, "y": y})
    given = echo.seen[0].inputs
    assert given["x"] is x
    assert given["y"].shape == (3,)
    assert np.shares_memory(given["y"], y)
    assert outputs["OUT__1"].shape == (3, 1)
    assert outputs["x_out"] is x


def test_an_output_that_is_not_declared_is_left_out_and_the_bucket_is_the_models() -> None:
    echo = Echo([TensorSpec("x", "FP32", (-1, 2)), TensorSpec("y", "FP32", (-1, 2))])
    runtime = declared("m", echo, config(outputs=[tensor("y_out", [-1, 2])]))
    rows = np.zeros((1, 2), np.float32)
    item = Item(request_id="r", inputs={"x": rows, "y": rows}, wanted=("y_out",))
    runtime.prepare(item)
    assert item.bucket == "inner"
    (result,) = runtime.predict([item])
    assert isinstance(result, Result)
    assert list(result.outputs) == ["y_out"]
    assert echo.seen[0].wanted == ("y_out",)


def test_everything_that_does_not_fit_the_artifact_is_told() -> None:
    echo = Echo([TensorSpec("x", "FP32", (-1, 2)), TensorSpec("z", "FP32", (-1, 2))])
    with pytest.raises(ModelLoadError) as caught:
        declared(
            "m",
            echo,
            config(
                inputs=[tensor("x", [-1, 3], datatype="INT8"), tensor("q", [1])],
                outputs=[tensor("OUT__7", [-1, 2])],
                sequence={"controls": {"S": "start"}},
            ),
        )
    assert caught.value.message.split("\n  - ")[1:] == [
        "models.m.inputs: the artifact has none called 'q'; there are x, z",
        "models.m.outputs: the artifact has none called 'OUT__7'; there are x_out, z_out",
        "models.m.inputs: the artifact also takes 'z', which is not declared",
        "models.m.sequence.controls: the artifact has no input 'S'",
        "models.m.inputs.x: INT8 is declared, but the artifact has FP32",
        "models.m.inputs.x: the shape [-1, 3] is declared, but the artifact has [-1, 2]",
    ]


def test_the_server_says_where_in_a_sequence_a_request_is() -> None:
    echo = Echo(
        [
            TensorSpec("x", "FP32", (-1, 1)),
            TensorSpec("start", "FP32", (-1, 1)),
            TensorSpec("end", "BOOL", (-1, 1)),
            TensorSpec("ready", "INT32", (-1, 1)),
            TensorSpec("id", "UINT64", (-1, 1)),
        ]
    )
    controls = {"start": "start", "end": "end", "ready": "ready", "id": "id"}
    runtime = declared("m", echo, config(sequence={"controls": controls}))
    assert [spec.name for spec in runtime.contract.inputs] == ["x"]
    assert runtime.contract.is_stateful
    x = np.zeros((2, 1), np.float32)
    ask(runtime, {"x": x}, sequence="42", sequence_start=True)
    ask(runtime, {"x": x}, sequence="call-7", sequence_end=True)
    ask(runtime, {"x": x}, sequence="call-7")
    first, last, again = (item.inputs for item in echo.seen)
    assert first["start"].tolist() == [[1.0], [1.0]]
    assert first["start"].dtype == np.float32
    assert first["end"].tolist() == [[False], [False]]
    assert first["ready"].tolist() == [[1], [1]]
    assert first["id"].tolist() == [[42], [42]]
    assert last["end"].tolist() == [[True], [True]]
    assert np.array_equal(last["id"], again["id"])
    assert not np.array_equal(last["id"], first["id"])


def test_torchscript_is_told_its_shapes_and_then_batched(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, a: Any, b: Any) -> Any:
            return a + b, a * b

    rows = torch.ones(1, 2)
    torch.jit.trace(Net(), (rows, rows)).save(str(tmp_path / "model.pt"))
    settings = config(
        source=str(tmp_path / "model.pt"),
        allow_code=True,
        batching={"max_batch_size": 4},
        inputs=[tensor("INPUT__0", [-1, 2]), tensor("INPUT__1", [-1, 2])],
        outputs=[tensor("OUTPUT__0", [-1, 2]), tensor("OUTPUT__1", [-1, 2])],
    )
    runtime = load_runtime("m", artifact_of(settings), settings, silent)
    assert runtime.contract.max_batch_size == 4
    items = []
    for place in (1.0, 2.0):
        value = np.full((1, 2), place, np.float32)
        items.append(Item(request_id=str(place), inputs={"INPUT__0": value, "INPUT__1": value + 1}))
        runtime.prepare(items[-1])
    first, second = runtime.predict(items)
    assert isinstance(first, Result)
    assert isinstance(second, Result)
    assert first.outputs["OUTPUT__0"].tolist() == [[3.0, 3.0]]
    assert second.outputs["OUTPUT__1"].tolist() == [[6.0, 6.0]]


def test_a_sequence_of_a_model_repository_keeps_its_state_and_is_told_its_start(tmp_path: Path) -> None:
    """Each answer is the sum so far; whether a request starts its sequence is an input that the server fills."""
    import onnx
    from onnx import TensorProto, helper

    def value(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 1])

    nodes = [
        helper.make_node("Add", ["x", "h"], ["sum"]),
        helper.make_node("Identity", ["sum"], ["hn"]),
        helper.make_node("Identity", ["START"], ["started"]),
    ]
    graph = helper.make_graph(
        nodes, "sums", [value("x"), value("h"), value("START")], [value("sum"), value("hn"), value("started")]
    )
    folder = tmp_path / "sums"
    (folder / "1").mkdir(parents=True)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9),
        str(folder / "1/model.onnx"),
    )
    (folder / "config.pbtxt").write_text(
        """
backend: "onnxruntime" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output [ { name: "sum" data_type: TYPE_FP32 dims: 1 }, { name: "started" data_type: TYPE_FP32 dims: 1 } ]
sequence_batching {
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  state { input_name: "h" output_name: "hn" data_type: TYPE_FP32 dims: 1 }
}"""
    )
    tree = read_repository(tmp_path).models["sums"]
    settings = msgspec.convert(tree, ModelConfig)
    runtime = load_runtime("sums", artifact_of(settings), settings, silent)
    assert runtime.contract.is_stateful
    assert [spec.name for spec in runtime.contract.inputs] == ["x"]
    assert [spec.name for spec in runtime.contract.outputs] == ["sum", "started"]
    told = []
    for sequence, number, start in (("a", 1, True), ("b", 10, True), ("a", 2, False), ("b", 20, False), ("a", 5, True)):
        outputs = ask(runtime, {"x": np.array([[number]], np.float32)}, sequence=sequence, sequence_start=start)
        told.append((float(outputs["sum"][0, 0]), float(outputs["started"][0, 0])))
    assert told == [(1, 1), (10, 1), (3, 0), (30, 0), (5, 1)]
    other = ask(runtime, {"x": np.array([[7]], np.float32)}, tenant="another", sequence="b", sequence_start=True)
    assert other["sum"].tolist() == [[7.0]], "another tenant's sequence of the same name"
    again = ask(runtime, {"x": np.array([[1]], np.float32)}, sequence="b")
    assert again["sum"].tolist() == [[31.0]]
    pipeline = load_runtime(
        "sums", artifact_of(settings), msgspec.structs.replace(settings, postprocess=DOUBLED), silent
    )
    assert pipeline.contract.is_stateful
    assert (pipeline.contract.max_batch_size, pipeline.contract.max_items) == (0, 4)
    for tenant, number, expected in (("one", 1, 2), ("two", 5, 10), ("one", 2, 6)):
        outputs = ask(
            pipeline, {"x": np.array([[number]], np.float32)}, tenant=tenant, sequence="s", sequence_start=number != 2
        )
        assert outputs["output"].tolist() == [[expected]]
