"""The audit: sometimes a row that was computed with other rows is computed again alone, while no request waits.

It finds rows that depend on each other only for some values, which a trial at load cannot find. Knows a runtime and its
items; knows no request and no dialect.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from inferd.errors import InferdError
from inferd.predict.agreement import agree, distance
from inferd.predict.contract import Array
from inferd.predict.runtime import Item, Result, Runtime

PATIENCE_S: Final = 1.0
"""How long a row waits for an idle moment before it is computed again anyway."""


class Audit:
    """The audit of one runtime whose contract has rows. ``share``: of the requests that are computed with others."""

    def __init__(self, runtime: Runtime, share: float) -> None:
        self._runtime = runtime
        self._share = share
        self._random = random.Random(0)
        self._pending: tuple[Item, Mapping[str, Array], float] | None = None

    def sample(self, items: Sequence[Item], results: Sequence[Result | InferdError], now: float) -> None:
        """Choose whether a row of this batch is audited, if no other row waits for it."""
        if self._pending is not None or self._random.random() >= self._share * len(items):
            return
        place = self._random.randrange(len(items))
        item, result = items[place], results[place]
        if isinstance(result, InferdError) or sum(one.rows for one in items) < 2:
            return
        if any(np.shape(array)[:1] != (item.rows,) for array in (*item.inputs.values(), *result.outputs.values())):
            return
        row = self._random.randrange(item.rows)
        inputs = {name: array[row : row + 1].copy() for name, array in item.inputs.items()}
        outputs = {name: array[row : row + 1].copy() for name, array in result.outputs.items()}
        alone = item.about(inputs, item.wanted, 1, 1)
        self._pending = alone, outputs, now

    def is_due(self, now: float, *, is_idle: bool) -> bool:
        """Whether a row is to be computed again now."""
        return self._pending is not None and (is_idle or now - self._pending[2] >= PATIENCE_S)

    def run(self) -> str:
        """Compute the chosen row alone. The reason when it depends on other rows; empty when it does not. Must not be
        called before it ``is_due``."""
        assert self._pending is not None, "no row is kept"
        (item, outputs, _), self._pending = self._pending, None
        first, second = self._alone(item), self._alone(item)
        if first is None or second is None:
            return ""  # it cannot be computed alone, which proves nothing about the rows beside it
        contract = self._runtime.contract
        for name, array in outputs.items():
            if name not in first or name not in second:
                continue
            noise = distance(contract, name, first[name], second[name])
            if not agree(contract, name, first[name], array, noise):
                return f"an audit found that the output {name!r} of a row changes with the rows beside it"
        return ""

    def _alone(self, item: Item) -> Mapping[str, Array] | None:
        again = item.about(item.inputs, item.wanted, 1, 1)
        try:
            self._runtime.prepare(again)
            (result,) = self._runtime.predict([again])
        except Exception:  # a model may raise anything
            return None
        return result.outputs if isinstance(result, Result) else None
