"""The requests that a worker's loop has accepted and that have not ended.

Every output goes to the gateway through ``OpenRequests.send``. It guarantees for both loops that a request ends exactly
once, and that an output that is too large for a frame ends its own request alone. It knows nothing of what a backend
computes, nor of sockets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from inferd import ends
from inferd.errors import InvalidRequest
from inferd.types import ModelKind, Output, StepStats
from inferd.worker.channel import ChannelError
from inferd.worker.messages import Outputs

_REMEDIES: dict[ModelKind, str] = {
    "generate": "ask for fewer log-probabilities or choices",
    "predict": "ask for fewer rows or outputs",
}

_log = logging.getLogger("inferd.worker")


class OpenRequests:
    """``send`` writes one message and raises ChannelError for one that fits no frame; ``cancel`` is the backend's."""

    def __init__(self, kind: ModelKind, send: Callable[[Outputs], None], cancel: Callable[[str], None]) -> None:
        self._send = send
        self._cancel = cancel
        self._arrivals: dict[str, float] = {}  # when each open request arrived at the gateway
        self._oversized: set[str] = set()  # cancelled because an output fits no frame; their ends are still to come
        self._too_large = InvalidRequest(f"The answer is too large to be sent; {_REMEDIES[kind]}.")

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._arrivals

    def accept(self, request_id: str, arrived_at: float) -> bool:
        """Open a request. False: one with this id is open already, and the second is ignored."""
        if request_id in self._arrivals:
            log_duplicate(request_id)
            return False
        self._arrivals[request_id] = arrived_at
        return True

    def fail(self, request_id: str, error: Exception) -> None:
        """End an open request by an error that the backend does not know of."""
        self.send([ends.failed(request_id, self._arrivals[request_id], error)])

    def fail_all(self, error: Exception) -> None:
        """End every open request. The backend was asked to cancel them before."""
        self.send([ends.failed(request_id, arrived_at, error) for request_id, arrived_at in self._arrivals.items()])

    def cancel_all(self, now: float) -> None:
        """End every request that is still open."""
        self.send([ends.cancelled(request_id, arrived_at, now) for request_id, arrived_at in self._arrivals.items()])

    def cancel_in_backend(self) -> None:
        """Have the backend cancel every open request."""
        for request_id in tuple(self._arrivals):
            self._cancel(request_id)

    def send(self, outputs: list[Output], stats: StepStats | None = None) -> None:
        """Send the outputs of open requests, in one frame if they fit. An output with an end closes its request; what
        comes after it is dropped."""
        arrivals = self._arrivals
        open_outputs = []
        for output in outputs:
            if output.request_id not in arrivals:
                continue
            if output.end is not None:
                del arrivals[output.request_id]
            if self._oversized and output.request_id in self._oversized:
                if output.end is None:
                    continue
                output = self._refused(output)
            open_outputs.append(output)
        if not open_outputs and stats is None:
            return
        try:
            self._send(Outputs(open_outputs, stats))
        except ChannelError:
            for output in open_outputs:
                self._send_alone(output)

    def _send_alone(self, output: Output) -> None:
        """Send one output of a message that was too large as a whole."""
        if output.end is not None and output.request_id in self._oversized:
            output = self._refused(output)
        try:
            self._send(Outputs([output]))
        except ChannelError as error:
            _log.error("an output of request %s is too large: %s", output.request_id, error)
            if output.end is not None:
                self._send(Outputs([self._refused(output)]))
            else:
                self._oversized.add(output.request_id)  # its end, which says what was computed, is still to come
                self._cancel(output.request_id)

    def _refused(self, output: Output) -> Output:
        self._oversized.discard(output.request_id)
        return ends.refused(output, self._too_large)


def log_duplicate(request_id: str) -> None:
    _log.error("request %s was submitted twice; the second is ignored", request_id)
