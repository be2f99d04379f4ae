"""Tells a rollout whose guard is ``refused`` of answers that are refusals (``compare/refusals.py``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from inferd.compare.refusals import READ_CHARACTERS, is_refusal
from inferd.router.stream import Handle, Submitting
from inferd.types import Item, Output, Relay, Request, Sink


def reading_refusals(router: Submitting, refused: Callable[[], None]) -> Submitting:
    """A router that calls ``refused`` when the answer to a request is done and is a refusal."""
    return _ReadingRouter(router, refused)


class _ReadingRouter:
    def __init__(self, router: Submitting, refused: Callable[[], None]) -> None:
        self._router = router
        self._refused = refused

    def submit(self, request: Request, sink: Sink, relay: Relay | None = None) -> Handle:
        return self._router.submit(request, _Reader(sink, self._refused), relay)


class _Reader:
    """Passes items on, and reads the beginning of the first choice."""

    __slots__ = ("_beginning", "_refused", "_sink")

    def __init__(self, sink: Sink, refused: Callable[[], None]) -> None:
        self._sink = sink
        self._refused = refused
        self._beginning = ""

    def deliver(self, item: Item) -> None:
        if isinstance(item, Output):
            for delta in item.deltas:
                if delta.index == 0 and delta.text and len(self._beginning) < READ_CHARACTERS:
                    self._beginning += delta.text[:READ_CHARACTERS]
        # Before the end is passed on, because the call is over then.
        if item.end is not None and item.end.outcome == "done" and is_refusal(self._beginning):
            self._refused()
        self._sink.deliver(item)


if TYPE_CHECKING:
    _sink: type[Sink] = _Reader
    _router: type[Submitting] = _ReadingRouter
