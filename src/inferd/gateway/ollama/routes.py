"""The routes of Ollama's API."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final

from inferd.gateway.call import LINES_TYPE, Answer, Call, Pieces, Switched
from inferd.gateway.context import Context
from inferd.gateway.ollama import models
from inferd.gateway.ollama.chat import create_chat, create_text
from inferd.gateway.ollama.embed import embed, embeddings
from inferd.gateway.ollama.errors import OLLAMA_ERRORS
from inferd.gateway.ollama.wire import (
    ModelDetails,
    ModelTags,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaTextAnswer,
    Progress,
    PullRequest,
    RunningModels,
    ShowRequest,
    VersionAnswer,
)
from inferd.gateway.operations import CHAT, EMBEDDINGS, TEXT_COMPLETION
from inferd.gateway.route import Endpoint, Route
from inferd.observe.payloads.texts import JsonLines
from inferd.predict.codecs.text_wire import (
    OllamaEmbeddingsRequest,
    OllamaEmbeddingsResponse,
    OllamaEmbedRequest,
    OllamaEmbedResponse,
)

_REFUSALS: Final = (401, 403)
_STATUSES: Final = (400, *_REFUSALS, 404, 408, 409, 413, 415, 422, 429, 500, 503)
_LINES: Final = "Lines of JSON (application/x-ndjson); the last has 'done': true, or 'error' alone."
_TEXTS: Final = JsonLines("content", "response", "thinking", whole=("name",))


def _by_programs(endpoint: Endpoint) -> Endpoint:
    """An endpoint that takes JSON also as curl's ``-d`` sends it, with the content type of a form.

    A browser lets any page send a form, so it is taken from programs alone: a browser sends Origin or Sec-Fetch-Site
    with it, and names itself Mozilla.
    """

    def asked(context: Context, call: Call, rest: str) -> Awaitable[Answer | Pieces | Switched]:
        media = (call.header(b"content-type") or b"").partition(b";")[0].strip().lower()
        if media == b"application/x-www-form-urlencoded" and call.header(b"content-encoding") is None:
            agent = call.header(b"user-agent") or b"Mozilla"
            is_page = any(call.header(name) is not None for name in (b"origin", b"sec-fetch-site", b"referer"))
            call.facts.is_json = not is_page and not agent.lower().startswith(b"mozilla")
        return endpoint(context, call, rest)

    return asked


_ROUTES: Final = (
    Route(
        *("POST", "/api/chat", "infer", create_chat, "Answer a conversation, as Ollama does."),
        request=OllamaChatRequest,
        response=OllamaTextAnswer,
        chunk=OllamaTextAnswer,
        operation=CHAT,
        texts=_TEXTS,
        events=_LINES,
        stream_media=LINES_TYPE,
        statuses=_STATUSES,
        errors=OLLAMA_ERRORS,
    ),
    Route(
        *("POST", "/api/generate", "infer", create_text, "Answer a prompt, as Ollama does."),
        request=OllamaGenerateRequest,
        response=OllamaTextAnswer,
        chunk=OllamaTextAnswer,
        operation=TEXT_COMPLETION,
        texts=_TEXTS,
        events=_LINES,
        stream_media=LINES_TYPE,
        statuses=_STATUSES,
        errors=OLLAMA_ERRORS,
    ),
    Route(
        *("POST", "/api/embed", "infer", embed, "Texts to vectors, as Ollama does."),
        request=OllamaEmbedRequest,
        response=OllamaEmbedResponse,
        operation=EMBEDDINGS,
        statuses=(*_STATUSES, 502, 504),
        errors=OLLAMA_ERRORS,
    ),
    Route(
        *("POST", "/api/embeddings", "infer", embeddings, "A text to a vector, as older clients of Ollama ask."),
        request=OllamaEmbeddingsRequest,
        response=OllamaEmbeddingsResponse,
        operation=EMBEDDINGS,
        statuses=(*_STATUSES, 502, 504),
        errors=OLLAMA_ERRORS,
    ),
    Route(
        *("GET", "/api/tags", "models", models.list_models, "The models served here, as Ollama lists them."),
        response=ModelTags,
        statuses=_REFUSALS,
        errors=OLLAMA_ERRORS,
    ),
    Route(
        *("GET", "/api/ps", "models", models.list_running, "The models that are loaded, as Ollama lists them."),
        response=RunningModels,
        statuses=_REFUSALS,
        errors=OLLAMA_ERRORS,
    ),
    Route(
        *("POST", "/api/show", "models", models.show_model, "One model, as Ollama shows it."),
        request=ShowRequest,
        response=ModelDetails,
        statuses=(400, *_REFUSALS, 404, 408, 413, 415),
        errors=OLLAMA_ERRORS,
    ),
    Route(
        *("POST", "/api/pull", "models", models.pull_model, "Is a model here? Nothing is fetched."),
        request=PullRequest,
        response=Progress,
        chunk=Progress,
        events="Lines of JSON (application/x-ndjson).",
        stream_media=LINES_TYPE,
        statuses=(400, *_REFUSALS, 404, 408, 413, 415),
        errors=OLLAMA_ERRORS,
    ),
    Route(
        *("GET", "/api/version", "models", models.version, "The version of Ollama's API that is served."),
        response=VersionAnswer,
        statuses=_REFUSALS,
        errors=OLLAMA_ERRORS,
    ),
)


ROUTES: Final = tuple(
    [route._replace(endpoint=_by_programs(route.endpoint)) if route.method == "POST" else route for route in _ROUTES]
)
