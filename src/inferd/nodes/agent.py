"""A node: the process that gives its machine to a server. It joins, starts the workers that it is sent, and joins again.

It decides nothing about models: the server says what to start and what to kill. What it owns are the processes. Where
its connection ends, they end with it, so the server, which places them anew, never has two of one replica.

A node leaves on SIGTERM or SIGINT: the server moves its workers, and their requests finish first. Another signal ends it
at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
from collections.abc import Sequence
from typing import Final

import msgspec

from inferd import __version__, clock
from inferd.config import ModelConfig
from inferd.engine.ranks.watch import RANK_COMMAND, until_stopped
from inferd.errors import ConfigError, InferdError, ModelLoadError, Unavailable
from inferd.nodes.cache import Cache
from inferd.nodes.dialling import CONNECT_S, NodeOptions, RefusedError, connect
from inferd.nodes.fetching import fetch
from inferd.nodes.files import are_equal, model_files
from inferd.nodes.frames import Connection
from inferd.nodes.messages import (
    PROTOCOL,
    Beat,
    Exited,
    Join,
    Launch,
    Leaving,
    NotStarted,
    Preparing,
    Refused,
    Released,
    Renewed,
    Signal,
    ToNode,
    Welcome,
    framed,
    to_node_decoder,
)
from inferd.nodes.pulse import BEAT_S, Acknowledgements, Pulse
from inferd.nodes.relay import Relay, attach
from inferd.worker.environment import environment_for
from inferd.worker.messages import Load, encode_frame, to_worker_decoder
from inferd.worker.process import Child

FIRST_RETRY_S: Final = 0.2
LONGEST_RETRY_S: Final = 5.0
_FLUSH_S: Final = 5.0  # for a channel's last bytes
_PROGRESS_S: Final = 0.2

_log = logging.getLogger("inferd.node")


class Agent:
    """One node, over all its connections to the server."""

    def __init__(self, options: NodeOptions, cache: Cache) -> None:
        self._options = options
        self._secret = options.token.secret
        self._cache = cache
        self._leaving = asyncio.Event()
        self._ending = asyncio.Event()
        self._was_welcome = False
        self._fetching: dict[str, asyncio.Lock] = {}  # by digest

    def handle_signals(self) -> None:
        """Leave on the first signal, end on the second."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.leave)

    def leave(self) -> None:
        """Ask the server to move the workers, then end; called again, end at once."""
        if self._leaving.is_set():
            self._ending.set()
        self._leaving.set()

    async def run(self) -> int:
        """Be a node until a signal; the exit code. Raises InferdError where the server refuses this machine, or was away
        for ``rejoin_s``."""
        delay, heard_at = FIRST_RETRY_S, clock.now()
        while not self._leaving.is_set():
            try:
                session = await self._joined()
            except RefusedError as error:
                if not (self._was_welcome and error.code in ("taken", "full")):
                    raise Unavailable(
                        f"The server at {self._options.host}:{self._options.port} refused this node: {error}."
                    ) from None
                reason = str(error)
            except (OSError, TimeoutError) as error:
                reason = str(error) or type(error).__name__
            else:
                delay, self._was_welcome = FIRST_RETRY_S, True
                _log.info("%s joined %s:%d", self._options.name, self._options.host, self._options.port)
                reason = await self._serve(session)
                heard_at = clock.now()
                if self._leaving.is_set() or session.is_released:
                    return 0
            if self._options.rejoin_s is not None and clock.now() - heard_at >= self._options.rejoin_s:
                raise Unavailable(
                    f"The server at {self._options.host}:{self._options.port} was not reached for "
                    f"{clock.now() - heard_at:.0f} s: {reason}."
                )
            _log.warning("not joined: %s; tried again in %.1f s", reason, delay)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), delay * random.uniform(0.75, 1.25))
            delay = min(LONGEST_RETRY_S, delay * 2)
        return 0

    async def _joined(self) -> _Session:
        """A connection on which the server welcomed this machine. Raises OSError, RefusedError."""
        options = self._options
        session = _Session(self)
        await connect(options, lambda: session)
        session.write(
            framed(
                Join(
                    protocol=PROTOCOL,
                    version=__version__,
                    secret=self._secret,
                    name=options.name,
                    num_cores=options.num_cores,
                    memory_bytes=options.memory_bytes,
                    num_gpus=options.num_gpus,
                    labels=dict(options.labels),
                )
            )
        )
        try:
            async with asyncio.timeout(CONNECT_S):
                await session.answered.wait()
        except TimeoutError:
            session.abort()
            raise
        if session.refusal is not None:
            raise session.refusal
        if not session.is_open:
            raise ConnectionResetError("the server closed the connection")
        return session

    async def _serve(self, session: _Session) -> str:
        """Do what the server says until the connection ends or this node is to end; why it ended."""
        loop = asyncio.get_running_loop()
        ended = loop.create_task(session.ended.wait())
        leaving = loop.create_task(self._leaving.wait())
        ending = loop.create_task(self._ending.wait())
        session.begin()
        try:
            await asyncio.wait((ended, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                _log.info("leaving: the server moves %d workers; once more to end now", session.num_workers)
                session.write(framed(Leaving()))
                await asyncio.wait((ended, ending), timeout=self._options.drain_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (ended, leaving, ending):
                task.cancel()
            session.abort()
            await session.close_workers()
        return session.reason

    def renew(self, secret: str) -> None:
        """The server gave another secret."""
        self._secret = secret

    async def start(self, session: _Session, launch: Launch) -> None:
        """Start one worker and stay with it to its end."""
        status: int | None = None
        try:
            status = await self._run_worker(session, launch)
        except InferdError as error:
            session.write(framed(NotStarted(launch.life, error.to_failure())))
        except OSError as error:
            failure = ModelLoadError(
                f"The node {self._options.name} could not start a worker: {error.strerror or error}."
            )
            session.write(framed(NotStarted(launch.life, failure.to_failure())))
        except asyncio.CancelledError:
            status = -signal.SIGKILL  # before it had a process
            raise
        finally:
            if status is not None:
                session.write(framed(Exited(launch.life, status)))

    async def _run_worker(self, session: _Session, launch: Launch) -> int:
        """The worker's exit status. Raises InferdError, OSError."""
        (load,) = to_worker_decoder.decode(launch.load[4:])
        assert isinstance(load, Load)
        load = self._with_threads(await self._prepared(session, launch, load))
        relay = Relay(b"" if launch.rank else bytes(encode_frame([load])))
        channel = await attach(self._options, launch.key, relay)
        environment = environment_for(load.model, os.environ)
        command = self._rank_command(launch.rank, load.model) if launch.rank else self._options.command
        child = Child(command, launch.name, environment, relay, relay.close)
        relay.on_closed = child.wire_closed
        session.started(launch.life, child)
        watching = asyncio.get_running_loop().create_task(_end_if_stopped(child)) if launch.rank else None
        try:
            status = await asyncio.shield(child.gone)
            await channel.flushed(_FLUSH_S)
        finally:
            if watching is not None:
                watching.cancel()
            channel.abort()
            child.signal(signal.SIGKILL)
        return status

    def _rank_command(self, rank: int, model: ModelConfig) -> Sequence[str]:
        """Starts a rank, whose first message comes from rank 0."""
        line = ("--line", str(rank), str(model.parallel.count))
        threads = () if model.threads is None else ("--threads", str(model.threads))
        memory = ("--memory", str(self._options.memory_bytes))
        return (*RANK_COMMAND, *line, "--source", model.source, *memory, *threads)

    def _with_threads(self, load: Load) -> Load:
        """The message with the threads that this node gives a worker, where the model's settings leave them open."""
        if load.model.threads is not None or self._options.threads is None:
            return load
        return msgspec.structs.replace(load, model=msgspec.structs.replace(load.model, threads=self._options.threads))

    async def _prepared(self, session: _Session, launch: Launch, load: Load) -> Load:
        """The message with settings whose files are on this machine. Raises InferdError, OSError."""
        with contextlib.suppress(OSError, InferdError):
            if are_equal(await asyncio.to_thread(model_files, load.model), launch.files):
                return load
        missing = await asyncio.to_thread(self._cache.missing, launch.files)
        total = sum(file.size for file in missing)
        done, told_at = 0, 0.0

        def came(num_bytes: int) -> None:
            nonlocal done, told_at
            done += num_bytes
            if clock.now() - told_at >= _PROGRESS_S or done >= total:
                told_at = clock.now()
                session.write(framed(Preparing(launch.life, "transfer", done, total)))

        came(0)
        for file in missing:
            # Another worker may be waiting for the same file.
            async with self._fetching.setdefault(file.sha256, asyncio.Lock()):
                if self._cache.has(file):
                    came(file.size)
                else:
                    await fetch(self._options, launch.key, file, self._cache, came)
        model = await asyncio.to_thread(self._cache.tree, load.model, launch.files)
        return Load(load.name, model)


class _Session(Connection[ToNode]):
    """One connection to the server, and the workers that it has."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(to_node_decoder)
        self._agent = agent
        self._children: dict[int, Child] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._pulse = Pulse(clock.now())
        self._acknowledgements: Acknowledgements | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.answered = asyncio.Event()
        self.ended = asyncio.Event()
        self.is_released = False
        self.refusal: RefusedError | None = None
        self.reason = "the connection ended"

    @property
    def num_workers(self) -> int:
        return len(self._tasks)

    def begin(self) -> None:
        """Send beats, and watch those of the server."""
        assert self.transport is not None
        if self.is_open:
            self._acknowledgements = Acknowledgements(self.transport.get_extra_info("socket").fileno())
            self._tick()

    def started(self, life: int, child: Child) -> None:
        """A worker's process runs."""
        self._children[life] = child

    def handle(self, message: ToNode) -> None:
        match message:
            case Welcome(secret):
                self._agent.renew(secret)
                self.answered.set()
            case Renewed(secret):
                self._agent.renew(secret)
            case Refused(code, said):
                self.refusal = RefusedError(code, said)
                self.answered.set()
            case Beat():
                self._pulse.beat()
            case Launch(life=life):
                task = self._tasks[life] = asyncio.get_running_loop().create_task(self._agent.start(self, message))
                task.add_done_callback(lambda done: self._worker_ended(life, done))
            case Signal(life, number):
                self._signal(life, number)
            case Released():
                self.reason = "the server let this node go"
                self.is_released = True
                self.ended.set()

    def _signal(self, life: int, number: int) -> None:
        child, task = self._children.get(life), self._tasks.get(life)
        if child is not None:
            child.signal(signal.Signals(number))
        elif task is not None and number == signal.SIGKILL:
            task.cancel()

    def _worker_ended(self, life: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(life, None)
        self._children.pop(life, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a worker could not be looked after", exc_info=error)

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._tick)
        self.write(framed(Beat(clock.now())))
        unacknowledged_s = None if self._acknowledgements is None else self._acknowledgements.read()[0]
        if self._pulse.look(clock.now(), unacknowledged_s) == "gone":
            self.reason = f"the server was not heard for {self._pulse.silent_s:.1f} s"
            self.abort()

    def closed(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._acknowledgements is not None:
            self._acknowledgements.close()
        if error is not None:
            self.reason = f"the connection ended: {error}"
        self.answered.set()
        self.ended.set()

    async def close_workers(self) -> None:
        """End every worker, and wait until their processes are gone."""
        children, tasks = list(self._children.values()), list(self._tasks.values())
        for child in children:
            child.signal(signal.SIGKILL)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(child.gone for child in children))


async def _end_if_stopped(child: Child) -> None:
    """Kill a rank that a signal has stopped: its group would wait for it."""
    await until_stopped(child.pid)
    _log.warning("a rank (process %d) is stopped; its replica ends", child.pid)
    child.signal(signal.SIGKILL)


def parse_labels(texts: Sequence[str]) -> dict[str, str]:
    """Labels from texts such as ``zone=a``. Raises ConfigError."""
    labels = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or len(text) > 256:
            raise ConfigError(f"{text[:256]!r} is no label such as zone=a.", param="label")
        labels[name] = value
    return labels
