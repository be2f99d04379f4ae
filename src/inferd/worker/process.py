"""A worker process as the gateway handles it: start it, send it messages, notice its end, leave nothing behind.

Knows processes and file descriptors, and nothing of models or of when to restart.
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

from inferd.worker.asynchronous import Channel
from inferd.worker.messages import FromWorker, ToWorker

# -P: a worker started in a model's folder must not import what lies there.
WORKER_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "inferd.worker")
LAST_BREATH_S = 0.2  # between the end of a process's channel and its own
READ_AFTER_EXIT_S = 1.0  # for reading what a process wrote before it ended
STDERR = 2


class WorkerProcess:
    """One life of a worker, which inherits its end of the channel, stderr and ``environment``, and nothing else.

    ``gone`` resolves to its exit status (negative: the signal that killed it) once it is reaped, its channel is closed
    and everything it sent has been handed over.
    """

    def __init__(
        self,
        command: Sequence[str],
        name: str,
        environment: Mapping[str, str],
        on_messages: Callable[[list[FromWorker]], None],
        on_writable: Callable[[], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[int] = loop.create_future()
        self.channel_error: Exception | None = None
        self.was_ended_here = False  # its channel broke, and the process did not end by itself
        self._closed = asyncio.Event()
        self._channel = Channel(on_messages, self._on_closed, on_writable)
        self._ours, theirs = socket.socketpair()
        try:
            arguments = ["--fd", str(theirs.fileno()), "--parent", str(os.getpid()), "--name", name]
            self._process = subprocess.Popen(
                [*command, *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=STDERR,
                env=environment,
                start_new_session=True,  # a terminal's Ctrl-C is the gateway's to handle
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

    @property
    def is_writable(self) -> bool:
        return self._channel.is_writable

    def send(self, message: ToWorker) -> None:
        self._channel.send(message)

    def adopt(self, on_messages: Callable[[list[FromWorker]], None], on_writable: Callable[[], None]) -> None:
        """Give the process to another owner, whose functions are called from now on."""
        self._channel.adopt(on_messages, on_writable)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. Nothing happens when the process has ended: its number is not used again before it is
        reaped."""
        if not self.gone.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    async def _live(self) -> None:
        loop = asyncio.get_running_loop()
        exited = loop.create_task(_exited(self._process))
        try:
            await loop.create_unix_connection(lambda: self._channel, sock=self._ours)
        except OSError as error:  # no memory for watching it, so the end of this process would never be noticed
            self._ours.close()
            self._on_closed(error)
        closed = loop.create_task(self._closed.wait())
        await asyncio.wait((exited, closed), return_when=asyncio.FIRST_COMPLETED)
        # A dying process closes its channel a moment before its end. Only one that stays alive is ended by us.
        await asyncio.wait((exited,), timeout=LAST_BREATH_S)
        self.was_ended_here = not exited.done()
        self._process.poll()
        self.kill()  # of no use without a channel
        await exited
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), READ_AFTER_EXIT_S)
        self._channel.close()
        await closed
        self.gone.set_result(self._process.wait())

    def _on_closed(self, error: Exception | None) -> None:
        self.channel_error = error
        self._closed.set()


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
