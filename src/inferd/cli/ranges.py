"""Ranges of numbers that flags take. Knows no flag."""

from __future__ import annotations

import math
from typing import Any

import click


class FloatRange(click.FloatRange):
    """click's, but that NaN is in none: it is neither below nor above any bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return found
