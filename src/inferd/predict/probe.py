"""How many rows are worth computing together, measured when a model is loaded, within a bounded time.

The measured times also give the batcher its first estimate of a batch's cost, so that it need not learn it from the
first clients. Knows runtimes and examples; knows no library.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from inferd import clock
from inferd.machine.memory import available_bytes, rss_bytes
from inferd.predict.contract import Contract
from inferd.predict.estimate import BatchCost
from inferd.predict.runtime import Item, Result, Runtime
from inferd.predict.runtimes.trial import example

BUDGET_S: Final = 0.15
FEWEST_ROWS: Final = 4
MOST_ROWS: Final = 256
QUICK_S: Final = 0.002
"""Batches that take no longer are not worth making smaller."""

_GAIN: Final = 0.95  # of the best throughput: what fewer rows must reach to be enough
_MEMORY_SHARE: Final = 0.25  # of free memory, for one batch

_log = logging.getLogger("inferd.predict")

Measure = Callable[[int], float | None]
"""Compute so many rows. The seconds it took; None when it failed."""


class Probe(msgspec.Struct, frozen=True):
    """What came out: the rows that are worth it, and the time of each size that was tried."""

    rows: int
    seconds: tuple[tuple[int, float], ...] = ()

    def teach(self, cost: BatchCost) -> None:
        for rows, seconds in self.seconds:
            cost.observe(rows, seconds)


def probe_rows(measure: Measure, most: int, *, likely: int = 0) -> Probe:
    """Try 1, 2, 4, ... rows, up to ``most``, as long as the next size is expected to fit into the budget.

    ``likely``: the result when the time did not suffice to see that more rows no longer pay.
    """
    tried: list[tuple[int, float]] = []
    spent_s = 0.0
    rows = 1
    is_whole = False
    while True:
        if tried and spent_s + 2.0 * tried[-1][1] > BUDGET_S:
            break
        seconds = measure(rows)
        if seconds is None:
            is_whole = True
            break
        spent_s += seconds
        if seconds < QUICK_S:  # a time so short that other programs would distort it
            again = measure(rows)
            spent_s += again or 0.0
            seconds = min(seconds, again or seconds)
        tried.append((rows, seconds))
        gains_nothing = len(tried) > 2 and not _pays(tried[-2:]) and not _pays(tried[-3:-1])
        if rows == most or (gains_nothing and seconds > QUICK_S):
            is_whole = True
            break
        rows = min(2 * rows, most)
    return Probe(_worth_it(tried, most, likely=0 if is_whole else likely), tuple(tried))


def _pays(last: Sequence[tuple[int, float]]) -> bool:
    """Whether the larger of two sizes has the higher throughput, by more than chance."""
    (fewer, less_s), (more, more_s) = last
    return fewer / less_s < _GAIN * more / more_s


def _worth_it(tried: Sequence[tuple[int, float]], most: int, *, likely: int) -> int:
    if not tried:
        return min(max(likely, 1), most)
    best = max(rows / seconds for rows, seconds in tried)
    enough = next(rows for rows, seconds in tried if rows / seconds >= _GAIN * best)
    quick = max([rows for rows, seconds in tried if seconds <= QUICK_S], default=1)
    is_gaining = len(tried) < 2 or _pays(tried[-2:])
    return min(max(enough, quick, FEWEST_ROWS, likely if is_gaining else 1), most)


def probe(runtime: Runtime, most: int, *, likely: int = 0, memory_bytes: int | None = None) -> Probe | None:
    """Measure a loaded model. None where examples would not show its speed: an input has another dimension of any size,
    the model keeps a state, or it does not compute rows."""
    contract = runtime.contract
    if not _is_probeable(contract):
        return None
    free = available_bytes() if memory_bytes is None else memory_bytes
    row = {spec.name: example(spec, has_rows=True) for spec in contract.inputs if not spec.is_optional}
    row_bytes = sum(array.nbytes for array in row.values())
    before = rss_bytes()
    grown: list[tuple[int, int]] = []  # tried numbers of rows, each with the growth of the process in bytes

    def measure(rows: int) -> float | None:
        inputs = {name: np.repeat(array, rows, axis=0) for name, array in row.items()}
        item = Item(request_id="probe", inputs=inputs, rows=rows, size=rows)
        began = clock.now()
        try:
            runtime.prepare(item)
            (result,) = runtime.predict([item])
        except Exception as error:  # as at a request's boundary: the model's library raises what it likes at an example
            if rows == 1:
                _log.warning("the model cannot compute an example of its inputs; requests may fail alike: %s", error)
            else:
                _log.info("%d rows cannot be computed together: %s", rows, error)
            return None
        seconds = clock.now() - began
        grew = rss_bytes() - before
        grown.append((rows, grew))
        return seconds if isinstance(result, Result) and grew <= _MEMORY_SHARE * free else None

    if measure(1) is None:  # the first run also pays for lazy initialisation
        return None
    probed = probe_rows(measure, most, likely=likely)
    # The memory of more rows than were tried is extrapolated from the growth per row.
    most_rows = rows_within(grown, row_bytes, _MEMORY_SHARE * free)
    return msgspec.structs.replace(probed, rows=min(probed.rows, most_rows))


def rows_within(grown: Sequence[tuple[int, int]], row_bytes: int, allowed: float) -> int:
    """How many rows fit into so many bytes. ``grown``: numbers of rows, each with the growth of the process in bytes
    since the first was tried. ``row_bytes``: a row's inputs, which exist twice while a batch is put together."""
    (first, least), (last, most) = grown[0], grown[-1]
    fixed, per_row = (least, (most - least) / (last - first)) if last > first else (0, most / last)
    bytes_per_row = max(per_row, 0.0) + 2 * row_bytes
    rows = int((allowed - max(fixed, 0)) / bytes_per_row) if bytes_per_row else MOST_ROWS
    fits = max([rows for rows, grew in grown if grew <= allowed], default=1)
    return max(rows, fits)


def _is_probeable(contract: Contract) -> bool:
    is_open = any(-1 in spec.shape[1:] for spec in contract.inputs) or bool(contract.any_rank)
    return contract.max_batch_size > 1 and not is_open and not contract.is_stateful and not contract.is_decoupled
