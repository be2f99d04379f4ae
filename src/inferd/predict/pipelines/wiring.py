"""The wiring of a pipeline: which tensor each step reads, in which order, with which datatype and shape.

Pure, over the descriptions of operations and loaded models. Computes no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from inferd.config import ModelConfig, PipelineConfig, StepConfig
from inferd.config.pipeline_graph import Reference, Spec, needs, order, read_spec, resolve, step_names
from inferd.errors import ModelLoadError
from inferd.predict.contract import Contract
from inferd.predict.steps.operation import Operation
from inferd.predict.steps.registry import operation
from inferd.registry.artifact import artifact_of
from inferd.registry.source import is_remote
from inferd.types import TensorSpec


class Tensor(NamedTuple):
    """A tensor between steps: a step's output, or an input of the pipeline (step None)."""

    step: int | None
    name: str


class ModelPart(msgspec.Struct, frozen=True):
    """A model as a step: its inputs and outputs for any number of rows."""

    inputs: Mapping[str, Spec]
    outputs: Mapping[str, Spec]
    optional: frozenset[str] = frozenset()


Part = Operation | ModelPart | None
"""What a step does; None: a model that has not been loaded, about which nothing is known."""


class Wiring(msgspec.Struct, frozen=True):
    """A pipeline, ready to run."""

    names: tuple[str, ...]
    order: tuple[int, ...]
    inputs: tuple[Mapping[str, Tensor], ...]  # of each step: its input's name to what it reads
    outputs: Mapping[str, Tensor]


def parts_of(steps: Sequence[StepConfig], problems: list[str]) -> list[Part]:
    """The steps' operations; None for models and for invalid operations, which are added to ``problems``."""
    found: list[Part] = []
    for place, step in enumerate(steps):
        made: Part = None
        if step.op is not None:
            try:
                made = operation(step.op, step.options)
            except ValueError as error:
                problems.append(f"step {place + 1}: {error}")
        found.append(made)
    return found


def check_steps(name: str, model: ModelConfig, *, with_files: bool = True) -> None:
    """Raises ModelLoadError with all problems of a model's operations, and of its models' files unless these are
    checked elsewhere, that are known before loading."""
    problems: list[str] = []
    parts_of((*model.preprocess, *model.postprocess), problems)
    parts = parts_of(model.pipeline.steps, problems)
    if model.is_pipeline and not problems:
        connect(model.pipeline, parts, problems)
    for part, section in model.pipeline.models.items():
        settings = msgspec.convert(section, ModelConfig)
        try:
            if settings.is_pipeline or settings.preprocess or settings.postprocess:
                check_steps(part, settings, with_files=with_files)
            if with_files and not settings.is_pipeline and not is_remote(settings.source):
                artifact_of(settings)
        except ModelLoadError as error:
            problems.append(f"model {part}: {error.message}")
    refuse(name, problems)


def refuse(name: str, problems: Sequence[str]) -> None:
    """Raises ModelLoadError with all of them, if there are any."""
    if len(problems) == 1:
        raise ModelLoadError(f"The steps of {name!r} do not work: {problems[0].rstrip('.')}.", param="pipeline")
    if problems:
        listed = "\n  - ".join(problems)
        raise ModelLoadError(f"The steps of {name!r} have {len(problems)} problems:\n  - {listed}", param="pipeline")


def model_part(contract: Contract) -> ModelPart:
    """A loaded model as a step. A model whose tensors have a first dimension of 1 computes rows one after the other."""
    one_by_one = is_one_by_one(contract)

    def spec(tensor: TensorSpec) -> Spec:
        shape = (-1, *tensor.shape[1:]) if one_by_one else tensor.shape
        return Spec(tensor.datatype, None if tensor.name in contract.any_rank else shape, tensor.labels)

    return ModelPart(
        {tensor.name: spec(tensor) for tensor in contract.inputs},
        {tensor.name: spec(tensor) for tensor in contract.outputs},
        frozenset(tensor.name for tensor in contract.inputs if tensor.is_optional),
    )


def is_one_by_one(contract: Contract) -> bool:
    """Whether the model was made for exactly one row."""
    tensors = (*contract.inputs, *contract.outputs)
    return not contract.max_batch_size and all(tensor.shape[:1] == (1,) for tensor in tensors)


def takes(part: Part) -> tuple[str, ...]:
    """The inputs a step must have."""
    if isinstance(part, ModelPart):
        return tuple(name for name in part.inputs if name not in part.optional)
    return part.takes if part is not None else ()


def may_take(part: Part) -> tuple[str, ...]:
    if isinstance(part, ModelPart):
        return tuple(name for name in part.inputs if name in part.optional)
    return part.may_take if part is not None else ()


def gives(part: Part) -> tuple[str, ...]:
    if isinstance(part, ModelPart):
        return tuple(part.outputs)
    return part.gives if part is not None else ()


def takes_any(part: Part) -> bool:
    """Whether the step reads any inputs, by any names."""
    return isinstance(part, Operation) and not part.takes


def connect(pipeline: PipelineConfig, parts: Sequence[Part], problems: list[str]) -> Wiring:
    """The pipeline's connections; ``problems`` gets a sentence for each that cannot be made.

    ``pipeline`` has passed the configuration's own check: its references name steps and inputs that exist.
    """
    names = step_names(pipeline.steps)
    wired: list[dict[str, Tensor]] = []
    for place, (step, part) in enumerate(zip(pipeline.steps, parts, strict=True)):
        where = f"step {names[place]}"
        if step.inputs:
            found = {
                name: _tensor(resolve(text, pipeline.inputs, names), text, parts, names, f"{where}: ", problems)
                for name, text in step.inputs.items()
            }
        else:
            found = _implied(place, part, pipeline, parts, where, problems)
        wired.append({name: tensor for name, tensor in found.items() if tensor is not None})
        behind_unknown = not step.inputs and place > 0 and parts[place - 1] is None
        if part is None or behind_unknown or takes_any(part):
            if takes_any(part) and not found and not behind_unknown:
                problems.append(f"{where}: it has no inputs")
            continue
        known = (*takes(part), *may_take(part))
        for name in found:
            if name not in known:
                problems.append(f"{where}: it has no input {name!r}; it takes {', '.join(known)}")
        for name in takes(part):
            if name not in found:
                problems.append(f"{where}: its input {name!r} is missing")
    outputs = {
        name: _tensor(resolve(text, pipeline.inputs, names), text, parts, names, f"output {name}: ", problems)
        for name, text in pipeline.outputs.items()
    }
    return Wiring(
        names,
        tuple(order(needs(pipeline, names))),
        tuple(wired),
        {name: tensor for name, tensor in outputs.items() if tensor is not None},
    )


def _tensor(
    reference: Reference | None,
    text: str,
    parts: Sequence[Part],
    names: tuple[str, ...],
    where: str,
    problems: list[str],
) -> Tensor | None:
    if reference is None:
        problems.append(f"{where}{text!r} is neither an input of the pipeline nor a step")
        return None
    if reference.step is None:
        return Tensor(None, reference.output)
    given = gives(parts[reference.step])
    if parts[reference.step] is None:
        return Tensor(reference.step, reference.output)
    if not reference.output and len(given) == 1:
        return Tensor(reference.step, given[0])
    if reference.output not in given:
        wrong = "several outputs" if not reference.output else f"no output {reference.output!r}"
        listed = ", ".join(f"{names[reference.step]}.{name}" for name in given)
        problems.append(f"{where}{names[reference.step]} has {wrong}; there are {listed}")
        return None
    return Tensor(reference.step, reference.output)


def _implied(
    place: int, part: Part, pipeline: PipelineConfig, parts: Sequence[Part], where: str, problems: list[str]
) -> dict[str, Tensor | None]:
    """The inputs of a step that names none: the outputs of the step before, or the request's inputs for the first
    step."""
    before = parts[place - 1] if place else None
    if part is None or (place and before is None):
        return {}
    given = gives(before) if place else tuple(pipeline.inputs)
    source = place - 1 if place else None
    if takes_any(part):
        return {name: Tensor(source, name) for name in given}
    needed = takes(part)
    if len(needed) == 1:
        found: dict[str, Tensor | None] = {needed[0]: Tensor(source, needed[0] if needed[0] in given else given[0])}
    else:
        found = {name: Tensor(source, name) for name in needed if name in given}
    return found | {name: Tensor(source, name) for name in may_take(part) if name in given}


def chain(
    preprocess: Sequence[StepConfig], model: str, postprocess: Sequence[StepConfig], parts: Sequence[Part]
) -> PipelineConfig:
    """The pipeline of a model with operations before and after it.

    A step with one input reads the output of the step before: the one with its name, or the first. A step with several
    inputs reads each from the latest step that has an output of that name. A step that reads any inputs gets all
    outputs that no operation after the model has read. Inputs that no step produces come from the request. The answer
    is the outputs of the last step, and all that no operation after the model has read.
    """
    steps = [*preprocess, StepConfig(name="model", model=model), *postprocess]
    names = step_names(tuple(steps))
    middle = len(preprocess)
    inputs: dict[str, str] = {}
    latest: dict[str, int] = {}  # an output's name to the last step that gives it
    unread: dict[str, str] = {}  # an output's name to its reference, of the steps behind the model
    for place, (step, part) in enumerate(zip(steps, parts, strict=True)):
        found = dict(step.inputs)
        if not found:
            before = gives(parts[place - 1]) if place else ()
            needed = takes(part)
            if takes_any(part):
                found = dict(unread) or {name: f"{names[place - 1]}.{name}" for name in before}
            elif len(needed) == 1 and place:
                found = {needed[0]: f"{names[place - 1]}.{needed[0] if needed[0] in before else before[0]}"}
            else:
                found = {name: f"{names[latest[name]]}.{name}" if name in latest else name for name in needed}
            found |= {name: f"{names[latest[name]]}.{name}" for name in may_take(part) if name in latest}
            steps[place] = msgspec.structs.replace(step, inputs=found)
        inputs |= {text: "auto" for text in found.values() if resolve(text, {}, names) is None}
        unread = {name: text for name, text in unread.items() if text not in found.values()}
        latest |= dict.fromkeys(gives(part), place)
        if place > middle or (place == middle and not postprocess):
            unread |= {name: f"{names[place]}.{name}" for name in gives(part)}
    return PipelineConfig(inputs=inputs, steps=tuple(steps), outputs=unread)


class Described(msgspec.Struct, frozen=True):
    """Datatypes and shapes of all tensors of a pipeline."""

    inputs: Mapping[str, Spec]
    outputs: Mapping[str, Spec]


def describe(pipeline: PipelineConfig, wiring: Wiring, parts: Sequence[Part], problems: list[str]) -> Described:
    """The inputs and outputs of the pipeline. ``problems`` gets a sentence for each step that cannot work with its
    inputs.

    Every part is known.
    """
    flowing: dict[Tensor, Spec] = {}
    inputs: dict[str, Spec] = {}
    for name, text in pipeline.inputs.items():
        declared = read_spec(text)
        if declared is None or declared.shape is None:
            wanted = _wanted(Tensor(None, name), wiring, parts, set())
            if declared is not None and wanted is not None:
                wanted = wanted._replace(datatype=declared.datatype)
            declared = wanted or declared
        if declared is None:
            problems.append(
                f"input {name}: the steps that read it do not determine its datatype and shape; declare them, such as "
                f"{name}: FP32 [-1, 30]"
            )
            continue
        inputs[name] = flowing[Tensor(None, name)] = declared
    for place in wiring.order:
        part, where = parts[place], f"step {wiring.names[place]}"
        read = {name: flowing[tensor] for name, tensor in wiring.inputs[place].items() if tensor in flowing}
        if len(read) < len(wiring.inputs[place]):
            continue  # missing tensors have been reported
        if isinstance(part, ModelPart):
            for name, spec in read.items():
                misfit = _misfit(spec, part.inputs[name])
                if misfit:
                    problems.append(f"{where}: its input {name!r} {misfit}")
            flowing |= {Tensor(place, name): spec for name, spec in part.outputs.items()}
        elif part is not None:
            try:
                flowing |= {Tensor(place, name): spec for name, spec in part.describe(read).items()}
            except ValueError as error:
                problems.append(f"{where}: {error}")
    outputs = {name: flowing[tensor] for name, tensor in wiring.outputs.items() if tensor in flowing}
    return Described(inputs, outputs)


def optional_inputs(wiring: Wiring, parts: Sequence[Part]) -> frozenset[str]:
    """The pipeline's inputs that a request may leave out: every result of such an input ends in an operation that needs
    only one of its inputs."""
    inputs = {tensor for step in wiring.inputs for tensor in step.values() if tensor.step is None}
    return frozenset(tensor.name for tensor in inputs if _may_be_absent(tensor, wiring, parts))


def _may_be_absent(tensor: Tensor, wiring: Wiring, parts: Sequence[Part]) -> bool:
    if tensor in wiring.outputs.values():
        return False
    for place, read in enumerate(wiring.inputs):
        if tensor not in read.values():
            continue
        part = parts[place]
        if not isinstance(part, Operation):
            return False
        if not part.chooses and not all(_may_be_absent(Tensor(place, name), wiring, parts) for name in part.gives):
            return False
    return True


def _misfit(given: Spec, taken: Spec) -> str:
    """The reason why a model cannot take a tensor; empty: it can."""
    if (given.datatype == "BYTES") != (taken.datatype == "BYTES"):
        return f"takes {taken.datatype}, but is given {given.datatype}"
    if given.shape is None or taken.shape is None:
        return ""
    fits = len(given.shape) == len(taken.shape) and all(
        -1 in (has, wants) or has == wants for has, wants in zip(given.shape, taken.shape, strict=True)
    )
    return "" if fits else f"takes the shape {list(taken.shape)}, but is given {list(given.shape)}"


def _wanted(tensor: Tensor, wiring: Wiring, parts: Sequence[Part], seen: set[Tensor]) -> Spec | None:
    """The spec of a tensor that the steps which read it expect; None: none of them has an expectation."""
    if tensor in seen:
        return None
    seen.add(tensor)
    for place in wiring.order:
        part = parts[place]
        for name, read in wiring.inputs[place].items():
            if read != tensor:
                continue
            if isinstance(part, ModelPart):
                return part.inputs.get(name)
            if part is None:
                continue
            spec = part.expects(name)
            if spec is None and takes(part)[:1] == (name,):
                behind = _wanted(Tensor(place, gives(part)[0]), wiring, parts, seen)
                spec = None if behind is None else part.expects_for(behind)
            if spec is not None:
                return spec
    return None
