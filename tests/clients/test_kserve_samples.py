"""The request bodies of KServe's own samples, as they are, against models of their kind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.clients.tensor_models import Serving, serving

sklearn_io = pytest.importorskip("skops.io")
datasets = pytest.importorskip("sklearn.datasets")
linear_model = pytest.importorskip("sklearn.linear_model")
pytestmark = pytest.mark.shared


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("samples")
    features, classes = datasets.load_iris(return_X_y=True)
    sklearn_io.dump(linear_model.LogisticRegression(max_iter=1000).fit(features, classes), folder / "iris.skops")
    models = {
        "iris": {"source": str(folder / "iris.skops")},
        "mnist": {"source": str(shared_data / "onnx-models" / "mnist" / "mnist.onnx")},
    }
    with serving(folder / "server", models) as started:
        yield started


def ask(server: Serving, path: str, body: bytes, **headers: str) -> httpx.Response:
    return httpx.post(
        f"http://{server.host}{path}", content=body, headers={"authorization": f"Bearer {server.key}", **headers}
    )


def sample(shared_data: Path, name: str) -> bytes:
    return (shared_data / "kserve-requests" / f"{name}.json").read_bytes()


def test_iris_in_every_dialect_is_the_same_flower(server: Serving, shared_data: Path) -> None:
    v1 = ask(server, "/v1/models/iris:predict", sample(shared_data, "iris-input-v1")).json()
    assert v1 == {"predictions": [1, 1]}
    named = {"x-amzn-sagemaker-target-model": "iris"}
    assert ask(server, "/invocations", sample(shared_data, "iris-input-v1"), **named).json() == v1
    plain = ask(server, "/v2/models/iris/infer", sample(shared_data, "iris-input-v2")).json()
    outputs = {output["name"]: output for output in plain["outputs"]}
    assert (outputs["label"]["data"], outputs["label"]["shape"]) == ([1, 1], [2])
    assert np.array(outputs["probabilities"]["data"]).reshape(2, 3).argmax(axis=1).tolist() == [1, 1]
    binary = ask(server, "/v2/models/iris/infer", sample(shared_data, "iris-input-v2-binary"))
    end = int(binary.headers["inference-header-content-length"])
    told = {output["name"]: output for output in json.loads(binary.content[:end])["outputs"]}
    at = end
    for name, output in told.items():
        size = output["parameters"]["binary_data_size"]
        dtype = {"INT64": np.int64, "FP32": np.float32, "FP64": np.float64}[output["datatype"]]
        np.testing.assert_array_equal(np.frombuffer(binary.content[at : at + size], dtype), outputs[name]["data"])
        at += size
    assert at == len(binary.content)


def test_the_handwritten_zero_is_a_zero(server: Serving, shared_data: Path) -> None:
    body: dict[str, Any] = json.loads(sample(shared_data, "mnist-input-v2"))
    refused = ask(server, "/v2/models/mnist/infer", json.dumps(body).encode())
    assert refused.status_code == 400
    assert "'input-0'" in refused.json()["error"]
    metadata = httpx.get(f"http://{server.host}/v2/models/mnist", headers={"authorization": f"Bearer {server.key}"})
    [tensor] = body["inputs"]
    tensor["name"] = metadata.json()["inputs"][0]["name"]
    tensor["data"] = (np.array(tensor["data"]) * 255).reshape(1, 1, 28, 28).tolist()
    assert "got the shape [1, 28, 28]" in ask(server, "/v2/models/mnist/infer", json.dumps(body).encode()).text
    tensor["shape"] = [1, 1, 28, 28]
    answer = ask(server, "/v2/models/mnist/infer", json.dumps(body).encode()).json()
    assert answer["id"] == body["id"]
    assert np.argmax(answer["outputs"][0]["data"]) == 0


def test_a_shape_that_is_no_list_is_refused_by_name(server: Serving, shared_data: Path) -> None:
    refused = ask(server, "/v2/models/mnist/infer", sample(shared_data, "mnist-input-v2-bytes"))
    assert refused.status_code == 400
    assert "inputs[0].shape" in refused.json()["error"]


def test_a_picture_of_another_kind_is_told_what_was_expected(server: Serving, shared_data: Path) -> None:
    refused = ask(server, "/v2/models/mnist/infer", sample(shared_data, "cifar10-input-v2"))
    assert refused.status_code == 400
    assert "expected" in refused.json()["error"] or "its inputs are" in refused.json()["error"]
