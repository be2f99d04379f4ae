"""A source that is read in a thread of its own, regularly, with a bound on the time that a reading may take.

A driver that hangs keeps its thread and nothing else: its last readings become too old and are shown no more, and its
failures grow.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from inferd.observe.devices.reading import Reading, Source

LIMIT_S: Final = 2.0
"""The time after which a reading counts as failed."""

Find = Callable[[], Source | None]

_log = logging.getLogger("inferd.devices")


class Feed:
    """The readings of one source. ``find`` is called in the thread as well: it may load a library."""

    def __init__(
        self,
        name: str,
        find: Find,
        *,
        interval_s: float,
        now: Callable[[], float],
        on_reading: Callable[[Reading], None],
        limit_s: float = LIMIT_S,
    ) -> None:
        self.name = name
        self.is_absent = False  # there is no such source here
        self._find = find
        self._interval_s = interval_s
        self._limit_s = limit_s
        self._now = now
        self._on_reading = on_reading
        self._began: float | None = None  # the present reading
        self._done: tuple[float, Sequence[Reading]] = (0.0, ())
        self._failures = 0
        self._before: dict[str, Reading] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"devices-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end."""
        self._stopping.set()

    def join(self, limit_s: float) -> None:
        """Wait for the end of a thread that was asked to end; one in a driver that hangs ends with the process."""
        if self._thread.is_alive():
            self._thread.join(limit_s)

    def current(self) -> Sequence[Reading]:
        """The readings of the last time, unless they are too old."""
        at, readings = self._done
        return readings if self._now() - at <= 2 * self._interval_s + self._limit_s else ()

    @property
    def failures(self) -> int:
        """Readings that failed, and once for each limit of time that one has taken."""
        began = self._began
        return self._failures + (0 if began is None else int((self._now() - began) / self._limit_s))

    def _run(self) -> None:
        source: Source | None = None
        has_failed = False
        while not self._stopping.is_set():
            began = self._began = self._now()
            failed = 0
            try:
                source = source or self._find()
                if source is None:
                    self.is_absent, self._began = True, None
                    return
                readings = [self._completed(reading) for reading in source.read(began)]
                for reading in readings:
                    self._on_reading(reading)
                self._done = (self._now(), readings)
            except Exception as error:  # whatever a driver or a file does, the next reading may succeed
                failed = 1
                if not has_failed:
                    _log.warning("devices cannot be read from %s: %s", self.name, error)
            has_failed = failed == 1
            taken = int((self._now() - began) / self._limit_s)
            self._began = None
            self._failures += max(failed, taken)
            self._stopping.wait(self._interval_s)

    def _completed(self, reading: Reading) -> Reading:
        """The power from the energy, or the energy from the power, where a device tells only one of them."""
        before = self._before.get(reading.device)
        if reading.energy_j is None and reading.power_w is not None:
            energy_j = 0.0
            if before is not None and before.energy_j is not None and before.power_w is not None:
                mean_w = (before.power_w + reading.power_w) / 2
                energy_j = before.energy_j + mean_w * (reading.at - before.at)
            reading = replace(reading, energy_j=energy_j)
        elif reading.power_w is None and reading.energy_j is not None and before is not None:
            passed = reading.at - before.at
            if before.energy_j is not None and passed > 0 and reading.energy_j >= before.energy_j:
                reading = replace(reading, power_w=(reading.energy_j - before.energy_j) / passed)
        self._before[reading.device] = reading
        return reading
