"""The execution of a pipeline: operations and models as one model, run step by step in one worker.

Tensors go from step to step by reference. Each request goes through the operations alone. At a step that is a model,
and at operations that cost little more than their call, the rows of several requests are computed together as far as
the step allows. Between two steps the requests that were cancelled or have expired leave. Knows operations and
runtimes, and not how they were loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from inferd import clock
from inferd.errors import Cancelled, DeadlineExceeded, InferdError, InternalError, InvalidRequest
from inferd.predict.batcher import Limits
from inferd.predict.check import Checker
from inferd.predict.codecs.port import DecodedRequest
from inferd.predict.contract import Array, Contract
from inferd.predict.pipelines.wiring import Tensor, Wiring
from inferd.predict.runtime import Item, Result, Runtime
from inferd.predict.steps.operation import Function, dense

_log = logging.getLogger("inferd.predict.pipeline")

MAX_UNINTERRUPTED_S = 0.001
"""Seconds of operations before the first model after which other requests and cancellations are read."""

_SMALL_BYTES = 64 << 10  # of a request's tensor: copying more costs longer than a call of its own


class StepModel:
    """A model as a step of a pipeline."""

    def __init__(self, runtime: Runtime, limits: Limits) -> None:
        self.runtime = runtime
        self.checker = Checker(runtime.contract)
        self.max_rows = limits.max_rows
        self._max_size = limits.max_size
        contract = runtime.contract
        self._is_together = limits.mode != "off" and bool(contract.max_batch_size or contract.max_items)

    def batches(self, items: Sequence[Item]) -> list[list[Item]]:
        """The items in batches that may be computed together, in their order."""
        if not self._is_together:
            return [[item] for item in items]
        found: list[list[Item]] = []
        open_batches: dict[object, tuple[list[Item], int, int]] = {}
        for item in items:
            batch, rows, size = open_batches.get(item.bucket, ([], 0, 0))
            fits = rows + item.rows <= self.max_rows and not (self._max_size and size + item.size > self._max_size)
            if not batch or not fits:
                batch, rows, size = [], 0, 0
                found.append(batch)
            batch.append(item)
            open_batches[item.bucket] = (batch, rows + item.rows, size + item.size)
        return found


class _Stage(NamedTuple):
    """Steps that run without interruption: a model, an operation, or several cheap operations.

    ``reads``: the tensors of earlier steps that operations on several requests need; empty where each request is
    computed alone. ``gives``: the tensors of these steps that are read later.
    """

    places: tuple[int, ...]
    reads: tuple[Tensor, ...]
    gives: tuple[Tensor, ...]


class _Flow:
    """One item on its way through the steps, with the tensors known so far."""

    __slots__ = ("answer", "item", "num_tokens", "parameters", "seconds", "tensors")

    def __init__(self, item: Item) -> None:
        self.item = item
        self.tensors: dict[Tensor, Array] = {Tensor(None, name): array for name, array in item.inputs.items()}
        self.seconds: dict[str, float] = {}
        self.parameters: dict[str, object] = {}
        self.num_tokens = 0
        self.answer: InferdError | None = None  # set when it has failed


class Pipeline:
    """A ``Runtime`` made of others. It is ``Staged``: other requests may be read between two of its steps."""

    def __init__(
        self,
        wiring: Wiring,
        functions: Mapping[int, Function],
        models: Mapping[int, StepModel],
        contract: Contract,
        choosing: frozenset[int] = frozenset(),
        together: Mapping[int, Callable[[int], bool]] | None = None,
    ) -> None:
        self.contract = contract
        self._choosing = choosing  # steps that need only one of their inputs
        self._wiring = wiring
        self._functions = functions
        self._models = models
        self._together = together or {}  # operations that may compute the rows of several requests in one call
        self._early, late = _split(wiring, models, self._together)
        self._stages = _stages(wiring, late, self._together)
        self._last_reads = _last_reads(wiring)
        self._wanted = {place: _wanted(place, model, wiring) for place, model in models.items()}

    def prepare(self, item: Item) -> None:
        """Nothing: decoding a request's photos may take long, so it is a step of its own."""

    def predict(self, items: Sequence[Item]) -> Sequence[Result | InferdError]:
        steps = self.stages(items)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                results: Sequence[Result | InferdError] = end.value
                return results

    def stages(self, items: Sequence[Item]) -> Generator[None, None, Sequence[Result | InferdError]]:
        """``predict``, one step at each ``next``."""
        flows = [_Flow(item) for item in items]
        yielded_at = clock.now()
        for flow in flows:
            self._run_early(flow)
            if clock.now() - yielded_at > MAX_UNINTERRUPTED_S:
                yield
                yielded_at = clock.now()
        for number, stage in enumerate(self._stages):
            if number:
                yield
            live = [flow for flow in flows if _is_alive(flow)]
            if not live:
                break
            if stage.places[0] in self._models:
                self._compute(stage.places[0], live)
            else:
                self._operate_all(stage, live)
            for place in stage.places:
                self._forget(place, live)
        return [flow.answer or self._result(flow) for flow in flows]

    def close(self) -> None:
        for model in self._models.values():
            model.runtime.close()

    # -- one step -----------------------------------------------------------------------------

    def _run_early(self, flow: _Flow) -> None:
        """Run the operations that depend on no model, for one item."""
        try:
            for place in self._early:
                if not _is_alive(flow):
                    return
                self._operate(place, flow)
                self._forget(place, (flow,))
        except InferdError as error:
            flow.answer = error

    def _operate_all(self, stage: _Stage, flows: Sequence[_Flow]) -> None:
        """Run operations for all items: in one call each for items whose rows can be concatenated."""
        alone = list(flows)
        if stage.reads and len(flows) > 1:
            groups: dict[object, list[_Flow]] = {}
            for flow in flows:
                groups.setdefault(_form(stage.reads, flow.tensors), []).append(flow)
            alone = groups.pop(None, [])
            for group in groups.values():
                if len(group) == 1 or not self._operate_together(stage, group):
                    alone += group
        for flow in alone:
            try:
                for place in stage.places:
                    self._operate(place, flow)
            except InferdError as error:
                flow.answer = error

    def _operate_together(self, stage: _Stage, flows: Sequence[_Flow]) -> bool:
        """Run operations for several items in one call each. False: nothing was computed, and each item is to be
        computed alone, as one of them may be invalid."""
        tensors = {tensor: np.concatenate([flow.tensors[tensor] for flow in flows]) for tensor in stage.reads}
        first = stage.reads[0]
        sizes = [len(flow.tensors[first]) for flow in flows]
        shape, seconds = (sum(sizes),), dict[str, float]()
        for place in stage.places:
            began = clock.now()
            inputs = {name: tensors[tensor] for name, tensor in self._wiring.inputs[place].items()}
            if not all(self._together[place](array.ndim) for array in inputs.values()):
                return False
            try:
                found = self._functions[place](inputs)
            except InvalidRequest:
                return False
            if any(array.shape[:1] != shape for array in found.values()):
                return False
            for name, array in found.items():
                tensors[Tensor(place, name)] = array
            seconds[self._wiring.names[place]] = clock.now() - began
        given = [(tensor, tensors[tensor]) for tensor in stage.gives]
        begin = 0
        for flow, rows in zip(flows, sizes, strict=True):
            end = begin + rows
            for tensor, array in given:
                flow.tensors[tensor] = array[begin:end]
            flow.seconds.update(seconds)
            begin = end
        return True

    def _operate(self, place: int, flow: _Flow) -> None:
        began = clock.now()
        inputs = self._inputs(place, flow)
        if len(inputs) < len(self._wiring.inputs[place]) and place not in self._choosing:
            return  # the request left out an input that this step needs
        for name, array in self._functions[place](inputs).items():
            flow.tensors[Tensor(place, name)] = array
        _add_time(flow, self._wiring.names[place], began)

    def _compute(self, place: int, flows: Sequence[_Flow]) -> None:
        """Run a step that is a model, for all items."""
        began = clock.now()
        name, model = self._wiring.names[place], self._models[place]
        items: list[Item] = []
        owners: dict[int, _Flow] = {}
        for flow in flows:
            try:
                item = self._item(place, model, flow)
            except InvalidRequest as error:
                flow.answer = InvalidRequest(f"Step {name}: {error.message}", param=error.param, code=error.code)
                continue
            items.append(item)
            owners[id(item)] = flow
        for batch in model.batches(items):
            for item, result in zip(batch, self._predict(name, model, batch), strict=True):
                flow = owners[id(item)]
                if isinstance(result, InferdError):
                    flow.answer = result
                    continue
                flow.tensors |= {Tensor(place, output): array for output, array in result.outputs.items()}
                flow.num_tokens += result.num_tokens
                flow.parameters |= result.parameters
                for stage, seconds in result.stages_s.items():
                    flow.seconds[f"{name}.{stage}"] = seconds
        for flow in flows:
            _add_time(flow, name, began)

    def _predict(self, name: str, model: StepModel, batch: Sequence[Item]) -> Sequence[Result | InferdError]:
        """One answer for each item. The items of a batch that fails are computed one by one, at this step only: one bad
        item fails alone, and earlier steps, which may have changed a state, are not computed twice."""
        try:
            results = model.runtime.predict(batch)
            if len(results) == len(batch):
                return results
            raise InternalError(f"The model of step {name} gave {len(results)} results for {len(batch)} requests.")
        except InferdError as error:
            if len(batch) == 1:
                return [error]
        except Exception as error:  # a model may raise anything
            _log.error("step %s failed for %d requests", name, len(batch), exc_info=error)
            if len(batch) == 1:
                return [InternalError(f"Step {name} failed on this request; the server's log has the details.")]
        return [self._predict(name, model, [item])[0] for item in batch]

    def _item(self, place: int, model: StepModel, flow: _Flow) -> Item:
        """The input of a model for one request. Raises InvalidRequest."""
        whole = flow.item
        decoded = DecodedRequest(inputs={name: dense(array) for name, array in self._inputs(place, flow).items()})
        inputs, rows = model.checker.check(decoded)
        item = whole.about(inputs, self._wanted[place], rows, rows)
        model.runtime.prepare(item)
        return item

    def _inputs(self, place: int, flow: _Flow) -> dict[str, Array]:
        """The inputs of a step, without optional ones that the request left out."""
        return {
            name: flow.tensors[tensor] for name, tensor in self._wiring.inputs[place].items() if tensor in flow.tensors
        }

    def _forget(self, place: int, flows: Sequence[_Flow]) -> None:
        """Free the tensors that no later step reads: a decoded photo is larger than all that follows."""
        for tensor in self._last_reads.get(place, ()):
            for flow in flows:
                flow.tensors.pop(tensor, None)

    def _result(self, flow: _Flow) -> Result | InferdError:
        try:
            outputs = {
                name: dense(flow.tensors[tensor])
                for name, tensor in self._wiring.outputs.items()
                if not flow.item.wanted or name in flow.item.wanted
            }
        except InvalidRequest as error:
            return error
        return Result(outputs=outputs, num_tokens=flow.num_tokens, parameters=flow.parameters, stages_s=flow.seconds)


def _is_alive(flow: _Flow) -> bool:
    """Whether the next step is to be computed: the request has not failed, was not cancelled, and is in time."""
    item = flow.item
    if flow.answer is None and item.is_cancelled:
        flow.answer = Cancelled("The request was cancelled.")
    elif flow.answer is None and item.expires_at is not None and clock.now() >= item.expires_at:
        flow.answer = DeadlineExceeded("The request's deadline passed between two steps of the pipeline.")
    return flow.answer is None


def _add_time(flow: _Flow, name: str, began: float) -> None:
    flow.seconds[name] = clock.now() - began


def _form(reads: Sequence[Tensor], tensors: Mapping[Tensor, Array]) -> object:
    """What the inputs of two requests must have in common to be computed in one call. None: these are computed alone,
    because they have no rows, or are so large that concatenating them costs more than a call."""
    form: list[object] = []
    rows = 0
    for tensor in reads:
        array = tensors.get(tensor)
        if array is None or not array.ndim or array.nbytes > _SMALL_BYTES:
            return None
        rows = rows or len(array)
        if not rows or len(array) != rows:
            return None
        form.append((array.dtype, array.shape[1:]))
    return tuple(form)


def _stages(wiring: Wiring, late: Sequence[int], together: Collection[int]) -> list[_Stage]:
    """The steps in order. Consecutive operations that may compute several requests at once are one stage."""
    groups: list[list[int]] = []
    for place in late:
        if groups and place in together and groups[-1][-1] in together:
            groups[-1].append(place)
        else:
            groups.append([place])
    found = []
    for group in groups:
        reads = {
            tensor: None for place in group for tensor in wiring.inputs[place].values() if tensor.step not in group
        }
        outside = [wiring.inputs[place].values() for place in wiring.order if place not in group]
        wanted = {tensor for tensors in (*outside, wiring.outputs.values()) for tensor in tensors}
        gives = tuple(tensor for tensor in wanted if tensor.step in group)
        is_shared = group[0] in together
        found.append(_Stage(tuple(group), tuple(reads) if is_shared else (), gives))
    return found


def _split(
    wiring: Wiring, models: Mapping[int, StepModel], together: Collection[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The early steps, which each request goes through by itself, and the late ones, both in order. No early step
    depends on a model, and the last of them does not compute several requests at once."""
    behind: set[int] = set()
    for place in wiring.order:
        if place in models or any(tensor.step in behind for tensor in wiring.inputs[place].values()):
            behind.add(place)
    early = [place for place in wiring.order if place not in behind]
    while early and early[-1] in together:
        behind.add(early.pop())
    return tuple(early), tuple(place for place in wiring.order if place in behind)


def _last_reads(wiring: Wiring) -> dict[int, tuple[Tensor, ...]]:
    """The tensors that each step reads as the last one."""
    last: dict[Tensor, int] = {}
    for place in wiring.order:
        last |= dict.fromkeys(wiring.inputs[place].values(), place)
    found: dict[int, tuple[Tensor, ...]] = {}
    for tensor, place in last.items():
        if tensor not in wiring.outputs.values():
            found[place] = (*found.get(place, ()), tensor)
    return found


def _wanted(place: int, model: StepModel, wiring: Wiring) -> tuple[str, ...]:
    """The model's outputs that are read; empty: all of them."""
    read = {tensor for inputs in wiring.inputs for tensor in inputs.values()} | set(wiring.outputs.values())
    names = tuple(spec.name for spec in model.runtime.contract.outputs)
    wanted = tuple(name for name in names if Tensor(place, name) in read)
    return () if wanted == names else wanted
