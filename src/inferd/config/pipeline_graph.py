"""The graph of a pipeline's steps: references, order, cycles, and inputs or outputs that no step reads.

Pure, over a pipeline's settings. Knows names and not tensors: ``inferd.predict.steps`` defines the operations with
their inputs and outputs, and those of a model are known when it is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from inferd.config.pipelines import PipelineConfig, StepConfig
from inferd.config.tree import Path as Place
from inferd.config.tree import Problem

_WORD = re.compile(r"\W+")
_SPEC = re.compile(
    r"(?P<datatype>BOOL|U?INT(?:8|16|32|64)|FP(?:16|32|64)|BF16|BYTES)\s*(?:\[(?P<shape>\s*-?\d+\s*(?:,\s*-?\d+\s*)*)?\])?"
)


class Reference(NamedTuple):
    """Where a tensor comes from: a step's output, or an input of the pipeline."""

    step: int | None  # place in the list of steps; None: the pipeline's input
    output: str  # empty: the step's only (or first) output


class Spec(NamedTuple):
    """A declared datatype and shape; None: they are those of the steps that read it."""

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
    """The steps' names: given ones, or made of the operation or the model, with a number when repeated."""
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
    """The tensor that ``image``, ``decode`` or ``decode.image`` refers to; None: no tensor has that name."""
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
    """An order in which every step comes after those it waits for. Among several, the first in the list comes first.

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


def connections(here: Place, pipeline: PipelineConfig, names: tuple[str, ...]) -> Iterator[Problem]:
    """Problems of the graph: cycles, and steps and inputs that nothing reads."""
    waits = needs(pipeline, names)
    sound = order(waits)
    stuck = [names[place] for place in _on_cycles(waits) if place not in sound]
    if stuck:
        yield Problem((*here, "steps"), f"{', '.join(stuck)} wait for each other; a pipeline has no cycles.")
    if not pipeline.outputs:
        yield Problem((*here, "outputs"), "missing; name the outputs of the pipeline, such as label: classify.label.")
        return
    reached: set[int] = set()
    read: set[str] = set()
    for name, text in pipeline.outputs.items():
        ref = resolve(text, pipeline.inputs, names)
        if ref is None:
            yield Problem((*here, "outputs", name), unknown_reference(text, pipeline, names))
        elif ref.step is None:
            yield Problem((*here, "outputs", name), f"{text!r} is an input of the pipeline, which no step has changed.")
        else:
            reached.add(ref.step)
    while more := {before for place in reached for before in waits[place]} - reached:
        reached |= more
    for place, step in enumerate(pipeline.steps):
        if place not in reached:
            yield Problem(
                (*here, "steps", place), f"no step reads an output of {names[place]!r}; use it or leave it out."
            )
        refs = (resolve(text, pipeline.inputs, names) for text in step.inputs.values())
        read |= {ref.output for ref in refs if ref is not None and ref.step is None}
        if not place and not step.inputs:
            read |= set(pipeline.inputs)
    for name in pipeline.inputs:
        if name not in read:
            yield Problem((*here, "inputs", name), "no step reads it; use it or leave it out.")


def _on_cycles(waits: list[set[int]]) -> list[int]:
    """The steps that wait for themselves, directly or through other steps."""
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


def unknown_reference(text: str, pipeline: PipelineConfig, names: tuple[str, ...]) -> str:
    known = [*pipeline.inputs, *names]
    return f"{text!r} is neither an input of the pipeline nor a step; there are {', '.join(known)}."
