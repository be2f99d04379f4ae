"""The stages of a model's version, and what each action makes of them. Pure: no clock, no I/O; the time is an argument.

    registered -verify-> verified -validate-> validated -approve-> approved <-canary, withdraw-> canary
                                                                      |                 |
                                                                      +-----promote-----+--> production
                                                                                             |       ^
                                                                           another is promoted,     promote
                                                                           or archive        v       |
                                                                                             archived

``reject`` leads from every stage before production to ``rejected``, which no action leaves. Each action asks for
evidence. The newest evidence of a kind counts, and one that did not pass holds a version back until a newer one passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, get_args

import msgspec

from inferd.errors import InvalidRequest

Stage = Literal["registered", "verified", "validated", "approved", "canary", "production", "archived", "rejected"]
Action = Literal["verify", "validate", "approve", "canary", "withdraw", "promote", "archive", "reject"]
Kind = Literal["digest", "signature", "contract", "equivalence", "golden", "replay"]

STAGES: Final[tuple[Stage, ...]] = get_args(Stage)
ACTIONS: Final[tuple[Action, ...]] = get_args(Action)
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

BEFORE_PRODUCTION: Final[tuple[Stage, ...]] = ("registered", "verified", "validated", "approved", "canary")

MOVES: Final[Mapping[tuple[Stage, Action], Stage]] = {
    ("registered", "verify"): "verified",
    ("verified", "validate"): "validated",
    ("validated", "approve"): "approved",
    ("approved", "canary"): "canary",
    ("approved", "promote"): "production",
    ("canary", "withdraw"): "approved",
    ("canary", "promote"): "production",
    ("archived", "canary"): "canary",
    ("archived", "promote"): "production",
    ("production", "archive"): "archived",
    **{(stage, "reject"): "rejected" for stage in BEFORE_PRODUCTION},
}
"""The stage after an action. What is not here is refused."""

_OF_FILES: Final = ("digest", "signature")
"""Kinds of evidence about files alone, which ``verify`` asks for. The others are asked for by ``validate``."""

_CHECKED: Final = frozenset(("verify", "validate", "approve", "canary", "promote"))
_COMPARED: Final = frozenset(("validate", "canary", "promote"))


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What was found out about a version. The report itself is stored under its SHA-256."""

    kind: Kind
    passed: bool
    at: float  # seconds since the epoch
    actor: str
    report: str  # SHA-256 of the report, in hexadecimal digits
    summary: str = ""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What a version needs on its way."""

    evidence: frozenset[Kind] = frozenset()  # beside the digest, which is always needed
    four_eyes: bool = False  # the approver is not the registrant


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """How a version's contract differs from that of the version in production."""

    base: int | None = None  # the version in production; None: there is none
    words: tuple[str, ...] = ()  # of each difference
    breaks: tuple[str, ...] = ()  # the words of those that clients may notice
    unknown: str = ""  # why outputs could not be compared; empty: they were


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """How far a version is."""

    stage: Stage = "registered"
    registrant: str = ""
    approver: str = ""
    evidence: tuple[Evidence, ...] = ()  # the newest of each kind
    accepted: tuple[str, ...] = ()  # changes of the contract that an override has accepted
    was_in_production: bool = False
    since: float = 0.0  # of the stage, in seconds since the epoch
    reason: str = ""  # of the last move

    def newest(self, kind: Kind) -> Evidence | None:
        return next((one for one in self.evidence if one.kind == kind), None)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An action that was asked for. ``override``: why a changed contract is accepted; empty: it is not."""

    action: Action
    actor: str
    at: float
    reason: str = ""
    override: str = ""
    change: Change = Change()


def moved(record: Record, event: Event, policy: Policy = Policy()) -> Record:
    """The record after an action. Raises InvalidRequest that names what is missing and the remedy; the record stays."""
    action = event.action
    following = MOVES.get((record.stage, action))
    if following is None:
        raise _refused(record, action, _way(record))
    if record.stage == "archived" and not record.was_in_production:
        raise _refused(record, action, "It was never in production.")
    if action == "reject" and not event.reason:
        raise InvalidRequest("A rejection needs a reason; give one.", param="reason", code="registry_reason")
    if action in _CHECKED:
        _check_evidence(record, action, policy)
    accepted = record.accepted
    if action in _COMPARED:
        accepted = _accepted(record, event)
    if action == "approve" and policy.four_eyes and person_of(event.actor) == person_of(record.registrant):
        raise InvalidRequest(
            f"The version was registered by {record.registrant}, so {event.actor} cannot approve it: "
            "registry.four_eyes is on, and another user or key has to approve.",
            param="actor",
            code="registry_four_eyes",
        )
    return msgspec.structs.replace(
        record,
        stage=following,
        approver=event.actor if action == "approve" else record.approver,
        accepted=accepted,
        was_in_production=record.was_in_production or following == "production",
        since=event.at,
        reason=event.reason or event.override,
    )


def with_evidence(record: Record, evidence: Evidence) -> Record:
    """The record with evidence that replaces the older one of its kind. Raises InvalidRequest for a version that was
    rejected."""
    if record.stage == "rejected":
        raise InvalidRequest(
            "The version was rejected, and takes no more evidence; register its files as a new version.",
            param="version",
            code="registry_stage",
        )
    others = tuple(one for one in record.evidence if one.kind != evidence.kind)
    return msgspec.structs.replace(record, evidence=(*others, evidence))


def person_of(actor: str) -> str:
    """An actor, so that one user at the command line and at the control socket is one."""
    kind, _, rest = actor.partition(":")
    return f"uid:{rest}" if kind in ("user", "control-socket") and rest else actor


def possible(stage: Stage) -> tuple[Action, ...]:
    """The actions that lead on from a stage."""
    return tuple(action for action in ACTIONS if (stage, action) in MOVES)


def _check_evidence(record: Record, action: Action, policy: Policy) -> None:
    needed: list[Kind] = ["digest", *(kind for kind in KINDS if kind in policy.evidence and kind != "digest")]
    if action == "verify":
        needed = [kind for kind in needed if kind in _OF_FILES]
    for kind in KINDS:
        found = record.newest(kind)
        if found is not None and not found.passed:
            raise InvalidRequest(
                f"The newest {kind} report of the version did not pass ({found.summary or 'it has no summary'}), so "
                f"{action!r} is refused; attach a report that passes, or reject the version.",
                param="evidence",
                code="registry_evidence",
            )
        if found is None and kind in needed and kind != "contract":
            raise InvalidRequest(
                f"The version has no {kind} report, which {action!r} needs; {_REMEDIES[kind]}",
                param="evidence",
                code="registry_evidence",
            )


_REMEDIES: Final[Mapping[Kind, str]] = {
    "digest": "'inferd registry verify NAME@VERSION' reads its files and compares them.",
    "signature": "'inferd registry verify NAME@VERSION' checks the one beside its files.",
    "equivalence": "'inferd registry attach --kind equivalence' adds one.",
    "golden": "'inferd registry attach --kind golden' adds one.",
    "replay": "'inferd registry attach --kind replay' adds one.",
}


def _accepted(record: Record, event: Event) -> tuple[str, ...]:
    """The accepted changes of the contract. Raises InvalidRequest for a change that is not accepted."""
    new = [word for word in event.change.breaks if word not in record.accepted]
    if not new:
        return record.accepted
    if not event.override:
        raise InvalidRequest(
            f"The contract differs from that of version {event.change.base}, which is in production: "
            f"{'; '.join(new)}. Clients may break; accept it with a reason (--override), or correct the model.",
            param="override",
            code="registry_contract",
        )
    return (*record.accepted, *new)


def _way(record: Record) -> str:
    ways = possible(record.stage)
    return f"Possible is {' or '.join(ways)}." if ways else "Register its files as a new version."


def _refused(record: Record, action: Action, remedy: str) -> InvalidRequest:
    return InvalidRequest(
        f"The version is {record.stage}, so {action!r} is not possible. {remedy}",
        param="action",
        code="registry_stage",
    )
