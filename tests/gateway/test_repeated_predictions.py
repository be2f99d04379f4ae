"""Predictions asked twice, computed once, as it is with texts: tensors, rows and requests about texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
from tests.gateway.fakes import FakeRouter, FakeStatus, FakeStream, Running, info, running
from tests.gateway.openai.test_text_requests import text_model

from inferd.cache.memory import MemoryCache
from inferd.config import CacheConfig, Config, ModelCacheConfig, ModelConfig
from inferd.errors import Overloaded
from inferd.tenancy.idempotency import IdempotencyStore
from inferd.types import End, Prediction, Relay, Relayed, RelayHead, Request, Sink

V2 = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
WAYS: dict[str, tuple[str, Any]] = {
    "v2": ("/v2/models/vectors/infer", V2),
    "v1": ("/v1/models/vectors:predict", {"instances": [[1]]}),
    "mlflow": ("/invocations", {"instances": [[1]]}),
    "csv": ("/invocations", b"x\n1\n"),
    "embeddings": ("/v1/embeddings", {"model": "vectors", "input": "a"}),
    "rerank": ("/v1/rerank", {"model": "vectors", "query": "a", "documents": ["b"]}),
    "score": ("/score", {"model": "vectors", "text_1": "a", "text_2": "b"}),
    "classify": ("/classify", {"model": "vectors", "input": "a"}),
    "elsewhere": ("/v1/embeddings", {"model": "far", "input": "a"}),
}


class CountingRouter(FakeRouter):
    """Each answer tells how many were computed; binary ones need a header to be read."""

    def __init__(self) -> None:
        super().__init__()
        several = text_model("vectors", "embed", "rerank", "score", "classify")
        self.statuses = [several, FakeStatus("far", info=msgspec.structs.replace(info("far")))]
        self.relay_script = lambda request, relay: [
            Relayed(
                request.id,
                head=RelayHead(200, b"application/json"),
                data=b'{"far": %d}' % len(self.streams),
                end=End("done"),
            )
        ]

    def submit(self, request: Request, sink: Sink, relay: Relay | None = None) -> FakeStream:
        headers = (("Inference-Header-Content-Length", "7"), ("server-timing", "q;dur=1"))
        self.prediction = Prediction(b'{"n":%d}' % len(self.streams), headers=headers)
        return super().submit(request, sink, relay)


def config(*, is_cached: bool) -> Config:
    cache = ModelCacheConfig(enabled=is_cached)
    return Config(
        models={
            "vectors": ModelConfig(source="x", cache=cache),
            "far": ModelConfig(source="openai:http://127.0.0.1:9/v1", cache=cache),
        },
        cache=CacheConfig(max_entry_bytes=4096),
    )


class Serving(NamedTuple):
    """A server, and whether its models keep their answers."""

    running: Running
    is_cached: bool

    @property
    def url(self) -> str:
        return self.running.url

    @property
    def router(self) -> FakeRouter:
        return self.running.router


@pytest.fixture(params=[False, True], ids=["keyed", "cached"])
def server(request: pytest.FixtureRequest) -> Iterator[Serving]:
    settings = config(is_cached=request.param)
    with running(
        CountingRouter(), settings, cache=MemoryCache(settings.cache), idempotency=IdempotencyStore(60)
    ) as made:
        yield Serving(made, request.param)


def ask(server: Serving, way: str, **headers: str) -> httpx.Response:
    path, body = WAYS[way]
    target = {} if path != "/invocations" else {"X-Amzn-SageMaker-Target-Model": "vectors"}
    kind = "text/csv" if isinstance(body, bytes) else "application/json"
    content = body if isinstance(body, bytes) else json.dumps(body)
    sent = {"content-type": kind, **target, **headers}
    return httpx.post(server.url + path, content=content, headers=sent, timeout=10)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_prediction_again_is_the_first_ones_answer(server: Serving, way: str) -> None:
    is_cached = server.is_cached
    key = {} if is_cached else {"idempotency-key": "k"}
    first, again = ask(server, way, **key), ask(server, way, **key)
    assert (first.status_code, again.status_code) == (200, 200), (first.text, again.text)
    assert again.content == first.content
    assert len(server.router.streams) == 1
    if is_cached:
        assert (first.headers["x-inferd-cache"], again.headers["x-inferd-cache"]) == ("miss", "hit")
    else:
        assert again.headers["idempotent-replayed"] == "true"
    if way != "elsewhere":
        assert again.headers["inference-header-content-length"] == "7"
        assert "server-timing" not in again.headers, "that was another one's time"


def test_another_prediction_under_the_same_key_is_refused_and_a_failed_one_tried_again(server: Serving) -> None:
    server.router.refusal = Overloaded("Full.")
    assert ask(server, "v2", **{"idempotency-key": "k"}).status_code == 503
    server.router.refusal = None
    assert ask(server, "v2", **{"idempotency-key": "k"}).status_code == 200
    for other in ("v1", "mlflow", "embeddings"):
        assert ask(server, other, **{"idempotency-key": "k"}).status_code == 422
    assert len(server.router.streams) == 1


def test_other_tensors_and_steps_of_a_sequence_are_computed(server: Serving) -> None:
    def infer(**fields: Any) -> Any:
        return httpx.post(server.url + "/v2/models/vectors/infer", json={**V2, **fields}, timeout=10).json()["n"]

    moves = [{"sequence_id": 7, "sequence_start": True}, {"sequence_id": 7}, {"sequence_id": 7}]
    assert [infer(parameters=move) for move in moves] == [0, 1, 2]
    assert [infer(id=name) for name in "ab"] == [3, 4]
