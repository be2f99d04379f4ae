"""The one interface of a predictive model: a contract, and a function from items to results.

``inferd.predict.backend`` drives it from the worker's only compute thread. A runtime never sees a dialect, a socket or
a queue. Its inputs have been checked against its contract, and it may refuse an item itself (``prepare``).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from inferd.errors import InferdError
from inferd.predict.contract import Contract, Tensors

Parameters = Mapping[str, object]
"""A request's own parameters as its dialect carries them: numbers, texts, truth values."""


class Item(msgspec.Struct, kw_only=True, eq=False):
    """One request's inputs, ready to be computed. ``rows`` is its size along the batch dimension.

    ``size`` is its share of a batch's budget in the runtime's own measure (tokens for texts, rows otherwise). Items
    with different values of ``bucket`` are never computed together (other shapes, another task).
    """

    request_id: str
    inputs: Tensors
    wanted: tuple[str, ...] = ()  # names of outputs; empty: all
    parameters: Parameters = {}
    rows: int = 1
    first_row: int = 0  # of a request that is computed in parts: where this one begins
    total_rows: int = 0  # and how many rows all have; 0: it is no part
    size: int = 1
    bucket: object = None
    priority: int = 0
    expires_at: float | None = None  # clock.now() of its deadline
    may_wait: bool = True
    tenant: str = ""  # the owner of the sequence
    sequence: str = ""
    sequence_start: bool = False
    sequence_end: bool = False
    is_cancelled: bool = False  # set when the request is cancelled while it is computed
    prepared: object = None  # what the runtime's ``prepare`` made of the inputs

    def about(self, inputs: Tensors, wanted: tuple[str, ...], rows: int, size: int) -> Item:
        """An item of the same request with other inputs, for a model inside another. Not prepared."""
        return Item(
            request_id=self.request_id,
            inputs=inputs,
            wanted=wanted,
            parameters=self.parameters,
            rows=rows,
            size=size,
            priority=self.priority,
            expires_at=self.expires_at,
            may_wait=self.may_wait,
            tenant=self.tenant,
            sequence=self.sequence,
            sequence_start=self.sequence_start,
            sequence_end=self.sequence_end,
        )


class Result(msgspec.Struct, kw_only=True, eq=False):
    """What a model answered for one item."""

    outputs: Tensors
    num_tokens: int = 0  # read for it, for usage; 0: the model knows no tokens
    parameters: Parameters = {}  # of the answer, where the dialect carries some
    stages_s: Mapping[str, float] = {}  # seconds per step of a pipeline


class Runtime(Protocol):
    """All methods are called from one thread."""

    @property
    def contract(self) -> Contract: ...

    def prepare(self, item: Item) -> None:
        """Do everything that concerns one item alone and can fail: tokenize, decode an image; sets ``prepared``,
        ``size`` and ``bucket``. Its inputs have the contract's names, datatypes and shapes. Raises InvalidRequest."""
        ...

    def predict(self, items: Sequence[Item]) -> Sequence[Result | InferdError]:
        """Compute the items together, one result or error each, in order. ``sum(rows)`` is within the batch limit.
        An exception fails them all: the backend then computes each alone, so that one bad item fails alone."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Staged(Protocol):
    """A runtime whose batches take several steps. Requests and cancellations are read between two of them."""

    def stages(self, items: Sequence[Item]) -> Generator[None, None, Sequence[Result | InferdError]]:
        """What ``predict`` does, one step at each ``next``. Cancelled and expired items get no further."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """A runtime whose contract says ``is_decoupled``: its answers to one request come one after the other."""

    def stream(self, item: Item) -> Iterator[Result]:
        """The answers, each computed when it is needed. Closed early when no more are wanted. May raise."""
        ...
