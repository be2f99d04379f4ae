"""The feed of events: what changed in the server, in sentences, the newest last.

Bounded, whatever happens: refusals are counted and become one sentence per model and reason in ``BURST_S``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, Literal, get_args

import msgspec

from inferd.events import (
    BreakerChanged,
    ConfigReloaded,
    Event,
    ModelUnloaded,
    RefusalReason,
    ReplicaChanged,
    RequestRefused,
    StateChanged,
    state_words,
)
from inferd.observe.why.words import seconds_text

MAX_LINES: Final = 256
BURST_S: Final = 10.0

NEWS: Final = frozenset((RequestRefused, ReplicaChanged, BreakerChanged, ModelUnloaded, ConfigReloaded, StateChanged))
"""The kinds of events that ``Feed.handle`` takes."""

Level = Literal["info", "warning", "error"]

_FAULTS: Final = ("died", "failed", "hung")
_CAPACITY: Final = frozenset(reason for reason in get_args(RefusalReason) if not reason.startswith("quota_"))
_UNLOADED: Final = {
    "asked": "by an operator",
    "idle": "because it was idle",
    "evicted": "to make room for another model",
    "removed": "because the configuration no longer has it",
}
_BREAKER: Final[dict[str, tuple[Level, str]]] = {
    "open": ("warning", "gets no requests, because it failed several times in a row"),
    "half_open": ("info", "gets one request as a test"),
    "closed": ("info", "gets requests again"),
    "ejected": ("warning", "gets no requests, because it is much slower than the others"),
}


class Line(msgspec.Struct, frozen=True):
    """One event. ``detail`` is for keys that may use every model: it may name files and hosts."""

    at: float  # seconds since the epoch
    level: Level
    text: str
    model: str = ""  # empty: of the server
    replica: int | None = None
    detail: str = ""


class Feed:
    """The last events."""

    def __init__(self) -> None:
        self.lines: deque[Line] = deque(maxlen=MAX_LINES)
        self.num_lines = 0  # that were ever added
        self._states: dict[tuple[str, int], str] = {}
        self._refused: dict[tuple[str, str], int] = {}  # since the last sentence, by model and reason
        self._told_at: dict[tuple[str, str], float] = {}  # on the monotonic clock

    def handle(self, event: Event, wall: float) -> None:
        """Take an event of the kinds in ``NEWS``."""
        match event:
            case RequestRefused():
                key = (event.model, event.reason)
                self._refused[key] = self._refused.get(key, 0) + 1
            case ReplicaChanged():
                self._replica_changed(event, wall)
            case BreakerChanged():
                level, words = _BREAKER[event.state]
                text = f"{event.model}/{event.replica} {words}"
                self._add(Line(wall, level, text, event.model, event.replica, event.reason))
            case ModelUnloaded():
                self._add(Line(wall, "info", f"{event.model} was unloaded {_UNLOADED[event.reason]}", event.model))
            case ConfigReloaded():
                self._add(_reloaded(event, wall))
            case StateChanged():
                text = "The database answers again" if event.available else "The database does not answer"
                self._add(Line(wall, "info" if event.available else "error", text))

    def _replica_changed(self, event: ReplicaChanged, wall: float) -> None:
        key = (event.model, event.replica)
        if self._states.get(key) == event.state:
            return
        self._states[key] = event.state
        text = f"{event.model}/{event.replica} {state_words(event.state)}"
        if event.state == "ready" and event.load_s:
            text += f", loaded in {seconds_text(sum(event.load_s.values()))}"
        level: Level = "error" if event.state in _FAULTS else "info"
        self._add(Line(wall, level, text, event.model, event.replica, event.reason))

    def tick(self, now: float, wall: float) -> None:
        """Make sentences of refusals. ``now``: on the monotonic clock."""
        for (model, reason), count in list(self._refused.items()):
            told_at = self._told_at.get((model, reason))
            if told_at is not None and now - told_at < BURST_S:
                continue
            del self._refused[model, reason]
            self._told_at[model, reason] = now
            requests = "request was" if count == 1 else "requests were"
            level: Level = "warning" if reason in _CAPACITY else "info"
            self._add(Line(wall, level, f"{model}: {count} {requests} refused ({reason.replace('_', ' ')})", model))

    def keep(self, models: frozenset[str]) -> None:
        """Forget the states of all other models, which were removed."""
        self._states = {key: state for key, state in self._states.items() if key[0] in models}
        self._refused = {key: count for key, count in self._refused.items() if key[0] in models}
        self._told_at = {key: at for key, at in self._told_at.items() if key[0] in models}

    def since(self, number: int) -> Iterator[Line]:
        """The lines after the first ``number`` of all, as far as they are kept."""
        skipped = max(0, len(self.lines) - (self.num_lines - number))
        return (line for at, line in enumerate(self.lines) if at >= skipped)

    def _add(self, line: Line) -> None:
        self.lines.append(line)
        self.num_lines += 1


def _reloaded(event: ConfigReloaded, wall: float) -> Line:
    if not event.accepted:
        return Line(wall, "error", "The configuration file was refused; the old one is in use", detail=event.detail)
    if not event.is_whole:
        return Line(
            wall, "warning", "The configuration file was read, and some models did not load", detail=event.detail
        )
    return Line(wall, "info", "The configuration file was read", detail=event.detail)
