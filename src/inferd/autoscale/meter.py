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

from inferd.autoscale.decide import STALE_S, Seen

LOOK_S: Final = 0.1
"""Seconds between two samples, in the mean."""

_GOLDEN: Final = (math.sqrt(5.0) - 1.0) / 2.0
LONG_S: Final = 120.0
STABLE_S: Final = 60.0
SHORT_S: Final = 3.0
RECENT_S: Final = (0.5, 1.0)
BURST_S: Final = (0.2, 0.3, 0.5, 0.7, 1.0)
BURST_LEAST: Final = 8
"""Arrivals below which a moment says nothing of a rate."""

BURST_SURE: Final = 8.0
"""The negative logarithm of the chance, by the rate of the minute, below which arrivals are another rate."""

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
        self.together = 0
        """Requests in work. Those that began together end together: before the first of them ends, a long time passes
        without an end, so fewer ends than these are no speed. Twice as many are kept, so that one such time lies
        between them."""
        self.work_s = 0.0
        self.number = 0
        self.is_sound = False

    def note(self, work_s: float, number: int) -> None:
        self._noted.append((work_s, number))
        self.work_s += work_s
        self.number += number
        kept = max(SOUND_ENDS, 2 * self.together)
        while self.work_s - self._noted[0][0] >= SPEED_S and self.number - self._noted[0][1] >= kept:
            old_s, old = self._noted.popleft()
            self.work_s -= old_s
            self.number -= old
        if self.number >= max(SOUND_ENDS, self.together) and self.work_s > 0:
            self.is_sound = True  # also where more requests are in work from now on


class Meter:
    """The samples of one model over two minutes."""

    def __init__(self) -> None:
        self._points: list[_Point] = []
        self._times: list[float] = []  # of the points
        self._same_since = 0.0  # of the number of ready replicas
        self._waiting_since: float | None = None
        self._crowded = _Ends()  # by replica-seconds with waiting requests
        self._uncrowded = _Ends()  # by request-seconds without waiting ones

    def add(self, sample: Sample) -> None:
        """Take the next sample."""
        load_s = busy_s = 0.0
        if not self._points or self._points[-1].sample.ready != sample.ready:
            self._same_since = sample.at
        if self._points:
            before = self._points[-1]
            last, span_s = before.sample, sample.at - before.at
            if span_s > STALE_S or sample.accepted < last.accepted:
                self._points.clear()
                self._times.clear()
                self._same_since = sample.at
            else:
                load_s = before.load_s + span_s * (last.waiting + last.in_flight)
                busy_s = before.busy_s + span_s * last.busy
                if last.waiting and sample.waiting and min(last.ready, sample.ready):
                    self._crowded.together = last.in_flight
                    self._crowded.note(span_s * last.ready, sample.ended - last.ended)
                elif not last.waiting and not sample.waiting:
                    self._uncrowded.note(span_s * last.in_flight, sample.ended - last.ended)
        if not sample.waiting:
            self._waiting_since = None
        elif self._waiting_since is None or not self._points:
            self._waiting_since = sample.at
        self._points.append(_Point(sample.at, sample, load_s, busy_s))
        self._times.append(sample.at)
        old = bisect_right(self._times, sample.at - LONG_S) - 1
        if old > 64:  # some at a time
            del self._points[:old], self._times[:old]

    def forget_speed(self) -> None:
        """The model is another one now."""
        self._crowded, self._uncrowded = _Ends(), _Ends()

    @property
    def served_per_s(self) -> float | None:
        """Requests per second of one replica while others wait; None: too few were measured."""
        return self._crowded.number / self._crowded.work_s if self._crowded.is_sound else None

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
        burst = 0.0 if rate is None else self._burst(rate)
        surge = max(self._lower_rate(SHORT_S, 2.0), burst)
        rise = 0.0
        if rate is not None and surge > rate:
            # The rate over a minute is that of its middle.
            rise = (surge - rate) / max((covered_s - SHORT_S) / 2.0, 1.0)
        load_now, busy_now = self._means(SHORT_S)
        long = self._since(LONG_S)
        load_long, busy_long = self._means(LONG_S)
        is_long = last.at - max(self._points[0].at, self._same_since) >= LONG_S
        # The queue knows the waits in it, and not those in workers.
        waited_s = 0.0 if self._waiting_since is None else last.at - self._waiting_since
        return seen._replace(
            oldest_wait_s=max(seen.oldest_wait_s, waited_s),
            rate_per_s=rate,
            surge_per_s=surge,
            recent_per_s=max(burst, *(self._lower_rate(seconds, 1.0) for seconds in RECENT_S)),
            rise_per_s2=rise,
            served_per_s=self.served_per_s,
            took_s=self.took_s,
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

    def _lower_rate(self, seconds: float, deviations: float) -> float:
        """Arrivals per second of the last seconds, less so many standard deviations of a Poisson count. It grows with
        the count."""
        last, first = self._points[-1], self._since(seconds)
        count = last.sample.accepted - first.sample.accepted
        return max(0.0, count - deviations * math.sqrt(count)) / max(last.at - first.at, seconds)

    def _burst(self, rate_per_s: float) -> float:
        """Arrivals per second of a moment that the rate of the minute cannot have had by chance; 0: there is none.

        Chernoff's bound of a Poisson tail: n arrivals or more, where m are expected, have at most the chance
        exp(-(n log(n / m) - n + m)). It falls with n, so more arrivals never make a lower rate.
        """
        last, found = self._points[-1], 0.0
        for seconds in BURST_S:
            first = self._since(seconds)
            count = last.sample.accepted - first.sample.accepted
            span_s = max(last.at - first.at, seconds)
            expected = max(rate_per_s, 1.0 / STABLE_S) * span_s
            if count >= BURST_LEAST and count > expected:
                sure = count * math.log(count / expected) - count + expected
                if sure >= BURST_SURE:
                    found = max(found, count / span_s)
        return found

    def _means(self, seconds: float) -> tuple[float, float]:
        """The mean requests, in work and waiting, and the mean replicas that work, by time."""
        last, first = self._points[-1], self._since(seconds)
        if last.at <= first.at:
            return float(last.sample.waiting + last.sample.in_flight), float(last.sample.busy)
        span_s = last.at - first.at
        return (last.load_s - first.load_s) / span_s, (last.busy_s - first.busy_s) / span_s
