"""The stages of a version: every stage with every action, and what holds on every way through them."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.errors import InvalidRequest
from inferd.lifecycle.stages import (
    ACTIONS,
    BEFORE_PRODUCTION,
    KINDS,
    STAGES,
    Action,
    Change,
    Event,
    Evidence,
    Kind,
    Policy,
    Record,
    Stage,
    moved,
    person_of,
    possible,
    with_evidence,
)

ALLOWED: dict[tuple[str, str], str] = {
    ("registered", "verify"): "verified",
    ("registered", "reject"): "rejected",
    ("verified", "validate"): "validated",
    ("verified", "reject"): "rejected",
    ("validated", "approve"): "approved",
    ("validated", "reject"): "rejected",
    ("approved", "canary"): "canary",
    ("approved", "promote"): "production",
    ("approved", "reject"): "rejected",
    ("canary", "withdraw"): "approved",
    ("canary", "promote"): "production",
    ("canary", "reject"): "rejected",
    ("production", "archive"): "archived",
    ("archived", "canary"): "canary",
    ("archived", "promote"): "production",
}
"""Written out here as well: a row that is changed by mistake turns a test red."""

BROKEN = Change(base=1, words=("the output 'y' is gone",), breaks=("the output 'y' is gone",))


def proof(kind: Kind, passed: bool = True) -> Evidence:
    return Evidence(kind=kind, passed=passed, at=1.0, actor="user:1", report="0" * 64)


def record(stage: Stage, *kinds: Kind, registrant: str = "user:1") -> Record:
    evidence = tuple(proof(kind) for kind in kinds)
    return Record(stage=stage, registrant=registrant, evidence=evidence, was_in_production=stage == "archived")


def event(action: Action, actor: str = "key:boss", **more: object) -> Event:
    return msgspec.structs.replace(Event(action=action, actor=actor, at=9.0, reason="because"), **more)


@pytest.mark.parametrize(("stage", "action"), list(itertools.product(STAGES, ACTIONS)))
def test_every_stage_answers_every_action(stage: Stage, action: Action) -> None:
    before = record(stage, *KINDS)
    expected = ALLOWED.get((stage, action))
    if expected is None:
        with pytest.raises(InvalidRequest, match=f"The version is {stage}, so '{action}' is not possible") as refused:
            moved(before, event(action))
        assert refused.value.code == "registry_stage"
        assert all(way in refused.value.message for way in possible(stage))
        return
    after = moved(before, event(action))
    assert (after.stage, after.since, after.reason) == (expected, 9.0, "because")
    assert after.evidence == before.evidence
    assert after.was_in_production == (stage == "archived" or expected == "production")


@pytest.mark.parametrize("action", ["verify", "validate", "approve", "canary", "promote"])
@pytest.mark.parametrize("kind", KINDS)
def test_evidence_that_did_not_pass_holds_every_step_back_until_a_newer_one_passes(action: Action, kind: Kind) -> None:
    stage = next(stage for stage in STAGES if (stage, action) in ALLOWED)
    failed = with_evidence(record(stage, *KINDS), proof(kind, passed=False))
    with pytest.raises(InvalidRequest, match=f"newest {kind} report") as refused:
        moved(failed, event(action))
    assert refused.value.code == "registry_evidence"
    assert moved(with_evidence(failed, proof(kind)), event(action)).stage == ALLOWED[stage, action]


@pytest.mark.parametrize("kind", ["signature", "equivalence", "golden", "replay"])
def test_what_the_policy_asks_for_has_to_be_there(kind: Kind) -> None:
    policy = Policy(evidence=frozenset((kind,)))
    needed_by: Action = "verify" if kind == "signature" else "validate"
    stage: Stage = "registered" if kind == "signature" else "verified"
    with pytest.raises(InvalidRequest, match=f"has no {kind} report, which '{needed_by}' needs"):
        moved(record(stage, "digest"), event(needed_by), policy)
    assert moved(record(stage, "digest", kind), event(needed_by), policy).stage == ALLOWED[stage, needed_by]
    if needed_by == "validate":
        assert moved(record("registered", "digest"), event("verify"), policy).stage == "verified"
    # A policy that became stricter holds for versions that are further already.
    with pytest.raises(InvalidRequest, match=f"has no {kind} report, which 'promote' needs"):
        moved(record("canary", "digest"), event("promote"), policy)


def test_nothing_is_verified_without_its_digest() -> None:
    with pytest.raises(InvalidRequest, match="inferd registry verify"):
        moved(record("registered"), event("verify"))


@pytest.mark.parametrize("approver", ["user:7", "control-socket:7", "key:a"])
def test_with_four_eyes_another_person_approves(approver: str) -> None:
    policy = Policy(four_eyes=True)
    for registrant in ("user:7", "control-socket:7", "key:a", "key:b", "control-socket"):
        before = record("validated", "digest", registrant=registrant)
        if person_of(registrant) == person_of(approver):
            with pytest.raises(InvalidRequest, match="cannot approve it") as refused:
                moved(before, event("approve", approver), policy)
            assert refused.value.code == "registry_four_eyes"
        else:
            assert moved(before, event("approve", approver), policy).approver == approver
        assert moved(before, event("approve", approver)).approver == approver


@pytest.mark.parametrize("action", ["validate", "canary", "promote"])
def test_a_changed_contract_needs_a_reason_once(action: Action) -> None:
    stage = next(stage for stage in STAGES if (stage, action) in ALLOWED)
    before = record(stage, "digest")
    with pytest.raises(InvalidRequest, match="the output 'y' is gone") as refused:
        moved(before, event(action, change=BROKEN))
    assert refused.value.code == "registry_contract"
    accepted = moved(before, event(action, change=BROKEN, override="the clients know"))
    assert accepted.accepted == BROKEN.breaks
    # What was accepted stays so; another change does not follow from it.
    again = msgspec.structs.replace(accepted, stage=stage)
    assert moved(again, event(action, change=BROKEN)).accepted == BROKEN.breaks
    other = Change(base=1, words=("the input 'z' is new",), breaks=("the input 'z' is new",))
    with pytest.raises(InvalidRequest, match="the input 'z' is new"):
        moved(again, event(action, change=other))


def test_a_rejection_has_a_reason_and_is_final() -> None:
    for stage in BEFORE_PRODUCTION:
        with pytest.raises(InvalidRequest, match="needs a reason"):
            moved(record(stage), event("reject", reason=""))
    gone = moved(record("canary"), event("reject"))
    with pytest.raises(InvalidRequest, match="takes no more evidence"):
        with_evidence(gone, proof("golden"))


def test_only_what_was_in_production_comes_back_from_the_archive() -> None:
    never = msgspec.structs.replace(record("archived", "digest"), was_in_production=False)
    with pytest.raises(InvalidRequest, match="never in production"):
        moved(never, event("promote"))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(ACTIONS),
            st.sampled_from(["user:1", "user:2"]),
            st.sampled_from(["", "a reason"]),
            st.sampled_from([Change(), BROKEN]),
            st.sampled_from(["", "an override"]),
            st.none() | st.tuples(st.sampled_from(KINDS), st.booleans()),
        ),
        max_size=24,
    ),
    st.booleans(),
    st.frozensets(st.sampled_from(KINDS)),
)
def test_no_way_leads_to_production_past_the_evidence_and_the_approval(
    steps: list[tuple[Action, str, str, Change, str, tuple[Kind, bool] | None]],
    four_eyes: bool,
    kinds: frozenset[Kind],
) -> None:
    policy = Policy(evidence=kinds, four_eyes=four_eyes)
    now = Record(registrant="user:1")
    for number, (action, actor, reason, change, override, attached) in enumerate(steps):
        before = now
        asked = Event(action=action, actor=actor, at=float(number), reason=reason, override=override, change=change)
        try:
            if attached is not None:
                kind, passed = attached
                now = with_evidence(now, proof(kind, passed))
            before = now
            now = moved(now, asked, policy)
        except InvalidRequest:
            assert now == before  # a refusal changes nothing
            continue
        assert ALLOWED[before.stage, action] == now.stage
        if action not in ("reject", "archive", "withdraw"):
            assert all(one.passed for one in now.evidence)
            assert now.newest("digest") is not None
        if now.stage in ("approved", "canary", "production"):
            assert now.approver
            assert not four_eyes or now.approver != now.registrant
            assert all(now.newest(kind) is not None for kind in kinds if kind != "contract")
        if now.stage in ("validated", "canary", "production") and change is BROKEN:
            assert now.accepted == BROKEN.breaks
        assert before.stage != "rejected"
