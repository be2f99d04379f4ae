"""How a rollout divides the units of its model between two versions, as every gateway adopts it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from inferd.config import Config
from inferd.config.versions import versions_of
from inferd.rollout.machine import JUDGED, Progress
from inferd.rollout.plan import Plan


class Split(NamedTuple):
    """A rollout's share of the units for the new version."""

    rollout: str
    run: int
    share: float
    is_counted: bool  # calls are counted: it is not over
    stable_entry: str  # the versions' names in the configuration
    new_entry: str
    unit: str  # what keeps one version; see ``RolloutConfig.unit``


def split_of(plan: Plan, progress: Progress, config: Config) -> Split:
    """The split that a rollout's progress asks for. The configuration has both versions."""
    entries = versions_of(config.models, plan.model)
    is_counted = progress.state in JUDGED
    stable, new = entries[plan.stable], entries[plan.new]
    return Split(plan.name, progress.run, progress.share, is_counted, stable, new, plan.unit)


def with_weights(config: Config, plans: Mapping[str, Plan], splits: Mapping[str, Split]) -> Config:
    """The configuration with the weights of its models' rollouts. A rollout without a split leaves the stable version
    all units: its progress is not known yet."""
    if not plans:
        return config
    models = dict(config.models)
    for name, plan in plans.items():
        share = splits[name].share if name in splits else 0.0
        weights = {plan.stable: 100.0 * (1.0 - share), plan.new: 100.0 * share}
        versions = msgspec.structs.replace(models[name].versions, weights=weights)
        models[name] = msgspec.structs.replace(models[name], versions=versions)
    return msgspec.structs.replace(config, models=models)
