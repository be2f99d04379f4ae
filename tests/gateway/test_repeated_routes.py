"""Every route that computes honours an Idempotency-Key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.gateway.fakes import FakeRouter, FakeStatus, Running, info, post, running, sse, words
from tests.gateway.openai.test_text_requests import PATHS, text_model

from inferd.errors import WorkerDied
from inferd.gateway.routes import ROUTES
from inferd.tenancy.idempotency import IdempotencyStore
from inferd.types import Delta, End, GenerateRequest, Output, PromptReport, TensorSpec, Usage

TENSORS = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
TEXT = {"text_input": "Hi"}
NOT_COMPUTING = {
    "/tokenize",
    "/detokenize",
    "/v1/messages/count_tokens",
    "/v1/responses/compact",
    "/v1/responses/input_tokens",
    "/v1/responses/{response_id}/cancel",
    "/v1/conversations",
    "/v1/conversations/{conversation_id}",
    "/v1/conversations/{conversation_id}/items",
    "/v1/files",
    "/v1/batches",  # its requests are asked later
    "/v1/batches/{id}/cancel",
    "/v1/batches/{id}/resume",
    "/v1/messages/batches",
    "/v1/messages/batches/{id}/cancel",
}  # they cost no tokens, and answer the same without a key

COMPUTING: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}),
    "/v1/responses": ("/v1/responses", {"model": "tiny", "input": "a"}),
    "/v1/messages": (
        "/v1/messages",
        {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]},
    ),
    "/v1/completions": ("/v1/completions", {"model": "tiny", "prompt": "a"}),
    "/v2/models/{model}/infer": ("/v2/models/digits/infer", TENSORS),
    "/v2/models/{model}/versions/{version}/infer": ("/v2/models/digits/versions/1/infer", TENSORS),
    "/v2/models/{model}/generate": ("/v2/models/tiny/generate", TEXT),
    "/v2/models/{model}/versions/{version}/generate": ("/v2/models/tiny/versions/1/generate", TEXT),
    "/v2/models/{model}/generate_stream": ("/v2/models/tiny/generate_stream", TEXT),
    "/v2/models/{model}/versions/{version}/generate_stream": ("/v2/models/tiny/versions/1/generate_stream", TEXT),
    "/v1/models/{model}:predict": ("/v1/models/digits:predict", {"instances": [[1, 2]]}),
    "/invocations": ("/invocations", {"inputs": [[1, 2]]}),
    "/v1/decisions": (
        "/v1/decisions",
        {"model": "tiny", "input": "a", "questions": [{"type": "predicate", "instructions": "It is late."}]},
    ),
    "/api/chat": ("/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}),
    "/api/generate": ("/api/generate", {"model": "tiny", "prompt": "a"}),
    "/api/embed": ("/api/embed", {"model": "vectors", "input": "a"}),
    "/api/embeddings": ("/api/embeddings", {"model": "vectors", "prompt": "a"}),
    "/generate": ("/generate", {"model": "tiny", "inputs": "a"}),
    "/generate_stream": ("/generate_stream", {"model": "tiny", "inputs": "a"}),
    "/": ("/", {"model": "tiny", "inputs": "a"}),
    **{
        path: (path, {**body, "model": "classes" if path in ("/classify", "/predict") else "vectors"})
        for path, (_, body) in PATHS.items()
    },
}


def says_or_scores(request: GenerateRequest) -> list[Output]:
    """Three tokens, or a score of each answer where answers are given."""
    if not request.answer_sets:
        return list(words("Hello", " world", "!")(request))  # type: ignore[arg-type]
    report = PromptReport(3, scores=tuple([(0.0,) * len(one.answers) for one in request.answer_sets]))
    return [Output(request.id, (Delta(0, finish_reason="length"),), report, End("done", Usage(3, 0, 0)))]


class Models(FakeRouter):
    """A model that writes, one that takes tensors and two that take texts."""

    def __init__(self) -> None:
        super().__init__("tiny")
        self.script = says_or_scores
        known = msgspec.structs.replace(
            info("digits"),
            kind="predict",
            platform="onnxruntime_onnx",
            tasks=("predict",),
            inputs=(TensorSpec("x", "FP32", (-1, 2)),),
            outputs=(TensorSpec("y", "FP32", (-1, 1)),),
        )
        self.statuses += [
            FakeStatus("digits", info=known),
            text_model("vectors", "embed", "score", "rerank"),
            text_model("classes", "classify"),
        ]

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with running(Models(), idempotency=IdempotencyStore(60)) as started:
        yield started


@pytest.fixture
def server(shared: Running) -> Running:
    return shared.reset()


def test_no_route_that_computes_is_forgotten_here() -> None:
    found = {route.pattern for route in ROUTES if route.method == "POST" and route.scope == "infer"}
    assert found - NOT_COMPUTING == set(COMPUTING)


@pytest.mark.parametrize("pattern", sorted(COMPUTING))
def test_the_same_request_under_a_key_is_computed_once(server: Running, pattern: str) -> None:
    path, body = COMPUTING[pattern]
    headers = {"idempotency-key": pattern, "x-amzn-sagemaker-target-model": "digits"}
    first, again = post(server, path, body, **headers), post(server, path, body, **headers)
    assert (first.status_code, again.status_code) == (200, 200), first.text
    assert again.content == first.content
    assert again.headers["content-type"] == first.headers["content-type"]
    assert again.headers["idempotent-replayed"] == "true"
    assert len(server.router.streams) == 1
    post(server, path, body, **headers | {"idempotency-key": f"another {pattern}"})
    assert len(server.router.streams) == 2


def test_a_generate_stream_that_broke_is_not_repeated(server: Running) -> None:
    """Its text looks like the end of a complete stream, and is none."""

    def broken(request: GenerateRequest) -> list[Output | Any]:
        said = Delta(0, '"details":{"finish_reason":"stop"}}\n\n', (1,))
        return [Output(request.id, (said,), PromptReport(1)), WorkerDied("Dead.")]

    whole, server.router.script = server.router.script, broken
    path = "/v2/models/tiny/generate_stream"
    first = post(server, path, TEXT, **{"idempotency-key": "broken"})
    assert sse(first.text)[-1] == {"error": "Dead."}
    server.router.script = whole
    again = post(server, path, TEXT, **{"idempotency-key": "broken"})
    assert "idempotent-replayed" not in again.headers
    assert sse(again.text)[-1]["details"] == {"finish_reason": "stop"}


def test_another_model_under_the_same_key_is_another_request(server: Running) -> None:
    headers = {"idempotency-key": "models"}
    assert post(server, "/v2/models/tiny/generate", TEXT, **headers).status_code == 200
    assert post(server, "/v2/models/tiny/versions/1/generate", TEXT, **headers).status_code == 422
