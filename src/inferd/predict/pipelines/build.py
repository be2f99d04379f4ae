"""Building a pipeline from its configuration and its loaded models: wiring, operations and the contract.

``inferd.predict.runtimes.pipeline`` loads the models, and ``execution.py`` runs the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from inferd.config import ModelConfig, PipelineConfig
from inferd.config.pipeline_graph import Spec, connections
from inferd.errors import ModelLoadError
from inferd.predict.contract import Contract
from inferd.predict.limits import limits_for
from inferd.predict.pipelines.execution import Pipeline, StepModel
from inferd.predict.pipelines.wiring import (
    Described,
    Part,
    chain,
    connect,
    describe,
    is_one_by_one,
    model_part,
    optional_inputs,
    parts_of,
    refuse,
)
from inferd.predict.runtime import Runtime
from inferd.predict.steps.operation import Operation
from inferd.types import TensorSpec

MAX_ROWS = 256
"""Rows computed together by a pipeline of operations alone."""


def around(name: str, runtime: Runtime, config: ModelConfig) -> Pipeline:
    """A loaded model with the operations of ``preprocess`` before and those of ``postprocess`` after it.

    Raises ModelLoadError with all that is wrong.
    """
    problems: list[str] = []
    before = parts_of(config.preprocess, problems)
    after = parts_of(config.postprocess, problems)
    refuse(name, problems)
    model = step_model(name, runtime, config)
    parts = [*before, model_part(runtime.contract), *after]
    pipeline = chain(config.preprocess, name, config.postprocess, parts)
    return build(name, pipeline, parts, {len(before): model}, config)


def step_model(name: str, runtime: Runtime, config: ModelConfig) -> StepModel:
    contract = runtime.contract
    if contract.is_decoupled:
        raise ModelLoadError(f"The model {name!r} gives several answers to one request, which no pipeline takes.")
    return StepModel(runtime, limits_for(contract, config))


def build(
    name: str, pipeline: PipelineConfig, parts: list[Part], models: Mapping[int, StepModel], config: ModelConfig
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
    contract = _contract(described, models, optional_inputs(wiring, parts), wiring.names)
    return Pipeline(wiring, functions, models, contract, choosing, together)


def _contract(
    described: Described, models: Mapping[int, StepModel], optional: frozenset[str], names: Sequence[str]
) -> Contract:
    contracts = [model.runtime.contract for model in models.values()]
    inputs = tuple(
        msgspec.structs.replace(_tensor_spec(name, spec), is_optional=name in optional)
        for name, spec in described.inputs.items()
    )
    outputs = tuple(_tensor_spec(name, spec) for name, spec in described.outputs.items())
    has_rows = all(contract.max_batch_size or is_one_by_one(contract) for contract in contracts) and all(
        spec.shape[:1] == (-1,) for spec in (*inputs, *outputs)
    )
    # Requests may be computed together although their rows are not told apart, as states of different sequences.
    can_meet = bool(contracts) and all(contract.max_batch_size or contract.max_items for contract in contracts)
    max_rows = min(
        (1 if is_one_by_one(model.runtime.contract) else model.max_rows for model in models.values()), default=MAX_ROWS
    )
    is_together = max_rows > 1 and (has_rows or can_meet)
    takes, gives = {spec.name for spec in inputs}, {spec.name for spec in outputs}
    tasks = ["predict"]
    if "text" in takes and "embedding" in gives:
        tasks.append("embed")
    if "text" in takes and "probabilities" in gives:
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
        not_batched="" if is_together else _not_batched(models, names),
    )


def _not_batched(models: Mapping[int, StepModel], names: Sequence[str]) -> str:
    """Why the pipeline's requests are computed one by one: the reason of its first model that has one."""
    reasons = ((names[place], model.runtime.contract.not_batched) for place, model in sorted(models.items()))
    return next((f"the step {name!r}: {reason}" for name, reason in reasons if reason), "")


def _tensor_spec(name: str, spec: Spec) -> TensorSpec:
    return TensorSpec(name, spec.datatype, (-1,) if spec.shape is None else spec.shape, labels=spec.labels)
