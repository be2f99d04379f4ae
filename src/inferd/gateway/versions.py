"""Chooses the version of a model for a request, when the versions share the requests for the model's own name.

Requests with the same sequence, session, user or Idempotency-Key get the same version; a request without these is
drawn by its id. A rollout may take another unit. Knows what identifies a request. The shares and the draw are in
``config/versions.py``.
"""

from __future__ import annotations

import msgspec

from inferd.config.versions import draw
from inferd.events import Assigned
from inferd.gateway.admission import find_model, may_use, session_of
from inferd.gateway.call import Call, Division
from inferd.gateway.context import Context
from inferd.gateway.rescue import rescuing
from inferd.gateway.upstream import ModelStatus
from inferd.rollout.copies import Copies, Shadow, shadow_of
from inferd.rollout.refusals import reading_refusals
from inferd.router.stream import Submitting

_UNABLE = frozenset(("failed", "stopped", "unavailable"))


def model_for(context: Context, call: Call, name: str | None, user: str = "") -> ModelStatus:
    """The model, or the version of it, that computes this request. Raises ModelNotFound, InvalidRequest."""
    model = find_model(context, call, name)
    return draw_version(context, call, model, user=user) if name is None or name == model.name else model


def draw_version(
    context: Context, call: Call, model: ModelStatus, *, sequence: str = "", user: str = ""
) -> ModelStatus:
    """The version that serves a request for a model's own name, among the versions that the request's key may use."""
    config = context.config.models.get(model.name)
    if config is None or not config.versions.weights:
        return model
    split = context.splits.get(model.name)
    named = _named_unit(call, "auto" if split is None else split.unit, sequence, user)
    tenant = call.principal.tenant
    found = draw(
        context.config.models,
        model.name,
        tenant if split is not None and split.unit == "tenant" else f"{tenant}\0{named or call.request_id}",
        lambda entry: _is_able(_usable(context, call, entry)),
    )
    if split is not None and split.is_counted and found.was_free:
        is_single = not named and split.unit != "tenant" and call.given_request_id is None
        call.assigned = assigned = Assigned(
            rollout=split.rollout,
            run=split.run,
            share=split.share,
            is_new=found.entry == split.new_entry,
            unit=b"" if is_single else found.digest,
        )
        other = _usable(context, call, split.stable_entry if assigned.is_new else split.new_entry)
        if other is not None and _is_able(other):
            if assigned.is_new:
                call.spare_model, call.division = split.stable_entry, rescuing
            elif context.copies is not None and split.is_shadowed(found.digest):
                call.division = _copying(context.copies, shadow_of(split, model.name, assigned, other.info))
        if split.reads_refusals:
            call.division = _reading_refusals(call.division)
    return _usable(context, call, found.entry) or model


def _copying(copies: Copies, shadow: Shadow) -> Division:
    def division(router: Submitting, call: Call) -> Submitting:
        copying = copies.copying(router, shadow)
        call.closers += (copying.call_ended,)
        return copying

    return division


def _reading_refusals(inner: Division | None) -> Division:
    """Note in the call's assignment whether its answer is a refusal. An answer that the other version gave is not."""

    def division(router: Submitting, call: Call) -> Submitting:
        def refused() -> None:
            if call.assigned is not None and not call.rescued_from:
                call.assigned = msgspec.structs.replace(call.assigned, is_refusal=True)

        return reading_refusals(router if inner is None else inner(router, call), refused)

    return division


def _named_unit(call: Call, kind: str, sequence: str, user: str) -> str:
    """What of a request is the same in all requests that must get one version; empty: the request itself."""
    if sequence:
        return sequence  # the version's workers hold its state
    # A retry must get the version of the first attempt.
    again = (call.header(b"idempotency-key") or b"").decode("latin-1")
    match kind:
        case "request":
            return again
        case "user":
            return user or again
        case "session":
            return session_of(call) or again
        case _:
            return session_of(call) or user or again


def _usable(context: Context, call: Call, entry: str) -> ModelStatus | None:
    """The version, if the request's key may use it."""
    return context.router.model(entry) if may_use(context, call.principal, entry) else None


def _is_able(version: ModelStatus | None) -> bool:
    return version is not None and version.state not in _UNABLE
