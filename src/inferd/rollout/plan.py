"""The plan of a rollout, as the configuration says it: which versions, in which steps, and what it watches. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final, Literal, get_args

import msgspec

from inferd.compare.answers import Tolerance
from inferd.config import ModelConfig, RolloutConfig
from inferd.config.versioning import DiffersGuardConfig, GoldenGuardConfig

GuardKind = Literal["errors", "invalid", "slow", "refused", "differs", "reported", "golden"]
Population = Literal["", "copies", "golden"]
"""Which units a guard counts: those that were divided between the versions, those whose requests were copied, or
questions of the golden set."""

KINDS: Final[tuple[GuardKind, ...]] = get_args(GuardKind)


class Guard(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of bad event of a unit, and how many of them are too many.

    With ``max_ratio`` the new version is compared with the stable one, else with ``max_fraction`` alone.
    """

    kind: GuardKind
    max_ratio: float | None = None  # bad events of the new version may be so many times as likely
    max_fraction: float | None = None  # so large a part of the new version's units may be bad
    over_s: float | None = None  # slow: a longer time to the end of the answer is a bad event
    first_over_s: float | None = None  # slow: a longer time to the first token
    tolerance: Tolerance | None = None  # differs, golden

    @property
    def population(self) -> Population:
        match self.kind:
            case "differs":
                return "copies"
            case "golden":
                return "golden"
        return ""

    @property
    def share(self) -> float:
        """Golden: the share of the questions that the new version is asked. The stable one is asked the others, where
        the two are compared."""
        return 1.0 if self.max_ratio is None else 0.5


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A share of the units for the new version, for some time."""

    share: float  # 0 to 1
    for_s: float = 0.0  # at least
    needs_approval: bool = False  # begins by the operator's command alone
    shadow: float = 0.0  # of the units, 0 to 1: those whose requests are copied

    def can_prove(self, guard: Guard) -> bool:
        """Whether evidence of a guard can come in this step: units have a choice, requests are copied, or it is asked
        for."""
        match guard.population:
            case "copies":
                return self.shadow > 0.0
            case "golden":
                return True
        return 0.0 < self.share < 1.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of one model. The shares of ``steps`` never shrink, and the last one is 1."""

    model: str
    stable: str  # the number of the version that serves now
    new: str  # the number of the version that is to serve
    steps: tuple[Step, ...]
    guards: tuple[Guard, ...] = ()
    alpha: float = 0.01  # largest probability that a version which is not worse is ever withdrawn
    beta: float = 0.05  # largest probability that a version which is too bad passes a guard
    inconclusive_s: float | None = None  # a step without enough evidence ends after so long; None: it waits
    max_deaths: int = 3  # so many deaths of the new version's workers withdraw it
    starts_itself: bool = False
    unit: str = "auto"
    registered_stable: str = ""  # the version in the registry, NAME@NUMBER; empty: it is not from there
    registered_new: str = ""

    @property
    def name(self) -> str:
        """The name of the rollout in the database. Another pair of versions is another rollout."""
        return f"{self.model}:{self.stable}:{self.new}"

    @property
    def golden(self) -> Guard | None:
        """The guard of a golden set; None: the rollout has none."""
        return next((guard for guard in self.guards if guard.kind == "golden"), None)

    @property
    def digest(self) -> str:
        """Equal for equal plans, at every gateway."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


def plan_named(name: str, registered_new: str) -> Plan:
    """What is left of the plan of a rollout that the configuration does not have: its versions, by its name."""
    model, stable, new = name.rsplit(":", 2)
    return Plan(model=model, stable=stable, new=new, steps=(), registered_new=registered_new)


def plan_of(model: str, config: ModelConfig) -> Plan | None:
    """The plan of a model's rollout, as its checked configuration says it; None: it has none."""
    rollout = config.rollout
    if rollout is None:
        return None
    steps = [
        Step(share=weight / 100.0, for_s=step.for_s, needs_approval=step.approval, shadow=step.shadow / 100.0)
        for step, weight in zip(rollout.steps, rollout.weights, strict=True)
    ]
    if steps[-1].share < 1.0:
        steps.append(Step(share=1.0, needs_approval=True))
    elif rollout.promote == "approve":
        steps[-1] = msgspec.structs.replace(steps[-1], needs_approval=True)
    return Plan(
        model=model,
        stable=str(rollout.stable),
        new=str(rollout.new),
        steps=tuple(steps),
        guards=tuple(_guards(config, rollout)),
        alpha=rollout.alpha,
        beta=rollout.beta,
        inconclusive_s=rollout.inconclusive_s,
        max_deaths=rollout.max_deaths,
        starts_itself=rollout.start == "auto",
        unit=rollout.unit,
    )


def _guards(config: ModelConfig, rollout: RolloutConfig) -> Iterator[Guard]:
    guards = rollout.guards
    for kind in KINDS:
        found = getattr(guards, kind)
        if found is None:
            continue
        guard = Guard(kind=kind, max_ratio=getattr(found, "max_ratio", None), max_fraction=found.max_fraction)
        if kind == "slow" and guards.slow is not None:
            total_ms, first_ms = guards.slow.limits_ms(config.objectives.total_ms, config.objectives.ttft_ms)
            guard = msgspec.structs.replace(guard, over_s=_seconds(total_ms), first_over_s=_seconds(first_ms))
        if isinstance(found, DiffersGuardConfig | GoldenGuardConfig):
            tolerance = Tolerance(relative=found.relative, absolute=found.absolute)
            guard = msgspec.structs.replace(guard, tolerance=tolerance)
        yield guard


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000.0
