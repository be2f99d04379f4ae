"""A request between its arrival and its end, and the parts in which a large one is computed.

A request of more rows than a batch may have is split into items of at most that many rows. Their results are joined to
the one that its client is sent. Knows arrays and results; knows no runtime and no dialect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from inferd.ends import NO_USAGE
from inferd.predict.codecs.port import Codec, DecodedRequest
from inferd.predict.contract import Array
from inferd.predict.runtime import Item, Result
from inferd.types import PredictRequest, Timings, Usage


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One request and what is known of it so far. Times are in seconds since its arrival."""

    request: PredictRequest
    codec: Codec
    decoded: DecodedRequest
    is_over: bool = False
    begun_s: float | None = None  # decoding began
    tokenized_s: float | None = None
    computed_before_s: float = 0.0  # seconds that the backend had computed when it was tokenized
    behind_s: float = 0.0  # between tokenized and scheduled: while other batches were computed
    scheduled_s: float | None = None
    computed_s: float | None = None
    item_ids: tuple[str, ...] = field(init=False)
    num_open: int = 1  # items without a result
    num_tokens: int = 0  # of what was computed, whether or not there will be an answer
    results: list[Result | None] = field(default_factory=list)  # of the parts, where there are several
    stream: Iterator[Result] | None = None

    def __post_init__(self) -> None:
        self.item_ids = (self.request.id,)

    def timings(self, now: float, steps_s: dict[str, float] | None = None) -> Timings:
        """The times of the request, which ends at ``now``."""
        return Timings(
            tokenized=self.tokenized_s,
            scheduled=self.scheduled_s,
            first_token=self.computed_s,
            finished=now - self.request.arrived_at,
            steps_s=steps_s,
            begun=self.begun_s,
            behind_s=self.behind_s,
        )

    @property
    def usage(self) -> Usage:
        return Usage(self.num_tokens) if self.num_tokens else NO_USAGE

    def split(self, item: RequestItem, max_rows: int) -> Sequence[RequestItem]:
        """The item as several of at most ``max_rows`` rows each."""
        parts = []
        for place, begin in enumerate(range(0, item.rows, max_rows)):
            rows = min(max_rows, item.rows - begin)
            part = msgspec.structs.replace(
                item,
                request_id=f"{item.request_id}/{place}",
                inputs={name: array[begin : begin + rows] for name, array in item.inputs.items()},
                rows=rows,
                first_row=begin,
                total_rows=item.rows,
                size=rows,
                place=place,
            )
            parts.append(part)
        self.item_ids = tuple([part.request_id for part in parts])
        self.results = [None] * len(parts)
        self.num_open = len(parts)
        return parts

    def add_result(self, item: RequestItem, result: Result) -> Result | None:
        """The result of the whole request; None while other parts are missing. Raises when the parts do not fit."""
        self.num_open -= 1
        self.num_tokens += result.num_tokens
        if not self.results:
            return result
        self.results[item.place] = result
        return None if self.num_open else _join([part for part in self.results if part is not None])


class RequestItem(Item, kw_only=True, eq=False):
    """An item with the request that it belongs to, and its place among the parts."""

    pending: PendingRequest
    place: int = 0


def request_of(item: Item) -> PendingRequest:
    """The request of an item that the batcher gave back."""
    assert isinstance(item, RequestItem), "the batcher gives back what it was given"
    return item.pending


def _join(results: Sequence[Result]) -> Result:
    """The results of all parts as one."""
    outputs: dict[str, Array] = {
        name: _concatenate([np.asarray(result.outputs[name]) for result in results]) for name in results[0].outputs
    }
    stages: dict[str, float] = {}
    for result in results:
        for stage, seconds in result.stages_s.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    num_tokens = sum(result.num_tokens for result in results)
    return Result(outputs=outputs, num_tokens=num_tokens, parameters=results[0].parameters, stages_s=stages)


def _concatenate(arrays: Sequence[Array]) -> Array:
    """The arrays, concatenated. If rows differ in length (detections, tokens), the shorter ones are padded: with -1 for
    signed integers, with empty texts, and with 0 for all other types."""
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1 and len({len(shape) for shape in shapes}) == 1:
        sizes = tuple(map(max, zip(*shapes, strict=True)))
        padding = {"O": b"", "i": -1}.get(arrays[0].dtype.kind, 0)
        padded = np.full((sum(map(len, arrays)), *sizes), padding, dtype=arrays[0].dtype)
        begin = 0
        for array in arrays:
            padded[(slice(begin, begin + len(array)), *map(slice, array.shape[1:]))] = array
            begin += len(array)
        return padded
    return np.concatenate(arrays)
