"""Refused sign-ins and refused requests for administration, as few lines of the audit log.

The first refusal is a line at once and opens a window. The refusals of a window are counted by their origin, and become
at most ``MAX_LINES`` lines and one for the rest when it ends. A window after one with refusals is twice as long, up to
an hour; a window without any is the last. So a flood of refusals writes a bounded number of lines a day. Knows neither
files nor HTTP.
"""

from __future__ import annotations

from typing import Final, NamedTuple

FIRST_WINDOW_S: Final = 60.0
LONGEST_WINDOW_S: Final = 3600.0
MAX_LINES: Final = 10
MAX_ORIGINS: Final = 1024  # that are told apart within a window


class Origin(NamedTuple):
    """Refusals that are counted together."""

    actor: str  # key:ID, or address:IP where no key was recognised
    tenant: str
    action: str
    address: str
    code: str


class RefusedLine(NamedTuple):
    """A line of the audit log. ``request_id``: of the first refusal that it stands for."""

    actor: str
    tenant: str
    action: str
    target: str
    detail: str
    request_id: str


class _Counted:
    __slots__ = ("number", "request_id", "target")

    def __init__(self, target: str, request_id: str) -> None:
        self.target = target
        self.request_id = request_id
        self.number = 0


class RefusedAccess:
    """The refusals of the current window. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self.ends_at: float | None = None  # of the window; None: there is none
        self._window_s = 0.0
        self._counted: dict[Origin, _Counted] = {}
        self._num_others = 0

    def note(self, now: float, origin: Origin, target: str, request_id: str) -> list[RefusedLine]:
        """Count a refusal; returns the lines to write now."""
        lines = self.due(now)
        if self.ends_at is None:
            self._window_s = FIRST_WINDOW_S
            self.ends_at = now + FIRST_WINDOW_S
            return [*lines, _line(origin, target, request_id, "")]
        counted = self._counted.get(origin)
        if counted is None and len(self._counted) < MAX_ORIGINS:
            counted = self._counted[origin] = _Counted(target, request_id)
        if counted is None:
            self._num_others += 1
        else:
            counted.number += 1
        return lines

    def due(self, now: float) -> list[RefusedLine]:
        """The lines of a window that has ended; the next one begins. None are due before ``ends_at``."""
        if self.ends_at is None or now < self.ends_at:
            return []
        lines = self.rest()
        self._window_s = min(2 * self._window_s, LONGEST_WINDOW_S)
        self.ends_at = now + self._window_s if lines else None
        return lines

    def rest(self) -> list[RefusedLine]:
        """The lines of what is counted and has none yet, before its window ends: the server stops."""
        most = sorted(self._counted.items(), key=lambda item: -item[1].number)
        span = f"within {self._window_s:.0f} s"
        lines = [
            _line(origin, counted.target, counted.request_id, f", {counted.number} times {span}")
            for origin, counted in most[:MAX_LINES]
        ]
        number = self._num_others + sum(counted.number for _, counted in most[MAX_LINES:])
        if number:
            detail = f"{number} further refusals of other keys and addresses {span}"
            lines.append(RefusedLine("others", "", "authenticate", "", detail, ""))
        self._counted.clear()
        self._num_others = 0
        return lines


def _line(origin: Origin, target: str, request_id: str, number: str) -> RefusedLine:
    address = f" from {origin.address}" if origin.address else ""
    return RefusedLine(
        origin.actor, origin.tenant, origin.action, target, f"{origin.code}{address}{number}", request_id
    )
