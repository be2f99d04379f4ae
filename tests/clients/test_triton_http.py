"""Triton's own HTTP clients, unmodified, against models such as their examples use."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.clients.tensor_models import Serving, serving, write_models, write_scale

httpclient = pytest.importorskip("tritonclient.http")
aioclient = pytest.importorskip("tritonclient.http.aio")
utils = pytest.importorskip("tritonclient.utils")

A = np.arange(16, dtype=np.int32).reshape(1, 16)
B = np.full((1, 16), -1, np.int32)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    write_models(folder)
    models: dict[str, object] = {
        name: {"source": str(folder / name)} for name in ("simple", "simple_string", "simple_identity", "half")
    }
    models["scale"] = {"source": str(folder / "scale"), "versions": {"policy": "all"}}
    write_scale(folder / "grows", 4)
    models["grows"] = {"source": str(folder / "grows"), "versions": {"policy": "latest", "count": 2}}
    with serving(folder / "server", models) as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


class WithKey(httpclient.InferenceServerClientPlugin):  # type: ignore[misc, name-defined]
    def __init__(self, key: str) -> None:
        self._key = key

    def __call__(self, request: Any) -> None:
        request.headers = {**(request.headers or {}), "authorization": f"Bearer {self._key}"}


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[Any]:
    with httpclient.InferenceServerClient(server.host) as made:
        made.register_plugin(WithKey(server.key))
        yield made
    # It closes itself once more, by gevent, in the thread that collects it: frames of raised errors go now, in its own.
    gc.collect()


def given(name: str, array: np.ndarray[Any, Any], datatype: str, *, binary: bool = True, kind: Any = None) -> Any:
    made = (kind or httpclient).InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def pair(*, binary: bool = True, kind: Any = None) -> list[Any]:
    return [given(name, array, "INT32", binary=binary, kind=kind) for name, array in (("INPUT0", A), ("INPUT1", B))]


def test_health_metadata_and_configuration(client: Any) -> None:
    assert client.is_server_live(query_params={"test_1": 1, "test_2": 2})
    assert client.is_server_ready()
    assert client.is_model_ready("simple")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["name"] == "inferd"
    metadata = client.get_model_metadata("simple", query_params={"test_1": 1})
    assert metadata["name"] == "simple"
    assert metadata["inputs"][0] == {"name": "INPUT0", "datatype": "INT32", "shape": [-1, 16]}
    assert client.get_model_config("simple")["input"][0]["data_type"] == "TYPE_INT32"
    for ask in (client.get_model_metadata, client.get_model_config, client.get_inference_statistics):
        with pytest.raises(utils.InferenceServerException, match="Request for unknown model"):
            ask("wrong_model_name")


@pytest.mark.parametrize("inputs_binary", [True, False])
@pytest.mark.parametrize("outputs_binary", [True, False, None])
@pytest.mark.parametrize(("request_by", "response_by"), [(None, None), ("gzip", "deflate"), ("deflate", "gzip")])
def test_tensors_go_and_come_in_every_form(
    client: Any, inputs_binary: bool, outputs_binary: bool | None, request_by: str | None, response_by: str | None
) -> None:
    outputs = None
    if outputs_binary is not None:
        outputs = [
            httpclient.InferRequestedOutput("OUTPUT0", binary_data=outputs_binary),
            httpclient.InferRequestedOutput("OUTPUT1", binary_data=not outputs_binary),
        ]
    result = client.infer(
        "simple",
        pair(binary=inputs_binary),
        outputs=outputs,
        request_id="mine",
        query_params={"test": 1},
        request_compression_algorithm=request_by,
        response_compression_algorithm=response_by,
    )
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), A + B)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), A - B)
    assert (result.get_response()["id"], result.get_response()["model_name"]) == ("mine", "simple")


def test_a_large_answer_is_compressed_and_read(client: Any) -> None:
    many = np.repeat(A, 100, axis=0)
    inputs = [given(name, many, "INT32") for name in ("INPUT0", "INPUT1")]
    result = client.infer("simple", inputs, response_compression_algorithm="gzip")
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), many * 2)


@pytest.mark.parametrize("binary", [True, False])
def test_texts_are_numbers_to_a_model_that_casts_them(client: Any, binary: bool) -> None:
    texts = [np.array([[str(value).encode() for value in array[0]]], np.object_) for array in (A, np.ones_like(A))]
    inputs = [given(f"INPUT{place}", text, "BYTES", binary=binary) for place, text in enumerate(texts)]
    outputs = [httpclient.InferRequestedOutput(f"OUTPUT{place}", binary_data=binary) for place in (0, 1)]
    result = client.infer("simple_string", inputs, outputs=outputs)
    assert [int(text) for text in result.as_numpy("OUTPUT0")[0]] == list(range(1, 17))
    assert [int(text) for text in result.as_numpy("OUTPUT1")[0]] == list(range(-1, 15))


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("element", ["he\x00llo", "\x00\x01\x02\x03", "grün", ""])
def test_texts_come_back_as_they_were(client: Any, binary: bool, element: str) -> None:
    texts = np.array([[element.encode()] * 16], np.object_)
    outputs = [httpclient.InferRequestedOutput("OUTPUT0", binary_data=binary)]
    found = client.infer("simple_identity", [given("INPUT0", texts, "BYTES", binary=binary)], outputs=outputs)
    wanted = texts if binary else np.array([[element] * 16], np.object_)
    np.testing.assert_array_equal(found.as_numpy("OUTPUT0"), wanted)


def test_half_precision_comes_as_bytes_and_never_as_json(client: Any) -> None:
    wanted = np.array([[1, 0.5, -2, 65504]], np.float16)
    inputs = [given("INPUT0", wanted, "FP16")]
    np.testing.assert_array_equal(client.infer("half", inputs).as_numpy("OUTPUT0"), wanted)
    outputs = [httpclient.InferRequestedOutput("OUTPUT0", binary_data=False)]
    with pytest.raises(utils.InferenceServerException, match="binary_data: true"):
        client.infer("half", inputs, outputs=outputs)


@pytest.mark.parametrize("binary", [True, False])
def test_classes_are_the_best_places(client: Any, binary: bool) -> None:
    outputs = [httpclient.InferRequestedOutput("OUTPUT0", binary_data=binary, class_count=2)]
    found = client.infer("simple", pair(), outputs=outputs).as_numpy("OUTPUT0")
    assert [text if isinstance(text, str) else text.decode() for text in found[0]] == ["14:15", "13:14"]


def test_every_version_answers_by_its_number(client: Any) -> None:
    x = np.array([[1, 2, 3]], np.float32)
    assert client.get_model_metadata("scale")["versions"] == ["1", "2"]
    for version, factor in (("1", 1), ("2", 2), ("", 2)):
        result = client.infer("scale", [given("x", x, "FP32")], model_version=version)
        np.testing.assert_array_equal(result.as_numpy("y"), x * factor)
        assert result.get_response()["model_version"] == (version or "2")
        assert result.get_response()["model_name"] == "scale"
        assert client.is_model_ready("scale", version)
    with pytest.raises(utils.InferenceServerException, match="version '3' is not found; its versions are 1, 2"):
        client.infer("scale", [given("x", x, "FP32")], model_version="3")


def test_a_new_version_comes_with_a_reload_and_without_a_refused_request(server: Serving, folder: Path) -> None:
    headers = {"authorization": f"Bearer {server.key}"}
    url = f"http://{server.host}"
    body = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 1, 1]}]}
    found: set[tuple[int, str, float]] = set()
    is_over = threading.Event()

    def ask(path: str = "") -> tuple[int, str, float]:
        reply = http.post(f"{url}/v2/models/grows{path}/infer", json=body).json()
        if "error" in reply:
            return 0, reply["error"], 0.0
        return 200, reply["model_version"], reply["outputs"][0]["data"][0]

    def ask_on() -> None:
        while not is_over.is_set():
            found.add(ask())

    with httpx.Client(headers=headers, timeout=60) as http:
        assert ask() == ask("/versions/4") == (200, "4", 4.0)
        write_scale(folder / "grows", 5)
        asking = threading.Thread(target=ask_on)
        asking.start()
        try:
            assert http.post(f"{url}/admin/reload").json()["accepted"]
        finally:
            is_over.set()
            asking.join()
        assert found <= {(200, "4", 4.0), (200, "5", 5.0)}
        assert ask() == ask("/versions/5") == (200, "5", 5.0)
        assert ask("/versions/4") == (200, "4", 4.0)
        assert http.get(f"{url}/v2/models/grows").json()["versions"] == ["4", "5"]


def test_statistics_count_what_was_asked(client: Any) -> None:
    before = client.get_inference_statistics("scale", "1")["model_stats"][0]
    x = np.ones((2, 3), np.float32)
    client.infer("scale", [given("x", x, "FP32")], model_version="1")
    with pytest.raises(utils.InferenceServerException):
        client.infer("scale", [given("x", np.ones((1, 4), np.float32), "FP32")], model_version="1")
    after = client.get_inference_statistics("scale", "1")["model_stats"][0]
    assert after["inference_count"] == before["inference_count"] + 2
    stats, stats_before = after["inference_stats"], before["inference_stats"]
    for stage in ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output"):
        assert stats[stage]["count"] == stats_before[stage]["count"] + 1, stage
    assert stats["compute_infer"]["ns"] > stats_before["compute_infer"]["ns"]
    assert 2 in [batch["batch_size"] for batch in after["batch_stats"]]
    assert {entry["name"] for entry in client.get_inference_statistics()["model_stats"]} >= {"simple", "scale"}


def test_many_requests_at_a_time(server: Serving) -> None:
    with httpclient.InferenceServerClient(server.host, concurrency=4) as client:
        client.register_plugin(WithKey(server.key))
        waiting = [client.async_infer("simple", pair()) for _ in range(12)]
        for one in waiting:
            np.testing.assert_array_equal(one.get_result().as_numpy("OUTPUT0"), A + B)


def test_the_asynchronous_client(server: Serving) -> None:
    async def ask() -> None:
        async with aioclient.InferenceServerClient(server.host) as client:
            client.register_plugin(WithKey(server.key))
            assert await client.is_model_ready("simple")
            for algorithm in (None, "gzip", "deflate"):
                result = await client.infer("simple", pair(kind=aioclient), response_compression_algorithm=algorithm)
                np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), A - B)
            with pytest.raises(utils.InferenceServerException, match="INPUT1"):
                await client.infer("simple", pair(kind=aioclient)[:1])

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("array", "datatype", "said"),
    [
        (A.astype(np.int64), "INT64", "expected INT32 of the shape [-1, 16], got the datatype INT64"),
        (A[:, :8], "INT32", "got the shape [1, 8]"),
        (A[0], "INT32", "got the shape [16]"),
    ],
)
def test_what_does_not_fit_is_told_with_what_was_expected(
    client: Any, array: np.ndarray[Any, Any], datatype: str, said: str
) -> None:
    with pytest.raises(utils.InferenceServerException) as refused:
        client.infer("simple", [given("INPUT0", array, datatype), pair()[1]])
    assert refused.value.status() == "400"
    assert "'INPUT0'" in refused.value.message()
    assert said in refused.value.message()
    assert client.is_server_ready()


def test_models_are_unloaded_loaded_and_changed(client: Any) -> None:
    index = {(entry["name"], entry["version"]): entry["state"] for entry in client.get_model_repository_index()}
    assert index[("half", "1")] == index[("scale", "1")] == "READY"
    client.unload_model("half")
    assert not client.is_model_ready("half")
    assert client.is_model_ready("simple")
    with pytest.raises(utils.InferenceServerException, match="failed to load"):
        client.load_model("half", config='"parameters": {"config": {{"max_batch_size": "16"}}}')
    with pytest.raises(utils.InferenceServerException, match="failed to load"):
        client.load_model("half", config="{}", files={"file:1/model.onnx": b"onnx"})
    client.load_model("half", config=json.dumps({"max_batch_size": "16"}))
    assert client.is_model_ready("half")
    assert client.get_model_config("half")["max_batch_size"] == 16
    with pytest.raises(utils.InferenceServerException, match="failed to load"):
        client.load_model("wrong_model_name")


def test_shared_memory_is_not_there(client: Any) -> None:
    for ask in (client.get_system_shared_memory_status, client.get_cuda_shared_memory_status):
        with pytest.raises(utils.InferenceServerException, match="There is nothing at"):
            ask()
