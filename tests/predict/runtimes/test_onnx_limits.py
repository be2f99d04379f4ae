"""ONNX models that ask for more than there is: a few bytes of a file say a terabyte, or a trillion rounds."""

from __future__ import annotations

import logging
import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.predict.runtimes.loading import answered, loaded
from tests.predict.runtimes.test_onnx_runtime import FLOAT, save

from inferd.config import ModelConfig
from inferd.errors import ModelLoadError
from inferd.predict.load import create_backend
from inferd.types import ModelInfo

ROWS: tuple[int | str, ...] = ("n", 2)


def huge(path: Path, size: int, shape: Sequence[int | str] = ROWS) -> Path:
    """x plus the sum of so many zeros."""
    nodes = [
        helper.make_node("ConstantOfShape", ["s"], ["big"]),
        helper.make_node("ReduceSum", ["big"], ["r"], keepdims=0),
        helper.make_node("Add", ["x", "r"], ["y"]),
    ]
    return save(path, nodes, [("x", FLOAT, shape)], [("y", FLOAT, shape)], {"s": np.array([size], np.int64)})


def endless(path: Path, shape: Sequence[int | str] = ROWS) -> Path:
    """x doubled 2**40 times."""
    inner = [
        helper.make_tensor_value_info("i", TensorProto.INT64, []),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        helper.make_tensor_value_info("v", FLOAT, None),
    ]
    outer = [
        helper.make_tensor_value_info("co", TensorProto.BOOL, []),
        helper.make_tensor_value_info("vo", FLOAT, None),
    ]
    steps = [helper.make_node("Identity", ["c"], ["co"]), helper.make_node("Add", ["v", "v"], ["vo"])]
    nodes = [helper.make_node("Loop", ["m", "k", "x"], ["y"], body=helper.make_graph(steps, "b", inner, outer))]
    weights = {"m": np.array(2**40, np.int64), "k": np.array(True)}
    return save(path, nodes, [("x", FLOAT, shape)], [("y", FLOAT, shape)], weights)


def picking(path: Path, index: int, shape: Sequence[int | str] = ROWS) -> Path:
    """The column of that number."""
    nodes = [helper.make_node("Gather", ["x", "k"], ["y"], axis=1)]
    return save(path, nodes, [("x", FLOAT, shape)], [("y", FLOAT, None)], {"k": np.array(index, np.int64)})


def refused(path: Path, **settings: object) -> ModelLoadError:
    config = ModelConfig(source=str(path), **settings)  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError) as caught:
        create_backend("m", config, lambda *told: None)
    return caught.value


def served(path: Path) -> ModelInfo:
    return create_backend("m", ModelConfig(source=str(path)), lambda *told: None).info


@pytest.mark.parametrize("shape", [ROWS, (1, 2), ("n", "m")])
def test_a_terabyte_is_refused_with_the_limits_name(tmp_path: Path, shape: tuple[int | str, ...]) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    error = refused(huge(tmp_path / "m.onnx", 2**40, shape))
    assert "asks for 4.0 TiB of memory at once, and the machine's free memory leaves it" in error.message
    assert error.param == "memory_bytes"
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_what_the_machine_would_grant_is_refused_beyond_the_models_own_limit(tmp_path: Path) -> None:
    path = huge(tmp_path / "m.onnx", 2**28)
    error = refused(path, memory_bytes=500_000_000)
    assert "1.00 GiB of memory at once, and memory_bytes = 477 MiB leaves it" in error.message
    small = huge(tmp_path / "small.onnx", 2**20)
    assert answered(loaded(small), {"x": np.ones((3, 2), np.float32)})["y"].tolist() == [[1, 1]] * 3


def test_an_example_that_is_not_computed_in_time_is_given_up_and_the_limit_named(tmp_path: Path) -> None:
    error = refused(endless(tmp_path / "m.onnx"), hang_timeout_s=0.2)
    assert "within hang_timeout_s = 0.2 s" in error.message
    assert error.param == "hang_timeout_s"


@pytest.mark.parametrize("shape", [ROWS, (1, 2)])
def test_a_model_that_fails_alike_whatever_it_is_given_is_not_loaded(
    tmp_path: Path, shape: tuple[int | str, ...]
) -> None:
    error = refused(picking(tmp_path / "m.onnx", 5, shape))
    assert "fails with the same words whatever they are" in error.message
    assert "out of data bounds" in error.message
    assert served(picking(tmp_path / "fine.onnx", 1, shape)).platform == "onnxruntime_onnx"


def test_sizes_that_were_only_guessed_prove_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = picking(tmp_path / "m.onnx", 5000, ("n", "m"))
    with caplog.at_level(logging.WARNING):
        assert served(path).max_batch_size > 1
    assert not caplog.records
    assert answered(loaded(path), {"x": np.zeros((1, 6000), np.float32)})["y"].tolist() == [0.0]


def test_an_initializer_that_claims_a_terabyte_is_told_before_anything_is_made_of_it(tmp_path: Path) -> None:
    proto = onnx.load(huge(tmp_path / "m.onnx", 8))
    del proto.graph.node[0]
    proto.graph.initializer.add(name="big", data_type=FLOAT, dims=[2**40], raw_data=bytes(8))
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    assert "declares a size of 4398046511104 bytes" in refused(tmp_path / "m.onnx").message
