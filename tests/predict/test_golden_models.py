"""Real models give the outputs that their publishers give: in the runtime, and through a server, over REST and gRPC."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from PIL import Image
from tests.predict.live import Address, serving
from tests.predict.runtimes.loading import Values, answered, loaded
from tritonclient.grpc import InferenceServerClient, InferInput  # type: ignore[import-untyped]

pytestmark = pytest.mark.shared


@pytest.fixture(scope="module")
def models(shared_data: Path) -> Path:
    return shared_data / "onnx-models"


def tract(models: Path, name: str) -> tuple[Path, Values, str, Values]:
    """The model, its input, the name of an output and what it is to be."""
    folder = models / "tract-test-cases" / name
    with np.load(folder / "io.npz") as arrays:
        (output,) = set(arrays) - {"input"}
        return folder / "model.onnx", arrays["input"], output, arrays[output]


TRACT = ["byte_sb_bidi_lstm", "lgbm_classifier_tensor", "lgbm_regressor_tensor"]


@pytest.mark.parametrize("name", TRACT)
def test_recorded_outputs_are_reproduced(models: Path, name: str) -> None:
    path, given, output, expected = tract(models, name)
    runtime = loaded(path)
    assert runtime.contract.max_batch_size > 1
    found = answered(runtime, {"input": given})
    array = found.get(output, found[runtime.contract.outputs[0].name])  # one file calls its output otherwise
    np.testing.assert_allclose(array.reshape(expected.shape), expected, atol=5e-6, rtol=1e-4)
    several = np.concatenate([given, given, given])
    again = answered(runtime, {"input": several})[runtime.contract.outputs[0].name]
    np.testing.assert_allclose(again[: len(given)], again[-len(given) :], rtol=1e-5)


@pytest.mark.parametrize(("name", "width", "classes"), [("linear_classifier", 12, 14), ("linear_regressor", 21, 0)])
def test_linear_models_give_their_own_arithmetic(models: Path, name: str, width: int, classes: int) -> None:
    path = models / "tract-test-cases" / name / "model.onnx"
    runtime = loaded(path)
    rows = np.random.default_rng(0).normal(size=(5, width)).astype(np.float32)
    found = answered(runtime, {"input": rows})
    (node,) = onnx.load(path).graph.node[:1]
    told = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    weights = np.asarray(told["coefficients"], np.float64).reshape(-1, width)
    raw = rows @ weights.T + np.asarray(told["intercepts"])
    if not classes:
        np.testing.assert_allclose(found["variable"], raw, rtol=1e-4, atol=1e-5)
        return
    assert runtime.contract.outputs[1].labels == tuple(map(str, range(classes)))
    np.testing.assert_array_equal(found["label"], raw.argmax(1))
    np.testing.assert_array_equal(found["probabilities"].argmax(1), raw.argmax(1))


@pytest.mark.parametrize(
    "name",
    [
        "squeezenet",
        "shufflenet",
        "inception_v1",
        *(
            pytest.param(slow, marks=pytest.mark.slow)
            for slow in ("inception_v2", "resnet50", "densenet121", "bvlc_alexnet", "zfnet512", "vgg19")
        ),
    ],
)
def test_classic_networks_give_their_recorded_outputs(models: Path, name: str) -> None:
    runtime = loaded(models / "onnx-light" / f"light_{name}.onnx", threads=2)
    (spec,) = runtime.contract.inputs
    count = int(np.prod(spec.shape))
    given = (np.arange(count).reshape(spec.shape) / count).astype(np.float32)
    tensor = onnx.TensorProto.FromString((models / "onnx-light" / f"light_{name}_output_0.pb").read_bytes())
    (found,) = answered(runtime, {spec.name: given}).values()
    np.testing.assert_allclose(found, numpy_helper.to_array(tensor), rtol=1e-3, atol=1e-6)


def photo(path: Path) -> Values:
    """As the detector was trained: RGB, 320x240, channels first."""
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB").resize((320, 240)), np.float32)
    return np.ascontiguousarray(((pixels - 127) / 128).transpose(2, 0, 1)[None], np.float32)


def check_faces(scores: Values, boxes: Values, golden: list[list[float]]) -> None:
    """Every golden face is among the raw boxes, with its score."""
    sure = scores[0, :, 1] > 0.6
    found = np.concatenate([boxes[0][sure], scores[0][sure][:, 1:]], axis=1)
    for face in golden:
        assert np.abs(found - np.asarray(face)).max(axis=1).min() < 0.02, face


def test_faces_are_found_where_they_are(models: Path) -> None:
    runtime = loaded(models / "ultraface" / "version-RFB-320.onnx", threads=2)
    assert runtime.contract.max_batch_size == 0
    cases = json.loads((models / "ultraface" / "golden_faces.json").read_text())["cases"]
    for case in cases:
        found = answered(runtime, {"input": photo(models / "ultraface" / "images" / case["file"])})
        check_faces(found["scores"], found["boxes"], case["boxes"])


def test_a_handwritten_zero_is_a_zero(models: Path, shared_data: Path) -> None:
    runtime = loaded(models / "mnist" / "mnist.onnx")
    body = json.loads((shared_data / "kserve-requests" / "mnist-input-v2.json").read_text())
    pixels = np.asarray(body["inputs"][0]["data"], np.float32).reshape(1, 1, 28, 28) * 255
    (found,) = answered(runtime, {"Input3": pixels}).values()
    assert found.argmax() == 0


# -- through a server ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    sources = {name: models / "tract-test-cases" / name for name in TRACT}
    sources["faces"] = models / "ultraface" / "version-RFB-320.onnx"
    settings = {name: {"source": str(path)} for name, path in sources.items()}
    with serving(tmp_path_factory.mktemp("server"), settings, grpc_port=0) as address:
        yield address


def infer(url: str, name: str, inputs: dict[str, tuple[str, Values]]) -> dict[str, Values]:
    body = {
        "inputs": [
            {"name": key, "datatype": datatype, "shape": list(array.shape), "data": array.ravel().tolist()}
            for key, (datatype, array) in inputs.items()
        ]
    }
    answer = httpx.post(f"{url}/v2/models/{name}/infer", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return {one["name"]: np.asarray(one["data"]).reshape(one["shape"]) for one in answer.json()["outputs"]}


@pytest.mark.parametrize("name", TRACT)
def test_recorded_outputs_come_through_rest(server: Address, models: Path, name: str) -> None:
    _, given, output, expected = tract(models, name)
    found = infer(server.url, name, {"input": ("UINT8" if given.dtype == np.uint8 else "FP32", given)})
    array = found.get(output, next(iter(found.values())))
    np.testing.assert_allclose(array.reshape(expected.shape), expected, atol=5e-6, rtol=1e-4)


@pytest.mark.parametrize("name", TRACT)
def test_recorded_outputs_come_through_grpc(server: Address, models: Path, name: str) -> None:
    _, given, output, expected = tract(models, name)
    asked = InferInput("input", given.shape, "UINT8" if given.dtype == np.uint8 else "FP32")
    asked.set_data_from_numpy(given)
    with InferenceServerClient(server.grpc) as client:
        answer = client.infer(name, [asked])
        known = [one.name for one in answer.get_response().outputs]
    array = answer.as_numpy(output if output in known else known[0])
    np.testing.assert_allclose(array.reshape(expected.shape), expected, atol=5e-6, rtol=1e-4)


def test_faces_come_through_rest(server: Address, models: Path) -> None:
    case = json.loads((models / "ultraface" / "golden_faces.json").read_text())["cases"][0]
    given = photo(models / "ultraface" / "images" / case["file"])
    found = infer(server.url, "faces", {"input": ("FP32", given)})
    check_faces(found["scores"], found["boxes"], case["boxes"])
