"""Calls over gRPC that are recorded: texts as texts, tensors by their sizes; nothing of a tenant that is not named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.gateway.fakes import FakeDoor
from tests.gateway.grpc.running import GrpcRunning, infer_request, running, stream, text_request, unary

from inferd.config import PayloadsConfig
from inferd.events import HttpServed
from inferd.gateway.operations import PREDICT, TEXT_COMPLETION
from inferd.observe.payloads.log import PayloadLog
from inferd.observe.payloads.store import PayloadStore
from inferd.tenancy.principal import Principal

A, B = (("authorization", "Bearer sk-a"),), (("authorization", "Bearer sk-b"),)
SECRET = "the canary of anna@example.com"

Records = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[tuple[GrpcRunning, Records]]:
    """A server that records, and its records once it has stopped."""
    config = PayloadsConfig(tenants=("team-a",), keep=("prompts", "answers"))
    log = PayloadLog(tmp_path, config, lambda: None)
    keys = {"sk-a": Principal(key_id="a", tenant="team-a"), "sk-b": Principal(key_id="b", tenant="team-b")}
    with running(door=FakeDoor(keys), payloads=log) as server:

        def records() -> list[dict[str, Any]]:
            server.stop()
            log.close()
            return list(PayloadStore(tmp_path).records())

        yield server, records
    log.close()


def test_a_text_is_recorded_redacted_whole_and_streamed(recorded: tuple[GrpcRunning, Records]) -> None:
    server, records = recorded
    request = text_request(SECRET, max_tokens=7)
    with server.channel() as channel:
        whole = unary(channel, "ModelInfer", request, metadata=A)
        pieces = list(stream(channel, iter([request]), metadata=A))
    assert len(pieces) > 1
    text = whole.raw_output_contents[0][4:].decode()
    found = records()
    assert [record["route"].rpartition("/")[2] for record in found] == ["ModelInfer", "ModelStreamInfer"]
    for record in found:
        assert record["request"]["body"] == {"text_input": "the canary of [email]", "parameters": {"max_tokens": 7}}
        assert record["request"]["bytes"] == len(request.SerializeToString())
        assert record["answer"]["body"] == {"text_output": text}
        assert (record["tenant"], record["key_id"], record["model"]) == ("team-a", "a", "tiny")
    assert "anna" not in json.dumps(found)


def test_the_operation_of_a_call_is_that_of_its_model(recorded: tuple[GrpcRunning, Records]) -> None:
    server, records = recorded
    with server.channel() as channel:
        for request in (text_request(SECRET), infer_request()):
            unary(channel, "ModelInfer", request, metadata=A)
            list(stream(channel, iter([request]), metadata=A))
    records()
    found = [event.operation for event in server.events if isinstance(event, HttpServed)]
    assert found == [TEXT_COMPLETION, TEXT_COMPLETION, PREDICT, PREDICT]


def test_tensors_are_recorded_by_sizes_and_digests(recorded: tuple[GrpcRunning, Records]) -> None:
    server, records = recorded
    with server.channel() as channel:
        unary(channel, "ModelInfer", infer_request(), metadata=A)
        list(stream(channel, iter([infer_request()]), metadata=A))
    found = records()
    assert len(found) == 2
    for record in found:
        assert record["request"]["bytes"] == len(infer_request().SerializeToString())
        assert record["answer"]["bytes"] > 0
        assert len(record["answer"]["sha256"]) == 64
        assert "body" not in record["request"]
        assert "body" not in record["answer"]


def test_refused_calls_are_recorded_with_their_code(recorded: tuple[GrpcRunning, Records]) -> None:
    server, records = recorded
    broken = text_request(SECRET)
    broken.inputs[0].name = "other"
    with server.channel() as channel:
        for request in (broken, infer_request("unknown"), text_request(SECRET, temperature=-1.0)):
            with pytest.raises(grpc.RpcError):
                unary(channel, "ModelInfer", request, metadata=A)
    wrong, unknown, refused = records()
    assert "body" not in wrong["request"]
    assert unknown["error_code"] == "model_not_found"
    assert refused["request"]["body"]["text_input"] == "the canary of [email]"
    assert "body" not in refused["answer"]


def test_another_tenant_leaves_no_record(recorded: tuple[GrpcRunning, Records], tmp_path: Path) -> None:
    server, records = recorded
    with server.channel() as channel:
        unary(channel, "ModelInfer", text_request(SECRET), metadata=B)
        list(stream(channel, iter([text_request(SECRET)]), metadata=B))
        with pytest.raises(grpc.RpcError):
            unary(channel, "ModelInfer", text_request(SECRET), metadata=(("authorization", "Bearer x"),))
    assert records() == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
