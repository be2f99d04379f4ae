"""What the counts say of the new version: whether a guard withdraws it, and whether all guards are passed. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import msgspec

from inferd.rollout.evidence import Count, Counts, log_evidence, log_excess, log_mean, log_rarity, log_tolerance
from inferd.rollout.plan import Guard, GuardKind, Plan, Population


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The evidence of one guard. All evidence is a natural logarithm; without data it is 0.

    ``against`` says that the new version is worse, and withdraws it at ``against_limit``. ``in_favour`` says that it is
    good enough, and passes the guard at ``in_favour_limit``.
    """

    guard: GuardKind
    bad: Count  # units with a bad event
    units: Count  # all units
    against: float
    against_limit: float
    in_favour: float
    in_favour_limit: float

    @property
    def is_worse(self) -> bool:
        return self.against >= self.against_limit

    @property
    def is_passed(self) -> bool:
        return self.in_favour >= self.in_favour_limit


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What all guards together say. ``worse``: the guard that withdraws the new version; None: no guard does."""

    readings: tuple[Reading, ...] = ()

    @property
    def worse(self) -> Reading | None:
        found = [reading for reading in self.readings if reading.is_worse]
        return max(found, key=lambda reading: reading.against - reading.against_limit, default=None)

    def is_passed(self, guards: Collection[GuardKind] | None = None) -> bool:
        """Whether these guards are passed; None: all."""
        return all(reading.is_passed for reading in self.readings if guards is None or reading.guard in guards)


def judge(plan: Plan, bad: Mapping[str, Counts], units: Mapping[Population, Counts]) -> Verdict:
    """The readings of all guards. ``bad``: bad events by guard; ``units``: all units by population, as both were
    counted so far.

    The guards share ``alpha``, so all of them together withdraw a version that is not worse with that probability at
    most. Each must be passed, so ``beta`` holds for each.
    """
    return Verdict(
        readings=tuple(
            [_read(plan, guard, bad.get(guard.kind, {}), units.get(guard.population, {})) for guard in plan.guards]
        )
    )


def _read(plan: Plan, guard: Guard, bad: Counts, units: Counts) -> Reading:
    bad_sum, unit_sum = _sum(bad), _sum(units)
    # A good enough version has one of the two: its bad events are not much more likely, or they are rare.
    ratio, fraction, favours = guard.max_ratio, guard.max_fraction, []
    if fraction is not None:
        against = log_excess(bad_sum.new, unit_sum.new, fraction)
        favours.append(log_rarity(bad_sum.new, unit_sum.new, fraction))
    if ratio is not None:
        against = log_evidence(bad)
        favours.append(log_tolerance(bad, ratio))
    return Reading(
        guard=guard.kind,
        bad=bad_sum,
        units=unit_sum,
        against=against,
        against_limit=math.log(len(plan.guards) / plan.alpha),
        in_favour=log_mean(favours),
        in_favour_limit=math.log(1.0 / plan.beta),
    )


def _sum(counts: Counts) -> Count:
    return Count(sum(count.stable for count in counts.values()), sum(count.new for count in counts.values()))


def reading_text(reading: Reading) -> str:
    """A reading in words and numbers, for people."""
    bad, units = reading.bad, reading.units
    if reading.guard == "differs":
        counts = f"{bad.new} of {units.new} copied units"
    elif reading.guard == "golden":
        counts = f"{bad.new} of {units.new} answers of the new version were not the expected ones"
        counts += f", {bad.stable} of {units.stable} of the stable one" if units.stable else ""
    else:
        counts = (
            f"{bad.new} of {units.new} units with the new version, {bad.stable} of {units.stable} with the stable one"
        )
    return (
        f"{reading.guard}: {counts}; evidence against it {_times(reading.against)} of "
        f"{_times(reading.against_limit)}, in its favour {_times(reading.in_favour)} of "
        f"{_times(reading.in_favour_limit)}"
    )


def _times(log: float) -> str:
    """The number that a natural logarithm stands for, in at most three digits and an exponent."""
    return f"{math.exp(log):.3g}" if log < 700 else f"1e{log / math.log(10):.0f}"
