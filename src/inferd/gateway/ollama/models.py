"""The served models, as Ollama's API tells of them: /api/tags, ps, show, pull and version."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from inferd.errors import ModelNotFound
from inferd.gateway.admission import find_model, listed_models
from inferd.gateway.body.decode import decode_body, json_body
from inferd.gateway.call import LINES_TYPE, Answer, Call, Response
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid
from inferd.gateway.generation.writer import encode
from inferd.gateway.ollama.names import found_by
from inferd.gateway.ollama.wire import (
    ModelDetails,
    ModelTags,
    OllamaDetails,
    OllamaModelEntry,
    Progress,
    PullRequest,
    RunningModel,
    RunningModels,
    ShowRequest,
    VersionAnswer,
    pull_decoder,
    show_decoder,
)
from inferd.gateway.upstream import ModelStatus

API_VERSION: Final = "0.13.0"
"""The version of Ollama whose API this dialect follows. Editors refuse servers that tell an older one."""

_UNITS: Final = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


async def list_models(context: Context, call: Call, rest: str) -> Answer:
    """GET /api/tags: the models that the client may use."""
    return Response(200, encode(ModelTags([_entry(status) for status in listed_models(context, call.principal)])))


async def list_running(context: Context, call: Call, rest: str) -> Answer:
    """GET /api/ps: those of them that are loaded."""
    running = [status for status in listed_models(context, call.principal) if status.replicas_ready > 0]
    return Response(200, encode(RunningModels([_running(status) for status in running])))


async def show_model(context: Context, call: Call, rest: str) -> Answer:
    """POST /api/show: one model. Raises InvalidRequest, ModelNotFound."""
    raw = await json_body(call, context.max_body_bytes, context.body_timeout_s)
    body = await decode_body(raw, show_decoder)
    return Response(200, encode(_details_of(_named(context, call, body))))


async def pull_model(context: Context, call: Call, rest: str) -> Answer:
    """POST /api/pull: nothing is fetched; the answer tells whether the model is here. Raises InvalidRequest,
    ModelNotFound."""
    raw = await json_body(call, context.max_body_bytes, context.body_timeout_s)
    body = await decode_body(raw, pull_decoder)
    try:
        _named(context, call, body)
    except ModelNotFound as error:
        raise ModelNotFound(
            f"{error.message} Models come from the server's configuration; add it there.", param="model"
        ) from None
    done = encode(Progress("success"))
    if body.stream is False:
        return Response(200, done)
    return Response(200, encode(Progress("pulling manifest")) + b"\n" + done + b"\n", LINES_TYPE)


async def version(context: Context, call: Call, rest: str) -> Answer:
    """GET /api/version"""
    return Response(200, encode(VersionAnswer(API_VERSION)))


def _named(context: Context, call: Call, body: ShowRequest | PullRequest) -> ModelStatus:
    name = body.model or body.name
    if not name:
        raise invalid("model", "model is missing; name the model.", "missing_required_parameter")
    return found_by(lambda name: find_model(context, call, name), name)


def _entry(status: ModelStatus) -> OllamaModelEntry:
    return OllamaModelEntry(
        name=status.name,
        model=status.name,
        modified_at=_time(status),
        size=status.memory_bytes,
        digest=_digest(status),
        details=_details(status),
    )


def _running(status: ModelStatus) -> RunningModel:
    return RunningModel(
        name=status.name,
        model=status.name,
        size=status.memory_bytes,
        digest=_digest(status),
        details=_details(status),
        context_length=status.info.max_model_len if status.info is not None else 0,
    )


def _details_of(status: ModelStatus) -> ModelDetails:
    info = status.info
    found: dict[str, str | int] = {}
    capabilities: list[str] = []
    if info is not None:
        family = info.architecture
        found["general.architecture"] = family
        found["general.parameter_count"] = info.num_parameters
        if info.max_model_len:
            found[f"{family}.context_length"] = info.max_model_len
        if "generate" in info.tasks:
            capabilities.append("completion")
            if info.answer_format:
                capabilities.append("tools")
        if "embed" in info.tasks:
            capabilities.append("embedding")
    return ModelDetails(
        modified_at=_time(status), details=_details(status), model_info=found, capabilities=capabilities
    )


def _details(status: ModelStatus) -> OllamaDetails:
    """What is known of the model's files: nothing before its first load."""
    info = status.info
    if info is None:
        return OllamaDetails(format="", family="", families=[], parameter_size="", quantization_level="")
    level = info.dtype if info.quantization == "none" else info.quantization
    return OllamaDetails(
        format=info.platform,
        family=info.architecture,
        families=[info.architecture],
        parameter_size=_size(info.num_parameters),
        quantization_level=level.upper(),
    )


def _size(number: int) -> str:
    """A number of parameters as Ollama writes it: 1.5B, 596M."""
    for unit, letter in _UNITS:
        if number >= unit:
            return f"{number / unit:.1f}{letter}"
    return str(number) if number else ""


def _digest(status: ModelStatus) -> str:
    return "" if status.info is None else status.info.artifact or status.info.fingerprint


def _time(status: ModelStatus) -> str:
    return datetime.fromtimestamp(int(status.created), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
