"""Runs one request or one step in an engine, and joins the parts of an answer."""

from __future__ import annotations

from inferd.engine.engine import Engine
from inferd.types import Delta, GenerateRequest, Output, StepStats


def deltas(engine: Engine, request: GenerateRequest) -> list[Delta]:
    """Every delta of a request that ends as ``done``."""
    engine.add(engine.prepare(request), 0.0)
    outputs: list[Output] = []
    while engine.due(0.0) is not None:
        outputs += engine.step(0.0)[0]
    end = outputs[-1].end
    assert end is not None
    assert end.outcome == "done", end.failure
    return [delta for output in outputs for delta in output.deltas]


def joined(parts: list[Delta]) -> tuple[str, str, list[tuple[str, str]]]:
    """The text, the reasoning, and the name and arguments of each call."""
    calls: list[tuple[str, str]] = []
    for part in (call for delta in parts for call in delta.calls):
        if part.name is not None:
            calls.append((part.name, ""))
        name, before = calls[part.index]
        calls[part.index] = (name, before + part.arguments)
    return "".join(d.text for d in parts), "".join(d.reasoning for d in parts), calls


def stats_of(engine: Engine, now: float) -> StepStats:
    """The counts of a step, which does not pause."""
    stats = engine.step(now)[1]
    assert stats is not None
    return stats
