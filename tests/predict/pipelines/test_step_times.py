"""The duration of each step of a pipeline, in answers to requests that ask for it: over REST and over gRPC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.predict.live import serving
from tests.predict.small_onnx import identity

from inferd.errors import InvalidRequest
from inferd.predict.codecs.v2 import wants_times

tritonclient = pytest.importorskip("tritonclient.grpc")

STEPS = {"step_ms.normalize", "step_ms.model", "step_ms.softmax"}


def test_step_times_are_in_an_answer_only_where_the_request_asks_for_them(tmp_path: Path) -> None:
    file = identity(tmp_path / "m.onnx")
    around = {"preprocess": [{"op": "normalize"}], "postprocess": [{"op": "softmax"}]}
    with serving(tmp_path, {"m": {"source": str(file), **around}}, grpc_port=0) as server:

        def ask(**parameters: object) -> Any:
            tensor = {"name": "input", "datatype": "FP32", "shape": [1, 2], "data": [0, 1]}
            body = {"inputs": [tensor], **({"parameters": parameters} if parameters else {})}
            return httpx.post(server.url + "/v2/models/m/infer", json=body, timeout=10).json()

        assert "parameters" not in ask()
        assert "parameters" not in ask(return_step_times=False)
        said = ask(return_step_times=True)
        assert "parameters" in said, said
        times = said["parameters"]
        assert times.keys() == STEPS
        assert all(0 <= value < 10_000 for value in times.values())
        assert "must be true or false" in ask(return_step_times=1)["error"]

        client = tritonclient.InferenceServerClient(server.grpc)
        given = tritonclient.InferInput("input", [1, 2], "FP32")
        given.set_data_from_numpy(np.zeros((1, 2), np.float32))
        told = client.infer("m", [given], parameters={"return_step_times": True}).get_response().parameters
        assert set(told) >= STEPS
        assert not STEPS & set(client.infer("m", [given]).get_response().parameters)
        client.close()


@pytest.mark.parametrize("value", ["true", 1, None])
def test_the_wish_is_true_or_false(value: str | int | None) -> None:
    with pytest.raises(InvalidRequest):
        wants_times({"return_step_times": value})
