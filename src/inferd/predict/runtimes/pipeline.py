"""Pipelines: operations and models as one model, run step by step in one worker.

Tensors go from step to step by reference. Each request flows through the operations alone; at a step that is a model the
rows of all that are computed together meet, as far as that model allows, and so they do at operations that cost little more than
their call. Between two steps whoever is no longer waited
for leaves. Knows operations and runtimes, no artifact of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from inferd import clock
from inferd.config import ModelConfig, PipelineConfig
from inferd.config.pipelines import Spec, connections
from inferd.errors import Cancelled, DeadlineExceeded, InferdError, InternalError, InvalidRequest, ModelLoadError
from inferd.predict.batcher import Limits
from inferd.predict.check import Checker
from inferd.predict.codecs.port import DecodedRequest
from inferd.predict.contract import Array, Contract
from inferd.predict.load import limits_for, load_runtime
from inferd.predict.runtime import Item, Result, Runtime
from inferd.predict.steps.operation import Function, Operation, dense
from inferd.predict.wiring import (
    Described,
    Part,
    Tensor,
    Wiring,
    chain,
    connect,
    describe,
    is_one_by_one,
    model_part,
    optional_inputs,
    parts_of,
    refuse,
)
from inferd.registry.artifact import artifact_of
from inferd.registry.source import Progress
from inferd.types import TensorSpec

_log = logging.getLogger("inferd.predict.pipeline")

HEARD_EVERY_S = 0.001
"""Operations before the first model go on for so long until others are heard."""

_SMALL_BYTES = 64 << 10  # of a request's tensor: more is faster left where it is

MAX_ROWS = 256
"""Rows taken together by a pipeline of operations alone."""


class _Model:
    """A model as a step."""

    def __init__(self, runtime: Runtime, limits: Limits) -> None:
        self.runtime = runtime
        self.checker = Checker(runtime.contract)
        self.max_rows = limits.max_rows
        self._max_size = limits.max_size
        contract = runtime.contract
        self._is_together = limits.mode != "off" and bool(contract.max_batch_size or contract.max_items)

    def batches(self, items: Sequence[Item]) -> list[list[Item]]:
        """The items as they may be computed together, each batch in their order."""
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
    """Steps that are taken without a look at who has left: a model, an operation, or cheap operations in a row.

    ``reads``: what the latter take from before, empty where requests are computed one by one; ``gives``: what of theirs
    is read later.
    """

    places: tuple[int, ...]
    reads: tuple[Tensor, ...]
    gives: tuple[Tensor, ...]


class _Flow:
    """One item on its way."""

    __slots__ = ("answer", "item", "num_tokens", "parameters", "seconds", "tensors")

    def __init__(self, item: Item) -> None:
        self.item = item
        self.tensors: dict[Tensor, Array] = {Tensor(None, name): array for name, array in item.inputs.items()}
        self.seconds: dict[str, float] = {}
        self.parameters: dict[str, object] = {}
        self.num_tokens = 0
        self.answer: InferdError | None = None  # once it has failed


class Pipeline:
    """A ``Runtime`` over others, and a ``Staged`` one: between two of its steps others may be heard."""

    def __init__(
        self,
        wiring: Wiring,
        functions: Mapping[int, Function],
        models: Mapping[int, _Model],
        contract: Contract,
        choosing: frozenset[int] = frozenset(),
        together: Mapping[int, Callable[[int], bool]] | None = None,
    ) -> None:
        self.contract = contract
        self._choosing = choosing  # steps that take whichever of their inputs is there
        self._wiring = wiring
        self._functions = functions
        self._models = models
        self._together = together or {}  # operations that may compute the rows of several requests in one call
        self._early, late = _split(wiring, models, self._together)
        self._stages = _stages(wiring, late, self._together)
        self._last_reads = _last_reads(wiring)
        self._wanted = {place: _wanted(place, model, wiring) for place, model in models.items()}

    def prepare(self, item: Item) -> None:
        """Nothing: decoding a request's photos may take long, and between two steps others are heard."""

    def predict(self, items: Sequence[Item]) -> Sequence[Result | InferdError]:
        steps = self.stages(items)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                results: Sequence[Result | InferdError] = end.value
                return results

    def stages(self, items: Sequence[Item]) -> Generator[None, None, Sequence[Result | InferdError]]:
        """The same, one step at each ``next``."""
        flows = [_Flow(item) for item in items]
        heard_at = clock.now()
        for flow in flows:
            self._begin(flow)
            if clock.now() - heard_at > HEARD_EVERY_S:
                yield
                heard_at = clock.now()
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

    def _begin(self, flow: _Flow) -> None:
        """The operations that wait for no model, which concern one item alone."""
        try:
            for place in self._early:
                if not _is_alive(flow):
                    return
                self._operate(place, flow)
                self._forget(place, (flow,))
        except InferdError as error:
            flow.answer = error

    def _operate_all(self, stage: _Stage, flows: Sequence[_Flow]) -> None:
        """Operations for all: in one call each for those whose rows can lie behind each other."""
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
        """Whether it was done; else each is to be tried alone, as one of them may be at fault."""
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
            return  # on a way that this request does not go
        for name, array in self._functions[place](inputs).items():
            flow.tensors[Tensor(place, name)] = array
        _note(flow, self._wiring.names[place], began)

    def _compute(self, place: int, flows: Sequence[_Flow]) -> None:
        """One model's step for all."""
        began = clock.now()
        name, model = self._wiring.names[place], self._models[place]
        asked: list[Item] = []
        owners: dict[int, _Flow] = {}
        for flow in flows:
            try:
                item = self._item(place, model, flow)
            except InvalidRequest as error:
                flow.answer = InvalidRequest(f"Step {name}: {error.message}", param=error.param, code=error.code)
                continue
            asked.append(item)
            owners[id(item)] = flow
        for batch in model.batches(asked):
            for item, result in zip(batch, self._predicted(name, model, batch), strict=True):
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
            _note(flow, name, began)

    def _predicted(self, name: str, model: _Model, batch: Sequence[Item]) -> Sequence[Result | InferdError]:
        """One answer each. A batch that fails is computed one by one at this step: one bad item fails alone, and no step
        before it, which may have changed a state, is computed twice."""
        try:
            results = model.runtime.predict(batch)
            if len(results) == len(batch):
                return results
            raise InternalError(f"The model of step {name} gave {len(results)} results for {len(batch)} requests.")
        except InferdError as error:
            if len(batch) == 1:
                return [error]
        except Exception as error:  # whatever a model raises
            _log.error("step %s failed for %d requests", name, len(batch), exc_info=error)
            if len(batch) == 1:
                return [InternalError(f"Step {name} failed on this request; the server's log has the details.")]
        return [self._predicted(name, model, [item])[0] for item in batch]

    def _item(self, place: int, model: _Model, flow: _Flow) -> Item:
        """What a model is asked for a request. Raises InvalidRequest."""
        whole = flow.item
        decoded = DecodedRequest(inputs={name: dense(array) for name, array in self._inputs(place, flow).items()})
        inputs, rows = model.checker.check(decoded)
        item = whole.about(inputs, self._wanted[place], rows, rows)
        model.runtime.prepare(item)
        return item

    def _inputs(self, place: int, flow: _Flow) -> dict[str, Array]:
        """Without optional inputs of the request that it left out."""
        return {
            name: flow.tensors[tensor] for name, tensor in self._wiring.inputs[place].items() if tensor in flow.tensors
        }

    def _forget(self, place: int, flows: Sequence[_Flow]) -> None:
        """Let go of what no later step reads: a decoded photo is larger than all that follows."""
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
    """Whether anybody waits for the next step."""
    item = flow.item
    if flow.answer is None and item.is_cancelled:
        flow.answer = Cancelled("The request was cancelled.")
    elif flow.answer is None and item.expires_at is not None and clock.now() >= item.expires_at:
        flow.answer = DeadlineExceeded("The request's deadline passed between two steps of the pipeline.")
    return flow.answer is None


def _note(flow: _Flow, name: str, began: float) -> None:
    flow.seconds[name] = clock.now() - began


def _form(reads: Sequence[Tensor], tensors: Mapping[Tensor, Array]) -> object:
    """What the inputs of two requests must have in common to be computed in one call; None: these are computed alone,
    as they have no rows or are so large that laying them behind each other costs more than a call."""
    form: list[object] = []
    rows = 0
    for tensor in reads:
        array = tensors.get(tensor)
        if array is None or not array.ndim or array.nbytes > _SMALL_BYTES:
            return None
        rows = rows or len(array)
        is_ragged = array.dtype == np.object_ and array.size and isinstance(array.flat[0], np.ndarray)
        if not rows or len(array) != rows or is_ragged:
            return None
        form.append((array.dtype, array.shape[1:]))
    return tuple(form)


def _stages(wiring: Wiring, late: Sequence[int], together: Collection[int]) -> list[_Stage]:
    """The steps one after the other; operations that may compute several requests at once are one stage where they follow
    each other."""
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
    wiring: Wiring, models: Mapping[int, _Model], together: Collection[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The steps that each request goes through by itself, and those after them, both in order: no early step waits for a
    model, and the last of them is none that may compute several requests at once."""
    behind: set[int] = set()
    for place in wiring.order:
        if place in models or any(tensor.step in behind for tensor in wiring.inputs[place].values()):
            behind.add(place)
    early = [place for place in wiring.order if place not in behind]
    while early and early[-1] in together:
        behind.add(early.pop())
    return tuple(early), tuple(place for place in wiring.order if place in behind)


def _last_reads(wiring: Wiring) -> dict[int, tuple[Tensor, ...]]:
    """What is read for the last time by each step."""
    last: dict[Tensor, int] = {}
    for place in wiring.order:
        last |= dict.fromkeys(wiring.inputs[place].values(), place)
    found: dict[int, tuple[Tensor, ...]] = {}
    for tensor, place in last.items():
        if tensor not in wiring.outputs.values():
            found[place] = (*found.get(place, ()), tensor)
    return found


def _wanted(place: int, model: _Model, wiring: Wiring) -> tuple[str, ...]:
    """The model's outputs that anything reads; empty: all of them."""
    read = {tensor for inputs in wiring.inputs for tensor in inputs.values()} | set(wiring.outputs.values())
    names = tuple(spec.name for spec in model.runtime.contract.outputs)
    wanted = tuple(name for name in names if Tensor(place, name) in read)
    return () if wanted == names else wanted


# -- loading -------------------------------------------------------------------------------------


def load(name: str, path: Path | str, config: ModelConfig, progress: Progress) -> Pipeline:
    """The pipeline that ``config`` describes, with all its models. Raises ModelLoadError with all that is wrong."""
    pipeline = config.pipeline
    problems: list[str] = []
    parts = parts_of(pipeline.steps, problems)
    refuse(name, problems)
    models: dict[int, _Model] = {}
    loaded: dict[str, _Model] = {}  # a model that is several steps is there once
    for place, step in enumerate(pipeline.steps):
        if step.model is None:
            continue
        if step.model not in loaded:
            if step.model not in pipeline.models:
                raise ModelLoadError(
                    f"The pipeline {name!r} has no settings of the model {step.model!r}; list it in the same file or below "
                    "pipeline.models.",
                    param="pipeline.models",
                )
            loaded[step.model] = _load_model(name, step.model, pipeline, config, progress)
        models[place] = loaded[step.model]
        parts[place] = model_part(models[place].runtime.contract)
    return _built(name, pipeline, parts, models, config)


def around(name: str, runtime: Runtime, config: ModelConfig) -> Pipeline:
    """A loaded model with the operations of ``preprocess`` before and those of ``postprocess`` after it.

    Raises ModelLoadError with all that is wrong.
    """
    problems: list[str] = []
    before = parts_of(config.preprocess, problems)
    after = parts_of(config.postprocess, problems)
    refuse(name, problems)
    model = _as_step(name, runtime, config)
    parts = [*before, model_part(runtime.contract), *after]
    pipeline = chain(config.preprocess, name, config.postprocess, parts)
    return _built(name, pipeline, parts, {len(before): model}, config)


def _load_model(name: str, model: str, pipeline: PipelineConfig, config: ModelConfig, progress: Progress) -> _Model:
    settings = msgspec.convert(pipeline.models[model], ModelConfig)
    settings = msgspec.structs.replace(settings, replicas=config.replicas, threads=settings.threads or config.threads)
    artifact = artifact_of(settings, progress)
    if artifact.kind != "predict":
        raise ModelLoadError(
            f"The pipeline {name!r} has the step {model!r}, which is a language model; a pipeline's steps make predictions. "
            "Serve it beside the pipeline.",
            param="pipeline",
        )
    return _as_step(model, load_runtime(model, artifact, settings, progress), settings)


def _as_step(name: str, runtime: Runtime, config: ModelConfig) -> _Model:
    contract = runtime.contract
    if contract.is_decoupled:
        raise ModelLoadError(f"The model {name!r} gives several answers to one request, which no pipeline takes.")
    return _Model(runtime, limits_for(contract, config))


def _built(
    name: str, pipeline: PipelineConfig, parts: list[Part], models: Mapping[int, _Model], config: ModelConfig
) -> Pipeline:
    problems: list[str] = []
    wiring = connect(pipeline, parts, problems)
    problems += [problem.sentence for problem in connections((), pipeline, wiring.names)]
    if not problems:
        described = describe(pipeline, wiring, parts, problems)
    refuse(name, problems)
    functions = {place: part.load() for place, part in enumerate(parts) if isinstance(part, Operation)}
    choosing = frozenset(place for place, part in enumerate(parts) if isinstance(part, Operation) and part.chooses)
    together = {
        place: part.is_by_rows for place, part in enumerate(parts) if isinstance(part, Operation) and part.is_by_rows(2)
    }
    contract = _contract(described, models, optional_inputs(wiring, parts))
    return Pipeline(wiring, functions, models, contract, choosing, together)


def _contract(described: Described, models: Mapping[int, _Model], optional: frozenset[str]) -> Contract:
    contracts = [model.runtime.contract for model in models.values()]
    inputs = tuple(
        msgspec.structs.replace(_tensor_spec(name, spec), is_optional=name in optional)
        for name, spec in described.inputs.items()
    )
    outputs = tuple(_tensor_spec(name, spec) for name, spec in described.outputs.items())
    has_rows = all(contract.max_batch_size or is_one_by_one(contract) for contract in contracts) and all(
        spec.shape[:1] == (-1,) for spec in (*inputs, *outputs)
    )
    # Requests may meet at a model although their rows are not told apart: states of different sequences, say.
    can_meet = bool(contracts) and all(contract.max_batch_size or contract.max_items for contract in contracts)
    max_rows = min(
        (1 if is_one_by_one(model.runtime.contract) else model.max_rows for model in models.values()), default=MAX_ROWS
    )
    names = {spec.name for spec in inputs}, {spec.name for spec in outputs}
    tasks = ["predict"]
    if "text" in names[0] and "embedding" in names[1]:
        tasks.append("embed")
    if "text" in names[0] and "probabilities" in names[1]:
        tasks.append("classify")
    return Contract(
        inputs=inputs,
        outputs=outputs,
        max_batch_size=max_rows if has_rows else 0,
        because="by_nature" if has_rows else None,
        tasks=tuple(tasks),
        platform="ensemble",
        is_stateful=any(contract.is_stateful for contract in contracts),
        max_items=max_rows if can_meet and not has_rows else 0,
        num_parameters=sum(contract.num_parameters for contract in contracts),
        dtype=contracts[0].dtype if contracts else "float32",
        max_tokens=max((contract.max_tokens for contract in contracts), default=0),
        any_rank=tuple(name for name, spec in described.inputs.items() if spec.shape is None),
    )


def _tensor_spec(name: str, spec: Spec) -> TensorSpec:
    return TensorSpec(name, spec.datatype, (-1,) if spec.shape is None else spec.shape, labels=spec.labels)
