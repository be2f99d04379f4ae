"""The plan of a rollout, from the configuration."""

from __future__ import annotations

from typing import Any

import msgspec

from inferd.compare.answers import Tolerance
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
    both = {"ttft_ms": 250, "total_ms": 2000}
    objective = planned(both, guards={"errors": None, "slow": {}})
    assert objective.guards == (Guard(kind="slow", max_ratio=1.5, over_s=2.0, first_over_s=0.25),)
    first = planned(both, guards={"errors": None, "slow": {"first_over_ms": 100}})
    assert first.guards == (Guard(kind="slow", max_ratio=1.5, first_over_s=0.1),), "what is given replaces both"


def test_shadow_steps_keep_the_weight_and_differs_has_its_tolerance() -> None:
    plan = planned(
        steps=[{"shadow": 100, "for_s": 9}, {"weight": 5, "shadow": 20}, {"shadow": 10}, {"weight": 100}],
        guards={"errors": None, "differs": {"max_fraction": 0.1, "relative": 0.5}},
    )
    assert [(step.share, step.shadow) for step in plan.steps] == [(0.0, 1.0), (0.05, 0.2), (0.05, 0.1), (1.0, 0.0)]
    (guard,) = plan.guards
    assert (guard.max_ratio, guard.max_fraction, guard.tolerance) == (None, 0.1, Tolerance(relative=0.5))
    assert [step.can_prove(guard) for step in plan.steps] == [True, True, True, False]


def test_equal_plans_have_equal_digests() -> None:
    assert planned().digest == planned().digest
    assert len({planned().digest, planned(alpha=0.02).digest, planned(stable=3).digest}) == 3
