"""The model that stands for one of another vendor, whose agents ask for it by name where no other is set."""

from __future__ import annotations

import re

from inferd.errors import ModelNotFound
from inferd.gateway.admission import visible_models
from inferd.gateway.call import Call
from inferd.gateway.context import Context
from inferd.gateway.generation.answer import model_of
from inferd.gateway.upstream import ModelStatus


def requested_model(
    context: Context, call: Call, name: str | None, user: str, foreign: re.Pattern[str]
) -> tuple[ModelStatus, list[str]]:
    """The model that a request names, and the names of the fields that had no effect.

    A name that matches ``foreign`` from its beginning, and that is not served here, stands for the only model that the
    key may use and that generates text. Raises ModelNotFound, InvalidRequest.
    """
    try:
        return model_of(context, call, name, user), []
    except ModelNotFound:
        if name is None or foreign.match(name) is None:
            raise
        able = [status for status in visible_models(context, call.principal) if _generates(status)]
        if len(able) != 1:
            raise
        only = able[0].name
    return model_of(context, call, only, user), ["model"]


def _generates(status: ModelStatus) -> bool:
    return status.info is None or "generate" in status.info.tasks
