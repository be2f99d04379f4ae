"""Models of which one GPU or this machine does not hold a replica are divided, though no layout is set: among GPUs of
this machine, or among it and nodes.

The layout follows from the model's settings and from the memory that the GPUs and this machine have, so every start
chooses the same one: what other programs and models leave free, and which nodes joined, do not count. Each machine is
taken to have as much as this one. Reads the headers of checkpoints.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from inferd.config import Config, ModelConfig
from inferd.config.rules import may_choose_gpus, may_choose_machines
from inferd.errors import ModelLoadError
from inferd.machine.gpus import may_compute_on_gpu
from inferd.machine.memory import limit_bytes
from inferd.planning.memory import over_gpus, over_machines
from inferd.planning.placing import Spot

HELD_SHARE: Final = 0.9
"""Of a GPU's memory, that a plan fills. The rest is for the libraries and the fragmentation that it does not know."""


class Spread(NamedTuple):
    """A configuration in which every layout is set, as far as this machine does not hold the models."""

    config: Config
    reasons: Mapping[str, tuple[str, ...]]  # of each model that was divided: why not among fewer


def spread(config: Config, whole_bytes: int | None = None, gpus: Sequence[int] = ()) -> Spread:
    """The configuration with ``parallel`` of each model that nothing excludes from a layout and of which one GPU, or
    this machine, does not hold a replica, even alone: the fewest that do. Each GPU has a part of the layers, and each
    machine a stage of them.

    ``whole_bytes``: the memory of this machine, of which ``server.memory_bytes`` may be used where it is set.
    ``gpus``: the memory of each, as CUDA counts them; only as many as are like the first are used. What no number of
    them holds keeps its layout, and is refused where it is planned or loaded.
    """
    if not any(_on_gpus(model, config) or may_choose_machines(model, config) for model in config.models.values()):
        return Spread(config, {})
    whole = limit_bytes() if whole_bytes is None else whole_bytes
    budget = whole if config.server.memory_bytes is None else min(whole, config.server.memory_bytes)
    models, reasons = dict(config.models), dict[str, tuple[str, ...]]()
    for name, model in config.models.items():
        with contextlib.suppress(ModelLoadError):  # it is refused where it is planned or loaded
            if _on_gpus(model, config):
                models[name], reasons[name] = _divided_by_gpus(model, gpus)
            elif may_choose_machines(model, config):
                models[name], reasons[name] = _divided(model, budget)
    divided = {name: why for name, why in reasons.items() if why}
    return Spread(msgspec.structs.replace(config, models=models), divided)


def _divided(model: ModelConfig, each_bytes: int) -> tuple[ModelConfig, tuple[str, ...]]:
    """The model in the smallest layout over machines with so much memory each, and why it is not on fewer; none where
    one holds it. A model that is computed on a GPU takes no memory of the machine. Raises ModelLoadError."""
    return _laid_out(model, None if may_compute_on_gpu(model.device) else over_machines(model, each_bytes))


def _divided_by_gpus(model: ModelConfig, gpus: Sequence[int]) -> tuple[ModelConfig, tuple[str, ...]]:
    """The same over GPUs."""
    alike = list(itertools.takewhile(lambda nbytes: nbytes == gpus[0], gpus))
    return _laid_out(model, over_gpus(model, len(alike), int(alike[0] * HELD_SHARE)) if len(alike) > 1 else None)


def _laid_out(model: ModelConfig, spot: Spot | None) -> tuple[ModelConfig, tuple[str, ...]]:
    if spot is None or spot.parallel.count == 1:
        return model, ()
    return msgspec.structs.replace(model, parallel=spot.parallel), spot.not_fewer


def _on_gpus(model: ModelConfig, config: Config) -> bool:
    return may_choose_gpus(model, config) and may_compute_on_gpu(model.device)
