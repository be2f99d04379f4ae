"""A pipeline: its settings, and how its steps hang together: references resolved, the order found, everything wrong with it told.

Pure, over a pipeline's configuration. Knows names, not tensors: which operations exist and what they take and give is
``inferd.predict.steps``'s to say, and a model's inputs and outputs are known when it is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from inferd.config.section import Section
from inferd.config.tree import Path as Place
from inferd.config.tree import Problem, check

if TYPE_CHECKING:
    from inferd.config.config import Config
    from inferd.config.model import ModelConfig

SOURCE = "pipeline"
_WORD = re.compile(r"\W+")
_SPEC = re.compile(
    r"(?P<datatype>BOOL|U?INT(?:8|16|32|64)|FP(?:16|32|64)|BF16|BYTES)\s*(?:\[(?P<shape>\s*-?\d+\s*(?:,\s*-?\d+\s*)*)?\])?"
)


class StepConfig(Section, frozen=True, kw_only=True):
    """One step of a pipeline: a built-in operation, or a model."""

    name: Annotated[
        str,
        Meta(
            description="Unique in the pipeline; its outputs are called name.output. Unset: the last word of the operation's name, or the model's.",
            pattern=r"^[\w-]*$",
        ),
    ] = ""
    op: Annotated[str | None, Meta(description="A built-in operation: image.decode, image.resize, labels, boxes.")] = (
        None
    )
    model: Annotated[
        str | None, Meta(description="The name of a model of this file, loaded into the pipeline's worker.")
    ] = None
    inputs: Annotated[
        dict[str, str],
        Meta(
            description="The step's inputs from the pipeline's inputs or other steps' outputs; unset: what the step before gives."
        ),
    ] = {}
    options: Annotated[dict[str, Any], Meta(description="The operation's own options.")] = {}


class PipelineConfig(Section, frozen=True, kw_only=True):
    """Several steps as one model (source: pipeline): a directed acyclic graph, run in one worker."""

    inputs: Annotated[
        dict[str, str],
        Meta(
            description="What a request brings: names, each with a datatype and shape such as FP32 [-1, 30], or auto: what the steps that read it ask for."
        ),
    ] = {}
    steps: tuple[StepConfig, ...] = ()
    outputs: Annotated[
        dict[str, str], Meta(description="The pipeline's outputs from steps' outputs: label: classify.label.")
    ] = {}
    models: Annotated[
        dict[str, Any],
        Meta(
            description="Models that this pipeline alone uses, each with a model's settings; they are not served by themselves."
        ),
    ] = {}


class Reference(NamedTuple):
    """Where a tensor comes from: a step's output, or an input of the pipeline."""

    step: int | None  # place in the list of steps; None: the pipeline's input
    output: str  # empty: the step's only (or first) output


class Spec(NamedTuple):
    """A declared datatype and shape; None: the steps that read it know."""

    datatype: str
    shape: tuple[int, ...] | None
    labels: tuple[str, ...] = ()  # names of the last dimension's places


def read_spec(text: str) -> Spec | None:
    """``FP32 [-1, 30]`` or ``BYTES``. Raises ValueError; None for auto."""
    if text.strip() == "auto":
        return None
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not auto, a datatype, or a datatype and a shape such as FP32 [-1, 30].")
    if "[" not in text:
        return Spec(match["datatype"], None)
    shape = tuple(int(size) for size in (match["shape"] or "").split(",") if size.strip())
    if any(size < -1 for size in shape):
        raise ValueError(f"{text!r} has a size below -1; -1 stands for any size.")
    return Spec(match["datatype"], shape)


def step_names(steps: tuple[StepConfig, ...]) -> tuple[str, ...]:
    """The steps' names: their own, or one made of what they do, numbered where it comes again."""
    taken = {step.name for step in steps if step.name}
    names = []
    for step in steps:
        name = step.name
        if not name:
            base = _WORD.sub("_", (step.op or "").rpartition(".")[2] or step.model or "step")
            name, number = base, 2
            while name in taken:
                name, number = f"{base}_{number}", number + 1
            taken.add(name)
        names.append(name)
    return tuple(names)


def resolve(text: str, inputs: Mapping[str, str], names: tuple[str, ...]) -> Reference | None:
    """What ``image``, ``decode`` or ``decode.image`` refers to; None: nothing has that name."""
    if text in inputs:
        return Reference(None, text)
    step, _, output = text.partition(".")
    return Reference(names.index(step), output) if step in names else None


def needs(pipeline: PipelineConfig, names: tuple[str, ...]) -> list[set[int]]:
    """The steps that each step waits for; references to nothing are left out."""
    found: list[set[int]] = []
    for place, step in enumerate(pipeline.steps):
        if not step.inputs:
            found.append({place - 1} if place else set())
            continue
        refs = (resolve(text, pipeline.inputs, names) for text in step.inputs.values())
        found.append({ref.step for ref in refs if ref is not None and ref.step is not None})
    return found


def order(waits: list[set[int]]) -> list[int]:
    """An order in which every step comes after those it waits for: of several the one that is listed first.

    Steps on a cycle, and those behind them, are left out. Kahn's algorithm.
    """
    done: list[int] = []
    left = dict(enumerate(waits))
    while True:
        free = next((place for place, before in left.items() if before.issubset(done)), None)
        if free is None:
            return done
        done.append(free)
        del left[free]


def problems_of(here: Place, model: ModelConfig, models: Mapping[str, ModelConfig]) -> Iterator[Problem]:
    """Everything wrong with a model's steps. ``models`` are those of the file."""
    for field in ("preprocess", "postprocess"):
        steps: tuple[StepConfig, ...] = getattr(model, field)
        if steps and model.is_pipeline:
            yield Problem((*here, field), "a pipeline has steps of its own; write these among them.")
        if steps and model.is_remote:
            yield Problem(
                (*here, field), "operations run beside a local model, and this one's source is a remote server."
            )
        for place, step in enumerate(steps):
            if step.model is not None or step.op is None:
                yield Problem((*here, field, place), "it has no op; steps that are models belong into a pipeline.")
    pipeline = model.pipeline
    is_meant = model.runtime == SOURCE or model.source == SOURCE
    if not pipeline.steps:
        if is_meant:
            yield Problem((*here, "pipeline", "steps"), "missing; a pipeline is a list of steps.")
        elif pipeline != type(pipeline)():
            yield Problem((*here, "pipeline"), "it has no steps; add some, or leave it out.")
        return
    if model.source != SOURCE:
        yield Problem(
            (*here, "source"), f"{model.source!r} would not be read: a model with steps has the source pipeline."
        )
    if model.runtime not in ("auto", SOURCE):
        yield Problem((*here, "runtime"), f"{model.runtime} cannot run steps; leave it out.")
    yield from _private((*here, "pipeline", "models"), pipeline, type(model))
    yield from _steps((*here, "pipeline"), pipeline, models)


def _private(here: Place, pipeline: PipelineConfig, kind: type[ModelConfig]) -> Iterator[Problem]:
    for name, section in pipeline.models.items():
        checked, problems = check(kind, section)
        for problem in problems:
            yield Problem((*here, name, *problem.path), problem.sentence)
        if not problems:
            model = msgspec.convert(checked, kind)
            yield from problems_of((*here, name), model, {})


def _steps(here: Place, pipeline: PipelineConfig, models: Mapping[str, ModelConfig]) -> Iterator[Problem]:
    names = step_names(pipeline.steps)
    for name, text in pipeline.inputs.items():
        try:
            read_spec(text)
        except ValueError as error:
            yield Problem((*here, "inputs", name), str(error))
        if name in names:
            yield Problem((*here, "inputs", name), "a step has the same name; rename one of them.")
    for place, step in enumerate(pipeline.steps):
        at: Place = (*here, "steps", place)
        if names[place] in names[:place]:
            yield Problem((*at, "name"), f"another step is called {names[place]!r}; names are unique in a pipeline.")
        if (step.op is None) == (step.model is None):
            yield Problem(at, "it needs either an op or a model" + ("." if step.op is None else ", not both."))
        elif step.model is not None:
            yield from _model_of(at, step, pipeline, models)
        for name, text in step.inputs.items():
            if resolve(text, pipeline.inputs, names) is None:
                yield Problem((*at, "inputs", name), _unknown(text, pipeline, names))
        if not place and not step.inputs and len(pipeline.inputs) != 1:
            yield Problem((*at, "inputs"), "missing; say which of the pipeline's inputs the first step takes.")
    yield from connections(here, pipeline, names)


def connections(here: Place, pipeline: PipelineConfig, names: tuple[str, ...]) -> Iterator[Problem]:
    """Cycles, and what nobody reads."""
    waits = needs(pipeline, names)
    sound = order(waits)
    stuck = [names[place] for place in _on_cycles(waits) if place not in sound]
    if stuck:
        yield Problem((*here, "steps"), f"{', '.join(stuck)} wait for each other; a pipeline has no cycles.")
    if not pipeline.outputs:
        yield Problem((*here, "outputs"), "missing; say what the pipeline answers: label: classify.label.")
        return
    reached: set[int] = set()
    read: set[str] = set()
    for name, text in pipeline.outputs.items():
        ref = resolve(text, pipeline.inputs, names)
        if ref is None:
            yield Problem((*here, "outputs", name), _unknown(text, pipeline, names))
        elif ref.step is None:
            yield Problem((*here, "outputs", name), f"{text!r} is an input of the pipeline, which no step has changed.")
        else:
            reached.add(ref.step)
    while more := {before for place in reached for before in waits[place]} - reached:
        reached |= more
    for place, step in enumerate(pipeline.steps):
        if place not in reached:
            yield Problem(
                (*here, "steps", place), f"nothing reads what {names[place]!r} gives; use it or leave it out."
            )
        refs = (resolve(text, pipeline.inputs, names) for text in step.inputs.values())
        read |= {ref.output for ref in refs if ref is not None and ref.step is None}
        if not place and not step.inputs:
            read |= set(pipeline.inputs)
    for name in pipeline.inputs:
        if name not in read:
            yield Problem((*here, "inputs", name), "no step reads it; use it or leave it out.")


def _on_cycles(waits: list[set[int]]) -> list[int]:
    """The steps that wait for themselves, by whatever way."""
    found = []
    for start in range(len(waits)):
        seen: set[int] = set()
        front = set(waits[start])
        while front:
            seen |= front
            front = {before for place in front for before in waits[place]} - seen
        if start in seen:
            found.append(start)
    return found


def _unknown(text: str, pipeline: PipelineConfig, names: tuple[str, ...]) -> str:
    known = [*pipeline.inputs, *names]
    return f"{text!r} is neither an input of the pipeline nor a step; there are {', '.join(known)}."


def _model_of(
    at: Place, step: StepConfig, pipeline: PipelineConfig, models: Mapping[str, ModelConfig]
) -> Iterator[Problem]:
    assert step.model is not None
    if step.options:
        yield Problem((*at, "options"), "they are an operation's; a model's options belong to the model.")
    if step.model in pipeline.models:
        return
    known = models.get(step.model)
    if known is None:
        listed = ", ".join([*pipeline.models, *models])
        yield Problem((*at, "model"), f"there is no model {step.model!r} in this file; there are {listed or 'none'}.")
    elif known.is_remote:
        yield Problem(
            (*at, "model"), f"{step.model!r} is a remote server; the models of a pipeline run in its own worker."
        )
    elif _reaches(step.model, pipeline, models):
        yield Problem((*at, "model"), f"{step.model!r} contains this pipeline again.")


def _reaches(name: str, pipeline: PipelineConfig, models: Mapping[str, ModelConfig]) -> bool:
    seen: set[str] = set()
    front = [name]
    while front:
        found = models.get(front.pop())
        if found is None or not found.is_pipeline:
            continue
        if found.pipeline == pipeline:
            return True
        more = {step.model for step in found.pipeline.steps if step.model is not None} - seen
        seen |= more
        front += more
    return False


def with_models(config: Config) -> Config:
    """The configuration with the models that pipelines name copied into them: a worker gets one model's settings.

    A changed model so changes every pipeline that uses it. ``config`` has no problems.
    """
    models = {name: _complete(model, config.models) for name, model in config.models.items()}
    return msgspec.structs.replace(config, models=models)


def _complete(model: ModelConfig, models: Mapping[str, ModelConfig]) -> ModelConfig:
    pipeline = model.pipeline
    named = {step.model for step in pipeline.steps if step.model is not None} - pipeline.models.keys()
    if not named:
        return model
    found = {name: msgspec.to_builtins(_complete(models[name], models)) for name in sorted(named)}
    return msgspec.structs.replace(
        model, pipeline=msgspec.structs.replace(pipeline, models={**pipeline.models, **found})
    )
