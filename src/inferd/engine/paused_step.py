"""A step with batch work that has paused for requests of other classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from inferd.engine.native_decoder import Layers
from inferd.engine.scheduling.scheduler import Step
from inferd.engine.step_clock import StepClock

MOST_BEFORE: Final = 4
"""Steps that precede the rest of one that has paused, so that batch work goes on however many requests arrive."""


@dataclass(slots=True, eq=False)
class PausedStep:
    """``layers``: what is left to compute; ``clock``: of its own time."""

    step: Step
    layers: Layers
    clock: StepClock
    seconds: float = 0.0  # computed
    num_before: int = 0  # steps that have preceded the rest of it

    def holds(self, request_id: str) -> bool:
        """Whether it computes tokens of a request."""
        return any(part.sequence.request_id == request_id for part in self.step.slices)
