"""Devices that are not there, for tests and demonstrations: a JSON file says what they tell over time.

    {"devices": [{"device": "gpu0", "kind": "gpu", "place": "cpu", "duty": 0.8, "power_w": [[0, 100], [30, 400]],
                  "temperature_c": 61, "memory_used_bytes": 6e10, "memory_total_bytes": 8e10,
                  "throttled": {"thermal": [[0, 0], [20, 1]]}, "errors": {"uncorrected": 0}}],
     "hang_s": 0, "fails": false}

A value is a number, or a list of pairs: from so many seconds on, that number. Time begins when the file is read, and
again when the file changes. ``throttled`` is the share of the time at a reduced speed. ``hang_s`` makes a reading take
as long, and ``fails`` makes it fail. A field that is left out is one that the device does not tell.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import msgspec

from inferd.errors import ConfigError
from inferd.observe.devices.reading import ErrorType, Kind, Reading, Reason

Values = float | list[tuple[float, float]]

_EMPTY_UUID: Final = "SIM-"


class SimulatedDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device of the file."""

    device: str
    kind: Kind = "gpu"
    name: str = "simulated"
    place: str = ""
    duty: Values | None = None
    memory_used_bytes: Values | None = None
    memory_total_bytes: Values | None = None
    temperature_c: Values | None = None
    power_w: Values | None = None
    has_energy: bool = True  # it counts its energy
    throttled: dict[Reason, Values] = {}
    errors: dict[ErrorType, Values] = {}


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file."""

    devices: list[SimulatedDevice] = []
    hang_s: float = 0.0
    fails: bool = False


def value_at(values: Values, at: float) -> float:
    """The value that holds at a time; before the first pair it is that pair's."""
    if isinstance(values, int | float):
        return float(values)
    found = values[0][1] if values else 0.0
    for since, value in values:
        if since <= at:
            found = value
    return float(found)


def integral(values: Values, begin: float, end: float) -> float:
    """The sum over a span of time."""
    if isinstance(values, int | float):
        return float(values) * (end - begin)
    total, at = 0.0, begin
    for bound in sorted({since for since, _ in values if begin < since < end} | {end}):
        total += value_at(values, at) * (bound - at)
        at = bound
    return total


class _Counts:
    """What a device has counted."""

    def __init__(self) -> None:
        self.energy_j = 0.0
        self.throttled_s: dict[Reason, float] = {}


class Simulated:
    """The devices of a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._script = Script()
        self._version: tuple[int, int] | None = None
        self._began = 0.0
        self._read_at: float | None = None
        self._counts: dict[str, _Counts] = {}

    def read(self, now: float) -> list[Reading]:
        stat = self._file.stat()
        version = (stat.st_mtime_ns, stat.st_size)
        before, began = self._script, self._began
        if version != self._version:
            self._script = script_of(self._file)
            self._version, self._began = version, now
        if self._script.hang_s:
            time.sleep(self._script.hang_s)
        if self._script.fails:
            raise OSError(f"{self._file} says that reading fails.")
        since = now if self._read_at is None else self._read_at
        self._read_at = now
        # What passed since the last reading was by the script of then.
        for one in before.devices:
            self._count(one, since - began, now - began)
        gpus = [one.device for one in self._script.devices if one.kind == "gpu"]
        return [self._one(one, gpus, since, now) for one in self._script.devices]

    def _count(self, one: SimulatedDevice, begin: float, end: float) -> None:
        counts = self._counts.setdefault(one.device, _Counts())
        if one.power_w is not None:
            counts.energy_j += integral(one.power_w, begin, end)
        for reason, share in one.throttled.items():
            counts.throttled_s[reason] = counts.throttled_s.get(reason, 0.0) + integral(share, begin, end)

    def _one(self, one: SimulatedDevice, gpus: list[str], since: float, now: float) -> Reading:
        counts, at = self._counts.setdefault(one.device, _Counts()), now - self._began
        begin = max(since - self._began, 0.0)
        used, total = one.memory_used_bytes, one.memory_total_bytes
        duty = None
        if one.duty is not None:
            duty = integral(one.duty, begin, at) / (at - begin) if at > begin else value_at(one.duty, at)
        return Reading(
            device=one.device,
            kind=one.kind,
            at=now,
            name=one.name,
            uuid=_EMPTY_UUID + one.device,
            index=gpus.index(one.device) if one.kind == "gpu" else None,
            place=one.place,
            duty=duty,
            memory_used_bytes=None if used is None else int(value_at(used, at)),
            memory_total_bytes=None if total is None else int(value_at(total, at)),
            temperature_c=None if one.temperature_c is None else value_at(one.temperature_c, at),
            power_w=None if one.power_w is None else value_at(one.power_w, at),
            energy_j=None if one.power_w is None or not one.has_energy else counts.energy_j,
            throttled_s={reason: counts.throttled_s.get(reason, 0.0) for reason in one.throttled},
            errors={kind: int(value_at(values, at)) for kind, values in one.errors.items()},
        )


def script_of(file: Path) -> Script:
    """Raises ConfigError where the file cannot be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Script)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"devices.simulated: {file} is no file of simulated devices: {error}. docs/devices.md shows one.",
            param="devices.simulated",
        ) from None
