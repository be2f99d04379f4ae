"""A spare worker: a process without a model whose imports are done, in which the next worker of a model starts.

Most of the time until a small model is ready goes to imports. A spare worker has done them, and takes the memory of the
libraries meanwhile, and with ``spare_memory`` that of the weights. Knows processes, and nothing of when a spare worker
is worth its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence

from inferd.config import ModelConfig
from inferd.machine.memory import rss_bytes
from inferd.worker.environment import environment_for
from inferd.worker.messages import FromWorker, Prepare, Stop
from inferd.worker.process import WorkerProcess

_log = logging.getLogger("inferd.supervisor")


class SpareWorker:
    """At most one process, for one model. ``command`` starts a worker; ``stop_s``: seconds between asking it to end and
    killing it."""

    def __init__(self, model: str, command: Sequence[str], stop_s: float) -> None:
        self._model = model
        self._command = command
        self._stop_s = stop_s
        self._process: WorkerProcess | None = None
        self._environment: Mapping[str, str] = {}
        self._weights: tuple[object, ...] | None = None  # whose memory it holds
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def rss_bytes(self) -> int:
        """Its resident memory now; 0: there is none."""
        return 0 if self._process is None else rss_bytes(self._process.pid)

    @property
    def pid(self) -> int | None:
        """Its process; None: there is none."""
        return None if self._process is None else self._process.pid

    def keep(self, config: ModelConfig) -> None:
        """Start one for such a model, unless there is one. Where no process can be started, there is none."""
        environment, weights = environment_for(config, os.environ), _held_weights(config)
        if self._process is not None:
            is_same = (environment, weights) == (self._environment, self._weights)
            if not self._process.gone.done() and is_same:
                return
            self.drop()
        try:
            self._process = WorkerProcess(self._command, f"{self._model}/spare", environment, _ignore, _nothing)
        except OSError as error:
            _log.warning("%s: no spare worker could be started: %s", self._model, error.strerror or error)
            return
        self._environment, self._weights = environment, weights
        self._process.send(Prepare(config))

    def take(
        self,
        environment: Mapping[str, str],
        on_messages: Callable[[list[FromWorker]], None],
        on_writable: Callable[[], None],
    ) -> WorkerProcess | None:
        """The process, for a worker with this environment, which owns it from now on; None: there is none for it."""
        process = self._process
        if process is None or process.gone.done() or environment != self._environment:
            return None
        self._process = None
        process.adopt(on_messages, on_writable)
        return process

    def drop(self) -> None:
        """End the process; does not wait for its end."""
        if self._process is not None:
            task = asyncio.get_running_loop().create_task(self._end(self._process))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            self._process = None

    async def stop(self) -> None:
        """End the process and wait for its end. Idempotent."""
        self.drop()
        await asyncio.gather(*self._ending)

    async def _end(self, process: WorkerProcess) -> None:
        process.send(Stop())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(process.gone), self._stop_s)
        process.kill()
        await asyncio.shield(process.gone)


def _held_weights(config: ModelConfig) -> tuple[object, ...] | None:
    """The settings that the size of the weights depends on; None: their memory is not held."""
    if config.scaling is None or not config.scaling.spare_memory:
        return None
    return config.source, config.dtype, config.quantization, config.device, config.parallel


def _ignore(messages: list[FromWorker]) -> None:
    """A process without a model has nothing to say."""


def _nothing() -> None:
    """Nothing waits until the channel is writable."""
