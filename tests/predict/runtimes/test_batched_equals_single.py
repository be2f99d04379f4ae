"""The law of every runtime: what a request is answered does not depend on the requests beside it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import lightgbm
import numpy as np
import onnx
import pytest
import skops.io
import torch
import xgboost
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tests.predict.runtimes.loading import Values, answered, item, loaded
from tests.predict.runtimes.programs import Scores, export

from inferd.predict.contract import NUMPY
from inferd.predict.runtime import Result, Runtime

WIDTH = 4
RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(80, WIDTH)).astype(np.float32)
CLASSES = np.arange(80) % 3


def onnx_model(path: Path) -> Path:
    """A small network: 4 -> 8 -> 3."""
    weights = {"a": RNG.normal(size=(WIDTH, 8)), "b": RNG.normal(size=(8, 3))}
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "b"], ["s"]),
        helper.make_node("Softmax", ["s"], ["y"]),
        helper.make_node("ArgMax", ["y"], ["label"], axis=1, keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3]),
            helper.make_tensor_value_info("label", TensorProto.INT64, ["n"]),
        ],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def torch_program(path: Path) -> Path:
    return export(Scores(), path, torch.randn(2, WIDTH))


def skops_pipeline(path: Path) -> Path:
    skops.io.dump(make_pipeline(StandardScaler(), LogisticRegression()).fit(ROWS, CLASSES), path)
    return path


def xgboost_model(path: Path) -> Path:
    settings = {"verbosity": 0, "objective": "multi:softprob", "num_class": 3, "nthread": 1}
    xgboost.train(settings, xgboost.DMatrix(ROWS, CLASSES), 3).save_model(path)
    return path


def lightgbm_model(path: Path) -> Path:
    settings = {"verbosity": -1, "objective": "multiclass", "num_class": 3, "num_threads": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightgbm.train(settings, lightgbm.Dataset(ROWS, CLASSES), 3).save_model(path)
    return path


MAKERS: Mapping[str, Callable[[Path], Path]] = {
    "m.onnx": onnx_model,
    "m.pt2": torch_program,
    "m.skops": skops_pipeline,
    "m.ubj": xgboost_model,
    "m.txt": lightgbm_model,
}


@pytest.fixture(scope="module", params=list(MAKERS))
def runtime(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    name: str = request.param
    return loaded(MAKERS[name](tmp_path_factory.mktemp("model") / name))


@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=6), seed=st.integers(0, 2**16))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_answer_does_not_depend_on_the_requests_beside_it(runtime: Runtime, counts: list[int], seed: int) -> None:
    (spec,) = runtime.contract.inputs
    rng = np.random.default_rng(seed)
    asked: list[dict[str, Values]] = [
        {spec.name: rng.normal(size=(count, WIDTH)).astype(NUMPY[spec.datatype])} for count in counts
    ]
    items = [item(inputs, f"r{place}") for place, inputs in enumerate(asked)]
    for one in items:
        runtime.prepare(one)
    together = runtime.predict(items)
    assert len({str(one.bucket) for one in items}) == 1
    for inputs, result in zip(asked, together, strict=True):
        assert isinstance(result, Result)
        alone = answered(runtime, inputs)
        assert alone.keys() == result.outputs.keys()
        for name, expected in alone.items():
            found: Values = np.asarray(result.outputs[name])
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            if found.dtype.kind == "f":
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
            else:
                np.testing.assert_array_equal(found, expected)


def test_outputs_are_those_of_the_contract(runtime: Runtime) -> None:
    (spec,) = runtime.contract.inputs
    found = answered(runtime, {spec.name: ROWS.astype(NUMPY[spec.datatype])})
    assert list(found) == [output.name for output in runtime.contract.outputs]
    for output in runtime.contract.outputs:
        array = found[output.name]
        assert len(array.shape) == len(output.shape)
        assert all(wanted in (-1, size) for wanted, size in zip(output.shape, array.shape, strict=True))
        assert array.dtype == NUMPY[output.datatype]
        assert not output.labels or len(output.labels) == array.shape[-1]
