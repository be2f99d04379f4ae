"""Models of which this machine does not hold one replica are divided among it and nodes, though no layout is set.

The layout follows from the model's settings and from the memory that this machine has, so every start chooses the same
one: what other programs and models leave free, and which nodes joined, do not count. Each machine is taken to have as
much as this one. Reads the headers of checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from inferd.config import Config, ModelConfig
from inferd.config.rules import may_choose_machines
from inferd.errors import ModelLoadError
from inferd.machine.gpus import may_compute_on_gpu
from inferd.machine.memory import limit_bytes
from inferd.planning.memory import over_machines


class Spread(NamedTuple):
    """A configuration in which every layout is set, as far as this machine does not hold the models."""

    config: Config
    reasons: Mapping[str, tuple[str, ...]]  # of each model that was divided: why it is not on fewer machines


def spread(config: Config, whole_bytes: int | None = None) -> Spread:
    """The configuration with ``parallel`` of each model that nothing excludes from several machines and of which this
    one does not hold a replica, even alone: the fewest machines that do, each with a stage of its layers.

    ``whole_bytes``: the memory of this machine, of which ``server.memory_bytes`` may be used where it is set. What no
    number of machines holds keeps its layout, and is refused where it is planned or loaded.
    """
    if not any(may_choose_machines(model, config) for model in config.models.values()):
        return Spread(config, {})
    whole = limit_bytes() if whole_bytes is None else whole_bytes
    budget = whole if config.server.memory_bytes is None else min(whole, config.server.memory_bytes)
    models, reasons = dict(config.models), dict[str, tuple[str, ...]]()
    for name, model in config.models.items():
        if may_choose_machines(model, config):
            with contextlib.suppress(ModelLoadError):  # it is refused where it is planned or loaded
                models[name], reasons[name] = _divided(model, budget)
    divided = {name: why for name, why in reasons.items() if why}
    return Spread(msgspec.structs.replace(config, models=models), divided)


def _divided(model: ModelConfig, each_bytes: int) -> tuple[ModelConfig, tuple[str, ...]]:
    """The model in the smallest layout over machines with so much memory each, and why it is not on fewer; none where
    one holds it. A model that is computed on a GPU takes no memory of the machine. Raises ModelLoadError."""
    spot = None if may_compute_on_gpu(model.device) else over_machines(model, each_bytes)
    if spot is None or spot.parallel.machines == 1:
        return model, ()
    return msgspec.structs.replace(model, parallel=spot.parallel), spot.not_fewer
