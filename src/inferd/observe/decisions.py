"""The log lines of decisions: one per decision, and at most ``MAX_LINES`` in a second of one kind for one model.

An overload refuses thousands of requests in a second. The lines beyond the limit are left out, and the next line of the
kind, or one of its own a second later, says how many they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from inferd.observe.logs import Decision, decision_fields
from inferd.types import JSON
from inferd.worker.log_lines import encoded
from inferd.worker.timestamp import timestamp

MAX_LINES: Final = 10
"""Lines of a kind and a model in ``PERIOD_S``."""

PERIOD_S: Final = 1.0


class _Period:
    """The lines of one kind for one model since ``began``."""

    __slots__ = ("began", "num_left_out", "num_lines")

    def __init__(self, began: float) -> None:
        self.began = began
        self.num_lines = 0
        self.num_left_out = 0


class DecisionLog:
    """Used from one thread."""

    def __init__(self, write: Callable[[str, str], None], now: Callable[[], float], wall: Callable[[], float]) -> None:
        """``write`` takes a level and a line."""
        self._write = write
        self._now = now
        self._wall = wall
        self._periods: dict[tuple[str, str, str], _Period] = {}
        self.due = float("inf")
        """When ``flush`` has something to write."""

    def write(self, event: Decision) -> None:
        name, level, fields = decision_fields(event)
        now = self._now()
        key = (name, level, str(fields["model"]))
        period = self._periods.get(key)
        if period is None or now - period.began >= PERIOD_S:
            num_left_out = 0 if period is None else period.num_left_out
            period = self._periods[key] = _Period(now)
            if num_left_out:
                fields["left_out"] = num_left_out
        if period.num_lines >= MAX_LINES:
            period.num_left_out += 1
            self.due = min(self.due, period.began + PERIOD_S)
            return
        period.num_lines += 1
        self._write(level, self._line(name, level, fields))

    def flush(self, now: float) -> None:
        """Write how many lines were left out in the periods that are over."""
        self.due = float("inf")
        for key, period in list(self._periods.items()):
            if now - period.began < PERIOD_S:
                if period.num_left_out:
                    self.due = min(self.due, period.began + PERIOD_S)
                continue
            del self._periods[key]
            if period.num_left_out:
                name, level, model = key
                self._write(level, self._line(name, level, {"model": model, "left_out": period.num_left_out}))

    def close(self) -> None:
        """Write how many lines were left out."""
        self.flush(float("inf"))

    def _line(self, name: str, level: str, fields: JSON) -> str:
        return encoded({"ts": timestamp(self._wall()), "level": level, "event": name, **fields})
