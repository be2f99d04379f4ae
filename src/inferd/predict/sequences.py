"""The state between the requests of one sequence: a model's state outputs are inputs of the next request.

Wraps any runtime whose artifact has its state as inputs and outputs (``sequence.states``). Only this wrapper holds the
last state of each sequence. Requests of different sequences are computed together, with their states stacked. Requests
of one sequence are computed one after the other, in the order of arrival. Knows arrays and time, no dialect.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from inferd import clock, ends
from inferd.config import ModelConfig
from inferd.errors import InferdError, InvalidRequest, ModelLoadError, Overloaded
from inferd.predict.contract import NUMPY, Array, Contract
from inferd.predict.runtime import Item, Result, Runtime
from inferd.predict.runtimes.trial import UNTRIED, try_sequences
from inferd.registry.rows.verdict import Verdict, claimed
from inferd.types import TensorSpec

MAX_ITEMS: Final = 32
"""Sequences computed together without a configured limit."""

_log = logging.getLogger("inferd.predict")

_Key = tuple[str, str]  # tenant and sequence


class _Sequence:
    """One sequence's state; None before its first request was computed."""

    __slots__ = ("key", "rows", "state", "used_at")

    def __init__(self, key: _Key, used_at: float) -> None:
        self.key = key
        self.used_at = used_at
        self.rows = 0
        self.state: Mapping[str, Array] | None = None


class Sequences:
    """A ``Runtime`` around another."""

    def __init__(
        self,
        name: str,
        runtime: Runtime,
        config: ModelConfig,
        now: Callable[[], float] = clock.now,
        *,
        rows: Verdict,
        is_tried: bool = False,
    ) -> None:
        """``rows``: whether rows of several sequences may be computed together, each state along its own axis.
        ``is_tried``: whether a trial with examples is made first, which requires that the artifact is a pure function
        of its inputs. Raises ModelLoadError with all that does not fit the artifact."""
        self._name = name
        self._runtime = runtime
        self._config = config.sequence
        self._now = now
        contract = runtime.contract
        inputs = {spec.name: spec for spec in contract.inputs}
        outputs = {spec.name: spec for spec in contract.outputs}
        self._states = _matched(name, config.sequence.states, inputs, outputs)
        self._axes = {spec.name: _axis_of(name, spec) for spec in self._states.values()}
        self._given = [spec for spec in contract.inputs if spec.name not in self._axes]
        self._with_rows = {spec.name for spec in self._given if spec.shape and spec.shape[0] == -1}
        self._answer_specs = [spec for spec in contract.outputs if spec.name not in self._states]
        can_stack = all(axis is not None for axis in self._axes.values()) and all(
            spec.shape and spec.shape[0] == -1 for spec in self._answer_specs
        )
        rows = claimed(rows, config.batching.max_batch_size)
        can_stack = can_stack and bool(self._with_rows) and rows.because is not None
        if can_stack and is_tried and config.batching.mode != "off":
            rows = self._tried(rows)
            can_stack = rows.because is not None
        max_items = (config.batching.max_batch_size or MAX_ITEMS) if can_stack else 0
        self._sequences: OrderedDict[_Key, _Sequence] = OrderedDict()  # the longest idle first
        self.contract: Contract = msgspec.structs.replace(
            contract,
            inputs=(
                *self._given,
                *[msgspec.structs.replace(spec, is_optional=True) for spec in self._states.values()],
            ),
            outputs=tuple(self._answer_specs),
            max_batch_size=0,
            because=None,
            not_batched="" if max_items else contract.not_batched if rows.because is not None else rows.sentence,
            max_items=max_items if config.batching.mode != "off" else 0,
            is_stateful=True,
        )

    def _tried(self, rows: Verdict) -> Verdict:
        """The verdict after a trial. Sequences are not computed together if the trial shows that they depend on each
        other, or if no trial was possible and the only reason is the exporter's name."""
        axes = dict.fromkeys([*self._with_rows, *[spec.name for spec in self._answer_specs]], 0)
        for output, spec in self._states.items():
            axes[output] = axes[spec.name] = self._axes[spec.name] or 0
        found = try_sequences(self._runtime.contract, self._compute, axes)
        if found == "" or (found is None and rows.because != "named"):
            return rows
        why = found or UNTRIED
        _log.warning("the sequences are not computed together: %s", why)
        return Verdict(None, why)

    def _compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        rows = max(inputs[spec.name].shape[self._axes[spec.name] or 0] for spec in self._states.values())
        whole = Item(request_id="trial", inputs=dict(inputs), rows=rows)
        self._runtime.prepare(whole)
        (result,) = self._runtime.predict([whole])
        if isinstance(result, InferdError):
            raise result
        return result.outputs

    def __len__(self) -> int:
        """Sequences that have a state."""
        return len(self._sequences)

    # -- one request ------------------------------------------------------------------------

    def prepare(self, item: Item) -> None:
        """Raises InvalidRequest for a sequence that is not known here, Overloaded when there are too many."""
        item.bucket = tuple(
            (spec.name, item.inputs[spec.name].shape[1:])
            if spec.name in self._with_rows
            else (spec.name, item.inputs[spec.name].tobytes())
            for spec in self._given
            if spec.name in item.inputs
        )
        rows = {len(item.inputs[name]) for name in self._with_rows if name in item.inputs}
        if len(rows) > 1:
            raise InvalidRequest(
                f"The inputs {', '.join(sorted(self._with_rows))} must have equally many rows, not {sorted(rows)}.",
                param="inputs",
            )
        item.rows = 1  # its share of a batch, which counts sequences and not their rows
        item.prepared = self._sequence_of(item, rows.pop() if rows else 1)

    def _sequence_of(self, item: Item, rows: int) -> _Sequence:
        now = self._now()
        self._forget_idle(now)
        key = (item.tenant, item.sequence)
        if not item.sequence:
            missing = [name for name in self._axes if name not in item.inputs]
            if missing:
                raise InvalidRequest(
                    f"The model {self._name!r} keeps a state between requests, and this one belongs to no sequence; "
                    "send parameters.sequence_id (and sequence_start with the first), or the state itself: "
                    f"{', '.join(missing)}.",
                    param="parameters.sequence_id",
                    code="missing_sequence",
                )
            sequence = _Sequence(key, now)
        elif item.sequence_start:
            if key not in self._sequences and len(self._sequences) >= self._config.max_sequences:
                raise Overloaded(
                    f"The model {self._name!r} keeps the state of {len(self._sequences)} sequences, and no more may "
                    "be; end one with sequence_end, or raise sequence.max_sequences.",
                    code="too_many_sequences",
                )
            sequence = self._sequences[key] = _Sequence(key, now)
        else:
            known = self._sequences.get(key)
            if known is None:
                raise InvalidRequest(
                    f"The sequence {item.sequence!r} has no state here: it was not started, has ended, was idle for "
                    f"{self._config.idle_s:g} s, or its worker was replaced. Start it again with sequence_start.",
                    param="parameters.sequence_id",
                    code="sequence_not_found",
                )
            sequence = known
        if sequence.rows not in (0, rows):
            raise InvalidRequest(
                f"The sequence {item.sequence!r} was started with {sequence.rows} rows, and this request has {rows}.",
                param="inputs",
            )
        sequence.rows = rows
        sequence.used_at = now
        if item.sequence:
            self._sequences.move_to_end(key)
        return sequence

    def _forget_idle(self, now: float) -> None:
        while self._sequences:
            key, oldest = next(iter(self._sequences.items()))
            if now - oldest.used_at <= self._config.idle_s:
                return
            del self._sequences[key]

    # -- a batch ----------------------------------------------------------------------------

    def predict(self, items: Sequence[Item]) -> Sequence[Result | InferdError]:
        """Never raises, because a second try would advance a state twice."""
        results: dict[int, Result | InferdError] = {}
        left = list(enumerate(items))
        while left:
            together: list[tuple[int, Item]] = []
            later: list[tuple[int, Item]] = []
            seen: set[int] = set()
            for place, item in left:
                if id(item.prepared) in seen:
                    later.append((place, item))
                else:
                    seen.add(id(item.prepared))
                    together.append((place, item))
            answers = self._together([item for _, item in together])
            results.update(zip([place for place, _ in together], answers, strict=True))
            left = later
        return [results[place] for place in range(len(items))]

    def _together(self, items: Sequence[Item]) -> Sequence[Result | InferdError]:
        try:
            return self._computed(items)
        except Exception as error:
            if len(items) == 1:
                return [ends.public_error(items[0].request_id, error)]
        return [self._together([item])[0] for item in items]

    def _computed(self, items: Sequence[Item]) -> list[Result | InferdError]:
        sequences = [_sequence(item) for item in items]
        inputs: dict[str, Array] = {}
        for spec in self._given:
            arrays = [item.inputs[spec.name] for item in items if spec.name in item.inputs]
            if arrays:
                inputs[spec.name] = _joined(arrays, 0) if spec.name in self._with_rows else arrays[0]
        for spec in self._states.values():
            states = [self._state(item, sequence, spec) for item, sequence in zip(items, sequences, strict=True)]
            inputs[spec.name] = _joined(states, self._axes[spec.name] or 0)
        whole = Item(request_id=items[0].request_id, inputs=inputs, rows=sum(s.rows for s in sequences))
        self._runtime.prepare(whole)
        (result,) = self._runtime.predict([whole])
        if isinstance(result, InferdError):
            raise result
        answers: list[Result | InferdError] = []
        begin = 0
        for item, sequence in zip(items, sequences, strict=True):
            end = begin + sequence.rows
            sequence.state = {
                spec.name: self._part(result.outputs[output], self._axes[spec.name], begin, end)
                for output, spec in self._states.items()
            }
            if item.sequence_end and self._sequences.get(sequence.key) is sequence:
                del self._sequences[sequence.key]
            outputs = {
                spec.name: self._part(result.outputs[spec.name], 0 if len(items) > 1 else None, begin, end)
                for spec in self._answer_specs
                if spec.name in result.outputs
            }
            answers.append(Result(outputs=outputs, stages_s=result.stages_s))
            begin = end
        return answers

    def _state(self, item: Item, sequence: _Sequence, spec: TensorSpec) -> Array:
        """The state that the client sent, else that of the last request, else zeros."""
        given = item.inputs.get(spec.name)
        if given is not None:
            return given
        if sequence.state is not None:
            return sequence.state[spec.name]
        shape = [sequence.rows if size == -1 else size for size in spec.shape]
        return np.zeros(shape, NUMPY[spec.datatype])

    @staticmethod
    def _part(array: Array, axis: int | None, begin: int, end: int) -> Array:
        """One request's part, a copy: a view would hold the whole batch for as long as the sequence lives."""
        if axis is None or array.shape[axis] == end - begin:
            return array
        return np.ascontiguousarray(array[(slice(None),) * axis + (slice(begin, end),)])

    def close(self) -> None:
        self._sequences.clear()
        self._runtime.close()


def _sequence(item: Item) -> _Sequence:
    assert isinstance(item.prepared, _Sequence), "the item was not prepared"
    return item.prepared


def _joined(arrays: Sequence[Array], axis: int) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis)


def _matched(
    name: str, states: Mapping[str, str], inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]
) -> dict[str, TensorSpec]:
    """State outputs to the inputs they become."""
    problems = []
    found: dict[str, TensorSpec] = {}
    for output, into in states.items():
        gives, takes = outputs.get(output), inputs.get(into)
        if gives is None:
            problems.append(f"there is no output {output!r}; there are {', '.join(outputs)}")
        elif takes is None:
            problems.append(f"there is no input {into!r}; there are {', '.join(inputs)}")
        elif gives.datatype != takes.datatype:
            problems.append(f"{output!r} is {gives.datatype}, and {into!r} takes {takes.datatype}")
        elif len(gives.shape) != len(takes.shape) or any(
            -1 not in (has, wants) and has != wants for has, wants in zip(gives.shape, takes.shape, strict=True)
        ):
            problems.append(f"{output!r} is {list(gives.shape)}, and {into!r} takes {list(takes.shape)}")
        else:
            found[output] = takes
    if problems:
        raise ModelLoadError(
            f"models.{name}.sequence.states does not fit the artifact: {'; '.join(problems)}.", param="sequence.states"
        )
    return found


def _axis_of(name: str, spec: TensorSpec) -> int | None:
    """Along which dimension the states of several sequences are stacked; None: they cannot be."""
    free = [axis for axis, size in enumerate(spec.shape) if size == -1]
    if len(free) > 1:
        raise ModelLoadError(
            f"The state {spec.name!r} of {name} has the shape {list(spec.shape)}: more than one of its dimensions is "
            "free, so it cannot be begun with zeros. Export the model with the others fixed.",
            param="sequence.states",
        )
    return free[0] if free else None
