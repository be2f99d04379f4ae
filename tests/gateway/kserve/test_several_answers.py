"""A Python generator behind calls that have one answer: one is given, several are refused with the way to get them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from tests.worker.watching import until

from inferd.config import Config, ModelConfig, ServerConfig
from inferd.gateway.server import create_app
from inferd.http.listener import HttpServer
from inferd.router.router import Router

MODEL = """
class Model:
    def predict(self, n: int) -> int:
        while n:
            yield n
            n -= 1
"""


async def asked(folder: Path, number: int) -> httpx.Response:
    """The answer; afterwards nothing may be in flight."""
    file = folder / "countdown.py"
    file.write_text(MODEL)
    model = ModelConfig(source=f"{file}:Model", allow_code=True)
    config = Config(server=ServerConfig(port=0, grace_s=1), models={"countdown": model})
    router = Router(config, lambda event: None)
    await router.start()
    await asyncio.wait_for(router.settled(), 30)
    server = HttpServer(create_app(router, config, lambda event: None), config.server)
    try:
        async with server.running(), httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
            tensor = {"name": "n", "shape": [1], "datatype": "INT64", "data": [number]}
            path = "/v2/models/countdown/infer"
            answer = await client.post(path, json={"inputs": [tensor]}, timeout=20)
            (replica,) = router.replicas("countdown")
            await until(lambda: not replica.num_in_flight, "the rest is cancelled")
            return answer
    finally:
        await router.stop()


def test_one_answer_is_the_answer(tmp_path: Path) -> None:
    answer = asyncio.run(asked(tmp_path, 1))
    assert answer.status_code == 200
    assert answer.json()["outputs"][0]["data"] == [1]


def test_several_answers_are_refused_and_the_rest_is_not_computed(tmp_path: Path) -> None:
    answer = asyncio.run(asked(tmp_path, 10**9))
    assert answer.status_code == 400
    assert "ModelStreamInfer" in answer.json()["error"]


def test_no_answer_is_an_error_of_the_model(tmp_path: Path) -> None:
    answer = asyncio.run(asked(tmp_path, 0))
    assert answer.status_code == 500
    assert "without an answer" in answer.json()["error"]
