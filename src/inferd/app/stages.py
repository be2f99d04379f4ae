"""Carries the changes of rollouts to the stages of the registry: implements ``rollout.ledger.Stages``.

A rollout whose versions are references with a number is about versions of the registry. It makes the new one a canary
when it starts, puts it into production when it is promoted, and takes it back when it ends otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from inferd.config.versioning import RegistryConfig
from inferd.lifecycle import serving
from inferd.lifecycle.actions import policy_of
from inferd.rollout.judge import Verdict, reading_text
from inferd.rollout.ledger import Stages
from inferd.rollout.machine import ACTIVE, Progress
from inferd.rollout.plan import Plan
from inferd.state.database import Transaction


class RegistryStages:
    """``settings`` are those of now; ``now`` is the time in seconds since the epoch."""

    def __init__(self, settings: Callable[[], RegistryConfig], now: Callable[[], float]) -> None:
        self._settings = settings
        self._now = now

    def problem(self, transaction: Transaction, plan: Plan) -> str:
        return serving.problem(transaction, plan.registered_new) if plan.registered_new else ""

    def follow(
        self, transaction: Transaction, plan: Plan, before: Progress, after: Progress, verdict: Verdict, actor: str
    ) -> None:
        new = plan.registered_new
        if not new or before.state == after.state:
            return
        settings = self._settings()
        cause = serving.Cause(
            actor=actor,
            at=self._now(),
            reason=f"rollout {plan.name} {after.state.replace('_', ' ')}: {after.reason}",
            numbers="; ".join([reading_text(reading) for reading in verdict.readings]),
            policy=policy_of(settings),
            needs_approval=settings.require_approval,
        )
        if after.state == "preparing":
            serving.begins(transaction, new, cause)
        elif after.state == "promoted":
            serving.serves(transaction, new, cause)
        elif before.state == "promoted":
            serving.goes_back(transaction, new, plan.registered_stable, cause)
        elif before.state in ACTIVE and after.state not in ACTIVE:
            serving.ends(transaction, new, cause)


if TYPE_CHECKING:
    _stages: type[Stages] = RegistryStages
