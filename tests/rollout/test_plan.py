"""The plan of a rollout, from the configuration."""

from __future__ import annotations

from typing import Any

import msgspec

from inferd.config import ModelConfig
from inferd.rollout.plan import Guard, Plan, Step, plan_of


def planned(objectives: dict[str, Any] | None = None, **rollout: Any) -> Plan:
    model = {"source": "x", "objectives": objectives or {}, "rollout": {"stable": 1, "new": 2, **rollout}}
    plan = plan_of("m", msgspec.convert(model, ModelConfig))
    assert plan is not None
    return plan


def test_a_model_without_a_rollout_has_no_plan() -> None:
    assert plan_of("m", ModelConfig(source="x")) is None


def test_percent_become_shares_and_only_set_guards_watch() -> None:
    plan = planned(steps=[{"weight": 5, "for_s": 60}, {"weight": 100}])
    assert plan.steps == (Step(share=0.05, for_s=60.0), Step(share=1.0))
    assert plan.guards == (Guard(kind="errors", max_ratio=2.0, max_fraction=0.01),)
    assert plan.name == "m:1:2"


def test_a_plan_that_ends_below_all_goes_on_by_approval() -> None:
    """As an A/B test does: it stays at its share until its operator decides."""
    assert planned(steps=[{"weight": 50}]).steps == (Step(share=0.5), Step(share=1.0, needs_approval=True))


def test_the_last_step_needs_an_approval_where_the_configuration_wants_it() -> None:
    plan = planned(steps=[{"weight": 5}, {"weight": 100, "for_s": 9}], promote="approve")
    assert [step.needs_approval for step in plan.steps] == [False, True]


def test_slow_is_what_the_guard_says_or_the_objective() -> None:
    own = planned(guards={"errors": None, "slow": {"over_ms": 300}})
    assert own.guards == (Guard(kind="slow", max_ratio=1.5, over_s=0.3),)
    objective = planned({"ttft_ms": 250}, guards={"errors": None, "slow": {"of": "first_token"}})
    assert objective.guards == (Guard(kind="slow", max_ratio=1.5, over_s=0.25, of="first_token"),)


def test_equal_plans_have_equal_digests() -> None:
    assert planned().digest == planned().digest
    assert len({planned().digest, planned(alpha=0.02).digest, planned(stable=3).digest}) == 3
