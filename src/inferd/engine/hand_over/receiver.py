"""The socket at which a worker gets blocks. Reads and writes frames; ``Incoming`` decides about them.

One thread accepts connections, and each connection has a thread: a hand-over that stalls holds up no other. Frames are
taken by the loop thread between two steps, at most ``WINDOW`` of all connections at a time: contents delay a step by
little, and a sender that is faster fills the socket and not memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from typing import Final

from inferd import clock
from inferd.engine.hand_over.frames import Done, Frame, FrameError, FrameReader, Offer, encode
from inferd.engine.hand_over.incoming import Incoming

WINDOW: Final = 4
"""Frames that wait for the loop thread. Writing one into the cache takes milliseconds, in which no answer goes on."""

MOST_CONNECTIONS: Final = 64
IDLE_S: Final = 120.0
"""Seconds without a frame after which a connection is closed."""

_RECEIVE_BYTES: Final = 1024 * 1024
_log = logging.getLogger("inferd.hand_over")

RunOnLoop = Callable[[Callable[[], None]], None]


class Receiver:
    """Listens at ``address``. ``run_on_loop`` runs an action in the loop thread, in order."""

    def __init__(self, address: str, key: bytes, incoming: Incoming, run_on_loop: RunOnLoop) -> None:
        self._key = key
        self._incoming = incoming
        self._run_on_loop = run_on_loop
        self._open = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._window = threading.BoundedSemaphore(WINDOW)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address)  # of the worker before this one
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(address)
        self._listening.listen(MOST_CONNECTIONS)

    def run(self) -> None:
        """Accept connections, for ever."""
        while True:
            connected, _ = self._listening.accept()
            if not self._open.acquire(blocking=False):
                connected.close()  # its sender reports it, and the prompt is computed here
                continue
            threading.Thread(target=self._serve, args=(connected,), name="inferd-receive", daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        names: set[bytes] = set()
        try:
            with connected:
                connected.settimeout(IDLE_S)
                self._exchange(connected, names)
        except (OSError, FrameError) as error:
            _log.warning("a hand-over ended early: %s", error)
        finally:
            self._open.release()
            for name in names:
                self._run_on_loop(lambda name=name: self._incoming.close(name))  # type: ignore[misc]

    def _exchange(self, connected: socket.socket, names: set[bytes]) -> None:
        reader = FrameReader(self._key)
        answers: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()

        def take(frame: Frame | None) -> None:
            try:
                answers.put(self._incoming.take(frame, clock.now()))
            finally:
                self._window.release()

        while data := connected.recv(_RECEIVE_BYTES):
            for frame in reader.feed(data):
                if isinstance(frame, Offer):
                    names.add(frame.hand_over)
                self._window.acquire()
                self._run_on_loop(lambda frame=frame: take(frame))  # type: ignore[misc]
                if isinstance(frame, Offer | Done):
                    answer = answers.get()
                    while answer is None:  # of the blocks before
                        answer = answers.get()
                    connected.sendall(encode(answer, self._key))
