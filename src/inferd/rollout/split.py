"""How a rollout divides the units of its model between two versions, as every gateway adopts it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from inferd.compare.answers import Tolerance
from inferd.config import Config
from inferd.config.versions import entry_of, versions_of
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
    shadow: float = 0.0  # of the units: those whose requests are copied to the new version
    tolerance: Tolerance = Tolerance()  # of numbers in compared answers
    reads_refusals: bool = False  # a guard counts answers that are refusals
    new_is_last: bool = True  # of the two, the new version has the higher number, so its units are drawn last

    def is_shadowed(self, unit: bytes) -> bool:
        """Whether the requests of a unit are copied: it is one of those that the new version would serve first. Of
        ``unit`` the digest, by which its version is drawn; the unit has the stable version."""
        if self.shadow <= 0.0:
            return False
        point = int.from_bytes(unit, "big") / 2**64
        return point >= 1.0 - self.shadow if self.new_is_last else point < self.shadow


def split_of(plan: Plan, progress: Progress, config: Config) -> Split:
    """The split that a rollout's progress asks for. The configuration has the stable version, and the new one unless
    that must not be served."""
    entries = versions_of(config.models, plan.model)
    is_counted = progress.state in JUDGED
    stable, new = entries[plan.stable], entries.get(plan.new, entry_of(plan.model, plan.new))
    return Split(
        plan.name,
        progress.run,
        progress.share,
        is_counted,
        stable,
        new,
        plan.unit,
        shadow=progress.shadow if is_counted else 0.0,
        tolerance=next((guard.tolerance for guard in plan.guards if guard.tolerance is not None), Tolerance()),
        reads_refusals=any(guard.kind == "refused" for guard in plan.guards),
        new_is_last=int(plan.new) > int(plan.stable),
    )


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
