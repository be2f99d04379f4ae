"""What must hold for the steps of a model, and the settings that a pipeline's worker gets. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from inferd.config.config import Config
from inferd.config.model import ModelConfig
from inferd.config.pipeline_graph import connections, read_spec, resolve, step_names, unknown_reference
from inferd.config.pipelines import SOURCE, PipelineConfig, StepConfig
from inferd.config.tree import Path as Place
from inferd.config.tree import Problem, check


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
                yield Problem((*at, "inputs", name), unknown_reference(text, pipeline, names))
        if not place and not step.inputs and len(pipeline.inputs) != 1:
            yield Problem((*at, "inputs"), "missing; say which of the pipeline's inputs the first step takes.")
    yield from connections(here, pipeline, names)


def _model_of(
    at: Place, step: StepConfig, pipeline: PipelineConfig, models: Mapping[str, ModelConfig]
) -> Iterator[Problem]:
    assert step.model is not None
    if step.options:
        yield Problem((*at, "options"), "only operations have options in a step; set a model's options at the model.")
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
