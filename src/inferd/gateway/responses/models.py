"""The list of models in the form that Codex asks for, and the names that its requests have."""

from __future__ import annotations

import re
from typing import Any, Final

from inferd.gateway.call import Call, Response
from inferd.gateway.context import Context
from inferd.gateway.generation.writer import encode
from inferd.gateway.openai.models import model_cards
from inferd.gateway.openai.wire import ModelList

FOREIGN: Final = re.compile(r"gpt-|codex-|chatgpt-|o[0-9]")
"""The beginning of the names that Codex and OpenAI's agents ask for where no other is set."""


class CodexModelList(ModelList, frozen=True, kw_only=True):
    """``models`` would have instructions of Codex for each model. It is empty: Codex then uses its own."""

    models: list[Any] = []


def is_asked(call: Call) -> bool:
    """Whether a request for the served models comes from Codex, which names its version in the query."""
    return any(field.startswith("client_version=") for field in call.head.query.split("&"))


def list_models(context: Context, call: Call) -> Response:
    """The models that the client may use."""
    return Response(200, encode(CodexModelList(data=model_cards(context, call))))
