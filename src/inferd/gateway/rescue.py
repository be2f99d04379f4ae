"""Gives a request that the new version of a rollout could not answer to the stable version, before its first byte.

So clients of a bad version see an answer and no error; the guards count what happened. Knows the two versions that the
rollout has named for a call, and no queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from inferd.errors import CLIENT_ERRORS, ContextLengthExceeded, InferdError, InvalidRequest
from inferd.gateway.call import Call
from inferd.router.stream import Handle, Submitting
from inferd.types import End, Item, Output, Relay, Request, Sink

_MAY_BE_THE_VERSIONS: Final = (InvalidRequest.kind, ContextLengthExceeded.kind)
"""Kinds of errors of clients that another version may not have: it takes other inputs."""


def router_for(router: Submitting, call: Call) -> Submitting:
    """The router for a call's requests: with what a rollout does with them."""
    return router if call.division is None else call.division(router, call)


def rescuing(router: Submitting, call: Call) -> Submitting:
    """The router for a call's requests: with a second attempt where a rollout has chosen the new version for it."""
    return router if call.spare_model is None else _Rescuer(router, call)


class _Rescuer:
    """A router whose requests are given to another model once."""

    def __init__(self, router: Submitting, call: Call) -> None:
        self._router = router
        self._call = call

    def submit(self, request: Request, sink: Sink, relay: Relay | None = None) -> Handle:
        if relay is not None or not request.idempotent:
            return self._router.submit(request, sink, relay)
        attempt = _Attempt(self._router, self._call, request, sink)
        attempt.begin()
        return attempt


class _Attempt:
    """A request at the new version, and then perhaps at the stable one. Is the sink of both, and their handle."""

    def __init__(self, router: Submitting, call: Call, request: Request, sink: Sink) -> None:
        self.end: End | None = None
        self._router = router
        self._call = call
        self._request = request
        self._sink: Sink | None = sink
        self._handle: Handle | None = None
        self._listener: Callable[[], None] | None = None
        self._is_cancelled = False
        self._is_final = False  # no other attempt follows

    def begin(self) -> None:
        """Raises the error of the second attempt, where both are refused."""
        try:
            self._handle = self._router.submit(self._request, self)
        except InferdError as error:
            if not _is_rescued(error.kind):
                raise
            self._submit_again(error.kind)

    def deliver(self, item: Item) -> None:
        failure = None if item.end is None else item.end.failure
        may_follow = not self._is_final and not self._is_cancelled and isinstance(item, Output)
        if may_follow and failure is not None and _is_rescued(failure.kind):
            # Not at once: the router is about to end the first attempt.
            asyncio.get_running_loop().call_soon(self._follow, item, failure.kind)
            return
        self._is_final = True
        self._pass_on(item)

    def _follow(self, failed: Item, kind: str) -> None:
        if not self._is_cancelled:
            try:
                self._submit_again(kind)
            except InferdError:
                pass  # the client gets the first error
            else:
                return
        self._pass_on(failed)

    def _submit_again(self, kind: str) -> None:
        model = self._call.spare_model
        assert model is not None, "else the call has the router itself"
        self._is_final = True
        request = msgspec.structs.replace(self._request, model=model)
        self._handle = self._router.submit(request, self)
        self._call.rescued_from, self._call.model = kind, model

    def _pass_on(self, item: Item) -> None:
        sink = self._sink
        assert sink is not None, "nothing follows its end"
        if item.end is None:
            sink.deliver(item)
            return
        self.end, self._sink, self._handle = item.end, None, None
        listener, self._listener = self._listener, None
        try:
            sink.deliver(item)
        finally:
            if listener is not None:
                listener()

    # -- as a handle --------------------------------------------------------------------------

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._handle is not None:
            self._handle.cancel()

    def pause(self) -> None:
        if self._handle is not None:
            self._handle.pause()

    def resume(self) -> None:
        if self._handle is not None:
            self._handle.resume()

    def when_over(self, listener: Callable[[], None]) -> None:
        assert self.end is None, "it has ended already"
        self._listener = listener


def _is_rescued(kind: str) -> bool:
    return kind not in CLIENT_ERRORS or kind in _MAY_BE_THE_VERSIONS


if TYPE_CHECKING:
    _handle: type[Handle] = _Attempt
    _sink: type[Sink] = _Attempt
