"""Temperatures and power of the machine's sensors, from /sys/class/hwmon and /sys/class/thermal (Linux).

https://docs.kernel.org/hwmon/sysfs-interface.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from inferd.observe.devices.reading import Reading

HWMON: Final = Path("/sys/class/hwmon")
THERMAL: Final = Path("/sys/class/thermal")
_INPUT: Final = re.compile(r"(temp|power|energy)(\d+)_(input|average)")


class _Sensor(NamedTuple):
    device: str
    quantity: str  # temp in millidegrees, power in microwatts, energy in microjoules
    file: Path


class Sensors:
    """The sensors that were found. One that cannot be read now has no reading."""

    def __init__(self, sensors: list[_Sensor]) -> None:
        self._sensors = sensors

    def read(self, now: float) -> list[Reading]:
        found = []
        for sensor in self._sensors:
            try:
                value = int(sensor.file.read_text())
            except (OSError, ValueError):  # such as of a disk that sleeps
                continue
            found.append(
                Reading(
                    device=sensor.device,
                    kind="sensor",
                    at=now,
                    temperature_c=value / 1e3 if sensor.quantity == "temp" else None,
                    power_w=value / 1e6 if sensor.quantity == "power" else None,
                    energy_j=value / 1e6 if sensor.quantity == "energy" else None,
                )
            )
        return found


def find_sensors(hwmon: Path = HWMON, thermal: Path = THERMAL) -> Sensors | None:
    """None where the system shows no sensor."""
    unique: dict[str, _Sensor] = {}
    for sensor in (*_of_chips(hwmon), *_of_zones(thermal)):
        name, number = sensor.device, 2
        while name in unique:
            name, number = f"{sensor.device} #{number}", number + 1
        unique[name] = sensor._replace(device=name)
    return Sensors(list(unique.values())) if unique else None


def _of_chips(root: Path) -> Iterator[_Sensor]:
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        chip = _text(folder / "name") or folder.name
        seen: set[str] = set()
        for file in sorted(folder.iterdir(), reverse=True):  # "input" before "average"
            match = _INPUT.fullmatch(file.name)
            if match is None or match[1] + match[2] in seen:
                continue
            seen.add(match[1] + match[2])
            label = _text(folder / f"{match[1]}{match[2]}_label") or match[1] + match[2]
            yield _Sensor(f"{chip} {label}", match[1], file)


def _of_zones(root: Path) -> Iterator[_Sensor]:
    for folder in sorted(root.glob("thermal_zone*")) if root.is_dir() else ():
        yield _Sensor(f"{folder.name} {_text(folder / 'type')}".strip(), "temp", folder / "temp")


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
