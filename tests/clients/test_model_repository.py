"""``inferd serve ./model_repository``: Triton's own client meets its models, and a folder that is added is served too."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.http as triton  # type: ignore[import-untyped]
from tests.registry.repositories import SIMPLE, repository, simple_model, write
from tests.worker.watching import until_now
from tritonclient.utils import InferenceServerException  # type: ignore[import-untyped]

ROW = np.arange(16, dtype=np.int32).reshape(1, 16)
ONE = np.ones((1, 16), dtype=np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("model_repository"))


@pytest.fixture(scope="module")
def address(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    state = tmp_path_factory.mktemp("state")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "INFERD_STATE__DATA_DIR": str(state)}
    with (state / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "inferd", "serve", str(folder), "--port", "0", "--allow-code", "--threads", "1"],
            env=env,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert process.stdout is not None
        found = next((m for line in process.stdout if (m := re.search(r"http://(127\.0\.0\.1:\d+)", line))), None)
        assert found is not None, (state / "log").read_text()
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(address) as made:
        yield made
    gc.collect()  # it closes itself once more, by gevent, which minds in which thread


def given(**arrays: np.ndarray) -> list[triton.InferInput]:
    inputs = []
    for name, array in arrays.items():
        inputs.append(triton.InferInput(name, array.shape, "INT32"))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def test_a_repository_is_served_as_it_is(client: triton.InferenceServerClient) -> None:
    metadata = client.get_model_metadata("simple")
    assert [(one["name"], one["datatype"], one["shape"]) for one in metadata["inputs"]] == [
        ("INPUT0", "INT32", [-1, 16]),
        ("INPUT1", "INT32", [-1, 16]),
    ]
    result = client.infer("simple", given(INPUT0=ROW, INPUT1=ONE))
    assert np.array_equal(result.as_numpy("OUTPUT0"), ROW + 1)
    assert np.array_equal(result.as_numpy("OUTPUT1"), ROW - 1)


def test_the_labels_of_a_file_name_the_classes(client: triton.InferenceServerClient) -> None:
    best = triton.InferRequestedOutput("OUTPUT0", class_count=2)
    result = client.infer("simple", given(INPUT0=ROW, INPUT1=ONE), outputs=[best])
    assert [one.split(b":")[1:] for one in result.as_numpy("OUTPUT0").ravel()] == [
        [b"15", b"class15"],
        [b"14", b"class14"],
    ]


def test_a_model_for_the_python_backend_answers_and_refuses(client: triton.InferenceServerClient) -> None:
    result = client.infer("triple", given(IN=np.concatenate([ROW, ROW])))
    assert result.as_numpy("OUT").dtype == np.float32
    assert np.array_equal(result.as_numpy("OUT"), np.concatenate([ROW, ROW]) * 3)
    with pytest.raises(InferenceServerException, match="The model refused the request: negative"):
        client.infer("triple", given(IN=-ROW))


def test_an_ensemble_hands_tensors_from_model_to_model(client: triton.InferenceServerClient) -> None:
    assert client.get_model_metadata("both")["platform"] == "ensemble"
    result = client.infer("both", given(A=ROW, B=ONE))
    assert np.array_equal(result.as_numpy("TRIPLED"), (ROW + 1) * 3.0)


def test_each_step_of_an_ensemble_is_timed(client: triton.InferenceServerClient, address: str) -> None:
    inputs = [{"name": name, "shape": [1, 16], "datatype": "INT32", "data": ROW.tolist()} for name in ("A", "B")]
    answer = httpx.post(f"http://{address}/v2/models/both/infer", json={"inputs": inputs})
    assert answer.status_code == 200, answer.text
    times = dict(step.split(";dur=") for step in answer.headers["server-timing"].split(", "))
    assert list(times) == ["simple", "triple"]
    assert all(float(took) > 0 for took in times.values())
    metrics = httpx.get(f"http://{address}/metrics").text
    for step in times:
        counted = re.search(
            rf'inferd_pipeline_step_seconds_count{{model="both",replica="0",step="{step}"}} (\d+)', metrics
        )
        assert counted is not None
        assert int(counted[1]) >= 1


def test_a_model_that_is_added_while_serving_is_served(client: triton.InferenceServerClient, folder: Path) -> None:
    simple_model(folder / "later/1/model.onnx")
    write(
        folder, {"later/config.pbtxt": SIMPLE.replace('name: "simple"', "").replace('label_filename: "labels.txt"', "")}
    )
    until_now(lambda: client.is_model_ready("later"), "the new model is ready", 20)
    result = client.infer("later", given(INPUT0=ROW, INPUT1=ONE))
    assert np.array_equal(result.as_numpy("OUTPUT1"), ROW - 1)
