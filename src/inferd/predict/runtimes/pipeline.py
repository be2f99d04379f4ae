"""Loading a pipeline: each model by its own runtime; ``inferd.predict.pipelines`` builds the pipeline of them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from inferd.config import ModelConfig, PipelineConfig
from inferd.errors import ModelLoadError
from inferd.predict.load import load_runtime
from inferd.predict.pipelines.build import build, step_model
from inferd.predict.pipelines.execution import Pipeline, StepModel
from inferd.predict.pipelines.wiring import model_part, parts_of, refuse
from inferd.registry.artifact import artifact_of
from inferd.registry.source import Progress


def load(name: str, path: Path | str, config: ModelConfig, progress: Progress) -> Pipeline:
    """The pipeline that ``config`` describes, with all its models. Raises ModelLoadError with all that is wrong."""
    pipeline = config.pipeline
    problems: list[str] = []
    parts = parts_of(pipeline.steps, problems)
    refuse(name, problems)
    models: dict[int, StepModel] = {}
    loaded: dict[str, StepModel] = {}  # a model that is used in several steps is loaded once
    for place, step in enumerate(pipeline.steps):
        if step.model is None:
            continue
        if step.model not in loaded:
            if step.model not in pipeline.models:
                raise ModelLoadError(
                    f"The pipeline {name!r} has no settings of the model {step.model!r}; list it in the same file or "
                    "below pipeline.models.",
                    param="pipeline.models",
                )
            loaded[step.model] = _load_model(name, step.model, pipeline, config, progress)
        models[place] = loaded[step.model]
        parts[place] = model_part(models[place].runtime.contract)
    return build(name, pipeline, parts, models, config)


def _load_model(name: str, model: str, pipeline: PipelineConfig, config: ModelConfig, progress: Progress) -> StepModel:
    settings = msgspec.convert(pipeline.models[model], ModelConfig)
    settings = msgspec.structs.replace(
        settings, replicas=max(1, config.num_local), threads=settings.threads or config.threads
    )
    artifact = artifact_of(settings, progress)
    if artifact.kind != "predict":
        raise ModelLoadError(
            f"The pipeline {name!r} has the step {model!r}, which is a language model; a pipeline's steps make "
            "predictions. Serve it beside the pipeline.",
            param="pipeline",
        )
    return step_model(model, load_runtime(model, artifact, settings, progress), settings)
