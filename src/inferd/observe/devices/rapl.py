"""The energy of processors and their memory, from the counters that Linux shows below /sys/class/powercap (RAPL).

Most kernels let only the superuser read them. https://docs.kernel.org/power/powercap/powercap.html
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from inferd.observe.devices.reading import Kind, Reading

POWERCAP: Final = Path("/sys/class/powercap")
_ZONE: Final = re.compile(r"[a-z]+-rapl:\d+(:\d+)?")


class _Zone:
    """A counter of microjoules that begins again at zero above its range."""

    def __init__(self, folder: Path, device: str, kind: Kind) -> None:
        self.device = device
        self.kind = kind
        self._counter = folder / "energy_uj"
        self._range_uj = int((folder / "max_energy_range_uj").read_text())
        self._last_uj = int(self._counter.read_text())
        self._total_uj = 0

    def energy_j(self) -> float:
        """Joules since the zone was found."""
        now_uj = int(self._counter.read_text())
        passed = now_uj - self._last_uj
        self._total_uj += passed if passed >= 0 else passed + self._range_uj
        self._last_uj = now_uj
        return self._total_uj / 1e6


class Rapl:
    """The packages and the memory of this machine. Cores and the graphics unit are parts of their package."""

    def __init__(self, zones: list[_Zone]) -> None:
        self._zones = zones

    def read(self, now: float) -> list[Reading]:
        return [
            Reading(device=zone.device, kind=zone.kind, at=now, place="cpu", energy_j=zone.energy_j())
            for zone in self._zones
        ]


def find_rapl(root: Path = POWERCAP) -> Rapl | None:
    """None where there are no counters, or they may not be read."""
    zones = []
    for folder in sorted(root.glob("*-rapl:*")) if root.is_dir() else ():
        try:
            name = (folder / "name").read_text().strip()
            above = folder.name.rpartition(":")[0]
            if not _ZONE.fullmatch(folder.name):
                continue
            if name.startswith("package"):
                zones.append(_Zone(folder, name, "cpu"))
            elif name == "dram":
                package = (root / above / "name").read_text().strip()
                zones.append(_Zone(folder, f"dram of {package}", "memory"))
        except (OSError, ValueError):  # no such file, or not allowed
            continue
    return Rapl(zones) if zones else None
