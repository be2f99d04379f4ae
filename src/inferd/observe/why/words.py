"""Durations and numbers as words."""

from __future__ import annotations


def seconds_text(seconds: float) -> str:
    """A duration with two significant digits: ``4.1 s``, ``0.34 s``, ``34 ms``, ``1.2 min``."""
    if seconds < 0:
        return f"-{seconds_text(-seconds)}"
    if seconds >= 99.5:
        return f"{seconds / 60:.1f} min"
    if seconds >= 9.95:
        return f"{seconds:.0f} s"
    if seconds >= 0.0995:
        return f"{seconds:.2g} s"
    millis = seconds * 1000
    return f"{millis:.0f} ms" if millis >= 9.95 else f"{millis:.2g} ms" if millis >= 0.1 else "under 0.1 ms"


def counted(number: int, noun: str) -> str:
    """``1 request``, ``31 requests``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
