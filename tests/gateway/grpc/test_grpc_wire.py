"""gRPC's form on HTTP/2 (PROTOCOL-HTTP2): messages in any pieces, headers that say something else, ends of every kind."""

from __future__ import annotations

import gzip
import itertools
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.grpc.client import Client, framed
from tests.gateway.grpc.running import GrpcRunning, infer_request, running, stream, unary, unary_future
from tests.worker.watching import until_now

from inferd.config import ServerConfig
from inferd.events import HttpServed
from inferd.gateway.grpc.statuses import Status
from inferd.gateway.grpc.wire import status_block, timeout_of
from inferd.http.http2.hpack import Decoder
from inferd.types import End, Output, Prediction, PredictRequest, Usage

BODY = infer_request(id="mine").SerializeToString()


@pytest.fixture
def client(server: GrpcRunning) -> Iterator[Client]:
    made = Client(server.port)
    try:
        yield made
    finally:
        made.close()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, len(BODY) + 5), max_size=6))
def test_a_message_may_come_in_any_pieces(cuts: list[int]) -> None:
    whole, places = framed(BODY), [0, *sorted(cuts), None]
    pieces = [whole[start:end] for start, end in itertools.pairwise(places)]
    client = Client(SHARED.port)
    try:
        headers, body = client.ask(pieces)
    finally:
        client.close()
    assert headers["grpc-status"] == "0"
    assert (headers[":status"], headers["content-type"]) == ("200", "application/grpc")
    assert len(headers["x-request-id"]) == 24
    assert body[:5] == struct.pack(">BL", 0, len(body) - 5)


SHARED: GrpcRunning


@pytest.fixture(scope="module", autouse=True)
def _shared(listening: GrpcRunning) -> None:
    global SHARED  # noqa: PLW0603
    SHARED = listening


# No time in it: what a case is named by must be the same in every test process.
@pytest.mark.parametrize(
    ("encoding", "packed"), [("gzip", gzip.compress(BODY, mtime=0)), ("deflate", zlib.compress(BODY))]
)
def test_compressed_messages_are_opened(server: GrpcRunning, client: Client, encoding: str, packed: bytes) -> None:
    headers, _ = client.ask([framed(packed, 1)], grpc_encoding=encoding)
    assert headers["grpc-status"] == "0"
    request: Any = server.router.streams[-1].given
    assert request.body == BODY
    assert server.served().request_bytes == len(BODY)
    headers, _ = client.ask([framed(BODY)], grpc_encoding=encoding)  # which may be left as it is
    assert headers["grpc-status"] == "0"


@pytest.mark.parametrize(
    ("pieces", "headers", "status", "says"),
    [
        ([], {}, Status.UNIMPLEMENTED, "none came"),
        ([framed(BODY), framed(BODY)], {}, Status.UNIMPLEMENTED, "another one"),
        ([framed(BODY)[:-3]], {}, Status.INTERNAL, "ends within a message"),
        ([framed(BODY, 2)], {}, Status.INTERNAL, "begins with 2"),
        ([framed(BODY, 1)], {}, Status.INTERNAL, "compressed"),
        ([framed(BODY, 1)], {"grpc_encoding": "gzip"}, Status.INTERNAL, "gzip"),
        ([framed(BODY)], {"grpc_encoding": "snappy"}, Status.UNIMPLEMENTED, "snappy"),
        ([framed(BODY)], {"grpc_timeout": "soon"}, Status.INVALID_ARGUMENT, "soon"),
        ([framed(BODY)], {"grpc_timeout": "123456789S"}, Status.INVALID_ARGUMENT, "eight digits"),
        ([framed(BODY)], {"content_length": "3"}, Status.INTERNAL, "content-length"),
        ([framed(BODY)], {"grpc_timeout": "0m"}, Status.DEADLINE_EXCEEDED, "deadline"),
        ([struct.pack(">BL", 0, 1 << 30)], {}, Status.RESOURCE_EXHAUSTED, "max_body_bytes"),
        ([framed(BODY)], {"x_large": "x" * 70_000}, Status.RESOURCE_EXHAUSTED, "64 KiB"),
    ],
)
def test_what_is_no_call_is_told_so(
    client: Client, pieces: list[bytes], headers: dict[str, str], status: Status, says: str
) -> None:
    # h2 counts a body by its Content-Length; this one lies on purpose.
    client._state.config.validate_outbound_headers = False
    number = client.begin(**headers)
    for piece in pieces:
        client.send(number, piece)
    client._state.end_stream(number)
    told, body = client.answer(number)
    assert (told[":status"], told["grpc-status"], body) == ("200", str(int(status)), b"")
    assert says in told["grpc-message"]
    headers_, _ = client.ask([framed(BODY)])
    assert headers_["grpc-status"] == "0", "and the connection goes on"


def test_what_is_not_grpc_is_told_in_https_words(client: Client) -> None:
    told, _ = client.ask([b"{}"], content_type="application/json")
    assert (told[":status"], told["grpc-status"]) == ("415", str(int(Status.INTERNAL)))
    told, _ = client.ask([], content_type="application/grpc-web")
    assert told[":status"] == "415"
    told, _ = client.ask([], __method="GET")
    assert told[":status"] == "405"
    told, _ = client.ask([framed(BODY)], content_type="application/grpc+proto")
    assert told["grpc-status"] == "0"
    told, _ = client.ask([framed(b"")], "/no.Such/Method")
    assert (told[":status"], told["grpc-status"]) == ("200", str(int(Status.UNIMPLEMENTED)))


def test_a_sentence_in_any_language_comes_through(server: GrpcRunning) -> None:
    from inferd.errors import Overloaded

    sentence = "100 % voll: größer geht's nicht, 満員"
    server.router.refusal = Overloaded(sentence)
    with server.channel() as channel, pytest.raises(grpc.RpcError) as failed:
        unary(channel, "ModelInfer", infer_request())
    assert failed.value.details() == sentence
    [_, (name, told)] = Decoder().decode(status_block(Status.INTERNAL, "a%\u00e9"), 1000) or []
    assert (name, told) == (b"grpc-message", b"a%25%C3%A9")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"1H", 3600),
        (b"2M", 120),
        (b"3S", 3),
        (b"4m", 0.004),
        (b"5u", 5e-6),
        (b"6n", 6e-9),
        (b"", None),
        (b"S", None),
        (b"-1S", None),
        (b"1", None),
    ],
)
def test_timeouts_have_one_form(value: bytes, seconds: float | None) -> None:
    assert timeout_of(value) == (None if seconds is None else pytest.approx(seconds))


# -- large messages --------------------------------------------------------------------------------


def sized_answer(size: int) -> Any:
    def answer(request: PredictRequest) -> list[Output]:
        large = Prediction(b"\x32" + _varint(size) + bytes(size))
        return [Output(request.id, (), None, End("done", Usage(1)), large)]

    return answer


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def test_large_messages_go_both_ways(server: GrpcRunning) -> None:
    server.router.answer = sized_answer(9_000_000)
    with server.channel(("grpc.max_receive_message_length", -1)) as channel:
        answer = unary(channel, "ModelInfer", infer_request(raw_input_contents=[bytes(15_000_000)]))
        assert len(answer.raw_output_contents[0]) == 9_000_000
        answers = list(stream(channel, iter([infer_request(id="x" * 100) for _ in range(3)])))
        assert [len(answer.infer_response.raw_output_contents[0]) for answer in answers] == [9_000_000] * 3
        server.router.answer = sized_answer(10)
        answers = list(stream(channel, iter([infer_request(raw_input_contents=[bytes(3_000_000)]) for _ in range(8)])))
        assert [len(answer.infer_response.raw_output_contents[0]) for answer in answers] == [10] * 8


def test_more_than_a_connection_keeps_comes_one_after_the_other(server: GrpcRunning) -> None:
    """Forty messages of two megabytes at once, of which 16 megabytes are kept while they are not complete."""
    with server.channel() as channel:
        asked = [
            unary_future(channel, "ModelInfer", infer_request(id=str(n), raw_input_contents=[bytes(2_000_000)]))
            for n in range(40)
        ]
        assert [call.result(60).id for call in asked] == [str(number) for number in range(40)]


def test_a_deadline_is_kept_for_clients_that_do_not_look_at_theirs(server: GrpcRunning, client: Client) -> None:
    server.router.answer = None
    told, _ = client.ask([framed(BODY)], grpc_timeout="50m")
    assert told["grpc-status"] == str(int(Status.DEADLINE_EXCEEDED))
    assert server.router.streams[0].closed.wait(10)
    served = server.served()
    assert (served.status, served.outcome, served.error_code) == (408, "cancelled", "deadline_exceeded")


def test_a_message_that_does_not_come_is_not_waited_for() -> None:
    config = ServerConfig(port=0, grpc_port=0, grace_s=1, body_timeout_s=0.2)
    with running(config=config) as server:
        client = Client(server.port)
        try:
            slow, empty = client.begin(), client.begin()
            client.send(slow, framed(BODY)[:20])
            for number in (slow, empty):
                told, _ = client.answer(number)
                assert told["grpc-status"] == str(int(Status.DEADLINE_EXCEEDED))
            idle = client.begin("/inference.GRPCInferenceService/ModelStreamInfer")  # which may say nothing for long
            told, _ = client.ask([framed(BODY)])
            assert told["grpc-status"] == "0"
            client.send(idle, framed(BODY)[:3])
            told, _ = client.answer(idle)
            assert told["grpc-status"] == str(int(Status.DEADLINE_EXCEEDED))
        finally:
            client.close()


def test_a_stream_of_compressed_messages(server: GrpcRunning) -> None:
    with server.channel() as channel:
        asked = iter([infer_request(id=str(number)) for number in range(3)])
        answers = list(stream(channel, asked, compression=grpc.Compression.Gzip))
    assert sorted(answer.infer_response.id for answer in answers) == ["0", "1", "2"]


# -- hostile peers beside others -------------------------------------------------------------------


def test_messages_without_content_are_counted_too(server: GrpcRunning) -> None:
    """Tens of thousands fit into a window; requests that are computed hold up those behind them."""
    server.router.answer = None
    client = Client(server.port)
    try:
        number = client.begin("/inference.GRPCInferenceService/ModelStreamInfer")
        for _ in range(300):
            client.send(number, framed(BODY))
        for _ in range(5):
            client.send(number, framed(b"") * 1000)
        told, _ = client.answer(number)
        assert told["grpc-status"] == str(int(Status.RESOURCE_EXHAUSTED))
    finally:
        client.close()
    for of in tuple(server.router.streams):
        assert of.closed.wait(10)
        server.put(of, Output(of.given.id, (), None, End("cancelled")))


def test_hundreds_of_streams_reset_at_once_do_not_disturb_other_calls(server: GrpcRunning) -> None:
    """Each is begun as a whole request and given up in the next frame, as fast as it goes."""
    client = Client(server.port)
    try:
        for _ in range(900):
            number = client.begin()
            client.send(number, framed(BODY), end_stream=True)
            client._state.reset_stream(number, 8)
        client._socket.sendall(client._state.data_to_send())
        for _ in range(900):
            server.served()
    finally:
        client.close()
    statuses = [event.status for event in server.events if isinstance(event, HttpServed)]
    assert statuses.count(499) > 850, (
        "those that came together with their end were not even begun, but for one in a turn"
    )
    assert len(server.router.streams) < 50
    with server.channel() as channel:
        assert unary(channel, "ModelInfer", infer_request(id="other")).id == "other"
    until_now(lambda: server.server._calls._num_open == 0, "every call is closed", 10)
    until_now(lambda: not server.server.connections, "no connection is left", 10)
