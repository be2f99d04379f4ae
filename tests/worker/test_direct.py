"""The loop of a predictive worker over a real socket: what comes is answered, whatever it is."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest
from tests.predict.fake_runtime import Counter, Doubler, info, numbers, request
from tests.worker.watching import until_now

from inferd import clock
from inferd.config import ModelConfig
from inferd.predict import backend as backend_module
from inferd.predict.backend import PredictBackend
from inferd.predict.batcher import Batcher, Limits
from inferd.predict.estimate import BatchCost
from inferd.predict.runtime import Item, Result
from inferd.types import GenerateRequest, Output, PredictRequest, TextPrompt
from inferd.worker import direct as direct_module
from inferd.worker.channel import BlockingChannel, ChannelError, Frames
from inferd.worker.direct import ChannelClosedError, DirectLoop
from inferd.worker.messages import (
    Cancel,
    Detokenize,
    Detokenized,
    FromWorker,
    Load,
    Outputs,
    Stop,
    Submit,
    Tokenize,
    Tokenized,
    ToWorker,
    encode_frame,
    from_worker_decoder,
)


class Gateway:
    """The other end of the channel, and the loop's thread."""

    def __init__(self, limits: Limits, runtime: Doubler, cost: BatchCost | None = None) -> None:
        self.ours, theirs = socket.socketpair()
        self.ours.settimeout(20)
        self.channel = BlockingChannel(theirs)
        self.runtime = runtime
        self.backend = PredictBackend(runtime, Batcher(limits, cost), info(limits.max_rows), codecs=numbers)
        self.loop = DirectLoop(self.backend, self.channel.socket, self.channel.frames, self._send)
        self.error: Exception | None = None
        self._frames: Frames[FromWorker] = Frames(from_worker_decoder)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _send(self, message: FromWorker) -> None:
        self.channel.send([message])

    def _run(self) -> None:
        try:
            self.loop.run()
        except (ChannelClosedError, ChannelError) as error:
            self.error = error

    def send(self, *messages: ToWorker) -> None:
        self.ours.sendall(encode_frame(list(messages)))

    def receive(self) -> list[FromWorker]:
        """The messages of the next frames that come."""
        while True:
            messages = [message for frame in self._frames.feed(self.ours.recv(1 << 16)) for message in frame]
            if messages:
                return messages

    def outputs(self) -> list[Output]:
        """The outputs of the next frames that come."""
        found = []
        for message in self.receive():
            assert isinstance(message, Outputs)
            found += message.outputs
        return found

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.ours.close()
        self.join()
        self.channel.socket.close()


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    made = Gateway(Limits(max_rows=4, max_delay_s=0.0), Doubler())
    yield made
    made.close()


@pytest.fixture
def patient() -> Iterator[Gateway]:
    """One that computes only full batches of four."""
    made = Gateway(Limits(mode="static", max_rows=4), Doubler())
    yield made
    made.close()


def asked(name: str, *rows: int, **fields: object) -> Submit:
    return Submit(request(name, *rows, arrived_at=clock.now(), **fields))


def ends(outputs: list[Output]) -> dict[str, str]:
    return {output.request_id: output.end.outcome for output in outputs if output.end is not None}


def test_what_arrives_in_one_frame_is_computed_together_and_answered_in_one(gateway: Gateway) -> None:
    gateway.send(*[asked(f"r{place}", place) for place in range(4)])
    outputs = gateway.outputs()
    assert gateway.runtime.batches == [["r0", "r1", "r2", "r3"]]
    assert [o.prediction.body for o in outputs if o.prediction is not None] == [b"[0]", b"[2]", b"[4]", b"[6]"]


def test_an_idle_loop_is_not_busy_and_answers_again(gateway: Gateway) -> None:
    for place in range(20):
        gateway.send(asked(f"r{place}", place))
        assert ends(gateway.outputs()) == {f"r{place}": "done"}
    assert len(gateway.runtime.batches) == 20


def test_a_loop_that_computes_is_busy_and_one_that_waits_is_not() -> None:
    begun, go = threading.Event(), threading.Event()

    def hang(items: Sequence[Item]) -> None:
        begun.set()
        assert go.wait(20)

    made = Gateway(Limits(max_rows=4, max_delay_s=0.0), Doubler(on_predict=hang))
    made.send(asked("r", 1))
    assert begun.wait(20)
    assert made.loop.is_busy
    assert made.loop.steps == 0  # so long as this stands still, it hangs
    go.set()
    made.outputs()
    until_now(lambda: not made.loop.is_busy and made.loop.steps == 1, "the loop is idle")
    made.close()


def test_a_request_that_is_cancelled_before_it_begins_ends_at_once(patient: Gateway) -> None:
    patient.send(asked("a", 1), asked("b", 2), Cancel("a"), Cancel("nobody"))
    assert ends(patient.outputs()) == {"a": "cancelled"}
    patient.send(asked("c", 3), asked("d", 4), asked("e", 5))
    assert ends(patient.outputs()) == dict.fromkeys("bcde", "done")
    assert patient.runtime.batches == [["b", "c", "d", "e"]]


def test_a_deadline_ends_what_waits_for_a_batch_that_never_fills(patient: Gateway) -> None:
    patient.send(asked("late", 1, deadline_s=0.05))
    began = clock.now()
    (output,) = patient.outputs()
    assert output.end is not None
    assert output.end.failure is not None
    assert output.end.failure.kind == "deadline_exceeded"
    assert clock.now() - began < 10
    assert not patient.runtime.batches


def test_a_stop_ends_what_waits_and_closes_the_model(patient: Gateway) -> None:
    patient.send(asked("a", 1), Stop())
    assert ends(patient.outputs()) == {"a": "cancelled"}
    patient.join()
    assert patient.error is None
    assert patient.runtime.is_closed


def test_what_only_a_generating_model_takes_is_refused(gateway: Gateway) -> None:
    chat = GenerateRequest(id="chat", model="doubler", prompt=TextPrompt(text="hello"), arrived_at=clock.now())
    gateway.send(
        Submit(chat), Tokenize(1, TextPrompt(text="hello")), Detokenize(2, [1]), Load("x", ModelConfig(source="x"))
    )
    found: list[FromWorker] = []
    while len(found) < 3:
        found += gateway.receive()
    refused, tokenized, detokenized = found
    assert isinstance(refused, Outputs)
    assert ends(refused.outputs) == {"chat": "refused"}
    assert isinstance(tokenized, Tokenized)
    assert isinstance(detokenized, Detokenized)
    assert tokenized.failure is not None
    assert detokenized.failure is not None
    gateway.send(asked("r", 1))
    assert ends(gateway.outputs()) == {"r": "done"}


def test_a_gateway_that_is_gone_ends_the_loop() -> None:
    made = Gateway(Limits(max_rows=4), Doubler())
    made.close()
    assert isinstance(made.error, ChannelClosedError)


def test_what_is_no_frame_ends_the_loop() -> None:
    made = Gateway(Limits(max_rows=4), Doubler())
    made.ours.sendall(b"\x01\x00\x00\x00\xff")
    made.join()
    assert isinstance(made.error, ChannelError)
    made.close()


def test_an_answer_too_large_for_a_frame_is_an_error_of_its_request_alone(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = BlockingChannel.send

    def limited(channel: BlockingChannel, messages: list[FromWorker]) -> None:
        if len(encode_frame(messages)) > 1500:
            raise ChannelError("too large")
        send(channel, messages)

    monkeypatch.setattr(BlockingChannel, "send", limited)
    gateway.send(asked("small", 1), asked("large", *[10**15] * 100))
    found: dict[str, str] = {}
    while len(found) < 2:
        found |= ends(gateway.outputs())
    assert found == {"small": "done", "large": "refused"}


def test_an_answer_of_several_that_is_too_large_ends_its_request_and_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Sized(Counter):
        def stream(self, item: Item) -> Iterator[Result]:
            for number, result in enumerate(super().stream(item)):
                yield result if number != 1 else Result(outputs={"y": np.full((200, 1), 10**15)})

    send = BlockingChannel.send

    def limited(channel: BlockingChannel, messages: list[FromWorker]) -> None:
        if len(encode_frame(messages)) > 1500:
            raise ChannelError("too large")
        send(channel, messages)

    monkeypatch.setattr(BlockingChannel, "send", limited)
    runtime = Sized()
    made = Gateway(Limits(max_rows=4, max_delay_s=0.0), runtime)
    made.send(asked("endless", 1000))
    outputs: list[Output] = []
    while not ends(outputs):
        outputs += made.outputs()
    assert [output.end.outcome if output.end is not None else "" for output in outputs] == ["", "refused"]
    until_now(lambda: not made.loop.is_busy, "the loop is idle")
    assert runtime.closed == ["endless"]
    made.close()


def test_a_descriptor_beyond_selects_set_is_replaced_by_one_within(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_module, "_MAX_SELECT", 0)
    made = Gateway(Limits(max_rows=4, max_delay_s=0.0), Doubler())
    made.send(asked("r", 1))
    assert ends(made.outputs()) == {"r": "done"}
    made.close()
    made.loop._socket.close()


def test_a_flood_is_answered_bit_by_bit_and_a_model_for_which_batches_pay_gets_it_whole() -> None:
    quick, slow = BatchCost(), BatchCost()
    for rows in (1, 2, 4):
        quick.observe(rows, 0.00001 * rows)
        slow.observe(rows, 0.1 + 0.00001 * rows)
    for cost, first in ((quick, 17), (slow, 64)):
        made = Gateway(Limits(max_rows=256, max_delay_s=0.0), Doubler(), cost)
        made.send(*[asked(f"r{place}", place) for place in range(64)])
        found: dict[str, str] = {}
        while len(found) < 64:
            found |= ends(made.outputs())
        assert len(made.runtime.batches[0]) == first
        made.close()


@pytest.mark.parametrize("deadline_s", [None, 600.0])
def test_while_much_is_held_and_nothing_is_to_be_computed_yet_more_is_read(
    patient: Gateway, monkeypatch: pytest.MonkeyPatch, deadline_s: float | None
) -> None:
    monkeypatch.setattr(backend_module, "MAX_HELD_BYTES", 10)
    patient.send(asked("a", 10**10, deadline_s=deadline_s))
    until_now(lambda: patient.backend.is_full, "the request is held")
    patient.send(Cancel("a"))
    assert ends(patient.outputs()) == {"a": "cancelled"}


def test_nothing_more_is_read_while_much_is_held_and_there_is_something_to_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend_module, "MAX_HELD_BYTES", 10)
    begun, go = threading.Event(), threading.Event()
    waiting: list[int] = []

    def note(items: Sequence[Item]) -> None:
        waiting.append(made.backend.num_waiting)
        begun.set()
        assert go.wait(20)

    made = Gateway(Limits(max_rows=1, max_delay_s=0.0), Doubler(on_predict=note))
    made.send(asked("a", 10**10), asked("b", 10**10))
    assert begun.wait(20)
    made.send(asked("c", 1))
    go.set()
    found: dict[str, str] = {}
    while len(found) < 3:
        found |= ends(made.outputs())
    assert waiting == [1, 0, 0]  # c came in only when b was done
    made.close()


def test_a_frame_may_come_in_any_pieces(gateway: Gateway) -> None:
    frame = encode_frame([asked("a", 1), asked("b", 2)])
    for place in range(0, len(frame), 7):
        gateway.ours.sendall(frame[place : place + 7])
    assert ends(gateway.outputs()) == {"a": "done", "b": "done"}


def test_a_request_and_its_answer_cross_the_wire_as_they_are() -> None:
    given = PredictRequest(
        id="r", model="m", dialect="v2", body=b"\x00\xff", header_bytes=2, sequence="s", may_wait=False
    )
    frame = encode_frame([Submit(given)])
    assert msgspec.msgpack.decode(frame[4:], type=list[ToWorker]) == [Submit(given)]
