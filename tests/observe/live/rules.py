"""The rules of ``inferd alerts`` with all times divided by one factor, so that a live test takes minutes.

Divided are the windows of ranges, the times of ``for``, and the ten minutes by which a slope is multiplied. Thresholds,
labels, words and the least numbers of requests stay as they are. The names of recorded series keep the windows that
they have in production.
"""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

FACTOR: Final = 30
"""30 seconds stand for 15 minutes."""

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_RANGE: Final = re.compile(r"\[(\d+)([smhd])\]")


def seconds(duration: str) -> float:
    return int(duration[:-1]) * _UNITS[duration[-1]]


def shortened(rules: str, factor: int = FACTOR) -> str:
    """The text of a rules file with times that are ``factor`` times shorter, and at least two seconds."""
    read: dict[str, Any] = yaml.safe_load(rules)

    def short(duration: str) -> str:
        return f"{max(round(seconds(duration) / factor), 2)}s"

    for group in read["groups"]:
        for rule in group["rules"]:
            expr = _RANGE.sub(lambda match: f"[{short(match[1] + match[2])}]", rule["expr"])
            rule["expr"] = expr.replace("* 600", f"* {600 / factor:g}")
            if "for" in rule:
                rule["for"] = short(rule["for"])
    return str(yaml.safe_dump(read, sort_keys=False))
