"""Devices and prices as data: the bundled tables, and files of an operator in the same form. Knows no model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from inferd.config.tree import check, dotted
from inferd.config.yaml_file import read_yaml
from inferd.errors import ConfigError, InvalidRequest
from inferd.planning.shape import Format

GB: Final = 10**9
MOST: Final = 4096
"""Devices of one kind in a plan."""

CORE_KERNEL_US: Final = 0.4
"""Microseconds of a kernel's start and end on the cores of a processor: a step of layers of 64 columns, by their
number."""

Positive = Annotated[float, Meta(gt=0, le=1e9)]
T = TypeVar("T", bound=msgspec.Struct)


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device as its maker describes it, or as it was measured. GB are 10^9 bytes."""

    title: str
    vendor: Literal["nvidia", "amd", "cpu", "other"]
    memory_gb: Positive
    bandwidth_gb_s: Positive  # of its memory
    tflops: dict[Literal["fp32", "fp16", "fp8", "int8", "int4"], Positive]  # 10^12 operations per second
    source: str
    link: str = ""  # between devices of one machine
    link_gb_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0  # in one direction; 0: there is none
    group: Annotated[int, Meta(ge=1, le=MOST)] = 8  # devices in one machine, which the link joins
    memory_share: Annotated[float, Meta(gt=0, le=1)] = 0.8  # of the bandwidth that decoding reaches
    arithmetic_share: Annotated[float, Meta(gt=0, le=1)] = 0.5  # of the operations that products reach
    streams_gb_s: dict[Literal["fp32", "fp16", "fp8", "int8", "int4"], Positive] = {}  # measured, instead of the share
    # Where reading weights and arithmetic take equally long, what passes of one during the other; missing: all.
    overlaps: dict[Literal["fp32", "fp16", "fp8", "int8", "int4"], Annotated[float, Meta(ge=0, le=1)]] = {}
    kernel_us: Annotated[float, Meta(ge=0, le=1e6)] = 1.3  # of a kernel's start and end, microseconds
    cache_gb_s: Positive | None = None  # at which attention reads keys and values; None: as weights are read

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gb * GB)

    def operations(self, form: Format) -> float:
        """Operations per second of products with weights in this format. Integers and stored formats are converted to
        16 bits on their way into a product, unless the device was measured."""
        rates: dict[str, float] = dict(self.tflops.items())
        return _of_form(rates, form, min(rates.values())) * 1e12 * self.arithmetic_share

    def overlap(self, form: Format) -> float:
        """Of reading weights in this format and arithmetic (``native.overlap``)."""
        return _of_form(dict(self.overlaps.items()), form, 1.0)

    def stream(self, form: Format) -> float:
        """Bytes per second at which weights in this format are read."""
        rates: dict[str, float] = dict(self.streams_gb_s.items())
        return rates[form] * GB if form in rates else self.bandwidth_gb_s * GB * self.memory_share

    @property
    def cache_stream(self) -> float:
        """Bytes of keys and values per second that attention reads."""
        return self.stream("fp16") if self.cache_gb_s is None else self.cache_gb_s * GB

    def lacks(self, form: Format) -> str:
        """Why the device does not compute a format; empty: it does."""
        if form == "fp8" and "fp8" not in self.tflops:
            return f"{self.title} has no FP8 units; int8 takes the same memory"
        return ""


def _of_form(rates: Mapping[str, float], form: Format, otherwise: float) -> float:
    """The rate of a format. Integers and stored formats are converted to 16 bits where they have none of their own."""
    return rates.get("fp16" if form == "stored" else form, rates.get("fp16", otherwise))


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What devices cost, and when that was true."""

    date: str
    source: str
    per_hour: dict[str, Annotated[float, Meta(ge=0, le=1e6)]]  # of one device, by its name
    currency: str = "USD"


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of one kind that a plan may use."""

    name: str
    device: Device
    count: int | None = None  # None: as many as needed


class _DeviceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    devices: dict[str, Device]


_NAME: Final = re.compile(r"(?P<name>[a-z0-9][a-z0-9._-]*?)(?:[x*](?P<count>\d+))?", re.IGNORECASE)


@cache
def bundled_devices() -> dict[str, Device]:
    return read_devices(Path(__file__).parent / "devices.yaml")


@cache
def bundled_prices() -> Prices:
    return read_prices(Path(__file__).parent / "prices.yaml")


def read_devices(path: Path) -> dict[str, Device]:
    """The devices of a file. Raises ConfigError that names the field and what it may be."""
    found = _converted(path, _DeviceFile, "devices", "'devices:'").devices
    for name, device in found.items():
        if name != name.lower() or not _NAME.fullmatch(name):
            raise ConfigError(
                f"{path}: {name!r} is no name of a device; take small letters, digits, dots and dashes.", param=name
            )
        if not device.tflops:
            raise ConfigError(
                f"{path}: {name}.tflops is empty; give at least fp16, in 10^12 operations per second.", param="tflops"
            )
    return found


def read_prices(path: Path) -> Prices:
    """The prices of a file. Raises ConfigError that names the field and what it may be."""
    return _converted(path, Prices, "prices", "'date:'")


def offers(words: Sequence[str], known: Mapping[str, Device]) -> list[Offer]:
    """The devices that ``h100x8`` and ``l40s`` name, with their number. No words: every known device, as many as
    needed. Raises InvalidRequest for an unknown name and for a number that is none."""
    if not words:
        return [Offer(name=name, device=device) for name, device in known.items()]
    found: dict[str, Offer] = {}
    for word in words:
        lowered = word.strip().lower()
        match = _NAME.fullmatch(lowered)
        name, count = (lowered, None) if lowered in known else (match["name"], match["count"]) if match else ("", None)
        if name not in known:
            raise InvalidRequest(
                f"The device {word!r} is not known; known are {', '.join(known)}. Describe others in a file "
                "(--devices-file), or write h100x8 for eight of one kind.",
                param="devices",
            )
        number = None if count is None else int(count)
        if number is not None and not 1 <= number <= MOST:
            raise InvalidRequest(f"{word!r} asks for {number} devices; take 1 to {MOST}.", param="devices")
        if name in found:
            raise InvalidRequest(f"The device {name!r} is named twice; write {name}x8 for eight.", param="devices")
        found[name] = Offer(name=name, device=known[name], count=number)
    return list(found.values())


def _converted(path: Path, kind: type[T], what: str, begins: str) -> T:
    checked, problems = check(kind, read_yaml(path, what, begins))
    if problems:
        said = [f"{dotted(one.path)}: {one.sentence}" for one in problems]
        head = f"{path}: " if len(said) == 1 else f"{len(said)} problems in {path}:\n  - "
        raise ConfigError(head + "\n  - ".join(said), param=dotted(problems[0].path))
    return msgspec.convert(checked, kind)
