"""The stages of a version as it comes to serve and goes: the moves of a rollout, in the rollout's own transaction.

Each function makes the stage what it should be and leaves one that it is already, so that it does not matter how often
a change is carried out. Versions are named NAME@NUMBER. Knows no rollout.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from inferd.errors import InvalidRequest, ModelNotFound
from inferd.lifecycle import registry
from inferd.lifecycle.registry import MAX_TEXT, Version
from inferd.lifecycle.stages import Action, Policy
from inferd.state.database import Transaction

_APPROVED: Final = ("approved", "canary", "production", "archived")
"""Stages of versions that were approved."""


class Cause(NamedTuple):
    """Why versions move."""

    actor: str
    at: float  # seconds since the epoch
    reason: str
    numbers: str = ""  # that the decision follows from
    policy: Policy = Policy()
    needs_approval: bool = False  # a version that was not approved must not serve


def problem(transaction: Transaction, version: str) -> str:
    """Why a version must not serve at all; empty: nothing."""
    found = _known(transaction, version)
    if found is None:
        return f"{version} is not in the registry any more"
    if found.record.stage == "rejected":
        return f"{version} was rejected in the registry: {found.record.reason}"
    return ""


def begins(transaction: Transaction, version: str, cause: Cause) -> None:
    """It is about to serve a part of the requests. Raises InvalidRequest for a version that must not."""
    found = _found(transaction, version)
    if _may_serve(found, version, cause) and found.record.stage not in ("canary", "production"):
        _move(transaction, found, "canary", cause)


def serves(transaction: Transaction, version: str, cause: Cause) -> None:
    """It serves everything. Raises InvalidRequest for a version that must not."""
    found = _found(transaction, version)
    if _may_serve(found, version, cause) and found.record.stage != "production":
        _move(transaction, found, "promote", cause)


def ends(transaction: Transaction, version: str, cause: Cause) -> None:
    """It serves no part of the requests any more."""
    found = _known(transaction, version)
    if found is not None and found.record.stage == "canary":
        _move(transaction, found, "withdraw", cause)


def goes_back(transaction: Transaction, version: str, before: str, cause: Cause) -> None:
    """It served everything, and the version ``before`` serves again; empty: that one is in no registry.

    Going back is never refused. Where the evidence of ``before`` does not allow its promotion, no version is in
    production, and the history says why.
    """
    old = _known(transaction, before) if before else None
    if old is not None and old.record.stage in _APPROVED:
        try:
            if old.record.stage != "production":
                _move(transaction, old, "promote", cause, override=_shortened(cause.reason))
            return
        except InvalidRequest as error:
            cause = cause._replace(reason=f"{cause.reason}; {before} is not promoted again: {error.message}")
    found = _known(transaction, version)
    if found is not None and found.record.stage == "production":
        _move(transaction, found, "archive", cause)


def _may_serve(found: Version, version: str, cause: Cause) -> bool:
    """Whether the version's stages follow what it serves: those of one that was approved do. Raises InvalidRequest for
    one that must not serve."""
    stage = found.record.stage
    if stage == "rejected" or (cause.needs_approval and stage not in _APPROVED):
        remedy = "name another version" if stage == "rejected" else f"'inferd registry approve {version}' approves it"
        raise InvalidRequest(
            f"{version} is {stage} in the registry, so no rollout brings it to production; {remedy}.",
            param="model",
            code="registry_stage",
        )
    return stage in _APPROVED


def _found(transaction: Transaction, version: str) -> Version:
    name, _, number = version.rpartition("@")
    return registry.one_in(transaction, name, int(number))


def _known(transaction: Transaction, version: str) -> Version | None:
    try:
        return _found(transaction, version)
    except ModelNotFound:
        return None


def _move(transaction: Transaction, found: Version, action: Action, cause: Cause, override: str = "") -> None:
    registry.tell_gateways(transaction)
    registry.move_in(
        *(transaction, found.name, found.version, action),
        actor=cause.actor,
        now=cause.at,
        policy=cause.policy,
        reason=_shortened(cause.reason),
        override=override,
        detail=_shortened(cause.numbers),
    )


def _shortened(text: str) -> str:
    """A text that the history takes."""
    return "".join([char if char.isprintable() else " " for char in text])[:MAX_TEXT]
