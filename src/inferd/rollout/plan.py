"""The plan of a rollout, as the configuration says it: which versions, in which steps, and what it watches. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final, Literal, get_args

import msgspec

from inferd.config import ModelConfig, RolloutConfig

GuardKind = Literal["errors", "invalid", "slow", "reported"]
KINDS: Final[tuple[GuardKind, ...]] = get_args(GuardKind)


class Guard(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of bad event of a unit, and how many of them are too many.

    With ``max_ratio`` the new version is compared with the stable one, else with ``max_fraction`` alone.
    """

    kind: GuardKind
    max_ratio: float | None = None  # bad events of the new version may be so many times as likely
    max_fraction: float | None = None  # so large a part of the new version's units may be bad
    over_s: float = 0.0  # slow: a longer time is a bad event
    of: Literal["total", "first_token"] = "total"  # slow: which time


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A share of the units for the new version, for some time."""

    share: float  # 0 to 1
    for_s: float = 0.0  # at least
    needs_approval: bool = False  # begins by the operator's command alone


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of one model. The shares of ``steps`` grow, and the last one is 1."""

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

    @property
    def name(self) -> str:
        """The name of the rollout in the database. Another pair of versions is another rollout."""
        return f"{self.model}:{self.stable}:{self.new}"

    @property
    def digest(self) -> str:
        """Equal for equal plans, at every gateway."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


def plan_of(model: str, config: ModelConfig) -> Plan | None:
    """The plan of a model's rollout, as its checked configuration says it; None: it has none."""
    rollout = config.rollout
    if rollout is None:
        return None
    steps = [Step(share=step.weight / 100.0, for_s=step.for_s, needs_approval=step.approval) for step in rollout.steps]
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
        guard = Guard(kind=kind, max_ratio=found.max_ratio, max_fraction=found.max_fraction)
        if kind == "slow" and guards.slow is not None:
            over_ms = guards.slow.limit_ms(config.objectives.total_ms, config.objectives.ttft_ms)
            assert over_ms is not None, "the configuration was checked"
            guard = msgspec.structs.replace(guard, over_s=over_ms / 1000.0, of=guards.slow.of)
        yield guard
