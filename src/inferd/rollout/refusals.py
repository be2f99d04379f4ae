"""Whether a generated answer is a refusal, by its first words: a heuristic, for the guard ``refused``.

A refusal begins with a set phrase in nearly all cases, in English at least. Answers of other languages, and refusals in
other words, are not found; a guard compares two versions, so that what both miss does not matter to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from inferd.router.stream import Handle, Submitting
from inferd.types import Item, Output, Relay, Request, Sink

READ_CHARACTERS: Final = 200
"""Of an answer. A refusal says so at its beginning."""

_APOLOGY: Final = r"(?:i['\u2019]?m|i am|we['\u2019]?re|we are)\s+(?:very |really |truly |so )?sorry,?\s+(?:but\s+)?"
_UNABLE: Final = (
    r"(?:i|we)(?:\s+(?:can(?:not|['\u2019]t)|can not|won['\u2019]t|will not|must decline|decline|refuse|"
    r"am not able|are not able|am unable|are unable|am not comfortable)|['\u2019]m (?:not able|unable|not comfortable)|"
    r"['\u2019]re (?:not able|unable))"
)
_DEEDS: Final = (
    r"(?:to\s+)?(?:help|assist|do|provide|comply|fulfil|answer|create|write|give|generate|discuss|support|"
    r"engage|continue|share|offer|produce|fulfill)"
)
_REFUSAL: Final = re.compile(
    rf"\W*(?:{_APOLOGY})?(?:unfortunately,?\s+|sorry,?\s+(?:but\s+)?|as an ai(?:\s+\w+){{0,3}},?\s+)*{_UNABLE}\b"
    rf",?(?:\s+\w+){{0,2}}?\s+{_DEEDS}\b",
    re.IGNORECASE,
)


def is_refusal(text: str) -> bool:
    """Whether a text begins as refusals do."""
    return _REFUSAL.match(text[:READ_CHARACTERS]) is not None


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
