"""The fake at the bottom: a runtime that doubles its input and misbehaves on demand, and a dialect to ask it with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from inferd.ends import failed
from inferd.errors import InferdError, InvalidRequest
from inferd.predict.backend import PredictBackend
from inferd.predict.batcher import Batcher
from inferd.predict.codecs.port import Codec, DecodedRequest
from inferd.predict.contract import Contract
from inferd.predict.runtime import Item, Result
from inferd.types import ModelInfo, Output, Prediction, PredictRequest, StepStats, TensorSpec

CONTRACT = Contract(
    inputs=(TensorSpec("x", "INT64", (-1, 1)),),
    outputs=(TensorSpec("y", "INT64", (-1, 1)),),
    max_batch_size=1024,
    because="declared",
)
POISON, BAD, REFUSED = 666, 667, 668
"""A number that fails the whole batch it is in; one that gets an error of its own; one that ``prepare`` refuses."""


class Doubler:
    """A ``Runtime``. ``on_predict`` is called with each batch, before it is computed."""

    def __init__(
        self, contract: Contract = CONTRACT, on_predict: Callable[[Sequence[Item]], None] | None = None
    ) -> None:
        self.contract = contract
        self.batches: list[list[str]] = []
        self.is_closed = False
        self._on_predict = on_predict

    def prepare(self, item: Item) -> None:
        if (item.inputs["x"] == REFUSED).any():
            raise InvalidRequest("The input 'x' holds 668.")

    def predict(self, items: Sequence[Item]) -> Sequence[Result | InferdError]:
        self.batches.append([item.request_id for item in items])
        if self._on_predict is not None:
            self._on_predict(items)
        if any((item.inputs["x"] == POISON).any() for item in items):
            raise ValueError("poison")
        return [
            InvalidRequest("bad") if (item.inputs["x"] == BAD).any() else Result(outputs={"y": item.inputs["x"] * 2})
            for item in items
        ]

    def close(self) -> None:
        self.is_closed = True


class Counter(Doubler):
    """A ``Streaming`` runtime: as many answers as the number says."""

    def __init__(self) -> None:
        super().__init__(msgspec.structs.replace(CONTRACT, is_decoupled=True))
        self.closed: list[str] = []

    def stream(self, item: Item) -> Iterator[Result]:
        try:
            for number in range(int(item.inputs["x"][0, 0])):
                if number == 2:
                    yield from self._misbehave(item)
                yield Result(outputs={"y": np.array([[number]])})
        finally:
            self.closed.append(item.request_id)

    def _misbehave(self, item: Item) -> Iterator[Result]:
        if int(item.inputs["x"][0, 0]) == POISON:
            raise ValueError("poison")
        yield from ()


class Numbers:
    """A dialect: a body is a JSON list of numbers, one row each; so is an answer."""

    def decode(self, request: PredictRequest, contract: Contract) -> DecodedRequest:
        try:
            numbers = msgspec.json.decode(request.body, type=list[int])
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"The body is no list of numbers: {error}") from None
        return DecodedRequest(inputs={"x": np.array(numbers, dtype=np.int64).reshape(len(numbers), 1)})

    def encode(self, request: PredictRequest, decoded: DecodedRequest, result: Result, info: ModelInfo) -> Prediction:
        return Prediction(msgspec.json.encode(result.outputs["y"].ravel().tolist()))


class Driven(PredictBackend):
    """Driven as by a worker's loop: a request that is not accepted ends with the next step, and a second one with the id
    of an open request is ignored."""

    def __init__(self, runtime: Doubler, batcher: Batcher, info: ModelInfo, codecs: Callable[[str], Codec]) -> None:
        super().__init__(runtime, batcher, info, codecs=codecs)
        self._refused: list[Output] = []

    def submit(self, request: PredictRequest, now: float) -> None:
        if request.id not in self._pending:
            try:
                self.add(request, now)
            except Exception as error:
                self._refused.append(failed(request.id, request.arrived_at, error))

    def due(self, now: float) -> float | None:
        return now if self._refused else super().due(now)

    def step(self, now: float) -> tuple[list[Output], StepStats | None]:
        outputs, stats = super().step(now)
        refused, self._refused = self._refused, []
        return refused + outputs, stats


def numbers(dialect: str) -> Codec:
    return Numbers()


def info(max_rows: int = 8) -> ModelInfo:
    return ModelInfo(
        name="doubler",
        source="doubler",
        architecture="Doubler",
        dtype="int64",
        max_model_len=0,
        vocab_size=0,
        num_parameters=0,
        num_blocks=0,
        block_size=0,
        max_num_seqs=max_rows,
        kind="predict",
        tasks=("predict",),
        max_batch_size=max_rows,
    )


def request(name: str, *numbers: int, arrived_at: float = 0.0, **fields: object) -> PredictRequest:
    body = msgspec.json.encode(list(numbers))
    return PredictRequest(
        id=name,
        model="doubler",
        dialect="numbers",
        body=body,
        arrived_at=arrived_at,
        **fields,  # type: ignore[arg-type]
    )
