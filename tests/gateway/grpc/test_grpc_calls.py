"""gRPC's calls of one answer, as clients of any language see them: statuses, metadata, deadlines, limits."""

from __future__ import annotations

import gc
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tests.gateway.fakes import FakeControl, FakeDoor
from tests.gateway.grpc.running import (
    GrpcRunning,
    PredictingRouter,
    infer_request,
    predicted,
    running,
    stream,
    text_request,
    unary,
    unary_future,
)
from tests.tiers import sample
from tests.worker.watching import until_now

from inferd.app.audit import AuditTrail
from inferd.config import ServerConfig
from inferd.errors import InferdError, Overloaded, QuotaExceeded, _kinds
from inferd.gateway.call import Call
from inferd.gateway.errors import TABLE as HTTP_TABLE
from inferd.gateway.grpc.statuses import TABLE
from inferd.state.audit import AuditLog
from inferd.tenancy.principal import Principal
from inferd.types import PredictRequest, Usage

KINDS = {
    cls.kind: cls
    for cls in _kinds(InferdError).values()
    if cls.__module__ in ("inferd.errors", "inferd.gateway.errors")
    and cls.kind not in ("method_not_allowed", "upgrade_required")
}
"""Every failure that has a name, but for two that only HTTP has."""

ANSWERS = {
    StatusCode.INVALID_ARGUMENT: {400, 415},
    StatusCode.UNAUTHENTICATED: {401},
    StatusCode.PERMISSION_DENIED: {403},
    StatusCode.NOT_FOUND: {404},
    StatusCode.DEADLINE_EXCEEDED: {408, 504},
    StatusCode.ABORTED: {409, 422},
    StatusCode.RESOURCE_EXHAUSTED: {413, 429, 503},
    StatusCode.INTERNAL: {500},
    StatusCode.UNIMPLEMENTED: {501},
    StatusCode.UNAVAILABLE: {502, 503},
    StatusCode.CANCELLED: {503},
}
"""The statuses of HTTP that may stand for one of gRPC's in the log."""


def failure(channel: grpc.Channel, name: str = "ModelInfer", message: Any = None, **call: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as failed:
        unary(channel, name, message if message is not None or name != "ModelInfer" else infer_request(), **call)
    return failed.value


def trailer(error: Any, name: str) -> str | None:
    return dict(error.trailing_metadata()).get(name)


def test_every_word_for_failure_has_a_status_in_both_tables() -> None:
    assert set(TABLE) == set(KINDS)
    assert set(HTTP_TABLE) >= set(KINDS)
    codes = {code.value[0]: code for code in StatusCode}
    for kind, status in TABLE.items():
        assert HTTP_TABLE[kind].status in ANSWERS[codes[status]], kind


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_failure_is_told_with_its_status_and_its_sentence(
    server: GrpcRunning, connected: grpc.Channel, kind: str
) -> None:
    server.router.refusal = KINDS[kind]("The sentence.", code="its_code")
    error: Any = failure(connected)
    assert (error.code().value[0], error.details()) == (TABLE[kind], "The sentence.")
    assert len(trailer(error, "x-request-id") or "") == 24
    told = server.served()
    assert told.error_code == "its_code"
    assert told.route == "/inference.GRPCInferenceService/ModelInfer"
    assert told.status == HTTP_TABLE[kind].status, "the log has the status that HTTP has for the same failure"


def calls_alive() -> list[object]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Call)]


def test_a_call_that_failed_is_freed_when_it_is_over(server: GrpcRunning, connected: grpc.Channel) -> None:
    server.router.refusal = Overloaded("The queue is full.")
    gc.collect()
    others = calls_alive()  # of other tests' servers; held, so that no new call gets the identity of an old one
    known = {id(call) for call in others}
    gc.disable()
    try:
        failure(connected)
        server.router.refusal = None  # the fake's, which has a traceback now
        until_now(lambda: all(id(call) in known for call in calls_alive()), "nothing has it", 5)
    finally:
        gc.enable()


def test_a_refused_call_carries_retry_after(server: GrpcRunning, connected: grpc.Channel) -> None:
    server.router.refusal = Overloaded("Full.", retry_after_s=7.2)
    assert trailer(failure(connected), "retry-after") == "8"


def test_an_answer_goes_through_as_it_is(server: GrpcRunning, connected: grpc.Channel) -> None:
    message = infer_request(id="mine", model_version="1", parameters={"priority": 1, "timeout": 5_000_000})
    answer = unary(connected, "ModelInfer", message, metadata=(("x-request-id", "abc"),))
    assert (answer.id, list(answer.raw_output_contents)) == ("mine", [b"!"])
    request: Any = server.router.streams[-1].given
    assert request.body == message.SerializeToString()
    assert (request.model, request.priority) == ("digits", -2)
    assert request.deadline_s is not None
    assert 0 < request.deadline_s <= 5
    told = server.served()
    assert (told.status, told.outcome, told.request_id, told.model) == (200, "done", "abc", "digits")
    assert told.usage == Usage(3)


def test_a_clients_deadline_is_the_requests(server: GrpcRunning, connected: grpc.Channel) -> None:
    unary(connected, "ModelInfer", infer_request(parameters={"timeout": 60_000_000}), timeout=9)
    deadline = server.router.streams[-1].given.deadline_s
    assert deadline is not None
    assert 8 < deadline < 9.5


def test_a_request_ends_when_its_client_cancels(server: GrpcRunning, connected: grpc.Channel) -> None:
    server.router.answer = None
    call = unary_future(connected, "ModelInfer", infer_request())
    assert server.router.submitted.acquire(timeout=10)
    call.cancel()
    assert server.router.streams[0].closed.wait(10)
    told = server.served()
    assert (told.status, told.outcome) == (499, "cancelled")


def test_a_request_ends_with_its_deadline(server: GrpcRunning, connected: grpc.Channel) -> None:
    server.router.answer = None
    error: Any = failure(connected, timeout=1.0)
    assert error.code() == StatusCode.DEADLINE_EXCEEDED
    assert server.router.streams[0].closed.wait(10)
    assert server.served().status in (408, 499), "whose clock was faster: the server told it, or the client had left"


def test_a_defect_ends_its_request_alone(server: GrpcRunning, connected: grpc.Channel) -> None:
    server.router.defect = RuntimeError("the secret")
    error: Any = failure(connected)
    assert error.code() == StatusCode.INTERNAL
    assert "secret" not in error.details()
    server.router.defect = None
    assert unary(connected, "ModelInfer", infer_request()).raw_output_contents == [b"!"]


@pytest.mark.parametrize("body", [b"\xff", b"\x0a\x05abc", b"\x0a\x01\xff"])
def test_bytes_that_are_no_message_are_the_clients_fault(
    server: GrpcRunning, connected: grpc.Channel, body: bytes
) -> None:
    error: Any = failure(connected, "ModelInfer", body)
    assert error.code() == StatusCode.INVALID_ARGUMENT
    error = failure(connected, "ModelReady", b"\xff")
    assert error.code() == StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("message", "status", "says"),
    [
        (infer_request("nothing"), StatusCode.NOT_FOUND, "nothing"),
        (infer_request(model_version="9"), StatusCode.NOT_FOUND, "9"),
        (infer_request(parameters={"timeout": "soon"}), StatusCode.INVALID_ARGUMENT, "timeout"),
        (infer_request(parameters={"sequence_start": True}), StatusCode.INVALID_ARGUMENT, "sequence_id"),
    ],
)
def test_what_is_wrong_is_named(
    server: GrpcRunning, connected: grpc.Channel, message: Any, status: StatusCode, says: str
) -> None:
    error: Any = failure(connected, "ModelInfer", message)
    assert error.code() == status
    assert says in error.details()


def test_a_sequences_request_says_so(server: GrpcRunning, connected: grpc.Channel) -> None:
    given = {"sequence_id": 7, "sequence_start": True, "sequence_end": True}
    unary(connected, "ModelInfer", infer_request(parameters=given))
    request: Any = server.router.streams[-1].given
    assert (request.sequence, request.sequence_start, request.sequence_end) == ("7", True, True)


def test_a_text_is_written_whole(server: GrpcRunning, connected: grpc.Channel) -> None:
    answer = unary(connected, "ModelInfer", text_request("Once", max_tokens=5, temperature=0.5))
    assert (answer.model_name, answer.id) == ("tiny", "t")
    assert (answer.outputs[0].name, answer.outputs[0].datatype, list(answer.outputs[0].shape)) == (
        "text_output",
        "BYTES",
        [1],
    )
    assert answer.raw_output_contents[0] == struct.pack("<I", 12) + b"Hello world!"
    asked = server.router.last
    assert asked.prompt.text == "Once"  # type: ignore[union-attr]
    assert (asked.sampling.max_tokens, asked.sampling.temperature) == (5, 0.5)
    told = server.served()
    assert (told.usage, told.finish_reasons) == (Usage(3, 3, 1), ("stop",))


def test_a_texts_options_may_come_as_a_tensor(server: GrpcRunning, connected: grpc.Channel) -> None:
    message = text_request("Once")
    options = message.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
    options.contents.bytes_contents.append(b'{"max_tokens": 9}')
    message.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(False)
    unary(connected, "ModelInfer", message)
    assert server.router.last.sampling.max_tokens == 9


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (infer_request("tiny"), "no input"),
        (text_request("", max_tokens=5), "empty"),
        (text_request("a", max_tokens="many"), "max_tokens"),
        (text_request("a", no_such_option=1), "no_such_option"),
        (text_request("a", n=2), "one text_output"),
    ],
)
def test_what_is_wrong_with_a_text_is_named(
    server: GrpcRunning, connected: grpc.Channel, message: Any, says: str
) -> None:
    error: Any = failure(connected, "ModelInfer", message)
    assert error.code() == StatusCode.INVALID_ARGUMENT
    assert says in error.details()


# -- what the server says of itself --------------------------------------------------------------


def test_models_are_described(server: GrpcRunning, connected: grpc.Channel) -> None:
    assert unary(connected, "ServerLive").live
    assert unary(connected, "ServerReady").ready
    assert "sequence" in unary(connected, "ServerMetadata").extensions
    assert unary(connected, "ModelReady", named("ModelReady", "digits")).ready
    metadata = unary(connected, "ModelMetadata", named("ModelMetadata", "digits"))
    assert (metadata.platform, list(metadata.versions)) == ("onnxruntime_onnx", ["1"])
    assert (metadata.inputs[0].name, list(metadata.inputs[0].shape)) == ("x", [-1, 4])
    config = unary(connected, "ModelConfig", named("ModelConfig", "digits")).config
    assert (config.max_batch_size, config.input[0].data_type, list(config.output[0].dims)) == (8, 11, [2])
    assert unary(connected, "ModelConfig", named("ModelConfig", "tiny")).config.model_transaction_policy.decoupled
    told = unary(connected, "ModelStatistics", named("ModelStatistics", "digits")).model_stats
    assert [model.name for model in told] == ["digits"]
    assert len(unary(connected, "ModelStatistics").model_stats) == 2
    assert {model.name for model in unary(connected, "RepositoryIndex").models} == {"tiny", "digits"}


def named(method: str, name: str) -> Any:
    from tests.gateway.grpc.messages import message_type

    return message_type(f"{method}Request")(name=name)


def test_what_is_not_served_says_what_to_do_instead(server: GrpcRunning, connected: grpc.Channel) -> None:
    for name, says in (("SystemSharedMemoryStatus", "shared memory"), ("LogSettings", "log"), ("NoSuchCall", "")):
        method: Any = connected.unary_unary(f"/inference.GRPCInferenceService/{name}")
        with pytest.raises(grpc.RpcError) as failed:
            method(b"", timeout=10)
        error: Any = failed.value
        assert error.code() == StatusCode.UNIMPLEMENTED
        assert says in error.details()


def test_health_follows_readiness(server: GrpcRunning, connected: grpc.Channel) -> None:
    stub: Any = health_pb2_grpc.HealthStub(connected)
    statuses = health_pb2.HealthCheckResponse
    for name in ("", "inference.GRPCInferenceService"):
        assert stub.Check(health_pb2.HealthCheckRequest(service=name)).status == statuses.SERVING
    watching = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=20)
    assert next(watching).status == statuses.SERVING
    for status in server.router.statuses:
        status.replicas_ready = 0
    assert next(watching).status == statuses.NOT_SERVING
    assert stub.Check(health_pb2.HealthCheckRequest()).status == statuses.NOT_SERVING
    watching.cancel()
    with pytest.raises(grpc.RpcError) as failed:
        stub.Check(health_pb2.HealthCheckRequest(service="other"))
    assert failed.value.code() == StatusCode.NOT_FOUND


def test_reflection_describes_every_service(server: GrpcRunning, connected: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(connected)
    assert set(database.get_services()) == {
        "externalscaler.ExternalScaler",
        "inference.GRPCInferenceService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    file = database.FindFileContainingSymbol("inference.GRPCInferenceService")
    methods = {method.name for service in file.service for method in service.method}
    assert {"ModelInfer", "ModelStreamInfer", "RepositoryModelLoad"} <= methods
    assert database.FindFileContainingSymbol("grpc.health.v1.Health").package == "grpc.health.v1"


def reflected(connected: grpc.Channel, *asked: bytes) -> list[Any]:
    method: Any = connected.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=bytes,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    return list(method(iter(asked), timeout=20))


def test_reflection_reads_past_what_it_does_not_know(connected: grpc.Channel) -> None:
    known = reflection_pb2.ServerReflectionRequest(host="h", file_containing_symbol="grpc.health.v1.Health")
    number, text = b"\x78\x05", b"\x7a\x01x"  # fields 15, which no message has
    plain, *others = reflected(
        connected,
        known.SerializeToString(),
        number + known.SerializeToString(),
        text + known.SerializeToString(),
        known.SerializeToString() + number + text,
    )
    assert plain.valid_host == "h"
    assert plain.original_request == known
    assert plain.file_descriptor_response.file_descriptor_proto
    for other in others:
        assert other.valid_host == "h"
        assert other.file_descriptor_response == plain.file_descriptor_response


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (reflection_pb2.ServerReflectionRequest(file_by_filename="none.proto"), StatusCode.NOT_FOUND),
        (reflection_pb2.ServerReflectionRequest(file_containing_symbol="none.None"), StatusCode.NOT_FOUND),
        (reflection_pb2.ServerReflectionRequest(all_extension_numbers_of_type="none.None"), StatusCode.NOT_FOUND),
        (reflection_pb2.ServerReflectionRequest(), StatusCode.UNIMPLEMENTED),
    ],
)
def test_reflection_answers_with_an_error_and_goes_on(
    connected: grpc.Channel, asked: reflection_pb2.ServerReflectionRequest, status: StatusCode
) -> None:
    listing = reflection_pb2.ServerReflectionRequest(list_services="*")
    refused, listed = reflected(connected, asked.SerializeToString(), listing.SerializeToString())
    assert refused.error_response.error_code == status.value[0]
    assert len(listed.list_services_response.service) == 5


def test_a_file_comes_with_those_that_it_needs_each_once(connected: grpc.Channel) -> None:
    asked = [reflection_pb2.ServerReflectionRequest(list_services="*")]
    (listed,) = reflected(connected, *[one.SerializeToString() for one in asked])
    for service in listed.list_services_response.service:
        by_symbol = reflection_pb2.ServerReflectionRequest(file_containing_symbol=service.name)
        (found,) = reflected(connected, by_symbol.SerializeToString())
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(one)
            for one in found.file_descriptor_response.file_descriptor_proto
        ]
        names = [file.name for file in files]
        assert len(names) == len(set(names))
        assert {need for file in files for need in file.dependency} <= set(names)
        assert any(f"{files[0].package}.{one.name}" == service.name for one in files[0].service)
        by_name = reflection_pb2.ServerReflectionRequest(file_by_filename=names[0])
        (again,) = reflected(connected, by_name.SerializeToString())
        assert again.file_descriptor_response == found.file_descriptor_response


def test_what_is_not_served_is_logged_as_such(server: GrpcRunning, connected: grpc.Channel) -> None:
    """A client that asks for what there is not is no defect of the server."""
    method: Any = connected.unary_unary("/inference.GRPCInferenceService/LogSettings")
    with pytest.raises(grpc.RpcError):
        method(b"", timeout=10)
    told = server.served()
    assert (told.status, told.error_code) == (501, "unsupported")


# -- permissions ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded() -> Iterator[tuple[GrpcRunning, FakeDoor, FakeControl]]:
    door = FakeDoor(
        {
            "good": Principal(key_id="k", tenant="acme", models=("digits",)),
            "reader": Principal(key_id="r", scopes=frozenset(("metrics",))),
            "boss": Principal(key_id="b", scopes=frozenset(("admin",))),
        }
    )
    control = FakeControl()
    with running(door=door, control=control) as server:
        yield server, door, control


Guarded = tuple[GrpcRunning, FakeDoor, FakeControl]
GOOD = (("authorization", "Bearer good"),)


def test_a_key_opens_the_door_in_either_header(guarded: Guarded) -> None:
    server, door, _ = guarded
    server.reset()
    with server.channel() as channel:
        for metadata in (GOOD, (("x-api-key", "good"),)):
            unary(channel, "ModelInfer", infer_request(), metadata=metadata)
            told = server.served()
            assert (told.tenant, told.key_id) == ("acme", "k")
            assert door.permits[-1].settled == [(Usage(3), "done")]


def test_every_request_of_a_stream_is_reserved_and_settled(guarded: Guarded) -> None:
    server, door, _ = guarded
    server.reset()
    door.permits.clear()
    with server.channel() as channel:
        assert len(list(stream(channel, iter([infer_request(), infer_request()]), metadata=GOOD))) == 2
        until_now(lambda: len(door.permits) == 2 and all(permit.settled for permit in door.permits), "both are settled")
    assert [permit.settled for permit in door.permits] == [[(Usage(3), "done")]] * 2


def test_a_call_without_permission_is_refused_with_its_status(guarded: Guarded) -> None:
    server, _, _ = guarded
    server.reset()
    with server.channel() as channel:
        error: Any = failure(channel)
        assert error.code() == StatusCode.UNAUTHENTICATED
        assert failure(channel, metadata=(("authorization", "Bearer bad"),)).code() == StatusCode.UNAUTHENTICATED
        error = failure(channel, metadata=(("authorization", "Bearer reader"),))
        assert error.code() == StatusCode.PERMISSION_DENIED
        error = failure(channel, "ModelInfer", text_request("a"), metadata=GOOD)
        assert error.code() == StatusCode.NOT_FOUND, "a model that the key may not use does not exist for it"
        assert "tiny" not in error.details().partition("this server has")[2]
        assert unary(channel, "ServerLive").live
        assert unary(channel, "ServerReady").ready
        for name in ("ServerMetadata", "ModelStatistics", "RepositoryIndex"):
            assert failure(channel, name).code() == StatusCode.UNAUTHENTICATED
        index = unary(channel, "RepositoryIndex", metadata=GOOD).models
        assert [model.name for model in index] == ["digits"]


def test_models_are_loaded_and_unloaded_by_operators_alone(guarded: Guarded) -> None:
    from tests.gateway.grpc.messages import message_type

    server, _, control = guarded
    server.reset()
    boss = (("authorization", "Bearer boss"),)
    with server.channel() as channel:
        for verb in ("Load", "Unload"):
            name = f"RepositoryModel{verb}"
            message: Any = message_type(f"{name}Request")(model_name="digits")
            error: Any = failure(channel, name, message, metadata=GOOD)
            assert error.code() == StatusCode.PERMISSION_DENIED
            unary(channel, name, message, metadata=boss)
            assert control.asked[-1] == f"{verb.lower()} digits"
        message = message_type("RepositoryModelLoadRequest")(model_name="digits")
        message.parameters["file:1/model.onnx"].bytes_param = b"\0\xff"
        error = failure(channel, "RepositoryModelLoad", message, metadata=boss)
        assert error.code() == StatusCode.INVALID_ARGUMENT
        error = failure(channel, "RepositoryModelLoad", named_model("nothing"), metadata=boss)
        assert error.code() == StatusCode.NOT_FOUND


def test_a_refused_call_for_administration_is_in_the_audit_log(tmp_path: Path) -> None:
    door = FakeDoor({"good": Principal(key_id="k", tenant="acme")})
    trail = AuditTrail(tmp_path, lambda event: None)
    with running(door=door, control=FakeControl(), audit=trail) as server, server.channel() as channel:
        failure(channel, "RepositoryModelLoad", named_model("digits"), metadata=GOOD)
        for _ in range(2):
            failure(channel, "RepositoryModelLoad", named_model("digits"), metadata=(("authorization", "Bearer x"),))
        failure(channel, "ModelMetadata", metadata=(("authorization", "Bearer x"),))
    trail.close()
    entries = AuditLog(tmp_path).entries()
    path = "/inference.GRPCInferenceService/RepositoryModelLoad"
    assert [(one.actor, one.tenant, one.action, one.target, one.outcome, one.detail) for one in entries] == [
        ("address:127.0.0.1", "", "authenticate", path, "refused", "invalid_api_key, 2 times within 60 s"),
        ("key:k", "acme", "authenticate", path, "refused", "insufficient_permissions from 127.0.0.1"),
    ]


def named_model(name: str) -> Any:
    from tests.gateway.grpc.messages import message_type

    return message_type("RepositoryModelLoadRequest")(model_name=name)


def test_quotas_hold_here_as_well(guarded: Guarded) -> None:
    server, door, _ = guarded
    server.reset()
    refused = QuotaExceeded("Enough.", retry_after_s=3)
    refused.headers = ((b"x-ratelimit-remaining-requests", b"0"),)
    door.refusal = refused
    try:
        with server.channel() as channel:
            error: Any = failure(channel, metadata=GOOD)
    finally:
        door.refusal = None
    assert error.code() == StatusCode.RESOURCE_EXHAUSTED
    assert trailer(error, "retry-after") == "3"
    assert trailer(error, "x-ratelimit-remaining-requests") == "0"


def test_a_cancelled_request_is_settled_once(guarded: Guarded) -> None:
    server, door, _ = guarded
    server.reset()
    server.router.answer = None
    with server.channel() as channel:
        call = unary_future(channel, "ModelInfer", infer_request(), metadata=GOOD)
        assert server.router.submitted.acquire(timeout=10)
        call.cancel()
        assert server.router.streams[0].closed.wait(10)
        assert door.permits[-1].over.wait(10)
    assert [outcome for _, outcome in door.permits[-1].settled] == ["cancelled"]


# -- limits -----------------------------------------------------------------------------------------


def test_a_request_that_is_too_large_is_refused(server: GrpcRunning) -> None:
    config = ServerConfig(port=0, grpc_port=0, grace_s=1, max_body_bytes=64 * 1024)
    with running(config=config) as small, small.channel() as channel:
        large = infer_request(id="x" * 70_000)
        assert failure(channel, "ModelInfer", large).code() == StatusCode.RESOURCE_EXHAUSTED
        bomb = infer_request(id="x" * 50_000_000)  # a few hundred bytes for each of ours
        error: Any = failure(channel, "ModelInfer", bomb, compression=grpc.Compression.Gzip)
        assert error.code() == StatusCode.RESOURCE_EXHAUSTED
        packed = infer_request(id="x" * 20_000)
        assert unary(channel, "ModelInfer", packed, compression=grpc.Compression.Gzip).id == packed.id
        assert small.router.submitted.acquire(timeout=10)
        assert len(small.router.streams) == 1


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)


def frames_of(connection: socket.socket) -> Iterator[tuple[int, bytes]]:
    """Kinds and contents of the frames that come, until the connection ends."""
    received = b""
    while True:
        while len(received) >= 9 and len(received) >= 9 + int.from_bytes(received[:3], "big"):
            size = int.from_bytes(received[:3], "big")
            yield received[3], received[9 : 9 + size]
            received = received[9 + size :]
        try:
            piece = connection.recv(65536)
        except ConnectionResetError:
            return
        if not piece:
            return
        received += piece


def test_a_client_that_floods_with_pings_is_sent_away(server: GrpcRunning, connected: grpc.Channel) -> None:
    with socket.create_connection(("127.0.0.1", server.server.port), timeout=10) as connection:
        connection.sendall(PREFACE)
        for number in range(20):
            try:
                connection.sendall(frame(6, 0, 0, number.to_bytes(8, "big")))
            except OSError:
                break
        goodbyes = [content for kind, content in frames_of(connection) if kind == 7]
    assert goodbyes, "no GOAWAY came"
    assert b"too_many_pings" in goodbyes[-1]
    assert unary(connected, "ServerLive").live


def test_a_connection_that_does_not_speak_http2_is_closed(server: GrpcRunning, connected: grpc.Channel) -> None:
    with socket.create_connection(("127.0.0.1", server.server.port), timeout=10) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        list(frames_of(connection))  # it ends
    assert unary(connected, "ServerLive").live


def test_a_server_that_leaves_finishes_what_it_began() -> None:
    with running(PredictingRouter(), ServerConfig(port=0, grpc_port=0, grace_s=10)) as leaving:
        leaving.router.answer = None
        with leaving.channel(("grpc.enable_retries", 0)) as channel:
            call = unary_future(channel, "ModelInfer", infer_request(id="last"))
            assert leaving.router.submitted.acquire(timeout=10)
            stub: Any = health_pb2_grpc.HealthStub(channel)
            watching = stub.Watch(health_pb2.HealthCheckRequest(), timeout=20)
            assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
            leaving.begin_stop()
            assert next(watching).status == health_pb2.HealthCheckResponse.NOT_SERVING
            error: Any = failure(channel, timeout=5)
            assert error.code() == StatusCode.UNAVAILABLE
            watching.cancel()
            request: Any = leaving.router.streams[0].given
            for output in predicted(request):
                leaving.put(leaving.router.streams[0], output)
            assert call.result(timeout=10).id == "last"
        leaving.ended()


def test_what_does_not_end_in_time_is_cut() -> None:
    with running(config=ServerConfig(port=0, grpc_port=0, grace_s=1)) as leaving:
        leaving.router.answer = None
        with leaving.channel(("grpc.enable_retries", 0)) as channel:
            call = unary_future(channel, "ModelInfer", infer_request())
            assert leaving.router.submitted.acquire(timeout=10)
            leaving.begin_stop()
            assert leaving.router.streams[0].closed.wait(10)
            assert call.exception(timeout=10).code() in (StatusCode.UNAVAILABLE, StatusCode.CANCELLED)
        leaving.ended()
        assert leaving.served().outcome == "cancelled"


@pytest.mark.parametrize("reason", sample(["load", "quota", "model"], "load"))
def test_a_connection_goes_on_however_many_of_its_calls_are_refused(reason: str) -> None:
    """Another call is under way on it all the while, perhaps another client's behind a proxy."""
    door = FakeDoor({"good": Principal(key_id="k", scopes=frozenset(("infer",)))})
    key = (("authorization", "Bearer good"),)
    with running(door=door) as server, server.channel() as channel:
        server.router.answer = None
        under_way = unary_future(channel, "ModelInfer", infer_request(), metadata=key)
        assert server.router.submitted.acquire(timeout=10)
        if reason == "load":
            server.router.refusal = Overloaded("The model's queue is full.", code="queue_full")
        elif reason == "quota":
            door.refusal = QuotaExceeded("There is none left.", retry_after_s=1)
        model = "nowhere" if reason == "model" else "digits"
        for _ in range(20):
            calls = [unary_future(channel, "ModelInfer", infer_request(model), metadata=key) for _ in range(256)]
            assert {call.code() for call in calls} <= {StatusCode.RESOURCE_EXHAUSTED, StatusCode.NOT_FOUND}
        request = server.router.streams[0].given
        assert isinstance(request, PredictRequest)
        server.put(server.router.streams[0], predicted(request)[0])
        assert under_way.result().raw_output_contents == [b"!"]
