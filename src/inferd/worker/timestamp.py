"""The time of a line of the log, as text."""

from __future__ import annotations

import functools
from datetime import UTC, datetime
from typing import Final

_MILLIS: Final = [f".{number:03d}Z" for number in range(1000)]


def timestamp(wall_s: float) -> str:
    """Seconds since the epoch as RFC 3339 in UTC, to the millisecond."""
    second = int(wall_s)
    return _second(second) + _MILLIS[int((wall_s - second) * 1000)]


@functools.lru_cache(maxsize=2)
def _second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).isoformat(timespec="seconds").removesuffix("+00:00")
