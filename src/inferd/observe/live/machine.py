"""The machine's processor time and memory, and the figures of its devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from inferd.machine.memory import available_bytes, limit_bytes
from inferd.observe.devices.reading import Reading
from inferd.observe.live.series import OF_MACHINE, Kept, Series

MAX_DEVICE_SERIES: Final = 96
"""A machine with more sensors shows the first of them."""

_FIGURES: Final = {
    "device_duty": Kept("Duty cycle", "ratio", "gauge"),
    "device_memory": Kept("Memory in use", "bytes", "gauge"),
    "device_temperature": Kept("Temperature", "celsius", "gauge"),
    "device_power": Kept("Power", "watts", "gauge"),
}


def no_devices() -> Sequence[Reading]:
    """The readings of a machine that tells nothing of its devices."""
    return ()


class MachineReader:
    """Reads the machine's numbers. The share of processor time in use is that since the reading before.

    A device has a series for each figure that it ever told: ``device_power:gpu0``.
    """

    def __init__(self, devices: Callable[[], Sequence[Reading]] = no_devices, proc: Path = Path("/proc")) -> None:
        self.series = [Series(id_, "", *kept) for id_, kept in OF_MACHINE.items()]
        """All series. It grows when a device tells a figure for the first time."""
        self._devices = devices
        self._known: set[str] = set()
        self._stat = proc / "stat"
        self._before: tuple[int, int] | None = None

    def read(self) -> dict[str, float | None]:
        """The value of every series, by its id."""
        limit = limit_bytes()
        values: dict[str, float | None] = {
            "cpu": self._busy(),
            "memory_used": float(max(limit - available_bytes(), 0)),
            "memory_limit": float(limit),
        }
        for reading in self._devices():
            for figure, value in _figures(reading):
                values[f"{figure}:{reading.device}"] = value
                self._know(figure, reading)
        return values

    def _know(self, figure: str, reading: Reading) -> None:
        id_ = f"{figure}:{reading.device}"
        if id_ not in self._known and len(self._known) < MAX_DEVICE_SERIES:
            self._known.add(id_)
            title, unit, kind = _FIGURES[figure]
            self.series.append(Series(id_, "", f"{title} of {reading.name or reading.device}", unit, kind))

    def _busy(self) -> float | None:
        try:
            with open(self._stat, "rb") as file:
                times = [int(word) for word in file.readline().split()[1:9]]  # without guests, which count as users
        except (OSError, ValueError):
            return None
        idle = sum(times[3:5])  # idle, and waiting for a disk
        whole = sum(times)
        before, self._before = self._before, (whole, idle)
        if before is None or whole <= before[0]:
            return None
        return 1 - (idle - before[1]) / (whole - before[0])


def _figures(reading: Reading) -> Iterator[tuple[str, float]]:
    """What a device tells; what it does not tell has no figure."""
    figures = (reading.duty, reading.memory_used_bytes, reading.temperature_c, reading.power_w)
    for figure, value in zip(_FIGURES, figures, strict=True):
        if value is not None:
            yield figure, float(value)
