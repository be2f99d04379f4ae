"""The worker's side of trials: starts the process that waits for them, and reads what became of one."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Final

import msgspec

from inferd.backend import FOR_EVER, Wait
from inferd.errors import InternalError, Overloaded
from inferd.structured.trial.frames import TENANT_BYTES, split_status, write_frame
from inferd.structured.trial.task import Result, Task, TrialVocabulary
from inferd.structured.vocabulary import Vocabulary

MOST_SECONDS: Final = 2.0  # of processor time
MOST_WAIT_S: Final = 30.0  # on cores that are busy with more urgent work
MOST_BYTES: Final = 1 << 30
MOST_SAVED_S: Final = 0.2  # of processor time with the worker's share, for the trials of a tenant,
REFILL: Final = 0.005  # and how much of it comes back in a second
OUT_OF_MEMORY: Final = (3, -signal.SIGABRT)
_COMMAND: Final = (sys.executable, "-P", "-m", "inferd.structured.trial")
_END_S = 5.0

_log = logging.getLogger("inferd.worker")


class LimitReached(Exception):
    """The trial ended at a limit, as it would the next time. ``limit``: which, for a message."""

    def __init__(self, limit: str) -> None:
        super().__init__(limit)
        self.limit = limit


class Trials:
    """Safe to use from several threads. The process is started when it is needed first."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Of the process that waits for trials; None: it was not needed."""
        process = self._process
        return None if process is None else process.pid

    def run(self, task: Task, tenant: str = "", wait: Wait = FOR_EVER) -> Result:
        """``tenant``: whose trials have a budget of processor time with the worker's share of contended cores.

        Raises LimitReached; Overloaded where the trial had too little of the processor, or its process was ended; and
        WaitEndedError where ``wait`` was ended, which ends the process of the trial."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._hand_over(theirs, hashlib.blake2b(tenant.encode(), digest_size=TENANT_BYTES).digest())
            until = time.monotonic() + MOST_WAIT_S
            try:
                with wait.stopped_by(lambda: _shut(ours)):
                    answer = _asked(ours, msgspec.json.encode(task), until)
            except TimeoutError:
                raise Overloaded(
                    f"The form of the answer could not be compiled within {MOST_WAIT_S:g} s, because the processor is "
                    "busy. Try again in a moment.",
                    retry_after_s=MOST_SECONDS,
                ) from None
        text, status = split_status(answer)
        if status is None:
            raise _ended()
        if status == -signal.SIGPROF:
            raise LimitReached(f"compiling it takes longer than {MOST_SECONDS:g} s of processor time")
        if status == -signal.SIGSEGV:
            raise LimitReached("its parts stand too deeply within each other, or compiling it takes too much memory")
        if status in OUT_OF_MEMORY:
            raise LimitReached(f"compiling it takes more than {MOST_BYTES >> 20} MiB of memory")
        if status < 0:
            raise _ended()
        if status > 0:
            raise InternalError("The form of the answer could not be compiled; the server's log has the details.")
        return msgspec.json.decode(text, type=Result)

    def close(self) -> None:
        """End the process, and the trials that run. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _hand_over(self, theirs: socket.socket, tenant: bytes) -> None:
        """Start a trial that reads its task from this socket."""
        with self._lock:
            if self._is_closed:
                raise _ended()
            if self._control is not None:
                try:
                    socket.send_fds(self._control, [tenant], [theirs.fileno()])
                except OSError:  # the process was ended from outside
                    _log.warning("the process that tries forms of answers ended; another one is started")
                    self._end()
                else:
                    return
            try:
                self._start()
                assert self._control is not None
                socket.send_fds(self._control, [tenant], [theirs.fileno()])
            except OSError as error:
                self._end()
                _log.error("the process that tries forms of answers cannot be started: %s", error)
                raise _ended() from error

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            limits = ["--most-seconds", str(MOST_SECONDS), "--most-bytes", str(MOST_BYTES)]
            limits += ["--most-saved", str(MOST_SAVED_S), "--refill", str(REFILL)]
            self._process = subprocess.Popen(
                [*_COMMAND, "--fd", str(theirs.fileno()), *limits],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # a process with threads must not fork
            )
        self._control = ours
        known = TrialVocabulary(self._vocabulary.texts, self._vocabulary.eos_ids, self._vocabulary.missing)
        write_frame(ours, msgspec.msgpack.encode(known))

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def _ended() -> Overloaded:
    return Overloaded(
        "The process that compiles the form of the answer was ended. Try again in a moment.", retry_after_s=1.0
    )


def _shut(channel: socket.socket) -> None:
    """Wake the thread that reads from the channel. The process behind it ends the trial."""
    with contextlib.suppress(OSError):  # the process has ended
        channel.shutdown(socket.SHUT_RDWR)


def _asked(channel: socket.socket, task: bytes, until: float) -> bytes:
    """What the process of a trial writes for a task; empty where it has ended. Raises TimeoutError."""
    try:
        write_frame(channel, task)
        return _read_all(channel, until)
    except TimeoutError:
        raise
    except OSError:
        return b""


def _read_all(channel: socket.socket, until: float) -> bytes:
    """Everything up to the end. Raises TimeoutError."""
    parts: list[bytes] = []
    while True:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        channel.settimeout(left)
        part = channel.recv(1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)
