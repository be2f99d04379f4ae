"""Between the channel and the step loop: prepares requests in threads of their own.

Tokenizing a long prompt takes as long as many steps. In a thread of its own it delays neither the loop nor the reading
of cancellations. Requests whose form must be compiled are prepared by other threads, so that a large schema delays no
request without one. Those whose form has to be tried in another process wait for it in threads of their own, by turns
of their tenants. A request is either still in the intake or in the loop's inbox, never in between, so a cancellation
always finds it. It also ends the trial of the request's form, which then leaves its thread to others.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from inferd import clock, ends
from inferd.backend import PreparingBackend, TakesAdapters, TakesLong, Tokenizes, Wait, WaitEndedError
from inferd.errors import InferdError, InternalError, InvalidRequest, Overloaded
from inferd.types import GenerateRequest
from inferd.worker.fair_queue import FairQueue
from inferd.worker.loop import Add, Drop, Inbox
from inferd.worker.messages import (
    AdaptersSet,
    Check,
    Checked,
    Detokenize,
    Detokenized,
    FromWorker,
    Outputs,
    SetAdapters,
    Tokenize,
    Tokenized,
)
from inferd.worker.open_requests import log_duplicate

NUM_FORMING = 2
NUM_TRYING = 3
_MOST_TRYING = 2  # of a tenant
_MOST_WAIT_S = 20.0  # for a thread that tries forms

_log = logging.getLogger("inferd.worker")


class _Open(NamedTuple):
    """A request that is not in the inbox yet."""

    arrived_at: float
    wait: Wait


class Intake:
    """``submit``, ``cancel``, ``call`` and ``withdraw`` belong to the reading thread, ``run`` to the preparing one,
    ``run_formed`` to ``NUM_FORMING`` others, and ``run_tried`` to ``NUM_TRYING`` more.

    ``run_calls`` belongs to a thread of its own, so that no request waits behind a long /tokenize, and so does
    ``run_adapters``.
    """

    def __init__(self, backend: PreparingBackend, inbox: Inbox, send: Callable[[FromWorker], None]) -> None:
        self._backend = backend
        self._inbox = inbox
        self._send = send
        self._requests: queue.SimpleQueue[GenerateRequest] = queue.SimpleQueue()
        self._formed: queue.SimpleQueue[GenerateRequest] = queue.SimpleQueue()  # with a form to be compiled
        self._tried: FairQueue[tuple[float, GenerateRequest | Check]] = FairQueue(_MOST_TRYING)
        self._calls: queue.SimpleQueue[Tokenize | Detokenize | Check] = queue.SimpleQueue()
        self._adapters: queue.SimpleQueue[SetAdapters] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: dict[str, _Open] = {}  # submitted and not yet in the inbox
        self._checks: dict[int, Wait] = {}  # that are not answered
        self._num_submitted = 0
        self._num_done = 0

    @property
    def is_busy(self) -> bool:
        return self._num_submitted != self._num_done

    @property
    def num_done(self) -> int:
        return self._num_done

    def submit(self, request: GenerateRequest) -> None:
        with self._lock:
            if request.id in self._waiting:
                log_duplicate(request.id)
                return
            self._waiting[request.id] = _Open(request.arrived_at, Wait())
        self._num_submitted += 1
        is_formed = request.form is not None and (request.form.constraint or request.form.tools) is not None
        (self._formed if is_formed else self._requests).put(request)

    def cancel(self, request_id: str) -> None:
        """Idempotent. A request that has not been prepared ends now, all others in the loop."""
        with self._lock:
            if request_id not in self._waiting:
                self._inbox.put(Drop(request_id))
                return
            waiting = self._waiting.pop(request_id)
        waiting.wait.end()
        self._send(Outputs([ends.cancelled(request_id, waiting.arrived_at, clock.now())]))

    def call(self, job: Tokenize | Detokenize | Check) -> None:
        if isinstance(job, Check):
            with self._lock:
                self._checks[job.call_id] = Wait()
        self._calls.put(job)

    def withdraw(self, call_id: int) -> None:
        """A check gets no answer, if it has none yet. Idempotent."""
        with self._lock:
            wait = self._checks.pop(call_id, None)
        if wait is not None:
            wait.end()

    def set_adapters(self, job: SetAdapters) -> None:
        self._adapters.put(job)

    def run_adapters(self) -> None:
        """Load and unload adapters, for ever."""
        while True:
            job = self._adapters.get()
            if isinstance(self._backend, TakesAdapters):
                self._send(AdaptersSet(job.call_id, self._backend.set_adapters(job.adapters)))
            else:
                refusal = InvalidRequest("This model takes no adapters.", param="adapters")
                self._send(AdaptersSet(job.call_id, failure=refusal.to_failure()))

    def run(self) -> None:
        """Prepare requests, for ever."""
        self._prepare_all(self._requests)

    def run_formed(self) -> None:
        """Prepare requests whose form must be compiled, for ever."""
        self._prepare_all(self._formed)

    def run_tried(self) -> None:
        """Prepare requests whose form must be tried, and check such requests, for ever."""
        while True:
            tenant, (since, job) = self._tried.get()
            try:
                is_late = clock.now() - since > _MOST_WAIT_S
                refusal = _too_many_forms() if is_late else None
                if isinstance(job, Check):
                    self._check(job, may_wait=True, refusal=refusal)
                    continue
                self._prepare(job, may_wait=True, refusal=refusal)
                self._count_done()
            finally:
                self._tried.done(tenant)

    def _prepare_all(self, requests: queue.SimpleQueue[GenerateRequest]) -> None:
        while True:
            request = requests.get()
            try:
                self._prepare(request, may_wait=False)
            except TakesLong:
                self._tried.put(request.tenant, (clock.now(), request))
            else:
                self._count_done()

    def _count_done(self) -> None:
        with self._lock:
            self._num_done += 1

    def run_calls(self) -> None:
        """Answer calls of the tokenizer, for ever."""
        while True:
            match self._calls.get():
                case Tokenize() as job:
                    self._send(self._tokenized(job))
                case Detokenize() as job:
                    self._send(self._detokenized(job))
                case Check() as job:
                    try:
                        self._check(job, may_wait=False)
                    except TakesLong:
                        self._tried.put(job.requests[0].tenant, (clock.now(), job))

    def _prepare(self, request: GenerateRequest, *, may_wait: bool, refusal: InferdError | None = None) -> None:
        """Raises TakesLong. ``refusal``: why it is not prepared."""
        waiting = self._waiting.get(request.id)
        if waiting is None:
            return  # cancelled
        prepared: object = None
        failure: Exception | None = None
        try:
            if ends.is_late(request, clock.now()):  # then not even its prompt is tokenized
                raise ends.too_late(request, has_begun=False)
            if refusal is not None:
                raise refusal
            prepared = self._backend.prepare(request, wait=waiting.wait if may_wait else None)
        except TakesLong:
            raise
        except WaitEndedError:
            return  # cancelled
        except Exception as error:
            failure = error
        with self._lock:
            if request.id not in self._waiting:
                return
            del self._waiting[request.id]
            if failure is None:
                self._inbox.put(Add(request.id, prepared, request.arrived_at))
                return
        self._send(Outputs([ends.failed(request.id, request.arrived_at, failure)]))

    def _tokenized(self, job: Tokenize) -> Tokenized:
        try:
            ids, strings = self._tokenizer().tokenize(job.prompt, job.want_strings, job.tenant)
        except Exception as error:
            return Tokenized(job.call_id, failure=_public_error(error).to_failure())
        return Tokenized(job.call_id, ids, strings)

    def _detokenized(self, job: Detokenize) -> Detokenized:
        try:
            return Detokenized(job.call_id, self._tokenizer().detokenize(job.token_ids))
        except Exception as error:
            return Detokenized(job.call_id, failure=_public_error(error).to_failure())

    def _check(self, job: Check, *, may_wait: bool, refusal: InferdError | None = None) -> None:
        """Raises TakesLong. ``refusal``: why the requests are not prepared."""
        wait = self._checks.get(job.call_id)
        if wait is None:
            return  # withdrawn
        failure: Exception | None = refusal
        if failure is None:
            try:
                for request in job.requests:
                    self._backend.prepare(request, wait=wait if may_wait else None)
            except TakesLong:
                raise
            except WaitEndedError:
                return  # withdrawn
            except Exception as error:
                failure = error
        with self._lock:
            if self._checks.pop(job.call_id, None) is None:
                return
        self._send(Checked(job.call_id, None if failure is None else _public_error(failure).to_failure()))

    def _tokenizer(self) -> Tokenizes:
        if not isinstance(self._backend, Tokenizes):
            raise InvalidRequest("This model has no tokenizer.", param="model")
        return self._backend


def _too_many_forms() -> Overloaded:
    return Overloaded("Too many forms of answers wait to be compiled. Try again in a moment.", retry_after_s=2.0)


def _public_error(error: Exception) -> InferdError:
    if isinstance(error, InferdError):
        return error
    _log.error("a tokenizer call failed", exc_info=error)
    return InternalError("The tokenizer failed; the server's log has the details.")
