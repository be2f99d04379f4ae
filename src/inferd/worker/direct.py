"""The loop of a predictive model: one thread that reads, decodes, batches, computes and answers.

A prediction may take microseconds, so nothing is handed from thread to thread: the loop reads every frame that has
arrived, gives the requests to the backend, and sends all answers of a batch in one frame. It waits on the socket, for
as long as the batcher allows. Knows frames and messages, nothing of tensors.
"""

from __future__ import annotations

import logging
import select
import socket
from collections import deque
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from inferd import clock
from inferd.errors import InferdError, InvalidRequest
from inferd.types import End, GenerateRequest, ModelInfo, Output, PredictRequest, StepStats, Timings
from inferd.worker.channel import ChannelError, Frames
from inferd.worker.messages import (
    Cancel,
    Check,
    Checked,
    Detokenize,
    Detokenized,
    FromWorker,
    Load,
    Outputs,
    Pause,
    Stop,
    Submit,
    Tokenize,
    Tokenized,
    ToWorker,
)

_RECEIVE_BYTES = 256 * 1024
_MAX_READS = 16
"""Pieces read before computing: a flood of requests must not keep those that are here from being computed."""

_MAX_SELECT = 1024  # descriptors from here on are beyond select's set

_NO_TOKENIZER = InvalidRequest("This model has no tokenizer.", param="model").to_failure()

_log = logging.getLogger("inferd.worker")


@runtime_checkable
class Predictor(Protocol):
    """The backend of a predictive model, as ``inferd.predict.backend`` has it."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def is_full(self) -> bool:
        """It holds so much that nothing more should be read while it has something to compute."""
        ...

    @property
    def has_enough(self) -> bool:
        """What is there should be computed before more is decoded."""
        ...

    def submit(self, request: PredictRequest, now: float) -> None: ...
    def cancel(self, request_id: str, now: float) -> None: ...
    def fail(self, request_id: str, error: InferdError) -> None: ...
    def pause(self, request_id: str, *, is_paused: bool) -> None: ...
    def due(self, now: float) -> float | None: ...
    def step(self, now: float) -> tuple[list[Output], StepStats | None]: ...
    def halt(self, now: float) -> list[Output]: ...
    def close(self) -> None: ...


class GoneError(Exception):
    """The other end of the channel was closed."""


class DirectLoop:
    """Owns the backend and the reading end of the socket. ``steps`` and ``is_busy`` may be read by others."""

    def __init__(
        self,
        backend: Predictor,
        connected: socket.socket,
        frames: Frames[ToWorker],
        send: Callable[[FromWorker], None],
    ) -> None:
        self._backend = backend
        self._socket = connected if connected.fileno() < _MAX_SELECT else connected.dup()
        self._frames = frames
        self._send = send
        self._inbox: deque[ToWorker] = deque()
        self._is_stopped = False
        self.is_busy = False
        self.steps = 0

    def run(self) -> None:
        """Until Stop. Raises GoneError when the gateway is gone, ChannelError when it cannot be understood."""
        backend, inbox = self._backend, self._inbox
        while True:
            if not inbox and not (backend.is_full and self._is_due()):  # else the gateway keeps what more there is
                self._read()
            while inbox:
                self._take(inbox.popleft())
                if backend.has_enough:
                    break
            if self._is_stopped:
                self._deliver(backend.halt(clock.now()), None)
                backend.close()
                return
            now = clock.now()
            due = backend.due(now)
            if due is not None and due <= now:
                self.is_busy = True
                outputs, stats = backend.step(now)
                if outputs or stats is not None:
                    self._deliver(outputs, stats)
                self.steps += 1
            elif not inbox:
                self.is_busy = False
                select.select([self._socket], [], [], None if due is None else due - now)

    def _is_due(self) -> bool:
        now = clock.now()
        due = self._backend.due(now)
        return due is not None and due <= now

    def _read(self) -> None:
        """Take in everything that has arrived."""
        for _ in range(_MAX_READS):
            try:
                data = self._socket.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if not data:
                raise GoneError
            self.is_busy = True
            for messages in self._frames.feed(data):
                self._inbox.extend(messages)
            if len(data) < _RECEIVE_BYTES:
                return

    def _take(self, message: ToWorker) -> None:
        match message:
            case Submit(PredictRequest() as request):
                self._backend.submit(request, clock.now())
            case Submit(request):
                self._send(Outputs([refused(request, "This model makes predictions; it generates no text.")]))
            case Cancel(request_id):
                self._backend.cancel(request_id, clock.now())
            case Pause(request_id, is_paused):
                self._backend.pause(request_id, is_paused=is_paused)
            case Tokenize(call_id):
                self._send(Tokenized(call_id, failure=_NO_TOKENIZER))
            case Detokenize(call_id):
                self._send(Detokenized(call_id, failure=_NO_TOKENIZER))
            case Check(call_id):
                self._send(Checked(call_id, _NO_TOKENIZER))
            case Stop():
                self._is_stopped = True
            case Load():
                _log.error("a second Load came; the model is loaded once")

    def _deliver(self, outputs: list[Output], stats: StepStats | None) -> None:
        try:
            self._send(Outputs(outputs, stats))
        except ChannelError:  # too large for a frame as a whole
            for output in outputs:
                self._deliver_large(output)

    def _deliver_large(self, output: Output) -> None:
        try:
            self._send(Outputs([output]))
        except ChannelError as error:
            _log.error("the answer to request %s is too large: %s", output.request_id, error)
            too_large = InvalidRequest("The answer is too large to be sent; ask for fewer rows or outputs.")
            if output.end is None:  # one of several answers: the request ends with it, by the next step
                self._backend.fail(output.request_id, too_large)
            else:
                end = End("refused", output.end.usage, output.end.timings, too_large.to_failure())
                self._send(Outputs([Output(output.request_id, (), None, end)]))


def refused(request: GenerateRequest | PredictRequest, reason: str) -> Output:
    """The one output of a request that this kind of model cannot take."""
    failure = InvalidRequest(reason, param="model", code="unsupported_task").to_failure()
    return Output(
        request.id,
        (),
        None,
        End("refused", timings=Timings(finished=clock.now() - request.arrived_at), failure=failure),
    )
