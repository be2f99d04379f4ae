"""What a call of gRPC costs before its key is known, and how much of a message is read: bounds for every method."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from tests.gateway.fakes import FakeDoor
from tests.gateway.grpc.client import INFER, Client, framed
from tests.gateway.grpc.running import GrpcRunning, PredictingRouter, infer_request, running, text_request, unary

from inferd.config.units import bytes_text
from inferd.gateway.body.decode_cost import MAX_DECODE_COST
from inferd.gateway.body.embedded import MAX_TEXT_BYTES
from inferd.gateway.grpc.envelope import MAX_BYTES, MAX_FIELDS, MAX_PARAMETERS
from inferd.gateway.grpc.rpc import Method
from inferd.gateway.grpc.statuses import Status
from inferd.protowire import sized
from inferd.tenancy.principal import Principal

KEY = "Bearer good"


@pytest.fixture(scope="module")
def guarded() -> Iterator[GrpcRunning]:
    door = FakeDoor({"good": Principal(key_id="k", scopes=frozenset(("infer", "models", "metrics", "admin")))})
    with running(door=door) as server:
        yield server


@pytest.fixture
def server(guarded: GrpcRunning) -> GrpcRunning:
    return guarded.reset()


@pytest.fixture
def client(server: GrpcRunning) -> Iterator[Client]:
    made = Client(server.port)
    try:
        yield made
    finally:
        made.close()


def methods(server: GrpcRunning) -> dict[str, Method]:
    """Every method, so that a new one is tested as well."""
    found = {path.decode("ascii"): method for path, method in server.server.methods.items()}
    assert len(found) > 15
    return found


def test_a_call_without_a_key_is_refused_before_its_message_comes(server: GrpcRunning, client: Client) -> None:
    """Its headers are all that is sent: an answer to them cannot have waited for a message."""
    for path, method in methods(server).items():
        if method.scope == "public":
            continue
        told, _ = client.answer(client.begin(path, grpc_encoding="gzip"))
        assert told["grpc-status"] == str(int(Status.UNAUTHENTICATED)), path
        event = server.served()
        assert (event.error_code, event.request_bytes) == ("invalid_api_key", 0), path


def test_a_key_that_lacks_the_scope_is_refused_before_the_message_comes(server: GrpcRunning) -> None:
    door = FakeDoor({"good": Principal(key_id="k", scopes=frozenset())})
    with running(door=door) as other:
        client = Client(other.port)
        try:
            for path, method in methods(other).items():
                if method.scope != "public":
                    told, _ = client.answer(client.begin(path, authorization=KEY))
                    assert told["grpc-status"] == str(int(Status.PERMISSION_DENIED)), path
        finally:
            client.close()


def test_a_method_refuses_a_larger_message_than_it_takes_before_it_comes(server: GrpcRunning, client: Client) -> None:
    """Of the message there are only the bytes that tell its size."""
    for path, method in methods(server).items():
        most = method.max_bytes or server.server.max_bytes
        number = client.begin(path, authorization=KEY)
        client.send(number, struct.pack(">BL", 0, most + 1))
        told, _ = client.answer(number)
        assert told["grpc-status"] == str(int(Status.RESOURCE_EXHAUSTED)), path
        assert f"larger than the {bytes_text(most)} that" in told["grpc-message"], path
        assert method.max_bytes is None or method.name in told["grpc-message"], path


def test_only_requests_for_models_are_larger_than_a_few_bytes(server: GrpcRunning) -> None:
    large = {path for path, method in methods(server).items() if (method.max_bytes or 1 << 30) > 4096}
    service = "/inference.GRPCInferenceService/"
    assert large == {
        service + name for name in ("ModelInfer", "ModelStreamInfer", "RepositoryModelLoad", "RepositoryModelUnload")
    }


def test_a_message_is_opened_no_further_than_its_method_takes(server: GrpcRunning, client: Client) -> None:
    """4 KB that stand for 4 MB, which a call of a few bytes does not take."""
    deflate = zlib.compressobj(9, wbits=31)
    bomb = deflate.compress(bytes(900_000)) + deflate.flush()
    assert len(bomb) < 1024
    for path, method in methods(server).items():
        if method.max_bytes is not None and not path.endswith("/Check"):  # which takes no compressed message
            told, _ = client.ask([framed(bomb, 1)], path, authorization=KEY, grpc_encoding="gzip")
            assert told["grpc-status"] == str(int(Status.RESOURCE_EXHAUSTED)), path
            assert method.name in told["grpc-message"], path


GOOD = infer_request().SerializeToString()
TINY = {
    "fields that are known and empty": b"\x22\x00" * MAX_FIELDS,
    "unknown fields": b"\x98\x06\x01" * MAX_FIELDS,
    "groups": b"\x9b\x06\x9c\x06" * MAX_FIELDS,
    "fields within a group": b"\x9b\x06" + b"\x08\x01" * MAX_FIELDS + b"\x9c\x06",
    "parameters": sized(4, sized(1, b"k") + sized(2, b"\x08\x01")) * (MAX_PARAMETERS + 1),
    "fields within a parameter": sized(4, b"\x08\x01" * 100),
    "fields within a parameter's value": sized(4, sized(1, b"k") + sized(2, b"\x08\x01" * 100)),
}


@pytest.mark.parametrize("name", TINY)
def test_a_request_of_too_many_tiny_fields_is_refused_by_name(name: str, server: GrpcRunning, client: Client) -> None:
    told, _ = client.ask([framed(GOOD + TINY[name])], INFER, authorization=KEY)
    assert told["grpc-status"] == str(int(Status.INVALID_ARGUMENT))
    assert "fields" in told["grpc-message"] or "parameters" in told["grpc-message"]
    assert server.served().error_code == "too_many_fields"
    assert not server.router.streams


def test_a_text_of_too_many_tiny_elements_is_refused(server: GrpcRunning, client: Client) -> None:
    message = text_request("a")
    message.inputs[0].contents.bytes_contents.extend([b""] * 10_000)
    told, _ = client.ask([framed(message.SerializeToString())], INFER, authorization=KEY)
    assert told["grpc-status"] == str(int(Status.INVALID_ARGUMENT))
    assert not server.router.streams


def with_options(options: bytes) -> Any:
    message = text_request("a")
    message.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1]).contents.bytes_contents.append(options)
    return message


TEXTS = {
    "a long text": text_request("\u00e9" * (MAX_TEXT_BYTES // 2)),
    "lists as options": with_options(b"[[]" + b",[]" * (MAX_DECODE_COST // 5) + b"]"),
    "a long parameter of a text": text_request("a", k="\u00e9" * (MAX_BYTES // 2)),
    "a long parameter of a prediction": infer_request(parameters={"k": "\u00e9" * (MAX_BYTES // 2)}),
    "a long name": infer_request("n" * (MAX_BYTES + 1)),
}


def refused(server: GrpcRunning, message: Any) -> grpc.RpcError:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel, pytest.raises(grpc.RpcError) as error:
        unary(channel, "ModelInfer", message, metadata=[("authorization", KEY)])
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not server.router.streams
    return error.value


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_are_slow_to_decode_are_refused_before_they_are_decoded(name: str, server: GrpcRunning) -> None:
    refused(server, TEXTS[name])
    assert server.served().error_code == "too_many_values"


@pytest.mark.parametrize("options", [b"[]", b"{", b"7", b"[" * 2000])
def test_options_that_are_no_object_are_refused_by_name(server: GrpcRunning, options: bytes) -> None:
    assert "sampling_parameters" in (refused(server, with_options(options)).details() or "")


def test_a_request_of_a_thousand_tensors_is_taken(client: Client, server: GrpcRunning) -> None:
    message = infer_request()
    for number in range(1000):
        message.inputs.add(name=f"x{number}", datatype="FP32", shape=[1, 1])
    message.raw_input_contents.extend([bytes(4)] * 1000)
    told, _ = client.ask([framed(message.SerializeToString())], INFER, authorization=KEY)
    assert told["grpc-status"] == "0"
    assert isinstance(server.router, PredictingRouter)
    assert len(server.router.streams) == 1


@pytest.mark.parametrize(
    ("size", "rounds", "is_sent_away"),
    [(16, 20, False), (4096, 20, True), (16_000, 2, False)],
    ids=["small", "as many fields as are counted", "few and large"],
)
def test_messages_of_calls_that_are_broken_off_are_paid_for(
    client: Client, size: int, rounds: int, is_sent_away: bool
) -> None:
    """What could be read of them costs, and nothing was answered; a large one costs no more than one of 4096 bytes."""
    told, _ = client.ask([framed(b"")], _LIVE)  # until then the connection's window is small
    for _ in range(rounds):
        for _ in range(50):
            number = client.begin(INFER, authorization=KEY)
            client.send(number, framed(bytes(size)))
            client.cancel(number)
        told, _ = client.ask([framed(b"")], _LIVE)
        if "goodbye" in told:
            break
    assert told.get("goodbye") == ("too_much_work" if is_sent_away else None)


_LIVE = "/inference.GRPCInferenceService/ServerLive"
_REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"


@pytest.mark.parametrize(
    ("path", "pieces", "headers", "status", "logged"),
    [
        ("/no.Service/Method", [framed(b"")], {}, Status.UNIMPLEMENTED, (501, "unsupported")),
        (_LIVE, [framed(b"\0" * 5000)], {}, Status.RESOURCE_EXHAUSTED, (413, "request_too_large")),
        (_REFLECTION, [framed(b"\0" * 5000)], {}, Status.RESOURCE_EXHAUSTED, (413, "request_too_large")),
        (_LIVE, [framed(b""), framed(b"")], {}, Status.UNIMPLEMENTED, (501, "unsupported")),
        (_LIVE, [b"\2\0\0\0\0"], {}, Status.INTERNAL, (400, "invalid_value")),
        (_LIVE, [framed(b"")[:3]], {}, Status.INTERNAL, (400, "invalid_value")),
        (_LIVE, [framed(b"")], {"grpc_encoding": "br"}, Status.UNIMPLEMENTED, (501, "unsupported")),
        (_LIVE, [framed(b"")], {"content_type": "application/json"}, Status.INTERNAL, (400, "invalid_value")),
        (_LIVE, [b"\1\0\0\0\4junk"], {"grpc_encoding": "gzip"}, Status.INTERNAL, (400, "invalid_value")),
    ],
)
def test_what_is_refused_before_a_method_serves_it_is_logged_once(
    server: GrpcRunning,
    client: Client,
    path: str,
    pieces: list[bytes],
    headers: dict[str, str],
    status: Status,
    logged: tuple[int, str],
) -> None:
    number = client.begin(path, **headers)
    for place, piece in enumerate(pieces):
        client.send(number, piece, end_stream=place == len(pieces) - 1)
    told, _ = client.answer(number)
    assert told["grpc-status"] == str(int(status))
    event = server.served()
    assert (event.status, event.error_code) == logged
    assert event.error_text
    is_known = path != "/no.Service/Method" and "content_type" not in headers and headers.get("grpc_encoding") != "br"
    assert (event.route, event.path) == ((path, "") if is_known else ("unmatched", path))
    client.ask([framed(b"")], _LIVE)
    assert server.served().status == 200


def test_a_message_that_is_too_large_is_told_in_kibibytes(client: Client) -> None:
    told, _ = client.ask([framed(b"\0" * 5000)], _LIVE)
    assert told["grpc-message"] == "A message is larger than the 4.00 KiB that ServerLive takes; send less."
