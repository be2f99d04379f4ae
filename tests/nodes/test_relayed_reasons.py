"""What a rank on a node says last reaches rank 0 through both relays, also while tensors are on their way to it."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import select
import socket
import threading
from collections.abc import Callable

import pytest
import torch

from inferd.engine.ranks.post import Line, Post
from inferd.nodes.relay import Relay

SENT = 1 << 20  # bytes of each tensor
SAID = f"rank 0 sent tensors of {SENT} bytes to rank 1, and a step has at most 1000"
LENGTH = f"rank 0 sent a tensor of {SENT} bytes to rank 1, which awaits 4"


async def _join(one: socket.socket, other: socket.socket) -> list[Relay]:
    """As a server or a node does."""
    loop = asyncio.get_running_loop()
    first, second = Relay(), Relay()
    for end, connection in ((first, one), (second, other)):
        connection.setblocking(False)
        await loop.connect_accepted_socket(lambda end=end: end, connection)  # type: ignore[misc]
    first.joined(second)
    second.joined(first)
    return [first, second]


async def _relay(*pairs: tuple[socket.socket, socket.socket]) -> None:
    """Until all connections are closed."""
    for relay in [relay for one, other in pairs for relay in await _join(one, other)]:
        await relay.is_closed.wait()


def _heard(most_bytes: int, compute: Callable[[Post], None]) -> str:
    """What rank 0 hears of rank 1, while it sends it tensors."""
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    near, server = socket.socketpair()
    outward, inward = socket.socketpair()
    node, far = socket.socketpair()
    relaying = threading.Thread(target=asyncio.run, args=(_relay((server, outward), (inward, node)),))
    relaying.start()
    posts = [Post(0, 2, lambda other, why: told.put(why)), Post(1, 2)]
    posts[1].most_bytes = most_bytes
    posts[0].add(Line(near, 1))
    posts[1].add(Line(far, 0))

    def send() -> None:
        tensor = torch.zeros(SENT, dtype=torch.uint8)
        with contextlib.suppress(ConnectionError):
            while True:
                posts[0].send(tensor, 1)

    sending = threading.Thread(target=send)
    sending.start()
    try:
        compute(posts[1])
        return told.get(timeout=30)
    finally:
        for post in posts:
            for line in post.lines.values():
                line.close()
        sending.join(30)
        relaying.join(30)


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need long to pass on a sentence."""
    monkeypatch.setattr("inferd.engine.ranks.post.CLOSE_S", 30, raising=False)


def test_bytes_that_are_passed_on_after_it_do_not_overtake_it() -> None:
    """The relay notices that a connection ended when it writes there, and then reads nothing more from it."""

    async def scenario() -> bytes:
        loop = asyncio.get_running_loop()
        near, server = socket.socketpair()
        node, far = socket.socketpair()
        relays = await _join(server, node)
        post = Post(1, 2)
        post.add(Line(far, 0))
        near.sendall(bytes(1000))  # the relay finds it first
        refusing = threading.Thread(target=post.refuse, args=(0, SAID))
        refusing.start()
        select.select([node], [], [], 30)
        refusing.join(0.05)  # where it does not wait, its connection is closed
        near.setblocking(False)
        said = await asyncio.wait_for(loop.sock_recv(near, 1 << 16), 30)
        near.close()
        for relay in relays:
            await relay.is_closed.wait()
        refusing.join(30)
        return said

    assert asyncio.run(scenario()).endswith(SAID.encode())


def test_what_the_thread_that_reads_found() -> None:
    assert _heard(1000, lambda post: None) == SAID


def test_what_the_thread_that_computes_found() -> None:
    def compute(post: Post) -> None:
        with pytest.raises(EOFError, match=LENGTH):
            post.receive(torch.empty(1), 0)

    assert _heard(1 << 40, compute) == LENGTH
