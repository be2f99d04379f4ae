"""What the step loop posts is written by another thread: all of it, in order, and never more than fits."""

from __future__ import annotations

import socket
import threading

import pytest

from inferd.types import Output
from inferd.worker import channel as channel_module
from inferd.worker.channel import BlockingChannel, ChannelError, Frames
from inferd.worker.messages import FromWorker, Outputs, from_worker_decoder
from inferd.worker.outbox import MAX_FRAMES, Outbox


def received(end: socket.socket) -> list[str]:
    """The requests that outputs were for, until the other end closes."""
    frames: Frames[FromWorker] = Frames(from_worker_decoder)
    found: list[str] = []
    while data := end.recv(65536):
        for messages in frames.feed(data):
            found += [o.request_id for message in messages if isinstance(message, Outputs) for o in message.outputs]
    return found


def test_everything_is_written_in_order_before_it_closes() -> None:
    ours, theirs = socket.socketpair()
    outbox = Outbox(BlockingChannel(ours))
    names = [str(i) for i in range(MAX_FRAMES - 1)]
    for name in names:  # the writing thread does not run yet: none of these waits
        outbox.post([Outputs([Output(name, (), None)])])
    outbox.close()
    outbox.run()
    ours.close()
    with theirs:
        assert received(theirs) == names


def test_a_reader_that_does_not_read_blocks_the_posting_thread() -> None:
    ours, theirs = socket.socketpair()
    outbox = Outbox(BlockingChannel(ours))
    large = "x" * 200_000  # more than a socket holds
    posted: list[int] = []
    is_full = threading.Event()

    def post() -> None:
        for i in range(2 * MAX_FRAMES):
            outbox.post([Outputs([Output(f"{i} {large}", (), None)])])
            posted.append(i)
            if len(posted) == MAX_FRAMES:
                is_full.set()
        outbox.close()

    writing, posting = threading.Thread(target=outbox.run), threading.Thread(target=post)
    posting.start()
    assert is_full.wait(60)
    assert len(posted) == MAX_FRAMES  # and there it stays, as no thread takes anything out
    writing.start()
    found: list[str] = []
    reading = threading.Thread(target=lambda: found.extend(received(theirs)))
    reading.start()
    posting.join()
    writing.join()
    ours.close()
    reading.join()
    theirs.close()
    assert [name.split()[0] for name in found] == [str(i) for i in range(2 * MAX_FRAMES)]


def test_an_output_too_large_for_a_frame_is_an_error_of_the_post(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_FRAME_BYTES", 10)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ChannelError):
        Outbox(BlockingChannel(ours)).post([Outputs([Output("a long name", (), None)])])


def test_a_reader_that_is_gone_ends_the_writer() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    outbox = Outbox(BlockingChannel(ours))
    outbox.post([Outputs([Output("a", (), None)])])
    with ours, pytest.raises(OSError, match="Broken pipe"):
        outbox.run()
