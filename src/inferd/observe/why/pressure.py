"""How much the machine held the server up: processor time that others took, limits, and throttled devices.

The counters of the kernel are read at most once a second, and only while requests come and go. Each reading takes some
tenths of a millisecond. A source that the machine does not have counts as nothing.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from inferd.observe.devices.reading import Reading

EVERY_S: Final = 1.0
NUM_SAMPLES: Final = 3600
MOST_THREADS: Final = 64  # of a process
MUCH_THROTTLED: Final = 0.05
"""Share of the time from which on a device counts as throttled."""

_PROC: Final = Path("/proc")
_QUOTA: Final = "quota"
"""The reason of a limit of processor time, among those of devices."""

_BUSY: Final = (1, 2, 3, 6, 7)
_STEAL: Final = 8  # columns of /proc/stat's first line, behind the word "cpu"


class Strain(NamedTuple):
    """What held the server up between two times."""

    taken_share: float = 0.0
    """Of the time, while the thread that waited longest was ready to run and another program ran. A thread also waits
    for threads of the server: its waits are divided as the processors' time is."""
    steal_share: float = 0.0
    """Of the processors' time, what the hypervisor gave to other machines."""
    limited_share: float = 0.0
    """Of the time, while the limit of processor time of the control group stopped the server."""
    throttled: tuple[str, ...] = ()
    """Why devices ran slower, as their drivers say it: thermal, power."""


NO_STRAIN: Final = Strain()


class Pressure(Protocol):
    """The evidence of the machine for causes of slow requests."""

    due: float
    """The time of the monotonic clock from which on ``sample`` reads the counters again."""

    def sample(self, now: float) -> None:
        """Read the counters if the last reading is old enough. Called when a request comes or goes."""

    def between(self, begin: float, end: float) -> Strain:
        """What held the server up between two times of the monotonic clock."""
        ...


class NoPressure:
    """A machine of which nothing is known."""

    due = inf

    def sample(self, now: float) -> None:
        pass

    def between(self, begin: float, end: float) -> Strain:
        return NO_STRAIN


class _Sample(NamedTuple):
    """Sums since the first reading, in seconds; ``at`` is on the monotonic clock."""

    at: float
    waited: float
    own: float
    foreign: float
    steal: float
    throttled: Mapping[str, float]  # seconds at a reduced speed of the device that had most, by reason


class MachinePressure:
    """Reads Linux's counters. ``readings``: what the devices tell now."""

    def __init__(self, readings: Callable[[], Iterable[Reading]] = tuple, proc: Path = _PROC) -> None:
        self._readings = readings
        self._proc = proc
        self._samples: deque[_Sample] = deque(maxlen=NUM_SAMPLES)
        self.due = 0.0
        self._waits: dict[str, int] = {}  # nanoseconds, by thread
        self._waited_s = 0.0

    def sample(self, now: float) -> None:
        if now >= self.due:
            self.due = now + EVERY_S
            self._samples.append(self._read(now))

    def between(self, begin: float, end: float) -> Strain:
        """Counters are known at the times of the readings alone: those around the interval count. Without a reading in
        it, the one before counts."""
        samples = self._samples
        if len(samples) < 2:
            return NO_STRAIN
        low = max(bisect_right(samples, begin, key=_at) - 1, 0)
        high = min(bisect_left(samples, end, key=_at), len(samples) - 1)
        if high == low:
            low, high = (low - 1, high) if low else (low, high + 1)
        first, last = samples[low], samples[high]
        elapsed = last.at - first.at
        throttled = {
            reason: (seconds - first.throttled.get(reason, 0.0)) / elapsed for reason, seconds in last.throttled.items()
        }
        own, foreign = max(0.0, last.own - first.own), max(0.0, last.foreign - first.foreign)
        return Strain(
            (last.waited - first.waited) / elapsed * (foreign / (own + foreign) if foreign else 0.0),
            (last.steal - first.steal) / elapsed,
            throttled.pop(_QUOTA, 0.0),
            tuple(sorted(reason for reason, share in throttled.items() if share >= MUCH_THROTTLED)),
        )

    def _read(self, now: float) -> _Sample:
        processes = self._processes()
        waits = dict(self._run_queue_waits(processes))
        own_s, foreign_s, steal_s = self._processors_s(processes)
        # A thread that is new has waited since it began, which is not since the last reading.
        gained = [max(0, waited - self._waits[tid]) for tid, waited in waits.items() if tid in self._waits]
        self._waits = waits
        self._waited_s += max(gained, default=0) / 1e9
        throttled: dict[str, float] = {}
        for reading in self._readings():
            for reason, seconds in reading.throttled_s.items():
                throttled[reason] = max(throttled.get(reason, 0.0), seconds)
        return _Sample(now, self._waited_s, own_s, foreign_s, steal_s, throttled)

    def _processes(self) -> list[str]:
        """This process and its workers."""
        own = str(os.getpid())
        return [own, *_text(self._proc / own / "task" / own / "children").split()]

    def _run_queue_waits(self, processes: list[str]) -> Iterator[tuple[str, int]]:
        """Nanoseconds that the threads of processes were ready and did not run."""
        for pid in processes:
            tasks = self._proc / pid / "task"
            for tid in _names(tasks)[:MOST_THREADS]:
                fields = _text(tasks / tid / "schedstat").split()
                if len(fields) > 1 and fields[1].isdecimal():
                    yield tid, int(fields[1])

    def _processors_s(self, processes: list[str]) -> tuple[float, float, float]:
        """Seconds per core that these processes took, that others took, and that the hypervisor gave to other
        machines."""
        lines = _text(self._proc / "stat").splitlines()
        fields = lines[0].split() if lines else []
        num_cores = sum(line.startswith("cpu") for line in lines) - 1
        if len(fields) <= _STEAL or num_cores < 1:
            return 0.0, 0.0, 0.0
        busy = sum(int(fields[column]) for column in _BUSY)
        own = 0
        for pid in processes:
            # The name in parentheses may have blanks.
            stat = _text(self._proc / pid / "stat").rpartition(") ")[2].split()
            own += sum(int(field) for field in stat[11:13])  # user and system time
        ticks = os.sysconf("SC_CLK_TCK") * num_cores
        return own / ticks, (busy - own) / ticks, int(fields[_STEAL]) / ticks


def _at(sample: _Sample) -> float:
    return sample.at


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
