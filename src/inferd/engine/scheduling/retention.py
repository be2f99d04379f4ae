"""The worth of a cached prefix, learned from the traffic. Knows keys, counts and ages; no blocks, tokens or clocks.

How soon an idle block is used again depends on how many requests have used it, and on how long ago the last one did.
Users take time to read an answer, so the chance of reuse first rises with age and then falls; blocks that were used
often are used more. Both are measured here, and give a block's

    worth = maximum over all ages at which it could be evicted, of (chance of reuse until then) / (time kept until then)

This is the reuse per unit of time if the block is kept and evicted at the best moment (the index of Gittins, 1979; for
caches "hit density": Beckmann, Chen, Cidon, LHD, 2018). The block with the least worth is evicted first. So a small
cache evicts most new prefixes at once and keeps a few for as long as their clients need; keeping all of them for too
short a time would give no reuse. A large cache keeps everything until it is old, which is LRU.

The statistics do not depend on what the cache keeps. A sample of about ``SAMPLED`` keys, those with the smallest first
bytes (Waldspurger et al., SHARDS, 2015; keys are hashes), is followed for ``HORIZON`` times the cache's size, cached or
not. Before there are statistics, reuse is taken to be equally likely in every doubling of age, and likelier the more
requests there were: LRU, where reused blocks stay longer.

Time is counted in released blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MOST_USES = 4  # uses of a block that are distinguished; more count as this number
HORIZON = 16  # times the cache's size: the age up to which reuse is observed
REMEMBERED = 4  # times the cache's size: evicted keys whose uses are remembered
SAMPLED = 2048  # keys
_YOUNGEST = 16  # the first class of ages is the cache's size divided by this; each other one doubles the age
_FITS = 8  # per turnover of the cache
_FORGET = 1.0 - 1.0 / 64  # of what was observed, per fit
_PRIOR_CHANCE = 0.05  # of reuse within one class of ages, times uses
_NUM_AGES = (HORIZON * _YOUNGEST).bit_length()

Histogram = list[list[float]]  # [uses - 1][class of age]


class Retention:
    """The worth of a block by uses and age, and the number of uses of evicted keys.

    Every call is O(1) per key, except a fit, which is O(SAMPLED) at most once in SAMPLED / 2 releases.
    """

    __slots__ = ("_followed", "_left", "_limit", "_next_fit", "_reused", "_size", "_unit", "_uses_of", "_worth", "now")

    def __init__(self, num_blocks: int) -> None:
        self.now = 0  # blocks released so far
        self._size = num_blocks
        self._unit = max(num_blocks // _YOUNGEST, 1)
        self._limit = SAMPLED * 2**32 // (HORIZON * num_blocks)  # of the first 32 bits of a key
        self._followed: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # sampled key -> (uses, when released)
        self._uses_of: OrderedDict[bytes, int] = OrderedDict()  # evicted key -> uses
        self._reused: Histogram = [[0.0] * _NUM_AGES for _ in range(MOST_USES)]
        self._left: Histogram = [[0.0] * _NUM_AGES for _ in range(MOST_USES)]  # not asked for again up to that age
        self._worth: Histogram = worth_by_age(self._reused, self._left)
        self._next_fit = max(num_blocks // _FITS, SAMPLED // 2)

    def asked(self, key: bytes) -> None:
        """A request uses ``key``, whether it is cached or not."""
        if int.from_bytes(key[:4]) < self._limit:
            was = self._followed.pop(key, None)
            if was is not None:
                uses, at = was
                self._reused[uses - 1][self._age_class(at)] += 1.0

    def released(self, keys: Sequence[tuple[bytes, int]]) -> int:
        """These blocks, (key, uses) each, have become idle; returns the time of that."""
        self.now += len(keys)
        for key, uses in keys:
            if int.from_bytes(key[:4]) < self._limit:
                self._followed.pop(key, None)
                self._followed[key] = (uses, self.now)
        if self.now >= self._next_fit:
            self._fit()
        return self.now

    def evicted(self, key: bytes, uses: int) -> None:
        """Remember for a while how often the block was used."""
        self._uses_of[key] = uses
        if len(self._uses_of) > REMEMBERED * self._size:
            self._uses_of.popitem(last=False)

    def computed(self, key: bytes) -> int:
        """Uses of a block that was just computed: one, and those before it was evicted."""
        self.asked(key)
        return min(self._uses_of.pop(key, 0) + 1, MOST_USES)

    def worth(self, uses: int, at: int) -> float:
        """Of a block idle since ``at``."""
        return self._worth[uses - 1][self._age_class(at)]

    def _age_class(self, at: int) -> int:
        return min(((self.now - at) // self._unit).bit_length(), _NUM_AGES - 1)

    def _fit(self) -> None:
        while self._followed:
            key, (uses, at) = next(iter(self._followed.items()))
            if self.now - at < HORIZON * self._size:
                break
            del self._followed[key]
            self._left[uses - 1][-1] += 1.0
        waiting = [list(row) for row in self._left]
        for uses, at in self._followed.values():
            waiting[uses - 1][self._age_class(at)] += 1.0
        self._worth = worth_by_age(self._reused, waiting)
        for rows in (self._reused, self._left):
            for row in rows:
                row[:] = [number * _FORGET for number in row]
        self._next_fit = self.now + max(self._size // _FITS, SAMPLED // 2)


def worth_by_age(reused: Histogram, left: Histogram) -> Histogram:
    """The worth at each class of ages, from the numbers that were reused at an age, and those not reused up to it.

    The first class of ages is one unit of time long, each other one as long as all before it; changes count in the
    middle of a class. For reused blocks the worth never rises with age and never falls with uses. So no block is worth
    less than one behind it in a prefix, which was never used later or more often.
    """
    found: Histogram = []
    for uses, (hits, others) in enumerate(zip(reused, left, strict=True), 1):
        widths = [1.0, *(float(1 << i) for i in range(_NUM_AGES - 1))]
        chances, times = list(hits), [0.0] * _NUM_AGES
        staying = 0.0
        for age in reversed(range(_NUM_AGES)):
            here = hits[age] + others[age]
            times[age] = (staying + here / 2) * widths[age]
            staying += here
        imagined = 1.0  # one imaginary block, before there are observations
        for age in range(_NUM_AGES):
            reuse = imagined * min(_PRIOR_CHANCE * uses, 1.0)
            chances[age] += reuse
            times[age] += (imagined - reuse / 2) * widths[age]
            imagined -= reuse
        row = [_best_ratio(chances[age:], times[age:]) for age in range(_NUM_AGES)]
        if found:
            for age in reversed(range(_NUM_AGES)):
                row[age] = max(row[age], found[-1][age], *row[age + 1 : age + 2])
        found.append(row)
    return found


def _best_ratio(chances: Sequence[float], times: Sequence[float]) -> float:
    best = chance = time = 0.0
    for more, longer in zip(chances, times, strict=True):
        chance, time = chance + more, time + longer
        best = max(best, chance / time)
    return best
