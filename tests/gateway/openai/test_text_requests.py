"""The fields that the gateway reads in requests about texts, and the models that it sends them to."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from tests.gateway.fakes import FakeRouter, FakeStatus, FakeStream, Running, info, post, running

from inferd.config import Config, ModelConfig
from inferd.types import End, Prediction, PredictRequest, Relay, Relayed, RelayHead, Request, Sink, Usage

PATHS: dict[str, tuple[str, dict[str, object]]] = {
    "/v1/embeddings": ("openai.embeddings", {"input": "a"}),
    "/v2/embed": ("cohere.embed", {"texts": ["a"]}),
    "/embed": ("tei.embed", {"inputs": "a"}),
    "/rerank": ("rerank", {"query": "a", "documents": ["b"]}),
    "/v1/rerank": ("rerank", {"query": "a", "documents": ["b"]}),
    "/v2/rerank": ("cohere.rerank", {"query": "a", "documents": ["b"]}),
    "/score": ("score", {"text_1": "a", "text_2": "b"}),
    "/v1/score": ("score", {"text_1": "a", "text_2": "b"}),
    "/classify": ("classify", {"input": "a"}),
    "/pooling": ("pooling", {"input": "a"}),
    "/predict": ("tei.predict", {"inputs": "a"}),
}


def text_model(name: str, *tasks: str) -> FakeStatus:
    changed = {"kind": "predict", "platform": "inferd_encoder", "tasks": ("predict", *tasks)}
    return FakeStatus(name, info=msgspec.structs.replace(info(name), **changed))


class TextRouter(FakeRouter):
    """A chat model beside text models that answer with what they were asked."""

    def __init__(self) -> None:
        super().__init__("chat")
        self.statuses += [text_model("vectors", "embed", "score", "rerank"), text_model("classes", "classify")]

    def submit(self, request: Request, sink: Sink, relay: Relay | None = None) -> FakeStream:
        if isinstance(request, PredictRequest):
            said = msgspec.json.encode({"dialect": request.dialect, "model": request.model})
            self.prediction = Prediction(said, headers=(("x-note", "told"),))
        return super().submit(request, sink, relay)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(TextRouter()) as started:
        yield started


@pytest.mark.parametrize("path", PATHS)
def test_a_request_reaches_the_model_in_its_own_dialect(server: Running, path: str) -> None:
    dialect, body = PATHS[path]
    model = "classes" if path in ("/classify", "/predict") else "vectors"
    reply = post(server, path, {**body, "model": model, "priority": -1, "timeout": 30})
    assert reply.json() == {"dialect": dialect, "model": model}
    assert reply.headers["x-note"] == "told"
    given = server.router.streams[-1].given
    assert isinstance(given, PredictRequest)
    assert given.deadline_s == 30
    assert msgspec.json.decode(given.body)["model"] == model
    assert server.served().outcome == "done"


def test_the_two_forms_of_rerank_are_told_apart(server: Running) -> None:
    assert post(server, "/rerank", {"query": "a", "texts": ["b"]}).json()["dialect"] == "tei.rerank"


@pytest.mark.parametrize("path", PATHS)
def test_without_a_name_the_one_model_that_can_is_meant(server: Running, path: str) -> None:
    dialect, body = PATHS[path]
    reply = post(server, path, body)
    if path == "/pooling":  # two can
        assert reply.status_code == 400
        assert "'model' is missing" in reply.text
        return
    assert reply.json() == {
        "dialect": dialect,
        "model": "classes" if "classify" in path or "predict" in path else "vectors",
    }


@pytest.mark.parametrize("path", PATHS)
def test_a_chat_model_is_not_asked_for_what_it_cannot_do(server: Running, path: str) -> None:
    reply = post(server, path, {**PATHS[path][1], "model": "chat"})
    assert reply.status_code == 400
    assert "it can generate" in reply.text
    assert ("error_type" in reply.json()) == (path in ("/embed", "/predict"))


def test_a_refusal_of_predict_names_what_predict_needs() -> None:
    router = FakeRouter("vectors")
    router.statuses[:] = [text_model("vectors", "embed", "score")]
    with running(router) as server:
        reply = post(server, "/predict", {"inputs": "a"})
    assert reply.status_code == 400
    assert "The model 'vectors' cannot classify or rerank; it can predict, embed, score." in reply.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_model_of_vectors_is_not_asked_to_chat(server: Running, path: str) -> None:
    body = {"model": "vectors", "messages": [{"role": "user", "content": "a"}]}
    if path == "/v1/completions":
        body = {"model": "vectors", "prompt": "a"}
    error = post(server, path, body).json()["error"]
    assert error["code"] == "unsupported_task"
    assert error["message"] == "The model 'vectors' cannot generate; it can predict, embed, score, rerank."


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"model": 3}', b'{"priority": "high"}', b'{"timeout": -1, "input": "a"}']
)
def test_a_malformed_body_is_refused_before_the_router_is_asked(server: Running, body: bytes) -> None:
    before = len(server.router.streams)
    assert post(server, "/v1/embeddings", body).status_code == 400
    assert len(server.router.streams) == before


@pytest.mark.parametrize(
    ("path", "there"), [("/v1/embeddings", "/embeddings"), ("/rerank", "/rerank"), ("/v1/score", "/score")]
)
def test_requests_for_a_model_elsewhere_are_relayed(path: str, there: str) -> None:
    config = Config(models={"far": ModelConfig(source="openai:http://127.0.0.1:9/v1")})
    router = FakeRouter("far")
    router.statuses[0].info = None
    router.relay_script = lambda request, relay: [
        Relayed(request.id, RelayHead(200, b"application/json"), b'{"data": []}', End("done", Usage(3)))
    ]
    with running(router, config) as server:
        reply = post(server, path, {"model": "far", **PATHS[path][1], "anything": 1})
        assert reply.json() == {"data": []}
        relay = router.relays[-1]
        assert relay is not None
        assert relay.path == there
        assert msgspec.json.decode(relay.body)["anything"] == 1
        assert server.served().usage == Usage(3)
        twice = post(server, path, b'{"model": "far", "input": "a", "input": "b"}')
        assert twice.json()["error"]["code"] == "duplicate_key"
        other = post(server, "/classify", {"model": "far", "input": "a"})
        assert other.status_code == 400
        assert "runs on remote servers, to which /classify is not relayed" in other.text
