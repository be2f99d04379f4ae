"""Numbers with units: sizes such as 4GiB, counts such as 200k, and which settings may be written in this form."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_COUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgG]?)\s*")
_COUNT_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3}
_UNITS: dict[str, int] = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power}
    _UNITS |= {f"{_letter}i": 1024**_power, f"{_letter}ib": 1024**_power}


class NotAllowedError(ValueError):
    """A leaf's value is not allowed; the message says what is."""


def size(text: str) -> int:
    """Bytes of '4GiB', '512 MB', '1.5G' or '4096'. Raises NotAllowedError."""
    match = _SIZE.fullmatch(text)
    unit = match and _UNITS.get(match[2].lower())
    if match is None or unit is None:
        raise NotAllowedError("a size such as 4GiB, 512MB or a number of bytes")
    return int(Decimal(match[1]) * unit)


def count(text: str) -> int:
    """The number that '200k', '1.5M' or '4096' stands for. Raises NotAllowedError."""
    match = _COUNT.fullmatch(text)
    if match is None:
        raise NotAllowedError("an integer, or a count such as 200k or 2M")
    exact = Decimal(match[1]) * _COUNT_UNITS[match[2].lower()]
    if exact != int(exact):
        raise NotAllowedError("an integer, or a count such as 200k or 2M")
    return int(exact)


@dataclass(frozen=True, slots=True)
class Scale:
    """How texts with a unit are read as numbers."""

    noun: str
    read: Callable[[str], int]


_SIZES = Scale("a size such as 4GiB, 512MB or a number of bytes", size)
_COUNTS = Scale("an integer, or a count such as 200k or 2M", count)


def is_size(name: str) -> bool:
    """Whether a field of this name is a number of bytes, which may have a unit: 4GiB."""
    return name.endswith("_bytes")


def is_count(name: str) -> bool:
    """Whether a field of this name may have a letter for its thousands: 200k."""
    return name.endswith("_tokens") or name in ("rpm", "tpm")


def scale_of(name: str | int) -> Scale | None:
    if isinstance(name, int):
        return None
    return _SIZES if is_size(name) else _COUNTS if is_count(name) else None


def size_text(num_bytes: int) -> str:
    """The shortest exact way to write a number of bytes: 16MiB, 4GiB, 1000."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes and num_bytes % 1024**power == 0:
            return f"{num_bytes // 1024**power}{unit}"
    return str(num_bytes)


def number_text(number: float) -> str:
    """A number with all its digits: 0.5, 65535, 1,000,000."""
    if number != int(number) or abs(number) >= 1e15:
        return f"{number:g}"
    return f"{int(number):,}" if abs(number) >= 100_000 else str(int(number))


def bytes_text(num_bytes: float) -> str:
    """A number of bytes in three digits and a unit: 512 B, 1.50 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1000:
            digits = 0 if unit == "B" or abs(num_bytes) >= 100 else 1 if abs(num_bytes) >= 10 else 2
            return f"{num_bytes:.{digits}f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def enough_text(num_bytes: int) -> str:
    """A size to set that is no less than a number of bytes: 253MiB, in whole MiB."""
    return f"{-(-num_bytes // 2**20)}MiB"
