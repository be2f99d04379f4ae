"""Counts the units of one rollout, and those with a bad event, as they end at this gateway.

A unit is counted when it is first seen, and at most once for each guard, so that one user who fails again and again is
one bad unit. The share of its assignment is that of its first sight. A growing share moves units from the stable
version to the new one; a unit that has moved proves nothing, because it was there on purpose and not by chance. For the
others the share is that of units that have not moved.

Has no clock and no I/O. What was counted waits until it is taken to the database.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from inferd.errors import CLIENT_ERRORS, ContextLengthExceeded, DeadlineExceeded, InvalidRequest
from inferd.events import Assigned, HttpServed
from inferd.rollout.evidence import Count
from inferd.rollout.plan import Guard, GuardKind, Population

MAX_UNITS: Final = 65_536
"""Units that are known at a time. The oldest is forgotten, and counted again when it comes back."""

MAX_BAD: Final = 4096
"""Bad events that wait for the database at a time. Further ones are not counted, whatever their version."""

_INVALID: Final = (400, 413, 422)  # statuses for a request that the version refuses
_INVALID_KINDS: Final = (InvalidRequest.kind, ContextLengthExceeded.kind)


class BadEvent(NamedTuple):
    """The first bad event of a unit for a guard."""

    guard: GuardKind
    share: float
    is_new: bool
    unit: bytes  # empty: the request was a unit of its own


class Batch(NamedTuple):
    """What was counted since the last batch."""

    units: dict[tuple[Population, float], Count]
    bad: list[BadEvent]


class _Known:
    """A unit that was seen."""

    __slots__ = ("bad", "is_new", "share")

    def __init__(self, share: float, is_new: bool) -> None:
        self.share = share
        self.is_new = is_new
        self.bad = 0  # one bit per guard


class Tally:
    """The units of one run of one rollout at this gateway."""

    def __init__(self, run: int, guards: tuple[Guard, ...]) -> None:
        self.run = run
        self._guards = guards
        self._known: dict[bytes, _Known] = {}
        self._copied: dict[bytes, bool] = {}  # units whose requests were copied: whether an answer differed
        self.units: dict[tuple[Population, float], Count] = {}  # since the last batch
        self.bad_counts: dict[str, dict[float, Count]] = {}  # likewise, by guard
        self._bad: list[BadEvent] = []

    def ended(self, event: HttpServed) -> bool:
        """Count a call that has ended; whether it was a bad event that was not known yet."""
        assigned = event.assigned
        if assigned is None or assigned.run != self.run:
            return False
        known = self._seen(assigned)
        if known.is_new != assigned.is_new:
            return False
        share = _share_of_unmoved(known.share, assigned.share)
        num_before = len(self._bad)
        for index, guard in enumerate(self._guards):
            if not known.bad >> index & 1 and is_bad(guard, event):
                known.bad |= 1 << index
                self._note(BadEvent(guard.kind, share, known.is_new, assigned.unit))
        return len(self._bad) > num_before

    def compared(self, assigned: Assigned, *, differs: bool) -> bool:
        """Count a copied request whose answers were compared; whether it was a difference that was not known yet.

        A unit is counted once here as well, and is bad when one of its copies differs.
        """
        unit = assigned.unit
        if assigned.run != self.run:
            return False
        if not unit or unit not in self._copied:
            self._add_units("copies", 0.0, Count(new=1))
            if unit:
                if len(self._copied) >= MAX_UNITS:
                    del self._copied[next(iter(self._copied))]
                self._copied[unit] = False
        if not differs or (unit and self._copied[unit]) or not any(guard.kind == "differs" for guard in self._guards):
            return False
        if unit:
            self._copied[unit] = True
        self._note(BadEvent("differs", 0.0, True, unit))
        return True

    def answered(self, share: float, *, is_new: bool, is_bad: bool) -> None:
        """Count an answer to a question of the golden set, which was drawn by chance and is a unit of its own.
        ``share``: of the questions, those that the new version is asked."""
        self._add_units("golden", share, Count(new=1) if is_new else Count(stable=1))
        if is_bad:
            self._note(BadEvent("golden", share, is_new, b""))

    def reported(self, assigned: Assigned) -> bool:
        """Count a unit of which something bad was reported, after its call; whether it was not known yet."""
        known = self._known.get(assigned.unit) if assigned.unit else None
        if known is None:
            known = _Known(assigned.share, assigned.is_new)
        for index, guard in enumerate(self._guards):
            if guard.kind == "reported" and not known.bad >> index & 1 and known.is_new == assigned.is_new:
                known.bad |= 1 << index
                share = _share_of_unmoved(known.share, assigned.share)
                self._note(BadEvent(guard.kind, share, known.is_new, assigned.unit))
                return True
        return False

    def take(self) -> Batch:
        """What was counted since the last call."""
        batch = Batch(self.units, self._bad)
        self.units, self._bad, self.bad_counts = {}, [], {}
        return batch

    def put_back(self, batch: Batch) -> None:
        """Keep what could not be stored for the next batch."""
        for (population, share), count in batch.units.items():
            self._add_units(population, share, count)
        events, self._bad, self.bad_counts = [*batch.bad, *self._bad], [], {}
        for event in events:
            self._note(event)

    def watch(self, guards: tuple[Guard, ...]) -> None:
        """Count the bad events of other guards from now on. A unit may be counted again for them."""
        self._guards = guards
        for known in self._known.values():
            known.bad = 0
        self._copied = dict.fromkeys(self._copied, False)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was counted since the last batch."""
        return not self.units and not self._bad

    def _seen(self, assigned: Assigned) -> _Known:
        known = self._known.get(assigned.unit) if assigned.unit else None
        if known is None:
            known = _Known(assigned.share, assigned.is_new)
            self._add_units("", assigned.share, Count(new=1) if assigned.is_new else Count(stable=1))
            if assigned.unit:
                if len(self._known) >= MAX_UNITS:
                    del self._known[next(iter(self._known))]
                self._known[assigned.unit] = known
        return known

    def units_of(self, population: Population) -> dict[float, Count]:
        """The units of a population that were counted since the last batch, by share."""
        return {share: count for (of, share), count in self.units.items() if of == population}

    def _add_units(self, population: Population, share: float, count: Count) -> None:
        before = self.units.get((population, share), Count())
        self.units[population, share] = Count(before.stable + count.stable, before.new + count.new)

    def _note(self, event: BadEvent) -> None:
        if len(self._bad) < MAX_BAD:
            self._bad.append(event)
            counts = self.bad_counts.setdefault(event.guard, {})
            before = counts.get(event.share, Count())
            counts[event.share] = Count(before.stable + (not event.is_new), before.new + event.is_new)


def _share_of_unmoved(first: float, now: float) -> float:
    """The new version's share of the units that were first seen at one share and have kept their version until now."""
    return first if first == now else first / (first + max(0.0, 1.0 - max(first, now)))


def is_bad(guard: Guard, event: HttpServed) -> bool:
    """Whether a call that has ended is a bad event for a guard."""
    failure = None if event.end is None else event.end.failure
    kind = None if failure is None else failure.kind
    match guard.kind:
        case "errors":
            kind = kind or event.rescued_from
            return event.status >= 500 or (bool(kind) and kind not in CLIENT_ERRORS)
        case "invalid":
            return event.status in _INVALID or kind in _INVALID_KINDS or event.rescued_from in _INVALID_KINDS
        case "slow":
            return _is_slow(guard, event, kind)
        case "refused":
            return event.assigned is not None and event.assigned.is_refusal
        case "differs" | "reported" | "golden":
            return False


def _is_slow(guard: Guard, event: HttpServed, failure_kind: str | None) -> bool:
    """A call that was ended by its client or its deadline before the measured time was slow if it lasted longer."""
    timings = event.timings
    if timings is None:
        return False
    is_given_up = event.outcome == "cancelled" or failure_kind == DeadlineExceeded.kind
    total_s, first_s = timings.finished, timings.first_token
    is_measured = total_s is not None and (event.outcome == "done" or is_given_up)
    if is_measured and guard.over_s is not None and (total_s or 0.0) > guard.over_s:
        return True
    if first_s is None and is_given_up:
        first_s = total_s
    return guard.first_over_s is not None and first_s is not None and first_s > guard.first_over_s
