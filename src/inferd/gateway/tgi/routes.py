"""The routes of text-generation-inference."""

from __future__ import annotations

from typing import Final

from inferd.gateway.operations import TEXT_COMPLETION
from inferd.gateway.route import Endpoint, Route
from inferd.gateway.tgi.errors import TGI_ERRORS
from inferd.gateway.tgi.generate import generate, generate_compat, generate_stream
from inferd.gateway.tgi.wire import Generated, StreamEvent, TgiGenerateRequest
from inferd.observe.payloads.texts import JsonTexts

_STATUSES: Final = (400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 500, 503)
_EVENTS: Final = "Events, one for each token; the last has the whole text, or 'error'."
_TEXTS: Final = JsonTexts("text", "generated_text")


def _route(pattern: str, endpoint: Endpoint, summary: str) -> Route:
    return Route(
        *("POST", pattern, "infer", endpoint, summary),
        request=TgiGenerateRequest,
        response=Generated,
        chunk=StreamEvent,
        operation=TEXT_COMPLETION,
        texts=_TEXTS,
        events=_EVENTS,
        statuses=_STATUSES,
        errors=TGI_ERRORS,
    )


ROUTES: Final = (
    _route("/generate", generate, "Continue a text, as text-generation-inference does."),
    _route("/", generate_compat, "The same for older clients: a whole answer comes in a list.")._replace(
        response=list[Generated]
    ),
    _route("/generate_stream", generate_stream, "The same as a stream of tokens."),
)
