"""One life of a replica whose ranks are on several machines: rank 0's worker here, and ranks on nodes.

For its supervisor it is the life of one worker. The parts are started together, and end with any of them. Rank 0
reaches each rank on a node through a socket in a folder that no other user can read; what it sends there leaves through
that rank's connection to this server, by TLS and with a key of its own.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from inferd.config import ModelConfig, SpeculationConfig
from inferd.engine.ranks.watch import EXIT_RANK_LOST, until_stopped
from inferd.nodes.life import RankLife
from inferd.nodes.relay import Relay
from inferd.worker.messages import FromWorker, Load, ToWorker
from inferd.worker.process import Life

_log = logging.getLogger("inferd.nodes")

LAST_S: Final = 0.5
"""Seconds that parts have to end by themselves after another one has, which tells why they did."""

_LEFT: Final = (0, 2)
"""Statuses of ranks that left because rank 0 did (``engine.ranks.rank``)."""


class Machine(Protocol):
    """A node that starts ranks."""

    @property
    def name(self) -> str: ...

    def launch_rank(
        self, name: str, load: Load, rank: int, on_messages: Callable[[list[FromWorker]], None]
    ) -> RankLife: ...


class GroupLife:
    """Implements ``Life`` for a worker and ranks on nodes."""

    def __init__(
        self,
        name: str,
        load: Load,
        machines: Sequence[Machine],
        start: Callable[[Load], Life],
        on_messages: Callable[[list[FromWorker]], None],
    ) -> None:
        """``machines``: the nodes, one after the other, that have the ranks behind those here. ``start`` starts the
        worker. Raises OSError."""
        loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[int] = loop.create_future()
        self._loop = loop
        self._on_messages = on_messages
        self._folder = Path(tempfile.mkdtemp(prefix="inferd-far-"))  # readable by this user alone
        self._ranks: dict[int, RankLife] = {}
        self._listeners: list[socket.socket] = []
        self._killing: asyncio.TimerHandle | None = None
        self._is_killed = False
        self._lost: int | None = None  # the rank that ended before the group was killed, and not because rank 0 did
        self._problem = ""
        parallel = load.model.parallel
        try:
            for rank in range(parallel.per_machine, parallel.count):
                self._listeners.append(_listener(self._folder / str(rank)))
            self._worker = start(msgspec.structs.replace(load, far=str(self._folder)))
        except OSError:
            for listener in self._listeners:
                listener.close()
            shutil.rmtree(self._folder)
            raise
        part = Load(load.name, _of_ranks(load.model), load.replica)
        for rank in range(parallel.per_machine, parallel.count):
            machine = machines[rank // parallel.per_machine - 1]
            self._ranks[rank] = machine.launch_rank(f"{name} rank {rank}", part, rank, self._told)
        self._openings = [
            loop.create_task(_join(listener, life.end))
            for listener, life in zip(self._listeners, self._ranks.values(), strict=True)
        ]
        for opening in self._openings:
            opening.add_done_callback(self._opened)
        self._watching = None if self.pid is None else loop.create_task(self._end_if_stopped(self.pid))
        for life in self._lives:
            life.gone.add_done_callback(self._part_ended)

    @property
    def pid(self) -> int | None:
        return self._worker.pid

    @property
    def is_writable(self) -> bool:
        return self._worker.is_writable

    @property
    def is_machine_lost(self) -> bool:
        return self._worker.is_machine_lost or any(life.is_machine_lost for life in self._ranks.values())

    @property
    def reason(self) -> str:
        """Why the group ended, as far as its parts tell: the log of rank 0 may say more."""
        lost = next((rank for rank, life in self._ranks.items() if life.is_machine_lost), self._lost)
        if lost is None or self._has_told(self._ranks[lost]):
            return self._problem or self._worker.reason
        return f"its rank {lost} was lost: {self._ranks[lost].reason}"

    def _has_told(self, rank: RankLife) -> bool:
        """Whether the rank ended after it had told rank 0 why, which tells the server more than its status does."""
        ends = (rank.gone, self._worker.gone)
        return all(end.done() and end.result() == EXIT_RANK_LOST for end in ends)

    def send(self, message: ToWorker) -> None:
        self._worker.send(message)

    def signal(self, number: signal.Signals) -> None:
        self._worker.signal(number)

    def kill(self) -> None:
        self._is_killed = True
        for life in self._lives:
            if not life.gone.done():
                life.kill()

    @property
    def _lives(self) -> list[Life]:
        return [self._worker, *self._ranks.values()]

    def _told(self, messages: list[FromWorker]) -> None:
        """A node tells of files that it copies, or why it cannot start a rank."""
        if not self.gone.done():
            self._on_messages(messages)

    def _part_ended(self, part: asyncio.Future[int]) -> None:
        """End the others: at once where a machine is lost, else after the time that they have to say why."""
        if self._lost is None and not self._is_killed and part.result() not in _LEFT:
            worker = self._worker.gone
            is_cause = not worker.done() or worker.result() == EXIT_RANK_LOST
            self._lost = next((n for n, life in self._ranks.items() if life.gone is part and is_cause), None)
        if all(life.gone.done() for life in self._lives):
            if not self.gone.done():  # two parts that end at once are both told of
                self._end()
        elif self.is_machine_lost:
            self.kill()
        elif self._killing is None:
            self._killing = self._loop.call_later(LAST_S, self.kill)

    def _opened(self, opening: asyncio.Task[None]) -> None:
        """End the group where rank 0's connection to a rank cannot be made: both would wait."""
        if not opening.cancelled() and (error := opening.exception()) is not None and not self.gone.done():
            self._problem = f"rank 0 could not be joined to a rank on a node: {error}"
            self.kill()

    async def _end_if_stopped(self, rank_0: int) -> None:
        """Kill a rank 0 that a signal has stopped: the others would wait for it."""
        await until_stopped(rank_0)
        _log.warning("rank 0 (process %d) is stopped; its replica ends", rank_0)
        self.kill()

    def _end(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._killing is not None:
            self._killing.cancel()
        for opening in self._openings:
            opening.cancel()
        for listener in self._listeners:
            listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self.gone.set_result(self._worker.gone.result())


def _of_ranks(model: ModelConfig) -> ModelConfig:
    """The settings without files that ranks other than 0 do not read."""
    return msgspec.structs.replace(model, adapters={}, speculation=SpeculationConfig(), chat_template=None)


def _listener(path: Path) -> socket.socket:
    """A socket where rank 0 is awaited. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.setblocking(False)
        listener.bind(str(path))
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    return listener


async def _join(listener: socket.socket, end: Relay) -> None:
    """Wait for rank 0, and join its connection to the rank's on a node."""
    loop = asyncio.get_running_loop()
    connection, _ = await loop.sock_accept(listener)
    other = Relay()
    await loop.connect_accepted_socket(lambda: other, connection)
    other.joined(end)
    end.joined(other)
    if end.is_closed.is_set():
        other.close()
