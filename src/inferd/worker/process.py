"""A worker process as its parent handles it: start it, send it messages, notice its end, leave nothing behind.

``Life`` is what a supervisor knows of a worker, wherever it runs, and ``WorkerProcess`` is a worker on this machine.
``Child`` is the process alone, for a parent that does not read its messages. Knows processes and file descriptors, and
nothing of models or of when to restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from inferd.worker.asynchronous import Channel
from inferd.worker.messages import FromWorker, ToWorker

# -P: a worker started in a model's folder must not import what lies there.
WORKER_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "inferd.worker")
LAST_BREATH_S = 0.2  # between the end of a process's channel and its own
READ_AFTER_EXIT_S = 1.0  # for reading what a process wrote before it ended
STDERR = 2


class Life(Protocol):
    """One life of a worker, on this machine or on another."""

    @property
    def gone(self) -> asyncio.Future[int]:
        """Resolves to the exit status (negative: the signal that killed it) once everything that the worker sent has
        been handed over."""
        ...

    @property
    def pid(self) -> int | None:
        """The process id on this machine; None: the worker runs on another one."""
        ...

    @property
    def is_writable(self) -> bool:
        """Whether the worker reads what it is sent."""
        ...

    @property
    def is_machine_lost(self) -> bool:
        """Whether the machine ended with the life, for which neither the model nor a request is to blame."""
        ...

    @property
    def reason(self) -> str:
        """How the life ended, without a full stop; once ``gone`` is resolved."""
        ...

    def send(self, message: ToWorker) -> None:
        """Send a message; it is lost if the worker ends."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, where the process still runs."""

    def kill(self) -> None:
        """End the life; ``gone`` resolves within a bounded time."""


class Child:
    """One worker process, which inherits its end of the channel, stderr and ``environment``, and nothing else.

    ``wire`` is this end, ``close_wire`` closes it at once, and it calls ``wire_closed`` when it is closed. ``gone``
    resolves to the exit status (negative: the signal that killed it) once the process is reaped and the wire is closed.
    """

    def __init__(
        self,
        command: Sequence[str],
        name: str,
        environment: Mapping[str, str],
        wire: asyncio.Protocol,
        close_wire: Callable[[], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[int] = loop.create_future()
        self.channel_error: Exception | None = None
        self.was_ended_here = False  # its channel broke, and the process did not end by itself
        self._closed = asyncio.Event()
        self._wire = wire
        self._close_wire = close_wire
        self._ours, theirs = socket.socketpair()
        try:
            arguments = ["--fd", str(theirs.fileno()), "--parent", str(os.getpid()), "--name", name]
            self._process = subprocess.Popen(
                [*command, *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=STDERR,
                env=environment,
                start_new_session=True,  # a terminal's Ctrl-C is the parent's to handle
            )
        except OSError:
            self._ours.close()
            raise
        finally:
            theirs.close()
        self._task = loop.create_task(self._live())

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. Nothing happens when the process has ended: its number is not used again before it is
        reaped."""
        if not self.gone.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _live(self) -> None:
        loop = asyncio.get_running_loop()
        exited = loop.create_task(_exited(self._process))
        try:
            await loop.create_unix_connection(lambda: self._wire, sock=self._ours)
        except OSError as error:  # no memory for watching it, so the end of this process would never be noticed
            self._ours.close()
            self.wire_closed(error)
        closed = loop.create_task(self._closed.wait())
        await asyncio.wait((exited, closed), return_when=asyncio.FIRST_COMPLETED)
        # A dying process closes its channel a moment before its end. Only one that stays alive is ended by us.
        await asyncio.wait((exited,), timeout=LAST_BREATH_S)
        self.was_ended_here = not exited.done()
        self._process.poll()
        self.signal(signal.SIGKILL)  # of no use without a channel
        await exited
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), READ_AFTER_EXIT_S)
        self._close_wire()
        await closed
        self.gone.set_result(self._process.wait())

    def wire_closed(self, error: Exception | None) -> None:
        """Note that this end of the channel is closed."""
        self.channel_error = error
        self._closed.set()


class WorkerProcess:
    """One life of a worker on this machine."""

    is_machine_lost = False

    def __init__(
        self,
        command: Sequence[str],
        name: str,
        environment: Mapping[str, str],
        on_messages: Callable[[list[FromWorker]], None],
        on_writable: Callable[[], None],
    ) -> None:
        self._channel = Channel(on_messages, self._on_closed, on_writable)
        self._child = Child(command, name, environment, self._channel, self._channel.close)

    @property
    def gone(self) -> asyncio.Future[int]:
        return self._child.gone

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_writable(self) -> bool:
        return self._channel.is_writable

    @property
    def reason(self) -> str:
        child = self._child
        return exit_reason(child.gone.result(), child.channel_error if child.was_ended_here else None)

    def send(self, message: ToWorker) -> None:
        self._channel.send(message)

    def signal(self, number: signal.Signals) -> None:
        self._child.signal(number)

    def kill(self) -> None:
        self._child.signal(signal.SIGKILL)

    def adopt(self, on_messages: Callable[[list[FromWorker]], None], on_writable: Callable[[], None]) -> None:
        """Give the process to another owner, whose functions are called from now on."""
        self._channel.adopt(on_messages, on_writable)

    def _on_closed(self, error: Exception | None) -> None:
        self._child.wire_closed(error)


def exit_reason(status: int, error: Exception | None) -> str:
    """How a process ended, of its exit status and the error that broke its channel."""
    if error is not None and status in (0, -signal.SIGKILL):
        return f"its channel broke: {error}"
    if status >= 0:
        return f"its process exited with status {status}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-status).name
        hint = ", as by the kernel where memory runs out" if -status == signal.SIGKILL else ""
        return f"its process was killed by signal {-status} ({name}{hint})"
    return f"its process was killed by signal {-status}"


async def _exited(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a child without a thread where the system can tell (Linux: pidfd)."""
    descriptor: int | None
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # another system, or no descriptor left
        descriptor = None
    if descriptor is None:
        with contextlib.suppress(RuntimeError):  # no thread can be started either
            await asyncio.to_thread(process.wait)
        while process.poll() is None:
            await asyncio.sleep(0.1)
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    try:
        loop.add_reader(descriptor, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    process.wait()
