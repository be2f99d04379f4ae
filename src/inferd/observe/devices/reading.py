"""What a device tells at one moment, and the interface of a source of readings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

Kind = Literal["gpu", "cpu", "memory", "sensor"]
KINDS: Final[tuple[Kind, ...]] = ("gpu", "cpu", "memory", "sensor")

Reason = Literal["power", "thermal", "hardware", "quota"]
REASONS: Final[tuple[Reason, ...]] = ("power", "thermal", "hardware", "quota")
"""Why a device runs slower than it can: its limit of power, its temperature, a signal of the board, a limit of
processor time that a container has."""

ErrorType = Literal["corrected", "uncorrected"]
ERROR_TYPES: Final[tuple[ErrorType, ...]] = ("corrected", "uncorrected")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The state of one device. None: the device does not tell.

    ``energy_j``, ``throttled_s`` and ``errors`` are cumulative; a number that goes down began again at zero.
    """

    device: str  # its name among the devices of this machine
    kind: Kind
    at: float  # seconds on the monotonic clock
    name: str = ""  # of its model
    uuid: str = ""
    index: int | None = None  # of a GPU, as its driver counts
    place: str = ""  # what the setting models.NAME.device calls it: cpu, cuda:0; empty: no model computes there
    duty: float | None = None  # share of the time since the last reading in which it computed, 0 to 1
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    throttled_s: Mapping[Reason, float] = field(default_factory=dict)  # seconds at a reduced speed
    errors: Mapping[ErrorType, int] = field(default_factory=dict)  # of its memory


class Source(Protocol):
    """Something that tells of devices. It is used by one thread."""

    def read(self, now: float) -> Sequence[Reading]:
        """The devices as they are now. May block, and may raise: both are counted."""
        ...
