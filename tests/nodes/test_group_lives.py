"""The end of a group of ranks: it names the part that ended first, and is no wait where parts cannot be joined."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest

from inferd.config import ModelConfig, ParallelConfig
from inferd.engine.ranks.watch import EXIT_RANK_LOST
from inferd.nodes.group import GroupLife
from inferd.nodes.relay import Relay
from inferd.worker.messages import Load

WORKER, LEFT, LOAD_FAILED = 0, 2, 3
LOAD = Load("m", ModelConfig(source="m", parallel=ParallelConfig(pipeline=3, machines=3)))


class Part:
    """A worker or a rank that ends when it is told to."""

    pid = None
    is_writable = True
    is_machine_lost = False

    def __init__(self) -> None:
        self.gone: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.end = Relay()

    @property
    def reason(self) -> str:
        return f"status {self.gone.result()}"

    def kill(self) -> None:
        self.gone.set_result(-signal.SIGKILL)


class Machine:
    name = "one"

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts

    def launch_rank(self, name: str, load: Load, rank: int, on_messages: object) -> Any:
        self._parts.append(Part())
        return self._parts[-1]


def group() -> tuple[GroupLife, list[Part]]:
    """A worker and two ranks."""
    parts = [Part()]
    start: Callable[[Load], Any] = lambda load: parts[0]  # noqa: E731
    return GroupLife("m/0", LOAD, [Machine(parts), Machine(parts)], start, lambda messages: None), parts


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ([(2, -9)], "its rank 2 was lost: status -9"),  # rank 0 is still loading, and is killed with it
        ([(WORKER, EXIT_RANK_LOST), (1, LEFT), (2, -9)], "its rank 2 was lost: status -9"),
        ([(WORKER, EXIT_RANK_LOST), (1, LEFT), (2, LEFT)], f"status {EXIT_RANK_LOST}"),  # of a rank beside rank 0
        ([(1, EXIT_RANK_LOST), (WORKER, EXIT_RANK_LOST), (2, LEFT)], f"status {EXIT_RANK_LOST}"),  # rank 1 told rank 0
        ([(1, EXIT_RANK_LOST)], f"its rank 1 was lost: status {EXIT_RANK_LOST}"),  # and rank 0 did not read it
        ([(WORKER, -9), (1, LEFT), (2, 1)], "status -9"),
        ([(WORKER, -9)], "status -9"),
    ],
)
def test_the_reason_is_that_of_the_part_that_ended_first(ends: list[tuple[int, int]], reason: str) -> None:
    async def scenario() -> None:
        life, parts = group()
        for part, status in ends:
            parts[part].gone.set_result(status)
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            assert await life.gone == parts[WORKER].gone.result()
        assert life.reason == reason

    asyncio.run(scenario())


def test_a_connection_that_cannot_be_made_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(listener: object, end: object) -> None:
        raise OSError(24, "Too many open files")

    async def scenario() -> None:
        life, _ = group()
        async with asyncio.timeout(30):
            await life.gone
        assert life.reason.startswith("rank 0 could not be joined to a rank on a node: ")

    monkeypatch.setattr("inferd.nodes.group._join", refuse)
    asyncio.run(scenario())


def test_what_a_rank_sends_before_rank_0_is_there_is_bounded_and_not_lost() -> None:
    whole = 16 << 20

    async def scenario() -> None:
        end, other = Relay(), Relay()
        loop = asyncio.get_running_loop()
        far, ours = socket.socketpair()
        near, theirs = socket.socketpair()
        await loop.connect_accepted_socket(lambda: end, ours)
        await loop.connect_accepted_socket(lambda: other, theirs)
        for each in (far, near):
            each.setblocking(False)
        sent = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(30):
                while sent < whole:  # a second in which nothing is taken: it is full
                    sent += await asyncio.wait_for(_send(far, b"x" * (1 << 16)), 1)
        assert sent < whole
        other.joined(end)
        end.joined(other)
        got = 0
        async with asyncio.timeout(30):
            while got < sent:
                got += len(await loop.sock_recv(near, 1 << 20))
        assert got == sent
        for made in (far, near):
            made.close()
        await end.is_closed.wait()
        await other.is_closed.wait()

    asyncio.run(scenario())


async def _send(to: socket.socket, data: bytes) -> int:
    while True:
        try:
            return to.send(data)
        except BlockingIOError:
            await asyncio.sleep(0.005)
