"""Asked twice over gRPC, computed once: ``idempotency-key`` in the metadata, and models whose answers are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from tests.gateway.fakes import words
from tests.gateway.grpc.running import (
    GrpcRunning,
    PredictingRouter,
    infer_request,
    predicted,
    running,
    text_request,
    unary,
    unary_future,
)

from inferd.cache.memory import MemoryCache
from inferd.config import CacheConfig, Config, ModelCacheConfig, ModelConfig, ServerConfig
from inferd.errors import Overloaded
from inferd.tenancy.idempotency import IdempotencyStore
from inferd.types import End, Failure, Output

KEY = (("idempotency-key", "k"),)


@pytest.fixture
def server() -> Iterator[GrpcRunning]:
    settings = Config(
        models={"digits": ModelConfig(source="digits", cache=ModelCacheConfig(enabled=True))},
        server=ServerConfig(port=0, grpc_port=0, grace_s=1),
        cache=CacheConfig(max_entry_bytes=4096),
    )
    with running(config=settings, idempotency=IdempotencyStore(60), cache=MemoryCache(settings.cache)) as started:
        yield started


@pytest.fixture
def channel(server: GrpcRunning) -> Iterator[grpc.Channel]:
    with server.channel() as channel:
        yield channel


def asked(channel: grpc.Channel, message: Any, *metadata: tuple[str, str]) -> tuple[bytes, dict[str, str]]:
    """The answer, and what is told beside it."""
    call = unary_future(channel, "ModelInfer", message, metadata=metadata)
    answer: bytes = call.result().SerializeToString()
    return answer, dict(call.trailing_metadata())


@pytest.mark.parametrize("message", [infer_request(id="a"), text_request("once upon")], ids=["tensors", "text"])
def test_a_key_is_computed_once_and_answered_with_the_same_bytes(
    server: GrpcRunning, channel: grpc.Channel, message: Any
) -> None:
    server.router.script = words("a time")
    fresh = ("cache-control", "no-store")
    first, told = asked(channel, message, *KEY, fresh)
    again, told_again = asked(channel, message, *KEY, fresh)
    assert again == first
    assert ("idempotent-replayed" in told, told_again["idempotent-replayed"]) == (False, "true")
    assert len(server.router.streams) == 1
    asked(channel, message, ("idempotency-key", "another"), fresh)
    asked(channel, message, fresh)
    assert len(server.router.streams) == 3


def test_another_request_under_a_key_is_refused(server: GrpcRunning, channel: grpc.Channel) -> None:
    unary(channel, "ModelInfer", infer_request(id="a"), metadata=KEY)
    for metadata, code in ((KEY, StatusCode.ABORTED), ((("idempotency-key", "x" * 300),), StatusCode.INVALID_ARGUMENT)):
        error: Any = unary_future(channel, "ModelInfer", infer_request(id="b"), metadata=metadata).exception()
        assert error.code() is code, error.details()
    assert len(server.router.streams) == 1


def test_an_equal_call_during_the_first_waits_for_its_answer(server: GrpcRunning, channel: grpc.Channel) -> None:
    server.router.answer = None
    both = [unary_future(channel, "ModelInfer", infer_request(), metadata=KEY) for _ in range(2)]
    assert server.router.submitted.acquire(timeout=10)
    (stream,) = server.router.streams
    for output in predicted(stream.given):  # type: ignore[arg-type]
        server.put(stream, output)
    assert both[0].result(10) == both[1].result(10)
    assert len(server.router.streams) == 1


def test_what_failed_is_tried_again(server: GrpcRunning, channel: grpc.Channel) -> None:
    failed = Failure(Overloaded.kind, "Too much.", code="queue_full")
    server.router.answer = lambda request: [Output(request.id, (), None, End("failed", failure=failed))]
    error: Any = unary_future(channel, "ModelInfer", infer_request(), metadata=KEY).exception()
    assert error.code() is StatusCode.RESOURCE_EXHAUSTED
    server.router.answer = predicted
    _, told = asked(channel, infer_request(), *KEY)
    assert "idempotent-replayed" not in told
    assert len(server.router.streams) == 2


def test_a_model_whose_answers_are_kept_is_asked_once_for_the_same_bytes(
    server: GrpcRunning, channel: grpc.Channel
) -> None:
    first, told = asked(channel, infer_request(id="a"))
    again, told_again = asked(channel, infer_request(id="a"))
    assert (again, told["x-inferd-cache"], told_again["x-inferd-cache"]) == (first, "miss", "hit")
    _, other = asked(channel, infer_request(id="b"))
    _, anew = asked(channel, infer_request(id="a"), ("cache-control", "no-cache"))
    assert (other["x-inferd-cache"], anew["x-inferd-cache"]) == ("miss", "miss")
    step: dict[str, Any] = {"parameters": {"sequence_id": 3, "sequence_start": True}}
    assert all("x-inferd-cache" not in asked(channel, infer_request(**step))[1] for _ in range(2))


def test_without_a_store_the_key_says_nothing() -> None:
    with running(PredictingRouter()) as server, server.channel() as channel:
        for _ in range(2):
            assert "idempotent-replayed" not in asked(channel, infer_request(), *KEY)[1]
        assert len(server.router.streams) == 2
