"""The settings of a pipeline and of its steps. What must hold between them is in ``pipeline_rules.py``."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from inferd.config.patterns import STEP_NAME
from inferd.config.section import Section

SOURCE = "pipeline"
"""The ``source`` of a model that consists of steps."""


class StepConfig(Section, frozen=True, kw_only=True):
    """One step of a pipeline: a built-in operation, or a model."""

    name: Annotated[
        str,
        Meta(
            description="Unique in the pipeline; its outputs are called name.output. Unset: the last word of the "
            "operation's name, or the model's.",
            pattern=STEP_NAME,
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
            description=(
                "The step's inputs from the pipeline's inputs or other steps' outputs; unset: the outputs of the step "
                "before."
            )
        ),
    ] = {}
    options: Annotated[dict[str, Any], Meta(description="The operation's own options.")] = {}


class PipelineConfig(Section, frozen=True, kw_only=True):
    """Several steps as one model (source: pipeline): a directed acyclic graph, run in one worker."""

    inputs: Annotated[
        dict[str, str],
        Meta(
            description=(
                "Inputs of a request: names, each with a datatype and shape such as FP32 [-1, 30], or auto: as the "
                "steps that read it need."
            )
        ),
    ] = {}
    steps: tuple[StepConfig, ...] = ()
    outputs: Annotated[
        dict[str, str], Meta(description="The pipeline's outputs from steps' outputs: label: classify.label.")
    ] = {}
    models: Annotated[
        dict[str, Any],
        Meta(
            description=(
                "Models that this pipeline alone uses, each with a model's settings; they are not served separately."
            )
        ),
    ] = {}
