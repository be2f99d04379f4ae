"""The wire: frames survive any cutting, and nothing untrustworthy gets through."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.worker.watching import until

from inferd.answer_form import AnswerForm, JsonSchema
from inferd.types import Chat, Delta, GenerateRequest, Output, PredictRequest, SamplingParams
from inferd.worker import asynchronous
from inferd.worker.asynchronous import LARGE_BYTES, Channel, _frames
from inferd.worker.channel import BlockingChannel, ChannelError, Frames
from inferd.worker.messages import (
    HEADER,
    MAX_FRAME_BYTES,
    Cancel,
    FromWorker,
    Heartbeat,
    Outputs,
    Submit,
    ToWorker,
    encode_frame,
    from_worker_decoder,
    to_worker_decoder,
)

MESSAGES = st.one_of(
    st.builds(Heartbeat, st.integers(0, 2**60), st.booleans()),
    st.builds(lambda text: Outputs([Output("r", (Delta(0, text, (1, 2)),))]), st.text(max_size=50)),
)


@given(st.lists(st.lists(MESSAGES, max_size=3), max_size=5), st.lists(st.integers(1, 40), min_size=1))
def test_frames_come_out_as_they_went_in_however_the_bytes_are_cut(
    sent: list[list[FromWorker]], sizes: list[int]
) -> None:
    wire = b"".join(encode_frame(messages) for messages in sent)
    frames: Frames[FromWorker] = Frames(from_worker_decoder)
    received: list[list[FromWorker]] = []
    at, turn = 0, 0
    while at < len(wire):
        size = sizes[turn % len(sizes)]
        received += frames.feed(wire[at : at + size])
        at, turn = at + size, turn + 1
    assert received == sent
    assert frames.is_between_frames


INTEGERS = (
    st.integers() | st.integers(-(2**80), 2**80) | st.sampled_from([2**64, 2**64 - 1, -(2**63), -(2**63) - 1, 10**400])
)
CLIENT_JSON = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(CLIENT_JSON)
def test_the_json_of_a_client_reaches_the_worker_with_integers_of_any_size(value: object) -> None:
    chat = Chat(messages=[{"role": "user", "content": "x", "extra": value}], template_kwargs={"value": value})
    form = AnswerForm(constraint=JsonSchema(schema={"const": value}, at="response_format"))
    asked = GenerateRequest(
        id="a", model="m", prompt=chat, sampling=SamplingParams(logit_bias={3: 1.0}, stop=("x",)), form=form
    )
    sent: list[ToWorker] = [
        Submit(asked), Submit(PredictRequest(id="b", model="m", dialect="v2", body=b"\x00\xff")), Cancel("c"),
    ]  # fmt: skip
    assert list(Frames(to_worker_decoder).feed(bytes(encode_frame(sent)))) == [sent]


@given(st.binary(min_size=1, max_size=200))
def test_garbage_is_an_error_or_waits_for_more_and_is_never_a_message(garbage: bytes) -> None:
    frames: Frames[FromWorker] = Frames(from_worker_decoder)
    try:
        received = list(frames.feed(HEADER.pack(len(garbage)) + garbage))
    except ChannelError:
        return
    # What decodes at all is what our own encoder could have written.
    assert [msgspec.msgpack.decode(msgspec.msgpack.encode(m), type=list[FromWorker]) for m in received] == received


def test_a_frame_that_claims_too_much_is_refused_before_it_is_read() -> None:
    frames: Frames[FromWorker] = Frames(from_worker_decoder)
    with pytest.raises(ChannelError, match="at most"):
        list(frames.feed(HEADER.pack(MAX_FRAME_BYTES + 1)))


class Ends:
    """A gateway's channel over a socket pair, and what it told its owner."""

    def __init__(self) -> None:
        self.received: list[FromWorker] = []
        self.closed: list[Exception | None] = []
        self.writable = 0
        ours, self.theirs = socket.socketpair()
        self.channel = Channel(self.received.extend, self.closed.append, self._on_writable)
        self._ours = ours

    def _on_writable(self) -> None:
        self.writable += 1

    async def connect(self) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self.channel, sock=self._ours)

    async def close(self) -> None:
        self.channel.close()
        await until(lambda: bool(self.closed), "the channel is closed")
        self.theirs.close()
        assert len(self.closed) == 1


def with_ends(scenario: Callable[[Ends], Awaitable[None]]) -> None:
    async def run() -> None:
        ends = Ends()
        await ends.connect()
        await scenario(ends)
        await ends.close()

    asyncio.run(run())


def test_messages_of_one_turn_leave_in_one_frame_even_before_the_connection() -> None:
    async def run() -> None:
        ends = Ends()
        ends.channel.send(Cancel("a"))
        await ends.connect()
        ends.channel.send(Cancel("b"))
        ends.channel.send(Cancel("c"))
        await asyncio.sleep(0)
        frames = iter(BlockingChannel(ends.theirs))
        assert [next(frames), next(frames)] == [[Cancel("a")], [Cancel("b"), Cancel("c")]]
        await ends.close()

    asyncio.run(run())


@pytest.mark.parametrize("sent", [b"\x04\x00\x00\x00junk", HEADER.pack(MAX_FRAME_BYTES + 1), encode_frame([])[:-1]])
def test_a_bad_frame_closes_the_channel_with_its_error(sent: bytes) -> None:
    async def scenario(ends: Ends) -> None:
        ends.theirs.sendall(sent)
        ends.theirs.shutdown(socket.SHUT_WR)
        await until(lambda: bool(ends.closed), "the channel is closed")
        assert isinstance(ends.closed[0], ChannelError)
        assert not ends.received

    with_ends(scenario)


def test_a_peer_that_does_not_read_makes_the_channel_unwritable_until_it_does() -> None:
    async def scenario(ends: Ends) -> None:
        big = Cancel("x" * 1024 * 1024)
        while ends.channel.is_writable:
            ends.channel.send(big)
            await asyncio.sleep(0)
        reader = threading.Thread(target=lambda: list(BlockingChannel(ends.theirs)))
        reader.start()
        await until(lambda: ends.channel.is_writable, "the channel has drained")
        assert ends.writable == 1
        ends.channel.close()
        await asyncio.to_thread(reader.join)

    with_ends(scenario)


def test_a_peer_that_never_reads_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asynchronous, "MAX_UNSENT_BYTES", 1024 * 1024)

    async def scenario(ends: Ends) -> None:
        for _ in range(10):
            ends.channel.send(Cancel("x" * 1024 * 1024))
            await asyncio.sleep(0)
        await until(lambda: bool(ends.closed), "the channel is closed")
        assert isinstance(ends.closed[0], ChannelError)

    with_ends(scenario)


def test_a_message_that_cannot_be_written_closes_the_channel_so_that_no_request_waits_for_ever() -> None:
    async def scenario(ends: Ends) -> None:
        ends.channel.send(Cancel("a"))
        ends.channel.send(Cancel("\ud800"))
        await until(lambda: bool(ends.closed), "the channel is closed")
        assert isinstance(ends.closed[0], ChannelError)

    with_ends(scenario)


def test_messages_that_fit_no_frame_together_leave_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asynchronous, "MAX_FRAME_BYTES", 64)

    async def scenario(ends: Ends) -> None:
        sent: list[ToWorker] = [Cancel(str(i) * 20) for i in range(9)]
        for message in sent:
            ends.channel.send(message)
        await asyncio.sleep(0)
        received: list[ToWorker] = []
        num_frames = 0
        for messages in BlockingChannel(ends.theirs):
            received += messages
            num_frames += 1
            if len(received) == len(sent):
                break
        assert received == sent
        assert num_frames > 1

    with_ends(scenario)


def test_large_requests_leave_in_frames_of_their_own() -> None:
    def asked(size: int) -> Submit:
        return Submit(PredictRequest(id="r", model="m", dialect="v2", body=bytes(size), num_bytes=size))

    half = LARGE_BYTES // 2
    sent = [asked(size) for size in (10, half, half, 3 * half, 10, 10)]
    frames = list(_frames(sent))
    decoded = [
        [
            message.request.num_bytes
            for message in next(iter(Frames(to_worker_decoder).feed(bytes(frame))))
            if isinstance(message, Submit)
        ]
        for frame in frames
    ]
    assert decoded == [[10, half, half], [3 * half], [10, 10]]
