"""ModelStreamInfer: many requests on one stream, each answered, failed and paid for by itself."""

from __future__ import annotations

import queue
import struct
import time
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.fakes import FakeDoor
from tests.gateway.grpc.running import (
    GrpcRunning,
    PredictingRouter,
    infer_request,
    predicted,
    running,
    stream,
    text_request,
    unary,
)
from tests.worker.watching import until_now

from inferd.config import ServerConfig
from inferd.errors import InvalidRequest, Overloaded
from inferd.events import HttpServed
from inferd.gateway.grpc import streams
from inferd.tenancy.principal import Principal
from inferd.types import Delta, End, Output, Prediction, PredictRequest, Usage


class Asking:
    """The client's half of a stream: says what it is given until it is closed."""

    def __init__(self, channel: grpc.Channel, **call: Any) -> None:
        self._said: queue.Queue[Any] = queue.Queue()
        self.answers = stream(channel, iter(self._said.get, None), **call)

    def say(self, message: Any) -> None:
        self._said.put(message)

    def close(self) -> None:
        self._said.put(None)


def is_last(answer: Any) -> bool:
    last: bool = answer.infer_response.parameters["triton_final_response"].bool_param
    return last


def test_requests_are_answered_as_they_are_done(server: GrpcRunning, connected: grpc.Channel) -> None:
    """The first request takes longest, and delays no other."""
    server.router.answer = None
    asking = Asking(connected)
    for name in ("slow", "fast"):
        asking.say(infer_request(id=name))
        assert server.router.submitted.acquire(timeout=10)
    slow, fast = server.router.streams
    finish(server, fast)
    answer = next(asking.answers)
    assert (answer.infer_response.id, answer.error_message, is_last(answer)) == ("fast", "", True)
    finish(server, slow)
    assert next(asking.answers).infer_response.id == "slow"
    asking.close()
    assert list(asking.answers) == []


def finish(server: GrpcRunning, of: Any) -> None:
    for output in predicted(of.given):
        server.put(of, output)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(["ok", "refused", "unknown", "broken"]), min_size=1, max_size=12))
def test_every_request_has_one_answer_whatever_becomes_of_the_others(kinds: list[str]) -> None:
    server = SHARED.reset()

    def answer(request: PredictRequest) -> list[Output]:
        outputs = predicted(request)
        if b"refused" in request.body:
            raise InvalidRequest("Not this one.")
        return outputs

    server.router.answer = answer
    messages: list[Any] = []
    for number, kind in enumerate(kinds):
        message = infer_request("nothing" if kind == "unknown" else "digits", id=f"{number} {kind}")
        messages.append(b"\xff" if kind == "broken" else message)
    with server.channel() as channel:
        answers = list(stream(channel, iter(messages)))
    assert len(answers) == len(kinds)
    for answered in answers:
        _, _, kind = answered.infer_response.id.partition(" ")
        assert (answered.error_message == "") == (kind == "ok")
        says = {"ok": "", "refused": "Not this one.", "unknown": "nothing", "": "protobuf"}[kind]
        assert says in answered.error_message
    assert sorted(a.infer_response.id for a in answers) == sorted(
        "" if kind == "broken" else f"{number} {kind}" for number, kind in enumerate(kinds)
    )
    for _ in kinds:
        assert server.served().stream


SHARED: GrpcRunning


@pytest.fixture(scope="module", autouse=True)
def _shared(listening: GrpcRunning) -> None:
    global SHARED  # noqa: PLW0603
    SHARED = listening


def test_a_sequence_is_asked_one_after_the_other(server: GrpcRunning, connected: grpc.Channel) -> None:
    server.router.answer = None
    asking = Asking(connected)
    for number in range(3):
        for sequence in ("a", "b"):
            asking.say(infer_request(id=f"{sequence}{number}", parameters={"sequence_id": sequence}))
    for number in range(3):
        for _ in range(2):
            assert server.router.submitted.acquire(timeout=10)
        assert len(server.router.streams) == 2 * (number + 1), "the next of a sequence waits for the one before"
        now = server.router.streams[-2:]
        assert {of.given.session for of in now} == {"a", "b"}
        for of in reversed(now):
            finish(server, of)
        got = {next(asking.answers).infer_response.id for _ in range(2)}
        assert got == {f"a{number}", f"b{number}"}
    asking.close()
    assert list(asking.answers) == []


def test_a_failed_request_of_a_sequence_is_followed_by_the_next(server: GrpcRunning, connected: grpc.Channel) -> None:
    server.router.refusal = Overloaded("Full.")
    asking = Asking(connected)
    for number in range(2):
        asking.say(infer_request(id=str(number), parameters={"sequence_id": "a"}))
    assert [next(asking.answers).error_message for _ in range(2)] == ["Full.", "Full."]
    asking.close()


def several(count: int, *, told_last: bool) -> Any:
    def answer(request: PredictRequest) -> list[Output]:
        one = predicted(request)[0].prediction
        assert one is not None
        end = End("done", Usage(1))
        outputs = [Output(request.id, prediction=one) for _ in range(count)]
        if told_last:
            return [*outputs[:-1], Output(request.id, (), None, end, one)]
        return [*outputs, Output(request.id, (), None, end)]

    return answer


@pytest.mark.parametrize(
    ("told_last", "wants_empty", "flags"),
    [
        (True, False, [False, False, True]),
        (False, False, [False, False, False]),
        (False, True, [False, False, False, True]),
        (True, True, [False, False, True]),
    ],
)
def test_a_model_may_answer_several_times(
    server: GrpcRunning, connected: grpc.Channel, told_last: bool, wants_empty: bool, flags: list[bool]
) -> None:
    server.router.answer = several(3, told_last=told_last)
    message = infer_request(id="m", parameters={"triton_enable_empty_final_response": True} if wants_empty else {})
    answers = list(stream(connected, iter([message])))
    assert [is_last(answer) for answer in answers] == flags
    assert {answer.infer_response.id for answer in answers} == {"m"}
    assert [bool(answer.infer_response.raw_output_contents) for answer in answers] == [True] * 3 + [False] * (
        len(flags) - 3
    )


@pytest.mark.parametrize("count", [0, 2])
def test_one_answer_is_what_a_call_of_one_answer_has(server: GrpcRunning, connected: grpc.Channel, count: int) -> None:
    server.router.answer = several(count, told_last=False)
    with pytest.raises(grpc.RpcError) as failed:
        unary(connected, "ModelInfer", infer_request())
    error: Any = failed.value
    assert error.code() == StatusCode.UNIMPLEMENTED
    assert "ModelStreamInfer" in error.details()


def test_a_text_comes_in_pieces(server: GrpcRunning, connected: grpc.Channel) -> None:
    answers = list(stream(connected, iter([text_request("Once", max_tokens=5)])))
    pieces = [answer.infer_response.raw_output_contents[0][4:] for answer in answers]
    assert b"".join(pieces) == b"Hello world!"
    assert [is_last(answer) for answer in answers] == [False] * (len(answers) - 1) + [True]
    assert server.router.last.stream
    told = server.served()
    assert (told.status, told.usage, told.finish_reasons) == (200, Usage(3, 3, 1), ("stop",))


def test_a_text_that_breaks_off_says_why(server: GrpcRunning, connected: grpc.Channel) -> None:
    failure = Overloaded("Memory ran out.").to_failure()
    server.router.script = lambda request: [
        Output(request.id, (Delta(0, "Hel"),)),
        Output(request.id, end=End("failed", failure=failure)),
    ]
    answers = list(stream(connected, iter([text_request("Once")])))
    said = b"".join(content for answer in answers for content in answer.infer_response.raw_output_contents)
    assert said in (struct.pack("<I", 3) + b"Hel", b"")  # what came together with the end may go with it
    assert answers[-1].error_message == "Memory ran out."
    assert answers[-1].infer_response.id == "t"


def test_a_cancelled_call_cancels_all_its_requests(server: GrpcRunning, connected: grpc.Channel) -> None:
    server.router.answer = None
    asking = Asking(connected)
    for number in range(3):
        asking.say(infer_request(id=str(number)))
        assert server.router.submitted.acquire(timeout=10)
    asking.answers.cancel()
    for of in server.router.streams:
        assert of.closed.wait(10)
        server.put(of, Output(of.given.id, (), None, End("cancelled")))
    assert {server.served().status for _ in range(3)} == {499}
    asking.close()


def test_a_call_cancelled_between_answers_leaves_no_trace(
    server: GrpcRunning, connected: grpc.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):
        answers = stream(connected, iter([infer_request() for _ in range(20)]))
        next(answers)
        answers.cancel()
    until_now(lambda: server.server._calls._num_open == 0, "every call is closed", 10)
    assert [record.getMessage() for record in caplog.records] == []
    assert next(stream(connected, iter([infer_request()]))).error_message == ""


def test_the_streams_deadline_is_each_requests(server: GrpcRunning, connected: grpc.Channel) -> None:
    server.router.answer = None
    asking = Asking(connected, timeout=1.5)
    asking.say(infer_request())
    with pytest.raises(grpc.RpcError) as failed:
        next(asking.answers)
    assert failed.value.code() == StatusCode.DEADLINE_EXCEEDED
    deadline = server.router.streams[0].given.deadline_s
    assert deadline is not None
    assert deadline <= 1.6
    assert server.router.streams[0].closed.wait(10)
    asking.close()


def test_a_stream_has_so_many_requests_under_way(
    server: GrpcRunning, connected: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_IN_FLIGHT", 4)
    server.router.answer = None
    asking = Asking(connected)
    for number in range(10):
        asking.say(infer_request(id=str(number)))
    for number in range(10):
        assert server.router.submitted.acquire(timeout=10)
        assert len(server.router.streams) <= number + 4
        finish(server, server.router.streams[number])
        next(asking.answers)
    asking.close()


def test_answers_that_a_client_does_not_read_are_not_computed() -> None:
    """When no answer was taken for a while, what the stream still has under way is cancelled and the stream ends."""
    config = ServerConfig(port=0, grpc_port=0, grace_s=1, send_timeout_s=1)
    with running(config=config) as server, server.channel() as channel:
        large = Prediction(b"\x32\x80\x80\x40" + bytes(1 << 20))

        def answer(request: PredictRequest) -> list[Output]:
            if len(server.router.streams) == 1:
                return []  # still computing
            return [Output(request.id, (), None, End("done", Usage(1)), large)]

        server.router.answer = answer
        asking = Asking(channel, timeout=60)
        for _ in range(150):
            asking.say(infer_request())
        for _ in range(2):
            assert server.router.submitted.acquire(timeout=10)
        computing = server.router.streams[1]
        assert computing.closed.wait(20)
        server.put(computing, Output(computing.given.id, (), None, End("cancelled")))
        with pytest.raises(grpc.RpcError) as failed:
            list(asking.answers)
        error: Any = failed.value
        assert error.code() == StatusCode.ABORTED
        assert "send_timeout_s" in error.details()
        asking.close()


def test_a_call_tells_how_long_the_reader_of_the_stream_kept_it_waiting() -> None:
    with running(config=ServerConfig(port=0, grpc_port=0, grace_s=1, send_timeout_s=10)) as server:
        large = Prediction(b"\x32\x80\x80\x40" + bytes(1 << 20))
        server.router.answer = lambda request: [Output(request.id, (), None, End("done", Usage(1)), large)]
        with server.channel() as channel:
            asking = Asking(channel, timeout=60)
            for _ in range(20):
                asking.say(infer_request())
            for _ in range(2):
                assert server.router.submitted.acquire(timeout=10)
            time.sleep(0.3)  # the answers wait meanwhile
            for _ in range(20):
                next(asking.answers)
            asking.close()
            assert list(asking.answers) == []
        for _ in range(20):
            assert server.emitted.acquire(timeout=10)
        calls = [event for event in server.events if isinstance(event, HttpServed)]
        assert sum(call.blocked_s for call in calls) > 0.2
        assert all(call.received_s is not None and call.submitted_s is not None for call in calls)


def test_a_stream_that_is_idle_ends_when_the_server_leaves() -> None:
    with running(PredictingRouter(), ServerConfig(port=0, grpc_port=0, grace_s=10)) as leaving:
        with leaving.channel(("grpc.enable_retries", 0)) as channel:
            idle, busy = Asking(channel), Asking(channel)
            idle.say(infer_request())
            next(idle.answers)
            leaving.router.answer = None
            assert leaving.router.submitted.acquire(timeout=10)
            busy.say(infer_request(id="busy"))
            assert leaving.router.submitted.acquire(timeout=10)
            leaving.begin_stop()
            with pytest.raises(grpc.RpcError) as failed:
                next(idle.answers)
            assert failed.value.code() == StatusCode.UNAVAILABLE
            finish(leaving, leaving.router.streams[-1])
            assert next(busy.answers).infer_response.id == "busy"
            with pytest.raises(grpc.RpcError):
                next(busy.answers)
            idle.close()
            busy.close()
        leaving.ended()


def test_keys_hold_for_streams() -> None:
    door = FakeDoor({"good": Principal(key_id="k", tenant="acme")})
    with running(door=door) as server, server.channel() as channel:
        with pytest.raises(grpc.RpcError) as failed:
            list(stream(channel, iter([infer_request()])))
        assert failed.value.code() == StatusCode.UNAUTHENTICATED
        assert server.served().status == 401
        asking = Asking(channel, metadata=(("authorization", "Bearer good"),))
        asking.say(infer_request())
        assert next(asking.answers).error_message == ""
        assert server.served().key_id == "k"
        assert door.permits[-1].settled == [(Usage(3), "done")]
        del door.keys["good"]  # revoked meanwhile
        asking.say(infer_request(id="later"))
        answer = next(asking.answers)
        assert ("key" in answer.error_message, answer.infer_response.id) == (True, "later")
        asking.close()
