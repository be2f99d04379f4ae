"""The loop of a predictive model: one thread that reads, decodes, batches, computes and answers.

A prediction may take microseconds, so nothing is passed between threads. The loop reads every frame that has arrived,
adds the requests to the backend, and sends all answers of a batch in one frame. It waits on the socket, for as long as
the batcher allows. It knows frames and messages, and nothing of tensors.
"""

from __future__ import annotations

import logging
import select
import socket
from collections import deque
from collections.abc import Callable

from inferd import clock
from inferd.backend import PredictiveBackend
from inferd.ends import failed
from inferd.errors import InvalidRequest
from inferd.types import GenerateRequest, Output, PredictRequest
from inferd.worker.channel import Frames
from inferd.worker.messages import (
    AdaptersSet,
    Cancel,
    Check,
    Checked,
    Detokenize,
    Detokenized,
    FromWorker,
    Load,
    Outputs,
    Pause,
    SetAdapters,
    Stop,
    Submit,
    Tokenize,
    Tokenized,
    ToWorker,
    Withdraw,
)
from inferd.worker.open_requests import OpenRequests

_RECEIVE_BYTES = 256 * 1024
_MAX_READS = 16
"""Pieces read before the next batch, so that a flood of requests does not delay those that are here."""

_MAX_SELECT = 1024  # descriptors from here on are beyond select's set

_NO_ADAPTERS = InvalidRequest("This model makes predictions; it takes no adapters.", param="adapters").to_failure()
_NO_TOKENIZER = InvalidRequest("This model has no tokenizer.", param="model").to_failure()

_log = logging.getLogger("inferd.worker")


class ChannelClosedError(Exception):
    """The other end of the channel was closed."""


class DirectLoop:
    """Owns the backend and the reading end of the socket. ``steps`` and ``is_busy`` may be read by others."""

    def __init__(
        self,
        backend: PredictiveBackend,
        connected: socket.socket,
        frames: Frames[ToWorker],
        send: Callable[[FromWorker], None],
    ) -> None:
        self._backend = backend
        self._socket = connected if connected.fileno() < _MAX_SELECT else connected.dup()
        self._frames = frames
        self._send = send
        self._open = OpenRequests("predict", send, backend.cancel)
        self._inbox: deque[ToWorker] = deque()
        self._failed: list[Output] = []  # the ends of requests that the backend did not accept, to be sent
        self._is_stopped = False
        self.is_busy = False
        self.steps = 0

    def run(self) -> None:
        """Run until Stop. Raises ChannelClosedError when the gateway is gone, and ChannelError for bytes that are no
        messages."""
        backend, open_requests, inbox = self._backend, self._open, self._inbox
        while True:
            if not inbox and not (backend.is_full and self._is_due()):  # otherwise the rest waits in the gateway
                self._read()
            while inbox:
                self._handle(inbox.popleft())
                if backend.has_enough:
                    break
            if self._failed:
                outputs, self._failed = self._failed, []
                open_requests.send(outputs)
            if self._is_stopped:
                now = clock.now()
                open_requests.send(backend.halt(now))
                open_requests.cancel_all(now)
                backend.close()
                return
            now = clock.now()
            due = backend.due(now)
            if due is not None and due <= now:
                self.is_busy = True
                outputs, stats = backend.step(now)
                if outputs or stats is not None:
                    open_requests.send(outputs, stats)
                self.steps += 1
            elif not inbox:
                self.is_busy = False
                select.select([self._socket], [], [], None if due is None else due - now)

    def _is_due(self) -> bool:
        now = clock.now()
        due = self._backend.due(now)
        return due is not None and due <= now

    def _read(self) -> None:
        """Read everything that has arrived."""
        for _ in range(_MAX_READS):
            try:
                data = self._socket.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if not data:
                raise ChannelClosedError
            self.is_busy = True
            for messages in self._frames.feed(data):
                self._inbox.extend(messages)
            if len(data) < _RECEIVE_BYTES:
                return

    def _handle(self, message: ToWorker) -> None:
        match message:
            case Submit(PredictRequest() as request):
                self._add(request)
            case Submit(request):
                self._send(Outputs([wrong_kind(request, "This model makes predictions; it generates no text.")]))
            case Cancel(request_id):
                self._backend.cancel(request_id)
            case Pause(request_id, is_paused):
                self._backend.pause(request_id, is_paused=is_paused)
            case Tokenize(call_id):
                self._send(Tokenized(call_id, failure=_NO_TOKENIZER))
            case Detokenize(call_id):
                self._send(Detokenized(call_id, failure=_NO_TOKENIZER))
            case Check(call_id):
                self._send(Checked(call_id, _NO_TOKENIZER))
            case Withdraw():
                pass  # every check is answered at once
            case SetAdapters(call_id):
                self._send(AdaptersSet(call_id, failure=_NO_ADAPTERS))
            case Stop():
                self._is_stopped = True
            case Load():
                _log.error("a second Load came; the model is loaded once")

    def _add(self, request: PredictRequest) -> None:
        if self._open.accept(request.id, request.arrived_at):
            try:
                self._backend.add(request, clock.now())
            except Exception as error:
                self._failed.append(failed(request.id, request.arrived_at, error))


def wrong_kind(request: GenerateRequest | PredictRequest, reason: str) -> Output:
    """The one output of a request that this kind of model cannot compute."""
    return failed(request.id, request.arrived_at, InvalidRequest(reason, param="model", code="unsupported_task"))
