"""KServe's own Python client, unmodified, where it is installed (its pins are heavy, so a venv of its own has it)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.clients.tensor_models import Serving, serving, write_models

kserve = pytest.importorskip("kserve")
inference_client = pytest.importorskip("kserve.inference_client")

X = np.array([[1, 2, 3]], np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("kserve")
    write_models(folder)
    with serving(folder / "server", {"scale": {"source": str(folder / "scale")}}) as started:
        yield started


def ask(server: Serving, protocol: str, *steps: Any) -> list[Any]:
    """Run steps, each a function of client, base URL and headers."""

    async def run() -> list[Any]:
        config = inference_client.RESTConfig(protocol=protocol, retries=0, timeout=30)
        async with inference_client.InferenceRESTClient(config) as client:
            headers = {"authorization": f"Bearer {server.key}"}
            return [await step(client, f"http://{server.host}", dict(headers)) for step in steps]

    return asyncio.run(run())


def request(*, binary: bool) -> Any:
    made = kserve.InferInput("x", list(X.shape), "FP32")
    made.set_data_from_numpy(X, binary_data=binary)
    return kserve.InferRequest(model_name="scale", infer_inputs=[made])


def test_v2_is_ready_and_answers_json_and_binary(server: Serving) -> None:
    live, ready, model, plain, binary = ask(
        server,
        "v2",
        lambda client, url, headers: client.is_server_live(url, headers=headers),
        lambda client, url, headers: client.is_server_ready(url, headers=headers),
        lambda client, url, headers: client.is_model_ready(url, "scale", headers=headers),
        lambda client, url, headers: client.infer(url, request(binary=False), model_name="scale", headers=headers),
        lambda client, url, headers: client.infer(url, request(binary=True), model_name="scale", headers=headers),
    )
    assert live
    assert ready
    assert model
    for result in (plain, binary):
        np.testing.assert_array_equal(result.outputs[0].as_numpy(), X * 2)


def test_v1_is_ready_and_predicts(server: Serving) -> None:
    ready, result = ask(
        server,
        "v1",
        lambda client, url, headers: client.is_model_ready(url, "scale", headers=headers),
        lambda client, url, headers: client.infer(url, {"instances": X.tolist()}, model_name="scale", headers=headers),
    )
    assert ready
    assert result == {"predictions": [[2, 4, 6]]}
