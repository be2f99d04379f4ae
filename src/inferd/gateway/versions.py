"""Which version of a model a request gets, where versions share out the requests for the model's own name.

Who comes again gets the same one: by the sequence, session, user or Idempotency-Key that the request names; a request
that names none is by itself. Knows who asks; what the shares are and how they are drawn from is the configuration's
(``config/versions.py``).
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
    """Of a model that was asked for by its own name: the version that serves this request, of those that its key may
    use."""
    config = context.config.models.get(model.name)
    if config is None or not config.versions.weights:
        return model
    again = (call.header(b"idempotency-key") or b"").decode("latin-1")  # the first time may have been another's turn
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
