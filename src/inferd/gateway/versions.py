"""Chooses the version of a model for a request, when the versions share the requests for the model's own name.

Requests with the same sequence, session, user or Idempotency-Key get the same version; a request without these is
drawn by its id. Knows what identifies a request. The shares and the draw are in ``config/versions.py``.
"""

from __future__ import annotations

from inferd.config.versions import entry_drawn
from inferd.gateway.admission import find_model, may_use, session_of
from inferd.gateway.call import Call
from inferd.gateway.context import Context
from inferd.gateway.upstream import ModelStatus

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
    again = (call.header(b"idempotency-key") or b"").decode(
        "latin-1"
    )  # a retry must get the version of the first attempt
    unit = sequence or session_of(call) or user or again or call.request_id
    entry = entry_drawn(
        context.config.models,
        model.name,
        f"{call.principal.tenant}\0{unit}",
        lambda entry: _is_able(_usable(context, call, entry)),
    )
    return _usable(context, call, entry) or model


def _usable(context: Context, call: Call, entry: str) -> ModelStatus | None:
    """The version, if the request's key may use it."""
    return context.router.model(entry) if may_use(context, call.principal, entry) else None


def _is_able(version: ModelStatus | None) -> bool:
    return version is not None and version.state not in _UNABLE
