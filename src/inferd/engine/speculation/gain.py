"""Decides whether speculation pays: measures steps, acceptance and outcome. Pure: no tensor, no clock.

A step of B sequences gives B tokens in ``plain(B)`` seconds, so a token is worth plain(B) / B. A guessed token costs
one more row in the step, and its draft. It is worth its cost where

    (chance that it and all before it are right) * plain(B) / B  >  seconds of a row

So measured chances and seconds decide the length of a draft. It is long where rows are nearly free and chances are
good: a lone sequence's step reads the weights for eight rows as for one. It is empty where the batch is full.

That is a forecast; the outcome decides. ``gain`` compares the tokens of steps that might speculate with those that
plain steps would have given in the same time, overhead included. Where it falls below 1, speculation pauses.
"""

from __future__ import annotations

from bisect import bisect_right

_SIZES = (1, 2, 3, 4, 5, 7, 9, 12, 16, 21, 28, 37, 48, 63)  # batches from one to below the next share what is learned
_KEEP = 0.94  # of earlier steps, at each: about the last sixteen count
_ENOUGH = 2  # plain steps of a size before anything is compared with them
_FIRST = 12.0  # weight of steps before their gain is judged,
_MOST_LOST = 8.0  # if they have not cost the time of so many plain steps before; for one sequence,
_LEAST_LOST = 2.0  # and never less than this
_HICCUP = 3.0  # times what is usual: a step that took longer did so because of another program
_STRANGE = 1.5  # and where it is one of few that are known
_LEAST_GAIN = 0.985
_REPAID = 60  # plain steps for each whose time was lost by trying: so trials cost less than 2 %
_SHORTEST_PAUSE, _LONGEST_PAUSE = 32, 1024  # steps
_PLAIN_EVERY = 32  # where every step speculates, one of so many does not, to measure it;
_PLAIN_LEAST = 8  # of so many, where little is gained
_MARGIN = 1.25  # by which a token's worth must exceed what it costs: both are estimates
_LEAST_CHANCE = 0.1


class Acceptance:
    """How often guessed tokens of a kind were right: a decaying average."""

    __slots__ = ("_chance", "_weight")

    _FORGET = 1.0 / 128

    def __init__(self, expected: float) -> None:
        self._chance = expected
        self._weight = 4.0  # what the expectation counts as

    @property
    def chance(self) -> float:
        return self._chance

    def record(self, was_right: bool) -> None:
        self._weight += 1.0
        self._chance += (was_right - self._chance) * max(1.0 / self._weight, self._FORGET)


class Chances:
    """``Acceptance`` by a value known beforehand: a match's length, or a model's confidence."""

    __slots__ = ("_classes", "bounds")

    def __init__(self, bounds: tuple[float, ...], expected: tuple[float, ...]) -> None:
        """``expected``: for values below the first bound, from each bound to the next, and from the last."""
        assert len(expected) == len(bounds) + 1
        self.bounds = bounds
        self._classes = [Acceptance(value) for value in expected]

    @property
    def chances(self) -> tuple[float, ...]:
        """Of values below the first bound, from each bound to the next, and from the last."""
        return tuple(acceptance.chance for acceptance in self._classes)

    def __getitem__(self, value: float) -> Acceptance:
        return self._classes[bisect_right(self.bounds, value)]


class BatchCost:
    """Measurements of steps with about the same number of decodes.

    A step's time lies between constant (reading weights) and proportional to its size (computing), so within a class it
    is taken to grow with the square root.
    """

    def __init__(self, least: int, *, is_random: bool = False) -> None:
        """``least``: the class's smallest batch. ``is_random``: whether some of its tokens are drawn at random."""
        self.least = least
        self.is_random = is_random
        self._plain_s = 0.0  # seconds of a step of that size without tentative tokens
        self.num_plain = 0
        self.off_for = 0  # steps for which nothing is tried
        self._rows_s = self._rows_rows = 0.0  # sums of rows * extra seconds, and rows ** 2: a slope
        self._good = self._spent = 0.0  # seconds that plain steps would have taken for the same tokens; seconds taken
        self._tries = 0.0
        self._lost_s = 0.0  # since the last pause
        self._since_plain = 0

    def plain_s(self, num_decodes: int) -> float:
        """Seconds of a step without tentative tokens."""
        return float(self._plain_s * (num_decodes / self.least) ** 0.5)

    def row_s(self, num_decodes: int) -> float:
        """Seconds of one more row.

        Before the first measurement: a small part of a token's worth in a small batch, most of it in a large one.
        """
        if self._rows_rows:
            return max(self._rows_s / self._rows_rows, 0.0)
        return 0.9 * self.plain_s(num_decodes) / (num_decodes + 8)

    @property
    def gain(self) -> float:
        """Tokens per second of steps that might speculate, relative to plain steps."""
        return self._good / self._spent if self._spent else 1.0

    @property
    def is_gaining(self) -> bool:
        """Whether steps that might speculate have brought a gain since the last pause."""
        return self._tries >= 2.0 and self.gain > 1.0

    def may_try(self) -> bool:
        """Whether this step may speculate. Call it once for each step."""
        if self.num_plain < _ENOUGH:
            return False
        if self.off_for:
            self.off_for -= 1
            return False
        self._since_plain += 1
        # A plain step costs what would have been gained in it: a hundredth of that, as long as it lasts.
        every = 100.0 * (1.0 - 1.0 / max(self.gain, 1.0))
        return self._since_plain <= min(max(every, _PLAIN_LEAST), _PLAIN_EVERY)

    def record_plain(self, num_decodes: int, seconds: float) -> None:
        seconds *= (self.least / num_decodes) ** 0.5
        share = 1.0 / min(self.num_plain + 1, 8)
        if self.num_plain >= _ENOUGH:  # a hiccup of the machine counts for little
            share = max(share, 0.5 * self._since_plain / _PLAIN_EVERY)  # the rarer they are, the older what is known
            seconds = min(max(seconds, 0.5 * self._plain_s), (_HICCUP if share < 0.25 else _STRANGE) * self._plain_s)
        self.num_plain += 1
        self._since_plain = 0
        self._plain_s += (seconds - self._plain_s) * share

    def record_rows(self, num_decodes: int, num_rows: int, seconds: float) -> None:
        """A step with so many guessed rows took ``seconds``, without drafting."""
        plain_s = self.plain_s(num_decodes)
        self._rows_s = self._rows_s * _KEEP + num_rows * (min(seconds, _HICCUP * plain_s) - plain_s)
        self._rows_rows = self._rows_rows * _KEEP + num_rows * num_rows

    def record_try(self, num_decodes: int, num_tokens: int, seconds: float) -> bool:
        """A step that might speculate gave so many tokens in ``seconds`` in all. Returns whether a pause begins."""
        step_s = self.plain_s(num_decodes)
        plain_s = step_s * num_tokens / num_decodes
        seconds = min(seconds, _HICCUP * max(plain_s, step_s))
        self._good = self._good * _KEEP + plain_s
        self._spent = self._spent * _KEEP + seconds
        self._tries = self._tries * _KEEP + 1.0
        self._lost_s += seconds - plain_s
        lost = self._lost_s / step_s
        # A step of many sequences gives as much evidence as many steps of one, and costs more where it is wasted.
        is_over = lost > max(_MOST_LOST / self.least**0.5, _LEAST_LOST) or (
            self._tries >= _FIRST / self.least**0.5 and self.gain < _LEAST_GAIN
        )
        if is_over:
            self.pause(int(min(max(lost * _REPAID, _SHORTEST_PAUSE), _LONGEST_PAUSE)))
        return is_over

    def pause(self, steps: int) -> None:
        """Do not speculate for so many steps, then judge anew."""
        self.off_for = max(self.off_for, steps)
        self._good = self._spent = self._tries = self._lost_s = 0.0


class Costs:
    """``BatchCost`` by number of decodes, and by whether some are drawn at random, which takes longer."""

    __slots__ = ("_costs",)

    def __init__(self) -> None:
        self._costs: dict[tuple[int, bool], BatchCost] = {}

    def at(self, num_decodes: int, *, is_random: bool) -> BatchCost:
        size = _SIZES[bisect_right(_SIZES, num_decodes) - 1]
        known = self._costs.get((size, is_random))
        if known is None:
            known = self._costs[size, is_random] = BatchCost(size, is_random=is_random)
        return known

    def pause_above(self, cost: BatchCost) -> None:
        """Pause larger batches too, unless they were found to gain.

        What does not pay for some sequences does not pay for more: their rows cost more and bring less.
        """
        for size in _SIZES[_SIZES.index(cost.least) + 1 :]:
            larger = self.at(size, is_random=cost.is_random)
            if not larger.is_gaining:
                larger.pause(cost.off_for)


class StepForecast:
    """The expected tokens and seconds of a step, guesses included.

    One more token is worth its seconds where its chance exceeds the tokens that these seconds would give otherwise. Two
    rates count. One is that of plain steps, with a margin because both are estimates. The other is that of this step: a
    text that is guessed well now will be guessed well in the next step, where new guesses begin with better chances.
    """

    __slots__ = ("least", "least_per_s", "row_s", "seconds", "tokens")

    def __init__(self, num_decodes: int, plain_s: float, row_s: float, gain: float = 1.0) -> None:
        self.tokens = float(num_decodes)
        self.seconds = max(plain_s, 1e-9)  # a clock may stand still
        self.row_s = row_s
        self.least = _LEAST_CHANCE
        self.least_per_s = max(_MARGIN, gain) * num_decodes / self.seconds

    def min_chance(self, cost_s: float) -> float:
        """The chance that a token must have to be worth so many seconds."""
        return max(self.least, cost_s * max(self.least_per_s, self.tokens / self.seconds))

    def add(self, chance: float) -> None:
        """One more token is computed, right with this chance (and all before it)."""
        self.tokens += chance
        self.seconds += self.row_s
