"""The evidence that a new version of a model is worse than the stable one, or as good. Pure: no clock, no I/O.

Every guard of a rollout counts *bad events* of units: an error, an answer over its time, a refusal. Units (sessions,
users, requests) are assigned to the versions at random. If bad events are ``r`` times as likely with the new version,
a bad event is one of the new version with the probability

    theta(r) = share * r / (1 + share * (r - 1))

where ``share`` is the new version's share of the units when the unit was assigned. So the likelihood ratio of the
events so far, of the relative risk ``r`` against 1, is

    L(r) = r ** (bad events of the new version) / product over all bad events of (1 + share * (r - 1))

``log_evidence`` is the logarithm of the mean of L over a grid of risks above 1. While the new version is not worse,
that mean is a nonnegative supermartingale that begins at 1. So the probability that it *ever* reaches ``1 / alpha`` is
at most ``alpha`` (Ville's inequality), whatever the number of looks, the changes of the share, and the changes of the
rate of bad events that both versions have in common. ``log_tolerance`` is the reversed test, of 1 against a largest
tolerable risk. Conditioning on the bad events is the construction of Lindon and Malek ("Anytime-Valid Inference for
Multinomial Count Data", 2022), the grid replaces their Dirichlet mixture.

A guard without a stable version to compare with has a largest *fraction* of bad units. A unit that is bad with at
most that probability is a draw with that share, so ``log_excess`` is the same test with the fraction as the share, bad
units as those of the new version and the other units as those of the stable one. ``log_rarity`` is its reversal.

The tests need counts alone. Counts are integers, so those of several gateways are added exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

RISKS: Final = (1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0)
"""The relative risks of the grid. Each has the same weight."""


class Count(NamedTuple):
    """Bad events of units that were assigned at one share."""

    stable: int = 0
    new: int = 0


Counts = Mapping[float, Count]
"""The bad events of one guard, by the new version's share of the units (0 to 1) when the unit was assigned. Events at a
share of 0 or 1 prove nothing, because there was no choice."""


def added(one: Counts, other: Counts) -> dict[float, Count]:
    """The bad events of both: of two gateways, or of two periods."""
    found = dict(one)
    for share, count in other.items():
        before = found.get(share, Count())
        found[share] = Count(before.stable + count.stable, before.new + count.new)
    return found


def log_evidence(counts: Counts) -> float:
    """The natural logarithm of the evidence that the new version is worse; 0.0 without bad events.

    The new version is to be withdrawn at ``log(1 / alpha)``. Raises ValueError for a share that is none.
    """
    return log_mean([log_likelihood_ratio(counts, risk) for risk in RISKS])


def log_tolerance(counts: Counts, max_risk: float) -> float:
    """The natural logarithm of the evidence that bad events of the new version are not ``max_risk`` times as likely, or
    more; 0.0 without bad events.

    The guard is passed at ``log(1 / beta)``: a version that is so bad ever passes with a probability of at most
    ``beta``. Raises ValueError for a risk that is not above 1.
    """
    if not max_risk > 1.0:
        raise ValueError(f"The largest tolerable risk must be above 1, not {max_risk}.")
    return -log_likelihood_ratio(counts, max_risk)


def log_excess(bad: int, units: int, max_fraction: float) -> float:
    """The natural logarithm of the evidence that more than ``max_fraction`` of the units are bad; 0.0 without units.
    Raises ValueError for a fraction that is none."""
    return log_evidence({_fraction(max_fraction): Count(max(0, units - bad), bad)})


def log_rarity(bad: int, units: int, max_fraction: float) -> float:
    """The natural logarithm of the evidence that fewer than ``max_fraction`` of the units are bad; 0.0 without units.
    Raises ValueError for a fraction that is none."""
    odds, counted = _fraction(max_fraction) / (1.0 - max_fraction), Count(max(0, units - bad), bad)
    return log_mean([log_tolerance({odds / (odds + risk): counted}, risk) for risk in RISKS])


def log_mean(logs: Sequence[float]) -> float:
    """The logarithm of the mean of numbers that are given by their logarithms. A mean of evidence is evidence."""
    largest = max(logs)
    return largest + math.log(math.fsum(math.exp(log - largest) for log in logs) / len(logs))


def _fraction(number: float) -> float:
    if not 0.0 < number < 1.0:
        raise ValueError(f"A largest fraction of bad units is between 0 and 1, not {number}.")
    return number


def log_likelihood_ratio(counts: Counts, risk: float) -> float:
    """The natural logarithm of L(risk), see above. Raises ValueError for a share that is none."""
    total = 0.0
    for share, count in counts.items():
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"A share of the units is between 0 and 1, not {share}.")
        if 0.0 < share < 1.0:
            total += count.new * math.log(risk) - (count.new + count.stable) * math.log1p(share * (risk - 1.0))
    return total
