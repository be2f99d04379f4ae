"""The rules by which others scale, restated from their formulas and defaults, for ``bench.autoscale``.

Each is a controller of ``inferd.autoscale.simulate``: it gets the same counts and gives a number of replicas. Their
metrics are given to them as they would have them: averaged, scraped and late as by default, and without loss. All get
the same target: so many requests of a replica as it works at together, times ``TARGET``, as Knative has by default.

- Knative's pod autoscaler: knative/serving, pkg/autoscaler/scaling/autoscaler.go and the defaults of config-autoscaler.
- Horizontal pod autoscaler v2 on CPU: its documented algorithm and default behaviour.
- KEDA: a Prometheus trigger on the requests, which the horizontal pod autoscaler follows from 1 on.
- Ray Serve: ray/serve/autoscaling_policy.py and the defaults of its AutoscalingConfig.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from inferd.autoscale.simulate import View

TARGET: Final = 0.7


def _ceil(value: float) -> int:
    return math.ceil(value - 1e-9)


def _bounded(value: float, most: int) -> int:
    return max(1, min(most, _ceil(value)))


class _Window:
    """The mean of a value over the last seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._samples: deque[tuple[float, float]] = deque()

    def add(self, now: float, value: float) -> float:
        self._samples.append((now, value))
        while self._samples[0][0] <= now - self._seconds:
            self._samples.popleft()
        return sum(one for _, one in self._samples) / len(self._samples)


class Knative:
    """Every 2 s: the concurrency over 60 s, and over 6 s in panic, which lasts until 60 s after its cause."""

    def __init__(self) -> None:
        self._stable, self._panic = _Window(60.0), _Window(6.0)
        self._next_at = 0.0
        self._desired = 0
        self._panic_at: float | None = None
        self._most_in_panic = 0

    def __call__(self, view: View) -> tuple[int, str]:
        load = float(view.waiting + view.in_flight)
        stable, panic = self._stable.add(view.now, load), self._panic.add(view.now, load)
        if view.now < self._next_at:
            return self._desired, "between ticks"
        self._next_at = view.now + 2.0
        ready, target = max(1, view.ready), TARGET * view.slots
        low, high = ready // 2, 1000 * ready
        wanted = min(max(_ceil(stable / target), low), high)
        in_panic = min(max(_ceil(panic / target), low), high)
        if _ceil(panic / target) / ready >= 2.0:
            self._panic_at = view.now
        elif self._panic_at is not None and view.now - self._panic_at > 60.0:
            self._panic_at, self._most_in_panic = None, 0
        if self._panic_at is not None:
            self._most_in_panic = max(self._most_in_panic, wanted, in_panic)
            wanted = self._most_in_panic
        self._desired = _bounded(wanted, view.limit)
        return self._desired, "panic" if self._panic_at is not None else "stable"


class _Hpa:
    """Every 15 s: at most twice as many or 4 more, within 10 % nothing, and down by the most of 300 s."""

    def __init__(self) -> None:
        self._next_at = 15.0
        self._desired = 0
        self._wanted: deque[tuple[float, int]] = deque()

    def _sync(self, view: View, ratio: float, count: int) -> int:
        """``ratio``: the metric over its target, ``count``: what it needs."""
        current = view.ready + view.starting
        if abs(ratio - 1.0) <= 0.1:
            count = current
        count = min(count, max(2 * current, current + 4))
        self._wanted.append((view.now, count))
        while self._wanted[0][0] <= view.now - 300.0:
            self._wanted.popleft()
        if count < current:
            count = min(current, max(one for _, one in self._wanted))
        return _bounded(count, view.limit)


class HpaOnCpu(_Hpa):
    """The part of the time that replicas work, over the 15 s of the metrics server; a target of 70 %."""

    def __init__(self) -> None:
        super().__init__()
        self._cpu = _Window(15.0)

    def __call__(self, view: View) -> tuple[int, str]:
        busy = self._cpu.add(view.now, float(view.busy))
        if view.now >= self._next_at:
            self._next_at = view.now + 15.0
            current = max(1, view.ready + view.starting)
            use = busy / current  # a replica that starts uses nothing yet
            self._desired = self._sync(view, use / TARGET, _ceil(current * use / TARGET))
        return self._desired or view.ready + view.starting, "cpu"


class Keda(_Hpa):
    """The number of requests, as Prometheus scraped it at most 15 s before."""

    def __init__(self) -> None:
        super().__init__()
        self._scraped_at = -15.0
        self._load = 0.0

    def __call__(self, view: View) -> tuple[int, str]:
        if view.now >= self._scraped_at + 15.0:
            self._scraped_at, self._load = view.now, float(view.waiting + view.in_flight)
        if view.now >= self._next_at + 7.5:  # the two periods are not in step
            self._next_at = view.now + 7.5
            current = max(1, view.ready + view.starting)
            target = TARGET * view.slots
            self._desired = self._sync(view, self._load / (target * current), _ceil(self._load / target))
        return self._desired or view.ready + view.starting, "requests"


class RayServe:
    """The requests over 30 s; another number after it was wanted for 30 s upwards, or 600 s downwards."""

    def __init__(self) -> None:
        self._load = _Window(30.0)
        self._since: tuple[int, float] | None = None  # direction, and since when it is wanted
        self._desired = 0

    def __call__(self, view: View) -> tuple[int, str]:
        current = view.ready + view.starting
        self._desired = self._desired or current
        wanted = _bounded(self._load.add(view.now, float(view.waiting + view.in_flight)) / (TARGET * view.slots), 10**6)
        direction = (wanted > self._desired) - (wanted < self._desired)
        if not direction:
            self._since = None
        elif self._since is None or self._since[0] != direction:
            self._since = direction, view.now
        elif view.now - self._since[1] >= (30.0 if direction > 0 else 600.0):
            self._desired, self._since = _bounded(wanted, view.limit), None
        return self._desired, "requests"
