"""One life of a worker on a node, as its supervisor handles it: what a ``WorkerProcess`` is for this machine.

Its frames travel over a connection of their own, so a replica whose reader is slow holds up no other one. The life ends
when the node has reported the exit and the channel is closed, or when the node is gone: once, in any case.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from inferd import clock
from inferd.errors import InferdError, ModelLoadError
from inferd.nodes.files import model_files, with_whole_paths
from inferd.nodes.messages import Launch, ModelFile, Signal, framed
from inferd.nodes.relay import Relay
from inferd.registry.identity import identity_of
from inferd.types import Failure
from inferd.worker.asynchronous import Channel
from inferd.worker.messages import FromWorker, Load, LoadFailed, Loading, Ready, Submit, ToWorker, encode_frame
from inferd.worker.process import exit_reason

LAST_BYTES_S: Final = 1.0
"""Seconds between the report of an exit and the end of its channel, and the other way round."""

KILL_S: Final = 2.0
"""Seconds that a node has to report a killed worker."""


class Link(Protocol):
    """The node, as its lives see it."""

    @property
    def name(self) -> str: ...
    @property
    def clock_offset_s(self) -> float:
        """What its monotonic clock is ahead of this machine's."""
        ...

    def write(self, data: bytes) -> None: ...
    def life_ended(self, life: NodeLife) -> None: ...


class NodeLife:
    """One life of a worker on a node. ``number`` identifies it there, ``key`` the connections that belong to it."""

    pid = None
    rank = 0  # a worker

    def __init__(
        self,
        link: Link,
        number: int,
        name: str,
        load: Load,
        on_messages: Callable[[list[FromWorker]], None],
        on_writable: Callable[[], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[int] = loop.create_future()
        self.is_machine_lost = False
        self.reason = ""
        self.number = number
        self.key = secrets.token_urlsafe(24)
        self.files: list[ModelFile] = []
        self.was_attached = False
        self._link = link
        self._name = name
        self._load = load
        self._on_messages = on_messages
        self._loop = loop
        self._artifact = ""
        self._status: int | None = None  # as the node reported it
        self._is_closed = False
        self.channel = Channel(self._received, self._closed, on_writable)
        self._wire: Channel | Relay = self.channel
        self._starting = loop.create_task(self._start())

    @property
    def is_writable(self) -> bool:
        return self.channel.is_writable

    def send(self, message: ToWorker) -> None:
        if type(message) is Submit:
            request = message.request
            arrived_at = request.arrived_at + self._link.clock_offset_s
            message = Submit(msgspec.structs.replace(request, arrived_at=arrived_at))
        self.channel.send(message)

    def signal(self, number: signal.Signals) -> None:
        if not self.gone.done():
            self._link.write(framed(Signal(self.number, number)))

    def kill(self) -> None:
        self._starting.cancel()
        self.signal(signal.SIGKILL)
        self._loop.call_later(KILL_S, self._give_up)

    async def _start(self) -> None:
        """Have the node start the worker, once it is known which files the model has."""
        try:
            self._artifact, self._load, self.files = await asyncio.to_thread(_described, self._load)
        except InferdError as error:
            self.not_started(error.to_failure())
            return
        except OSError as error:
            self.not_started(ModelLoadError(f"The model's files cannot be read: {error}.").to_failure())
            return
        load = bytes(encode_frame([self._load]))
        launch = Launch(life=self.number, key=self.key, name=self._name, load=load, files=self.files, rank=self.rank)
        self._link.write(framed(launch))

    # -- called by the link -----------------------------------------------------------------

    def attached(self, transport: asyncio.Transport) -> None:
        """The worker's channel is open."""
        self.was_attached = True
        transport.set_protocol(self._wire)
        self._wire.connection_made(transport)
        if self.gone.done():
            self._wire.close()

    def preparing(self, phase: str, done: int, total: int) -> None:
        """The node compares or copies files."""
        self._on_messages([Loading(phase, done, total, clock.now())])

    def not_started(self, failure: Failure) -> None:
        """The worker cannot be started there."""
        if not self.gone.done():
            self._on_messages([LoadFailed(failure)])
            self._end(1, failure.message)

    def exited(self, status: int) -> None:
        """The node reported the worker's end."""
        self._status = status
        if self._is_closed or not self.was_attached:
            self._end(status)
        else:  # its last bytes are on their way
            self._loop.call_later(LAST_BYTES_S, self._wire.close)

    def machine_lost(self, reason: str) -> None:
        """The node is gone."""
        if not self.gone.done():
            self.is_machine_lost = True
            self._end(-signal.SIGKILL, reason)

    # -- the channel ------------------------------------------------------------------------

    def _received(self, messages: list[FromWorker]) -> None:
        if self.gone.done():
            return
        for at, message in enumerate(messages):
            if type(message) is Loading:  # its clock is another one
                messages[at] = msgspec.structs.replace(message, at=clock.now())
            elif type(message) is Ready:
                # The bytes are those of this machine's files, of which the time and the inode count too.
                messages[at] = Ready(msgspec.structs.replace(message.info, artifact=self._artifact))
        self._on_messages(messages)

    def _closed(self, error: Exception | None) -> None:
        self._is_closed = True
        if self._status is not None:
            self._end(self._status)
        elif not self.gone.done():
            self._loop.call_later(LAST_BYTES_S, self._kill_unreported)

    def _kill_unreported(self) -> None:
        """The channel ended and no exit is known: a worker without a channel is of no use."""
        if not self.gone.done():
            self.kill()

    def _give_up(self) -> None:
        """The node did not report the end of a worker that was to be killed."""
        self._end(-signal.SIGKILL, f"the node {self._link.name} did not report its end")

    def _end(self, status: int, reason: str = "") -> None:
        if self.gone.done():
            return
        self._starting.cancel()
        self.reason = reason or f"{exit_reason(status, None)} on the node {self._link.name}"
        self._wire.close()
        self.gone.set_result(status)
        self._link.life_ended(self)


class RankLife(NodeLife):
    """One life of a rank on a node. Its bytes are those of ``end``, which rank 0's is joined to."""

    def __init__(
        self,
        link: Link,
        number: int,
        name: str,
        load: Load,
        on_messages: Callable[[list[FromWorker]], None],
        rank: int,
    ) -> None:
        """``on_messages`` gets the progress of files that are copied, and why the rank cannot be started."""
        super().__init__(link, number, name, load, on_messages, lambda: None)
        self.rank = rank
        self.end = Relay()
        self.end.on_closed = self._closed
        self._wire = self.end


def _described(load: Load) -> tuple[str, Load, list[ModelFile]]:
    """The identity of a model's files, the message with whole paths, and the files. Raises OSError, InferdError."""
    config = with_whole_paths(load.model)
    return identity_of(load.model), Load(load.name, config), model_files(config)
