"""Triton's own gRPC clients, unmodified: sync, asyncio and streams, against a real server of real models."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton  # type: ignore[import-untyped]
import tritonclient.grpc.aio as triton_aio  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import TensorProto, helper
from tests.worker.watching import children, is_running, until_now
from tritonclient.utils import InferenceServerException  # type: ignore[import-untyped]

from inferd.predict.contract import NUMPY, Array

DATATYPES = [name for name in NUMPY if name != "BF16"]  # for which these clients have no numpy type

MODELS = """
import numpy as np

class Echo:
    inputs = {name: f"{name.removesuffix('_in')}[-1]" for name in NAMES}
    outputs = {name.replace("_in", "_out"): f"{name.removesuffix('_in')}[-1]" for name in NAMES}

    def predict(self, **inputs):
        return {name.replace("_in", "_out"): value for name, value in inputs.items()}

class Repeat:
    inputs = {"IN": "INT32[1]"}
    outputs = {"OUT": "INT32[1]"}

    def predict(self, IN):
        for number in range(int(IN[0])):
            yield {"OUT": np.array([number], np.int32)}
"""


def write_simple(path: Path) -> None:
    """Triton's example: the sum and the difference of two rows of sixteen numbers."""
    shape: list[str | int | None] = ["rows", 16]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT32, shape) for name in ("INPUT0", "INPUT1")]
    outputs = [helper.make_tensor_value_info(name, TensorProto.INT32, shape) for name in ("OUTPUT0", "OUTPUT1")]
    nodes = [
        helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
        helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "simple", inputs, outputs), opset_imports=[helper.make_opsetid("", 17)]
    )
    model.ir_version = 9
    onnx.save(model, str(path))


class Served:
    def __init__(self, process: subprocess.Popen[str], http: str, grpc: str, log: Path) -> None:
        self.process = process
        self.http = http
        self.grpc = grpc
        self.log = log


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    write_simple(folder / "simple.onnx")
    names = [f"{name}_in" for name in DATATYPES]
    (folder / "some_models.py").write_text(textwrap.dedent(MODELS).replace("NAMES", repr(names)))
    code = {"allow_code": True}
    config = {
        "server": {"port": 0, "grpc_port": 0, "grace_s": 5},
        "models": {
            "simple": {"source": str(folder / "simple.onnx")},
            "echo": {"source": f"{folder / 'some_models.py'}:Echo", **code},
            "repeat": {"source": f"{folder / 'some_models.py'}:Repeat", **code},
        },
    }
    (folder / "inferd.yaml").write_text(json.dumps(config))
    log = tmp_path_factory.mktemp("log") / "stderr"
    with log.open("w", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "inferd", "serve", str(folder / "inferd.yaml")],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    assert process.stdout is not None
    try:
        ready = next((line for line in process.stdout if "is ready at" in line), "")
        assert ready, log.read_text(encoding="utf-8")
        http, grpc = re.findall(r"at (\S+?),? ", ready)
        yield Served(process, http, grpc, log)
        workers = children(process.pid)
        process.terminate()
        assert process.wait(timeout=20) == 0
        assert "Traceback" not in log.read_text(encoding="utf-8")
        until_now(lambda: not any(is_running(pid) for pid in workers), "the workers are gone", 5)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with triton.InferenceServerClient(served.grpc) as made:
        yield made


def tensor(name: str, array: Array, module: Any = triton, datatype: str = "") -> Any:
    made = module.InferInput(name, list(array.shape), datatype or "INT32")
    made.set_data_from_numpy(array)
    return made


LEFT = np.arange(16, dtype=np.int32).reshape(1, 16)
RIGHT = np.full((1, 16), 3, np.int32)


def pair(module: Any = triton) -> list[Any]:
    return [tensor("INPUT0", LEFT, module), tensor("INPUT1", RIGHT, module)]


def test_a_request_is_answered_with_its_id_and_the_outputs_it_wants(client: Any) -> None:
    result = client.infer("simple", pair(), request_id="mine", outputs=[triton.InferRequestedOutput("OUTPUT1")])
    assert (result.get_response().id, result.get_response().model_version) == ("mine", "1")
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), LEFT - RIGHT)
    assert result.as_numpy("OUTPUT0") is None


def test_the_best_classes_come_as_texts(client: Any) -> None:
    wanted = [triton.InferRequestedOutput("OUTPUT0", class_count=2)]
    assert client.infer("simple", pair(), outputs=wanted).as_numpy("OUTPUT0").tolist() == [[b"18:15", b"17:14"]]


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests_are_opened(client: Any, algorithm: str) -> None:
    result = client.infer("simple", pair(), compression_algorithm=algorithm)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), LEFT + RIGHT)


def test_values_may_come_in_the_field_of_their_datatype(served: Served) -> None:
    """As clients do that are made from the protocol's file (grpc_explicit_int_content_client)."""
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    request = service_pb2.ModelInferRequest(model_name="simple", id="my request id")
    for name, array in (("INPUT0", LEFT), ("INPUT1", RIGHT)):
        given_tensor = service_pb2.ModelInferRequest.InferInputTensor(name=name, datatype="INT32", shape=[1, 16])
        given_tensor.contents.int_contents[:] = array.ravel().tolist()
        request.inputs.append(given_tensor)
    with grpc.insecure_channel(served.grpc) as channel:
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=10)
    np.testing.assert_array_equal(np.frombuffer(answer.raw_output_contents[0], np.int32), (LEFT + RIGHT)[0])


def test_everything_is_told_that_these_clients_ask_for(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("simple")
    assert not client.is_model_ready("simple", "7")
    assert not client.is_model_ready("missing")
    assert client.get_server_metadata(as_json=True)["name"] == "inferd"
    metadata = client.get_model_metadata("simple", as_json=True)
    assert metadata["inputs"][0] == {"name": "INPUT0", "datatype": "INT32", "shape": ["-1", "16"]}
    config = client.get_model_config("simple", as_json=True)["config"]
    assert config["input"][0] == {"name": "INPUT0", "data_type": "TYPE_INT32", "dims": ["16"]}
    assert config["backend"] == "onnxruntime"
    client.infer("simple", pair())
    [told] = client.get_inference_statistics("simple").model_stats
    assert told.inference_count >= 1
    assert told.inference_stats.success.ns > 0
    assert {model.name for model in client.get_model_repository_index().models} == {"simple", "echo", "repeat"}


def test_failures_come_with_their_status(client: Any) -> None:
    short = [tensor("INPUT0", LEFT[:, :8]), tensor("INPUT1", RIGHT)]
    for inputs, model, status, says in (
        (pair(), "missing", "NOT_FOUND", "missing"),
        (short, "simple", "INVALID_ARGUMENT", r"INPUT0.*\[-1, 16\].*\[1, 8\]"),
        (pair()[:1], "simple", "INVALID_ARGUMENT", "INPUT1"),
    ):
        with pytest.raises(InferenceServerException, match=says) as failed:
            client.infer(model, inputs)
        assert failed.value.status() == f"StatusCode.{status}"
    with pytest.raises(InferenceServerException, match="admin"):
        client.load_model("simple")
    with pytest.raises(InferenceServerException, match="shared memory"):
        client.get_system_shared_memory_status()


def test_the_asyncio_client_asks_many_things_at_once(served: Served) -> None:
    async def ask() -> list[Any]:
        async with triton_aio.InferenceServerClient(served.grpc) as asking:
            assert await asking.is_model_ready("simple")
            results = [asking.infer("simple", pair(triton_aio), request_id=str(number)) for number in range(50)]
            return await asyncio.gather(*results)

    results = asyncio.run(ask())
    assert [result.get_response().id for result in results] == [str(number) for number in range(50)]
    for result in results:
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), LEFT + RIGHT)


class Heard:
    """What a stream's callback hears."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def __call__(self, result: Any, error: Any) -> None:
        self._queue.put((result, error))

    def next(self) -> tuple[Any, Any]:
        return self._queue.get(timeout=10)


def test_a_stream_answers_each_request(served: Served) -> None:
    heard = Heard()
    with triton.InferenceServerClient(served.grpc) as asking:
        asking.start_stream(heard)
        for number in range(20):
            asking.async_stream_infer("simple", pair(), request_id=str(number))
        ids = set()
        for _ in range(20):
            result, error = heard.next()
            assert error is None
            assert result.get_response().parameters["triton_final_response"].bool_param
            np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), LEFT - RIGHT)
            ids.add(result.get_response().id)
        assert ids == {str(number) for number in range(20)}
        asking.async_stream_infer("missing", pair())
        _, error = heard.next()
        assert "missing" in error.message()
        asking.async_stream_infer("simple", pair(), request_id="after")
        assert heard.next()[0].get_response().id == "after"
        asking.stop_stream()


def test_a_sequence_is_answered_in_order(served: Served) -> None:
    heard = Heard()
    with triton.InferenceServerClient(served.grpc) as asking:
        asking.start_stream(heard)
        for number in range(30):
            for sequence in (1000, "named"):
                asking.async_stream_infer(
                    "simple",
                    pair(),
                    request_id=f"{sequence} {number}",
                    sequence_id=sequence,
                    sequence_start=number == 0,
                    sequence_end=number == 29,
                )
        answered: dict[str, list[int]] = {"1000": [], "named": []}
        for _ in range(60):
            result, error = heard.next()
            assert error is None
            sequence, _, number = result.get_response().id.partition(" ")
            answered[sequence].append(int(number))
        asking.stop_stream()
    assert answered == {"1000": list(range(30)), "named": list(range(30))}


def test_a_model_that_answers_several_times_does_so_on_a_stream(served: Served) -> None:
    heard = Heard()
    with triton.InferenceServerClient(served.grpc) as asking:
        asking.start_stream(heard)
        count = np.array([3], np.int32)
        asking.async_stream_infer("repeat", [tensor("IN", count)], enable_empty_final_response=True)
        answers = [heard.next()[0].get_response() for _ in range(4)]
        asking.stop_stream()
        assert [answer.parameters["triton_final_response"].bool_param for answer in answers] == [False] * 3 + [True]
        assert [np.frombuffer(a.raw_output_contents[0], np.int32)[0] for a in answers[:3]] == [0, 1, 2]
        with pytest.raises(InferenceServerException, match="ModelStreamInfer"):
            asking.infer("repeat", [tensor("IN", count)])


def test_a_stream_of_the_asyncio_client(served: Served) -> None:
    async def ask() -> list[str]:
        async def requests() -> Any:
            for number in range(5):
                yield {"model_name": "simple", "inputs": pair(triton_aio), "request_id": str(number)}

        async with triton_aio.InferenceServerClient(served.grpc) as asking:
            ids = []
            async for result, error in asking.stream_infer(requests()):
                assert error is None
                ids.append(result.get_response().id)
            return ids

    assert sorted(asyncio.run(ask())) == [str(number) for number in range(5)]


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for datatype in DATATYPES:
        size = draw(st.integers(0, 3))
        if datatype == "BYTES":
            array = np.empty(size, np.object_)
            array[:] = [draw(st.binary(max_size=6)) for _ in range(size)]
        else:
            array = draw(arrays.arrays(NUMPY[datatype], size))
        found[datatype] = array
    return found


SERVED: Served


@pytest.fixture(scope="module", autouse=True)
def _shared(served: Served) -> None:
    global SERVED  # noqa: PLW0603
    SERVED = served


@settings(max_examples=25, deadline=None)
@given(tensors())
def test_both_doors_give_the_same_bits(given_tensors: dict[str, Array]) -> None:
    """Of every datatype, any values: REST with binary tensors, and gRPC."""
    described, parts = [], []
    for datatype, array in given_tensors.items():
        raw = as_bytes(array)
        parts.append(raw)
        described.append(
            {
                "name": f"{datatype}_in",
                "datatype": datatype,
                "shape": list(array.shape),
                "parameters": {"binary_data_size": len(raw)},
            }
        )
    head = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
    reply = httpx.post(
        f"{SERVED.http}/v2/models/echo/infer",
        content=head + b"".join(parts),
        headers={"inference-header-content-length": str(len(head)), "content-type": "application/octet-stream"},
        timeout=20,
    )
    assert reply.status_code == 200, reply.text
    length = int(reply.headers["inference-header-content-length"])
    outputs, at = {}, length
    for output in json.loads(reply.content[:length])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        outputs[output["name"]] = (output["datatype"], output["shape"], reply.content[at : at + size])
        at += size
    with triton.InferenceServerClient(SERVED.grpc) as asking:
        inputs = [tensor(f"{name}_in", array, datatype=name) for name, array in given_tensors.items()]
        answer = asking.infer("echo", inputs).get_response()
    told = {
        output.name: (output.datatype, list(output.shape), raw)
        for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
    }
    assert told == outputs
    assert [told[f"{name}_out"][2] for name in given_tensors] == parts


def as_bytes(array: Array) -> bytes:
    if array.dtype.kind == "O":
        return b"".join(len(element).to_bytes(4, "little") + element for element in array.tolist())
    return array.tobytes()


def test_grpcs_calls_are_in_the_log_and_the_metrics(served: Served, client: Any) -> None:
    client.infer("simple", pair(), headers={"x-request-id": "find-me"})

    def lines() -> list[dict[str, Any]]:
        told = [json.loads(line) for line in served.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in told if line.get("request_id") == "find-me"]

    until_now(lambda: bool(lines()), "the line is in the log", 5)
    [line] = lines()
    assert (line["route"], line["status"], line["model"], line["outcome"]) == (
        "/inference.GRPCInferenceService/ModelInfer",
        200,
        "simple",
        "done",
    )
    metrics = httpx.get(f"{served.http}/metrics", timeout=10).text
    assert re.search(r'inferd_http_requests_total\{[^}]*route="/inference.GRPCInferenceService/ModelInfer"', metrics)
