"""Models for Triton's Python backend: the interface as its examples use it, and nothing runs that was not allowed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.registry.repositories import TRIPLE, TRIPLE_CODE, write

from inferd.config import ModelConfig
from inferd.errors import InferdError, InternalError, InvalidRequest, ModelLoadError
from inferd.predict.load import load_runtime
from inferd.predict.runtime import Item, Result, Runtime
from inferd.predict.runtimes import triton_interface
from inferd.registry.artifact import artifact_of
from inferd.registry.source import silent
from inferd.registry.triton import read_repository
from inferd.types import TensorSpec


def loaded(folder: Path, code: str, config: str = TRIPLE, **settings: Any) -> Runtime:
    write(folder, {"m/1/model.py": code, "m/config.pbtxt": config})
    tree = {**read_repository(folder).models["m"], "allow_code": True, **settings}
    model = msgspec.convert(tree, ModelConfig)
    return load_runtime("m", artifact_of(model), model, silent)


def rows(*values: int) -> Item:
    array = np.array([[value] * 16 for value in values], dtype=np.int32)
    return Item(request_id="r", inputs={"IN": array}, rows=len(values))


def predicted(runtime: Runtime, *items: Item) -> Sequence[Result | InferdError]:
    for item in items:
        runtime.prepare(item)
    return runtime.predict(items)


def test_requests_of_a_batch_are_given_together_and_one_fails_alone(tmp_path: Path) -> None:
    runtime = loaded(tmp_path, TRIPLE_CODE)
    assert runtime.contract.max_batch_size == 4
    assert runtime.contract.inputs == (TensorSpec("IN", "INT32", (-1, 16)),)
    first, bad, last = predicted(runtime, rows(1), rows(-1), rows(2, 3))
    assert isinstance(first, Result)
    assert isinstance(last, Result)
    assert first.outputs["OUT"].dtype == np.float32
    assert first.outputs["OUT"][:, 0].tolist() == [3.0]
    assert last.outputs["OUT"][:, 0].tolist() == [6.0, 9.0]
    assert isinstance(bad, InvalidRequest)
    assert bad.message == "The model refused the request: negative"


def test_nothing_of_the_folder_runs_unless_it_is_allowed(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    with pytest.raises(ModelLoadError, match="only where code is allowed"):
        loaded(tmp_path, f"open({str(trace)!r}, 'w')", allow_code=False)
    assert not trace.exists()


def test_a_model_may_declare_its_own_inputs_and_outputs(tmp_path: Path) -> None:
    code = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_STRING", "dims": [-1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_STRING", "dims": [-1]})
        config.set_max_batch_size(3)
        return config
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", [[v.decode().upper() for v in row]
                for row in pb_utils.get_input_tensor_by_name(r, "IN").as_numpy()])])
            for r in requests
        ]
"""
    write(tmp_path, {"m/1/model.py": code})
    model = msgspec.convert({**read_repository(tmp_path).models["m"], "allow_code": True}, ModelConfig)
    runtime = load_runtime("m", artifact_of(model), model, silent)
    assert runtime.contract.inputs == (TensorSpec("IN", "BYTES", (-1,)),)
    texts = np.array([[b"a", b"b"]], dtype=object)
    (result,) = runtime.predict([Item(request_id="r", inputs={"IN": texts})])
    assert isinstance(result, Result)
    assert result.outputs["OUT"].tolist() == [[b"A", b"B"]]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import nothing_of_this_name", "importing it failed: ModuleNotFoundError"),
        ("x = 1", "has no class TritonPythonModel"),
        ("class TritonPythonModel: pass", "has no method execute"),
        ("class TritonPythonModel:\n  def initialize(self, args): 1 / 0", "initialize failed: ZeroDivisionError"),
    ],
)
def test_a_model_that_cannot_start_says_why(tmp_path: Path, code: str, said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        loaded(tmp_path, code)


def test_decoupled_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="answers in several parts"):
        loaded(tmp_path, TRIPLE_CODE, TRIPLE + "model_transaction_policy { decoupled: true }")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("[]", "must return a list of 1 responses, one per request; got 0"),
        ("None", "got NoneType"),
        ("[3]", "must return InferenceResponse objects; got int"),
    ],
)
def test_an_answer_that_is_none_is_the_models_fault(tmp_path: Path, answer: str, said: str) -> None:
    runtime = loaded(tmp_path, f"class TritonPythonModel:\n  def execute(self, requests): return {answer}")
    with pytest.raises(InternalError, match=said):
        predicted(runtime, rows(1))


def test_an_output_that_was_declared_must_come(tmp_path: Path) -> None:
    code = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""
    (result,) = predicted(loaded(tmp_path, code), rows(1))
    assert isinstance(result, InternalError)
    assert "has no output 'OUT'" in result.message


def test_datatypes_have_tritons_numbers() -> None:
    from tritonclient.grpc import model_config_pb2  # type: ignore[import-untyped]

    for word in ("BOOL", "UINT8", "INT64", "FP16", "FP32", "FP64", "STRING"):
        kind = triton_interface.triton_string_to_numpy(f"TYPE_{word}")
        number = triton_interface.numpy_to_triton_type(kind)
        assert number == model_config_pb2.DataType.Value(f"TYPE_{word}")
        assert triton_interface.triton_to_numpy_type(number) is kind
