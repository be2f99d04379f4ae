"""What is observed of one model: samples of its counts, as rates and means of windows. Pure: time is an argument.

A replica's speed is measured only between two samples with waiting requests: without them the rate of ends is that of
arrivals. The seconds that a request takes are measured only between two samples without waiting ones, and give a bound
of the speed before it is known. A gap between samples begins everything but these two anew.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from typing import Final, NamedTuple

from inferd.autoscale.decide import STALE_S, SURGE_S, Seen, Surge

LOOK_S: Final = 0.1
"""Seconds between two samples, in the mean."""

_GOLDEN: Final = (math.sqrt(5.0) - 1.0) / 2.0
LONG_S: Final = 120.0
STABLE_S: Final = 60.0
SHORT_S: Final = SURGE_S
RECENT_S: Final = (0.5, 1.0)
BURST_S: Final = (0.3, 0.4, 0.5, 0.7, 1.0, 2.0)
BURST_LEAST: Final = 8
"""Arrivals below which a moment says nothing of a rate."""

BURST_SURE: Final = 8.0
"""The negative logarithm of the chance, by the rate of the minute, below which arrivals are another rate."""

CLUMP_S: Final = 0.21
"""Seconds of the busiest moment of a surge, which is no part of its rate."""

AGAIN: Final = 5.0
"""A surge is taken to last so many times as long again as it has lasted, and less where arrivals come in clumps."""

CLUMP_PART: Final = 1.5
"""The rate of a surge is at most so many times that without its busiest moment."""

BIN_S: Final = 1.0
CLUMPED_S: Final = 120.0
"""Seconds after which arrivals count by a third in how clumped they come."""

SOUND_S: Final = 10.0
"""Seconds of samples below which there is no rate of the stable window."""

SOUND_ENDS: Final = 5
"""Ends while requests waited, below which the speed of a replica is not known."""

SPEED_S: Final = 30.0
"""Seconds of a replica's work, with requests waiting, that its speed is measured over; likewise of requests' work, with
none waiting, that their seconds are measured over."""


class Sample(NamedTuple):
    """The counts of one model at one time."""

    at: float
    accepted: int  # requests, since the beginning
    ended: int  # of them
    waiting: int
    in_flight: int
    busy: float  # replicas with a request, each as far as it is utilized
    ready: int


class _Point(NamedTuple):
    """A sample with the sums until then."""

    at: float
    sample: Sample
    load_s: float  # requests in work and waiting, times seconds
    busy_s: float  # replicas that work, as far as they are utilized, times seconds
    late: int  # arrivals that found more requests waiting than are served within the target


def pause_s(number: int) -> float:
    """The seconds between a sample and the next: three quarters to five quarters of ``LOOK_S``, evenly spread.

    Requests may be periodic. Samples of the same period would see each of them at the same point, all or none.
    """
    return LOOK_S * (0.75 + 0.5 * (number * _GOLDEN % 1.0))


class _Ends:
    """How much work there is to an end, over the last ``SPEED_S`` seconds of work. Slow work keeps a longer time, so that
    there are enough ends."""

    def __init__(self) -> None:
        self._noted: deque[tuple[float, int]] = deque()
        self.work_s = 0.0
        self.number = 0

    def note(self, work_s: float, number: int) -> None:
        self._noted.append((work_s, number))
        self.work_s += work_s
        self.number += number
        while self.work_s - self._noted[0][0] >= SPEED_S and self.number - self._noted[0][1] >= SOUND_ENDS:
            old_s, old = self._noted.popleft()
            self.work_s -= old_s
            self.number -= old

    @property
    def is_sound(self) -> bool:
        return self.number >= SOUND_ENDS and self.work_s > 0


class _Clumps:
    """How arrivals are spread over time: the variance of their counts in a second over the mean.

    It is 1 where they come by chance alone, and the size of clumps where these do. The variance is taken from the
    differences of neighbours, so that a slow change of the rate is none.
    """

    def __init__(self) -> None:
        self._begun: tuple[float, int] | None = None
        self._counts: deque[float] = deque()  # of the last seconds, which may be a surge: they come in later
        self._squares = self._mean = self._number = 0.0

    def note(self, at: float, accepted: int) -> None:
        if self._begun is None or accepted < self._begun[1]:
            self._begun = at, accepted
        span_s = at - self._begun[0]
        if span_s < BIN_S:
            return
        self._counts.append((accepted - self._begun[1]) * BIN_S / span_s)
        self._begun = at, accepted
        if len(self._counts) > SURGE_S / BIN_S + 1:
            before, after = self._counts.popleft(), self._counts[0]
            kept = math.exp(-BIN_S / CLUMPED_S)
            self._squares = kept * self._squares + (after - before) ** 2 / 2.0
            self._mean = kept * self._mean + after
            self._number = kept * self._number + 1.0

    def restart(self) -> None:
        self._begun = None
        self._counts.clear()

    @property
    def factor(self) -> float:
        """What it surely is, at least 1: less two standard deviations of the estimate for arrivals by chance."""
        if self._mean <= 0.0:
            return 1.0
        return max(1.0, self._squares / self._mean / (1.0 + 3.4 / math.sqrt(self._number)))


class Meter:
    """The samples of one model over two minutes. ``queue_s``: the target of the wait."""

    def __init__(self, queue_s: float = 0.2) -> None:
        self.queue_s = queue_s
        self._points: list[_Point] = []
        self._times: list[float] = []  # of the points
        self._same_since = 0.0  # of the number of ready replicas
        self._waiting_since: float | None = None
        self._clumps = _Clumps()
        self._together = 1.0  # requests that a replica works at while others wait
        self._crowded = _Ends()  # by replica-seconds with waiting requests
        self._uncrowded = _Ends()  # by request-seconds without waiting ones

    def add(self, sample: Sample) -> None:
        """Take the next sample."""
        load_s, busy_s, late = 0.0, 0.0, 0
        if not self._points or self._points[-1].sample.ready != sample.ready:
            self._same_since = sample.at
        if self._points:
            before = self._points[-1]
            last, span_s = before.sample, sample.at - before.at
            if span_s > STALE_S or sample.accepted < last.accepted:
                self._points.clear()
                self._times.clear()
                self._clumps.restart()
                self._same_since = sample.at
            else:
                load_s = before.load_s + span_s * (last.waiting + last.in_flight)
                busy_s = before.busy_s + span_s * last.busy
                served_per_s = self.served_per_s
                soon = math.inf if served_per_s is None else served_per_s * last.ready * self.queue_s
                late = before.late + (sample.accepted - last.accepted if last.waiting > soon else 0)
                if last.waiting and min(last.ready, sample.ready):  # until the end that lets the last one begin
                    self._together = max(1.0, last.in_flight / last.ready)
                    self._crowded.note(span_s * last.ready, sample.ended - last.ended)
                elif not last.waiting and not sample.waiting:
                    self._uncrowded.note(span_s * last.in_flight, sample.ended - last.ended)
        self._clumps.note(sample.at, sample.accepted)
        if not sample.waiting:
            self._waiting_since = None
        elif self._waiting_since is None or not self._points:
            self._waiting_since = sample.at
        self._points.append(_Point(sample.at, sample, load_s, busy_s, late))
        self._times.append(sample.at)
        old = bisect_right(self._times, sample.at - LONG_S) - 1
        if old > 64:  # some at a time
            del self._points[:old], self._times[:old]

    def forget_speed(self) -> None:
        """The model is another one now."""
        self._crowded, self._uncrowded = _Ends(), _Ends()

    @property
    def served_per_s(self) -> float | None:
        """Requests per second of one replica while others wait; None: too few were measured.

        Requests that began together end together, so fewer ends than half of what a replica works at say nothing.
        """
        is_sound = self._crowded.is_sound and self._crowded.number >= self._together / 2.0
        return self._crowded.number / self._crowded.work_s if is_sound else None

    @property
    def took_s(self) -> float | None:
        """Seconds that a request takes at least, by those that did not wait; None: too few were measured.

        Little's law. Those that are still in work count as ended, so the mean is not above that of whole requests.
        """
        if not self._uncrowded.is_sound:
            return None
        return self._uncrowded.work_s / (self._uncrowded.number + self._points[-1].sample.in_flight)

    def measured(self, seen: Seen) -> Seen:
        """An observation with the rates and means of the samples until now."""
        if not self._points:
            return seen
        last, stable = self._points[-1], self._since(STABLE_S)
        covered_s = last.at - stable.at
        is_sound = covered_s >= SOUND_S
        rate = (last.sample.accepted - stable.sample.accepted) / covered_s if is_sound else None
        load_now, busy_now = self._means(SHORT_S)
        long = self._since(LONG_S)
        load_long, busy_long = self._means(LONG_S)
        arrived = last.sample.accepted - long.sample.accepted
        is_long = last.at - max(self._points[0].at, self._same_since) >= LONG_S
        # The queue knows the waits in it, and not those in workers.
        waited_s = 0.0 if self._waiting_since is None else last.at - self._waiting_since
        return seen._replace(
            oldest_wait_s=max(seen.oldest_wait_s, waited_s),
            rate_per_s=rate,
            span_s=covered_s,
            surges=self._surges(rate),
            recent=self._recent(),
            served_per_s=self.served_per_s,
            together=self._together,
            took_s=self.took_s,
            late_part=(last.late - long.late) / arrived if is_long and arrived else None,
            load=self._means(STABLE_S)[0] if is_sound else None,
            load_now=load_now,
            busy_now=busy_now,
            rate_long=(last.sample.accepted - long.sample.accepted) / LONG_S if is_long else None,
            load_long=load_long if is_long else None,
            busy_long=busy_long if is_long else None,
        )

    def _since(self, seconds: float) -> _Point:
        """The last point that is as old, or the first one."""
        index = bisect_right(self._times, self._times[-1] - seconds) - 1
        return self._points[max(0, index)]

    def _surges(self, rate_per_s: float | None) -> tuple[Surge, ...]:
        """The moments whose arrivals the rate of the minute cannot have had by chance, and the last seconds, less two
        standard deviations.

        Chernoff's bound of a Poisson tail: n arrivals or more, where m are expected, have at most the chance
        exp(-(n log(n / m) - n + m)). It falls with n, so more arrivals never make a lower rate. Clumps of f requests
        are n / f arrivals of their own.
        """
        clumps, found = self._clumps.factor, list(self._lower(SHORT_S, 2.0))
        if rate_per_s is None:
            return tuple(found)
        for seconds in BURST_S:
            moment = self._moment(seconds)
            count, expected = moment.arrivals, max(rate_per_s, 1.0 / STABLE_S) * moment.seconds
            if count >= BURST_LEAST * clumps and count > expected:
                sure = (count * math.log(count / expected) - count + expected) / clumps
                if sure >= BURST_SURE:
                    found.append(moment)
        return tuple(found)

    def _recent(self) -> tuple[Surge, ...]:
        return tuple([one for seconds in RECENT_S for one in self._lower(seconds, 1.0)])

    def _lower(self, seconds: float, deviations: float) -> tuple[Surge, ...]:
        """The last seconds, less so many standard deviations of a Poisson count of clumps. It grows with the count."""
        moment = self._moment(seconds)
        counted = moment.rest_per_s * moment.seconds
        part = max(0.0, 1.0 - deviations * math.sqrt(self._clumps.factor / counted)) if counted else 0.0
        return (moment._replace(rest_per_s=part * moment.rest_per_s, per_s=part * moment.per_s),) if part else ()

    def _moment(self, seconds: float) -> Surge:
        """The arrivals of the last seconds, also without the busiest ``CLUMP_S``."""
        last = self._points[-1]
        begin = max(0, bisect_right(self._times, last.at - seconds) - 1)
        points = self._points[begin:]
        count, span_s = last.sample.accepted - points[0].sample.accepted, max(last.at - points[0].at, seconds)
        first, older = points[0], iter(points)
        most, most_s = 0, 0.0
        for point in points:
            while point.at - first.at > CLUMP_S:
                first = next(older)
            many, many_s = point.sample.accepted - first.sample.accepted, point.at - first.at
            if many >= most:
                most, most_s = many, many_s
        rest_per_s = (count - most) / max(span_s - most_s, LOOK_S / 2.0)
        lasts_s = AGAIN * span_s / self._clumps.factor
        return Surge(span_s, count, rest_per_s, min(count / span_s, CLUMP_PART * rest_per_s), lasts_s)

    def _means(self, seconds: float) -> tuple[float, float]:
        """The mean requests, in work and waiting, and the mean replicas that work, by time."""
        last, first = self._points[-1], self._since(seconds)
        if last.at <= first.at:
            return float(last.sample.waiting + last.sample.in_flight), float(last.sample.busy)
        span_s = last.at - first.at
        return (last.load_s - first.load_s) / span_s, (last.busy_s - first.busy_s) / span_s
