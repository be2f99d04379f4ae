"""Structured answers: a JSON document for each row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from inferd.config.pipeline_graph import Spec
from inferd.errors import InternalError
from inferd.predict.contract import Array, Tensors, object_array
from inferd.predict.steps.operation import Operation, dense


class Json(Operation, frozen=True, kw_only=True):
    """The step's inputs as one JSON document per row: an object with a member for each input, or, with ``records``, a
    list with an object for each place of the inputs' second dimension (one for each detection, class, token).

    An input called ``count`` says how many records a row has and is no member itself. NaN and infinity become null.
    """

    takes: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ("json",)

    records: bool = False
    digits: Annotated[int, Meta(ge=0, le=17)] | None = None  # numbers are rounded to so many places
    names: dict[str, str] = {}  # inputs to what they are called in the document

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        for name in self.names:
            if name not in inputs:
                raise ValueError(f"names has {name!r}, which is not one of its inputs: {', '.join(inputs)}")
        members = {name: spec for name, spec in inputs.items() if not (self.records and name == "count")}
        if not members:
            raise ValueError("it has no inputs to write")
        for name, spec in members.items():
            if self.records and spec.shape is not None and len(spec.shape) < 2:
                raise ValueError(f"its input {name!r} has no second dimension to make records of")
        return {"json": Spec("BYTES", (-1,))}

    def run(self, inputs: Tensors) -> Tensors:
        counts = inputs.get("count") if self.records else None
        members = {
            self.names.get(name, name): self._values(array)
            for name, array in inputs.items()
            if counts is None or name != "count"
        }
        sizes = {len(values) for values in members.values()}
        if len(sizes) != 1:
            raise InternalError("The parts of the answer have different numbers of rows.")
        documents: list[bytes] = []
        for row in range(sizes.pop()):
            one = {name: values[row] for name, values in members.items()}
            documents.append(msgspec.json.encode(self._records(one, counts, row) if self.records else one))
        return {"json": object_array(documents)}

    def _records(self, one: Mapping[str, object], counts: Array | None, row: int) -> list[dict[str, object]]:
        columns = [values if isinstance(values, list) else [values] for values in one.values()]
        if len({len(column) for column in columns}) != 1:
            raise InternalError("The parts of the answer have different numbers of records.")
        records = [dict(zip(one, values, strict=True)) for values in zip(*columns, strict=True)]
        return records if counts is None else records[: int(counts.reshape(-1)[row])]

    def _values(self, array: Array) -> list[object]:
        found = self._plain(dense(array).tolist())
        return found if isinstance(found, list) else [found]

    def _plain(self, value: object) -> object:
        if isinstance(value, list):
            return [self._plain(item) for item in value]
        if isinstance(value, bytes):
            return value.decode(errors="replace")
        if isinstance(value, float):
            if not math.isfinite(value):
                return None
            return value if self.digits is None else round(value, self.digits)
        return value
